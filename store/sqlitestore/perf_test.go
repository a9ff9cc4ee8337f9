package sqlitestore

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/stretchr/testify/require"
)

// floor is how many records a second a store could keep that pays one fsync
// for each: 512 bytes appended to a file and synced, by one goroutine.
func floor(t testing.TB, dir string, d time.Duration) float64 {
	f, err := os.Create(filepath.Join(dir, "floor"))
	require.NoError(t, err)
	defer f.Close()
	buf, n, start := make([]byte, 512), 0, time.Now()
	for time.Since(start) < d {
		_, err := f.Write(buf)
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		n++
	}
	return float64(n) / time.Since(start).Seconds()
}

var runID atomic.Int64

// claimAndSettle counts records a second that are claimed and settled.
func claimAndSettle(t testing.TB, s oncehttp.KeyStore, goroutines int, d time.Duration) float64 {
	ctx := context.Background()
	run := runID.Add(1)
	var n atomic.Int64
	var all sync.WaitGroup
	start := time.Now()
	for g := range goroutines {
		all.Go(func() {
			for i := 0; time.Since(start) < d; i++ {
				now := time.Now().UTC().Truncate(time.Microsecond)
				rec, created, err := s.Create(ctx, oncehttp.Record{
					ID: fmt.Sprintf("%064d", run<<40|int64(g)<<32|int64(i)), Upstream: "api.pay.example", Intent: "charge:order-1042",
					Key: "0d1f4a2e-6e7e-4f6e-9f0a-0a4b8a1c2d3e", State: oncehttp.StateSending, Owner: "pod-1 0123456789abcdef-1",
					Lease: now.Add(time.Minute), FirstSent: now, Updated: now, Expires: now.Add(time.Hour),
				})
				if err != nil || !created {
					t.Error(created, err)
					return
				}
				rec.State = oncehttp.StateDone
				rec.Response = &oncehttp.SavedResponse{Status: 201, Body: []byte(`{"id":"ch_1","amount":100,"currency":"eur","status":"succeeded"}`)}
				if _, err := s.Update(ctx, rec); err != nil {
					t.Error(err)
					return
				}
				n.Add(1)
			}
		})
	}
	all.Wait()
	return float64(n.Load()) / time.Since(start).Seconds()
}

// keyedPosts counts keyed POSTs a second of named intents through a Transport,
// over a base that answers at once.
func keyedPosts(t testing.TB, s oncehttp.KeyStore, goroutines int, d time.Duration) float64 {
	tr := &oncehttp.Transport{Store: s, Policy: oncehttp.Policy{Keys: oncehttp.KeysHonored}, Base: answers{}}
	client := tr.Client()
	run := runID.Add(1)
	var n atomic.Int64
	var all sync.WaitGroup
	start := time.Now()
	for g := range goroutines {
		all.Go(func() {
			for i := 0; time.Since(start) < d; i++ {
				ctx := oncehttp.WithIntent(context.Background(), fmt.Sprint("charge:", run, "-", g, "-", i))
				req, _ := http.NewRequestWithContext(ctx, "POST", "http://api.pay.example/charges", strings.NewReader(`{"amount":100}`))
				resp, err := client.Do(req)
				if oncehttp.OutcomeOf(resp, err) != oncehttp.Done {
					t.Error(err)
					return
				}
				resp.Body.Close()
				n.Add(1)
			}
		})
	}
	all.Wait()
	return float64(n.Load()) / time.Since(start).Seconds()
}

// answers is a base that says yes.
type answers struct{}

func (answers) RoundTrip(r *http.Request) (*http.Response, error) {
	io.Copy(io.Discard, r.Body)
	r.Body.Close()
	const body = `{"id":"ch_1","amount":100,"currency":"eur","status":"succeeded"}`
	return &http.Response{StatusCode: 201, Header: http.Header{"Content-Type": {"application/json"}}, ProtoMajor: 1,
		Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body))}, nil
}

var perfFor = flag.Duration("perf", 200*time.Millisecond, "how long each figure of the speed report is measured")

// The speed report: go test -run FsyncFloor -v -perf 3s. No time is asserted.
func TestSpeedAgainstTheFsyncFloor(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(context.Background(), filepath.Join(dir, "intents.db"))
	require.NoError(t, err)
	defer s.Close()
	for _, g := range []int{1, 8, 64} {
		f := floor(t, dir, *perfFor)
		r := claimAndSettle(t, s, g, *perfFor)
		f = (f + floor(t, dir, *perfFor)) / 2
		p := keyedPosts(t, s, g, *perfFor)
		t.Logf("%2d goroutines: claim+settle %6.0f/s, keyed POST %6.0f/s, floor %5.0f fsync/s: ratios %.2f and %.2f", g, r, p, f, r/f, p/f)
		require.Positive(t, r)
		require.Positive(t, p)
	}
}
