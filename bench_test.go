package oncehttp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// inMemory answers at once and allocates as little as a base can, so that what
// is measured is ours.
type inMemory struct{ header http.Header }

func (b inMemory) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	return &http.Response{Status: "200 OK", StatusCode: 200, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: b.header, Body: http.NoBody, Request: r}, nil
}

// benched are the calls whose cost is compared. Budget, breaker and attempt
// timeout are on: they are by default. No Trace.
func benched() map[string]struct {
	method string
	tr     *Transport // nil: none
	named  bool
} {
	base := inMemory{http.Header{}}
	honored := Policy{Keys: KeysHonored}
	return map[string]struct {
		method string
		tr     *Transport
		named  bool
	}{
		"bare GET":                  {http.MethodGet, nil, false},
		"bare POST":                 {http.MethodPost, nil, false},
		"bare POST, named":          {http.MethodPost, nil, true},
		"GET":                       {http.MethodGet, &Transport{Base: base}, false},
		"keyed POST, anonymous":     {http.MethodPost, &Transport{Base: base, Policy: honored}, false},
		"keyed POST, named, stored": {http.MethodPost, &Transport{Base: base, Policy: honored, Store: &MemoryStore{}}, true},
	}
}

// benchCall returns a function that makes one call, with a request of its own
// and a 256-byte body for POST.
func benchCall(t testing.TB, method string, tr *Transport, named bool) func() {
	client := &http.Client{Transport: inMemory{http.Header{}}}
	if tr != nil {
		client.Transport = tr
	}
	payload := bytes.Repeat([]byte("x"), 256)
	u := "http://upstream.example/charges"
	n := 0
	return func() {
		ctx := context.Background()
		var body io.Reader
		if method == http.MethodPost {
			body = bytes.NewReader(payload)
		}
		req, err := http.NewRequestWithContext(ctx, method, u, body)
		if err != nil {
			t.Fatal(err)
		}
		if named {
			n++
			req = req.WithContext(WithIntent(ctx, "charge:"+names[n%len(names)]))
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

// names of intents, made beforehand: making them is not what is measured.
var names = func() []string {
	s := make([]string, 200_000)
	for i := range s {
		s[i] = fmt.Sprint(i)
	}
	return s
}()

func BenchmarkCall(b *testing.B) {
	// A named call is an intent of its own each time: MemoryStore makes room
	// by dropping what settled first.
	for _, name := range []string{"bare GET", "GET", "bare POST", "keyed POST, anonymous", "keyed POST, named, stored"} {
		b.Run(name, func(b *testing.B) {
			c := benched()[name]
			call := benchCall(b, c.method, c.tr, c.named)
			b.ReportAllocs()
			for b.Loop() {
				call()
			}
		})
	}
}

// DESIGN.md §10: what everything on may cost over a bare http.Client with the
// same base.
func TestACallCostsFewAllocationsOverABareClient(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates too")
	}
	cases := benched()
	measure := func(name string) float64 {
		c := cases[name]
		call := benchCall(t, c.method, c.tr, c.named)
		call() // the first call makes the upstream's state
		return testing.AllocsPerRun(2000, call)
	}
	// The context that names the intent is the caller's, so the bare client
	// gets the same request.
	for _, row := range []struct {
		name, bare string
		over       float64
	}{
		{"GET", "bare GET", 10},
		{"keyed POST, anonymous", "bare POST", 24},
		{"keyed POST, named, stored", "bare POST, named", 24},
	} {
		allocs, bare := measure(row.name), measure(row.bare)
		t.Logf("%s: %.0f allocations, %.0f over a bare client's %.0f", row.name, allocs, allocs-bare, bare)
		assert.LessOrEqual(t, allocs-bare, row.over, row.name)
	}
}

func TestTenThousandCallsInBackoffHoldAtMost16KiBEach(t *testing.T) {
	calls := 10_000
	if raceEnabled || testing.Short() {
		calls = 1_000 // the detector's shadow is not ours to count
	}
	synctest.Test(t, func(t *testing.T) {
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			io.Copy(io.Discard, r.Body)
			return answerOf(503, "overloaded", "Retry-After", "50"), nil
		})
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored, Budget: Budget{Ratio: Off}, Breaker: Breaker{FailureRatio: Off}}}
		payload := bytes.Repeat([]byte("x"), 4096)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, calls)
		start := make(chan struct{})
		one := func() {
			<-start
			// The caller's body has no GetBody, so its bytes are ours to keep.
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://upstream.example/", io.NopCloser(bytes.NewReader(payload)))
			if err == nil {
				var resp *http.Response
				if resp, err = tr.RoundTrip(req); err == nil {
					resp.Body.Close()
				}
			}
			done <- err
		}
		for range calls {
			go one()
		}
		synctest.Wait() // the goroutines and their stacks are the caller's
		before := inUse()
		close(start)
		synctest.Wait() // all are in backoff
		each := (inUse() - before) / int64(calls)
		t.Logf("%d bytes for each of %d waiting calls", each, calls)
		if !raceEnabled {
			assert.LessOrEqual(t, each, int64(16<<10))
		}
		cancel()
		for range calls {
			require.ErrorIs(t, <-done, context.Canceled)
		}
	})
}

// raceEnabled tells whether the race detector is in this binary: it allocates,
// and it makes everything slower.
var raceEnabled = func() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == "-race" && s.Value == "true" })
}()

// inUse is the memory held after a collection, stacks included.
func inUse() int64 {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
