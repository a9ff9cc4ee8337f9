package oncehttp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// readers are the kinds of body that callers give.
var readers = map[string]func(string) io.Reader{
	"bytes.Buffer":    func(s string) io.Reader { return bytes.NewBufferString(s) },
	"bytes.Reader":    func(s string) io.Reader { return bytes.NewReader([]byte(s)) },
	"strings.Reader":  func(s string) io.Reader { return strings.NewReader(s) },
	"unknown type":    func(s string) io.Reader { return opaque(s) },
	"bufio":           func(s string) io.Reader { return bufio.NewReader(strings.NewReader(s)) },
	"one byte a read": func(s string) io.Reader { return iotest.OneByteReader(strings.NewReader(s)) },
	"data with EOF":   func(s string) io.Reader { return iotest.DataErrReader(strings.NewReader(s)) },
	"pipe": func(s string) io.Reader {
		r, w := io.Pipe()
		go func() { io.WriteString(w, s); w.Close() }()
		return r
	},
}

// A10, A35: every attempt has the whole body, whatever it is read from, and
// whether or not its length was known.
func TestEveryAttemptSendsTheWholeBody(t *testing.T) {
	for _, start := range []func(http.Handler, faulty.Script) *faulty.Server{faulty.NewServer, faulty.NewHTTP2Server} {
		for name, reader := range readers {
			for _, size := range []int{1, 100, 70_000} {
				for _, intent := range []string{"", "charge"} {
					body := strings.Repeat("amount=1&", size)[:size]
					s := start(newLedger(true), faulty.InOrder(faulty.Status(503), faulty.Status(429)))
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, reader(body))
					require.NoError(t, err)
					if intent != "" {
						req = req.WithContext(WithIntent(t.Context(), intent))
					}
					sum := fmt.Sprintf("%x", sha256.Sum256([]byte(body)))
					req.Header.Set("X-Sum", sum)
					r := do(contract(t, &Transport{Base: s.Transport(), Policy: quick(KeysHonored)}), req)
					require.NoError(t, r.err, name)
					sent := s.Requests()
					require.Len(t, sent, 3, name)
					for _, d := range sent {
						assert.Equal(t, sum, fmt.Sprintf("%x", sha256.Sum256(d.Body)), name)
						assert.Equal(t, fmt.Sprint(size), d.Header.Get("Content-Length"), name)
					}
					s.Close()
				}
			}
		}
	}
}

func TestMaxBodyBytesIsTheLineBetweenReplayAndStream(t *testing.T) {
	const limit = 1000
	for _, c := range []struct {
		size, known int // known: the request's ContentLength
		limit       int64
		replays     bool
	}{
		{limit - 1, -1, limit, true},
		{limit, -1, limit, true},
		{limit + 1, -1, limit, false},
		{limit - 1, limit - 1, limit, true},
		{limit, limit, limit, true},
		{limit + 1, limit + 1, limit, false},
		{1, 1, Off, false},
		{1, -1, Off, false},
		{1 << 20, -1, 0, true}, // the default
		{1<<20 + 1, -1, 0, false},
		{0, -1, limit, true},
	} {
		for _, intent := range []string{"", "charge"} {
			t.Run(fmt.Sprint(c.size, " of ", c.limit, ", length ", c.known, ", intent ", intent), func(t *testing.T) {
				body := strings.Repeat("x", c.size)
				var sizes []int
				base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
					b := []byte{}
					if r.Body != nil {
						b, _ = io.ReadAll(r.Body)
					}
					if sizes = append(sizes, len(b)); len(sizes) == 1 {
						return answerOf(503, "busy"), nil
					}
					return answerOf(200, ""), nil
				})
				pol := quick(KeysHonored)
				pol.MaxBodyBytes = c.limit
				ctx := t.Context()
				if intent != "" {
					ctx = WithIntent(ctx, intent)
				}
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://up.example/", opaque(body))
				require.NoError(t, err)
				req.ContentLength = int64(c.known)
				r := do(contract(t, &Transport{Base: base, Policy: pol}), req)
				switch {
				case c.replays:
					require.NoError(t, r.err)
					assert.Equal(t, []int{c.size, c.size}, sizes)
					assert.Equal(t, Done, r.report.Outcome)
				case intent != "":
					// It could not be told from another request for the intent.
					assert.ErrorIs(t, r.err, ErrBody)
					assert.ErrorContains(t, r.err, "MaxBodyBytes")
					assert.Equal(t, NotSent, r.report.Outcome)
					assert.Empty(t, sizes)
				default:
					require.NoError(t, r.err)
					assert.Equal(t, []int{c.size}, sizes, "streamed once, whole")
					assert.Equal(t, 503, r.status)
					assert.Equal(t, "busy", r.body)
					assert.Equal(t, ErrBody, r.report.Reason)
					assert.Equal(t, Unknown, r.report.Outcome)
				}
			})
		}
	}
}

// A body larger than MaxBodyBytes that GetBody can give again is fingerprinted
// and replayed without being held.
func TestALargeBodyWithGetBodyNamesAnIntent(t *testing.T) {
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		n, _ := io.Copy(io.Discard, r.Body)
		if n != 5000 {
			return answerOf(400, ""), nil
		}
		return answerOf(200, ""), nil
	})
	pol := quick(KeysHonored)
	pol.MaxBodyBytes = 100
	tr := &Transport{Base: base, Policy: pol}
	client := contract(t, tr)
	assert.Equal(t, 200, do(client, post(t, t.Context(), "charge", "http://up.example/", strings.Repeat("x", 5000))).status)
	other := do(client, post(t, t.Context(), "charge", "http://up.example/", strings.Repeat("y", 5000)))
	assert.ErrorIs(t, other.err, ErrIntentMismatch)
}

// A36: after a dial error nothing of a streamed body is lost; half a body is,
// and then the real cause is told.
func TestAStreamedBodyThatWasNotReadIsSentAgainWhole(t *testing.T) {
	body := strings.Repeat("x", 5000)
	for _, keys := range []KeyMode{KeysSent, KeysHonored} {
		for _, limit := range []int64{Off, 100, 1 << 20} {
			l := newLedger(true)
			s := faulty.NewServer(l, nil)
			base := s.Transport()
			failDials(base, []error{dialFailure(syscall.ECONNREFUSED), dialFailure(syscall.ECONNREFUSED)})
			pol := quick(keys)
			pol.MaxBodyBytes = limit
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, opaque(body))
			require.NoError(t, err)
			req.ContentLength = int64(len(body))
			r := do(contract(t, &Transport{Base: base, Policy: pol}), req)
			require.NoError(t, r.err)
			assert.Equal(t, 1, l.effects(body))
			assert.Equal(t, 3, r.report.Attempts)
			base.CloseIdleConnections()
			s.Close()
		}
	}
}

func TestAHalfReadStreamEndsWithTheRealCause(t *testing.T) {
	n := 0
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		n++
		io.CopyN(io.Discard, r.Body, 2500)
		return nil, &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}
	})
	pol := quick(KeysHonored)
	pol.MaxBodyBytes = Off
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://up.example/", opaque(strings.Repeat("x", 5000)))
	req.ContentLength = 5000
	r := do(contract(t, &Transport{Base: base, Policy: pol}), req)
	assert.Equal(t, 1, n)
	assert.ErrorIs(t, r.err, syscall.EPIPE)
	assert.ErrorIs(t, r.err, ErrBody)
	assert.NotContains(t, r.err.Error(), "ContentLength")
	assert.Equal(t, Unknown, r.report.Outcome)
}

// A37: over the cap, or with Off, the first byte is at the server before the
// caller has produced the last.
func TestAStreamIsNotWaitedForBeforeItIsSent(t *testing.T) {
	for name, pol := range map[string]Policy{"Off": {MaxBodyBytes: Off}, "over the cap": {MaxBodyBytes: 10}} {
		t.Run(name, func(t *testing.T) {
			arrived := make(chan struct{})
			s := faulty.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				first := make([]byte, 20)
				io.ReadFull(r.Body, first)
				close(arrived)
				rest, _ := io.ReadAll(r.Body)
				io.WriteString(w, string(first)+string(rest))
			}), nil)
			defer s.Close()
			body, producer := io.Pipe()
			go func() {
				io.WriteString(producer, strings.Repeat("a", 20))
				<-arrived // the second half comes only when the first has arrived
				io.WriteString(producer, "the rest")
				producer.Close()
			}()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, body)
			require.NoError(t, err)
			r := do(contract(t, &Transport{Base: s.Transport(), Policy: pol}), req)
			require.NoError(t, r.err)
			assert.Equal(t, strings.Repeat("a", 20)+"the rest", r.body)
		})
	}
}

// A54: the server answers before it has read the body. Every replay has a
// reader of its own, and the second body is intact.
func TestAnEarlyAnswerWhileTheBodyIsWrittenIsRaceFree(t *testing.T) {
	body := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	sum := sha256.Sum256([]byte(body))
	for name, start := range map[string]func(http.Handler) *httptest.Server{"h1": httptest.NewServer, "h2": func(h http.Handler) *httptest.Server {
		s := httptest.NewUnstartedServer(h)
		s.EnableHTTP2 = true
		s.StartTLS()
		return s
	}} {
		t.Run(name, func(t *testing.T) {
			var n atomic.Int32
			s := start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if n.Add(1)%2 == 1 {
					w.WriteHeader(http.StatusTooManyRequests)
					return
				}
				h := sha256.New()
				io.Copy(h, r.Body)
				if !bytes.Equal(h.Sum(nil), sum[:]) {
					w.WriteHeader(http.StatusBadRequest)
				}
			}))
			defer s.Close()
			base := s.Client().Transport.(*http.Transport)
			defer base.CloseIdleConnections()
			client := contract(t, &Transport{Base: base, Policy: quick(KeysHonored)})
			for i := range 100 { // 200 attempts; twice with the two protocols
				req := post(t, t.Context(), "", s.URL, body)
				if i%2 == 0 {
					req.Body, req.GetBody = opaque(body), nil
				}
				r := do(client, req)
				// The server may also close its end while we write: that is
				// ambiguous, and sent again.
				require.NoError(t, r.err)
				if r.status != 200 {
					assert.Equal(t, 429, r.status)
				}
				if r.report.Attempts%2 == 1 {
					n.Add(1)
				}
			}
		})
	}
}

// pooledBody gives its buffer back when it is closed, and scribbles on it: who
// reads it after that reads somebody else's bytes.
type pooledBody struct {
	mu  sync.Mutex
	buf []byte // guarded by mu
	at  int    // guarded by mu
}

var bodyPool = sync.Pool{New: func() any { return make([]byte, 32<<10) }}

func newPooledBody(fill byte) *pooledBody {
	buf := bodyPool.Get().([]byte)
	for i := range buf {
		buf[i] = fill
	}
	return &pooledBody{buf: buf}
}

func (b *pooledBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf == nil {
		return 0, errors.New("read after close")
	}
	n := copy(p, b.buf[b.at:])
	if b.at += n; n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (b *pooledBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf != nil {
		clear(b.buf)
		//lint:ignore SA6002 it is what such pools do
		bodyPool.Put(b.buf)
		b.buf = nil
	}
	return nil
}

// A85: pooled buffers, early 503s over HTTP/2.
func TestPooledBodiesAreNotReadAfterTheyAreClosed(t *testing.T) {
	var n atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1)%3 == 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client gave the attempt up
		}
		if len(b) != 32<<10 || bytes.Count(b, b[:1]) != len(b) || fmt.Sprint(b[0]) != r.Header.Get("X-Fill") {
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	base := s.Client().Transport.(*http.Transport)
	defer base.CloseIdleConnections()
	pol := quick(KeysHonored)
	pol.MaxAttempts = 10
	client := contract(t, &Transport{Base: base, Policy: pol})
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			for i := range 250 {
				fill := byte(worker*50 + i%50 + 1)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, newPooledBody(fill))
				if !assert.NoError(t, err) {
					return
				}
				req.ContentLength = 32 << 10
				if i%2 == 0 {
					req.GetBody = func() (io.ReadCloser, error) { return newPooledBody(fill), nil }
				}
				req.Header.Set("X-Fill", fmt.Sprint(fill))
				r := do(client, req)
				assert.NoError(t, r.err)
				assert.Equal(t, 200, r.status)
			}
		})
	}
	all.Wait()
}

// A95: a final status before 100 (Continue). The next attempt's bytes are not
// mixed with leftovers: the server parses whole requests only.
func TestAFinalAnswerBefore100ContinueLeavesNoLeftovers(t *testing.T) {
	body := strings.Repeat("x", 1<<20)
	var bad, n atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.Header.Get("Expect") != "100-continue" {
			bad.Add(1)
		}
		if n.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable) // without reading
			return
		}
		if b, err := io.ReadAll(r.Body); err != nil || string(b) != body {
			bad.Add(1)
		}
	}))
	defer s.Close()
	base := &http.Transport{ExpectContinueTimeout: time.Minute}
	req := post(t, t.Context(), "charge", s.URL, body)
	req.Header.Set("Expect", "100-continue")
	r := do(contract(t, &Transport{Base: base, Policy: quick(KeysHonored)}), req)
	require.NoError(t, r.err)
	assert.Equal(t, 200, r.status)
	assert.EqualValues(t, 2, n.Load())
	assert.Zero(t, bad.Load())
}

func TestAContentLengthThatContradictsTheBodyIsRefused(t *testing.T) {
	base := roundTripFunc(func(*http.Request) (*http.Response, error) { t.Error("sent"); return answerOf(200, ""), nil })
	for _, length := range []int64{1, 9, 11, 1000} {
		for _, intent := range []string{"", "charge"} {
			req := post(t, t.Context(), intent, "http://up.example/", "amount=100")
			req.ContentLength = length
			if intent == "" {
				req.Body, req.GetBody = opaque("amount=100"), nil // else it is the base's to find out
			}
			resp, err := strict{t, &Transport{Base: base}}.RoundTrip(req)
			r := finish(resp, err)
			assert.ErrorIs(t, r.err, ErrBody)
			assert.Equal(t, NotSent, r.report.Outcome)
			assert.ErrorContains(t, r.err, "ContentLength")
		}
	}
}

// A zero ContentLength with a body means "unknown" in a client's request.
func TestAZeroContentLengthWithABodyIsUnknown(t *testing.T) {
	s := faulty.NewServer(newLedger(true), faulty.InOrder(faulty.Status(503)))
	defer s.Close()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, opaque("amount=100"))
	req.ContentLength = 0
	require.NoError(t, do(contract(t, &Transport{Base: s.Transport(), Policy: quick(KeysHonored)}), req).err)
	for _, d := range s.Requests() {
		assert.Equal(t, "amount=100", string(d.Body))
	}
}

func TestABodyThatFailsWhileItIsReadIsNotSent(t *testing.T) {
	failure := errors.New("disk error")
	for name, limit := range map[string]int64{"before the first byte": 1 << 20, "after it": 1 << 20, "in a stream": Off} {
		for _, getBody := range []bool{true, false} {
			if limit == Off && getBody {
				continue
			}
			t.Run(fmt.Sprint(name, "/", getBody), func(t *testing.T) {
				content := "amount="
				if name == "before the first byte" {
					content = ""
				}
				broken := func() io.ReadCloser {
					return io.NopCloser(io.MultiReader(strings.NewReader(content), failingReader{failure}))
				}
				l := newLedger(true)
				s := faulty.NewServer(l, nil)
				defer s.Close()
				pol := quick(KeysHonored)
				pol.MaxBodyBytes = limit
				ctx := t.Context()
				if limit != Off {
					ctx = WithIntent(ctx, "charge")
				}
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL, broken())
				require.NoError(t, err)
				if getBody {
					req.GetBody = func() (io.ReadCloser, error) { return broken(), nil }
				}
				r := do(contract(t, &Transport{Base: s.Transport(), Policy: pol}), req)
				assert.ErrorIs(t, r.err, failure)
				assert.Empty(t, l.deliveries(), "no whole request")
				if limit == Off {
					assert.Equal(t, Unknown, r.report.Outcome, "half of it was sent")
					assert.Equal(t, 1, r.report.Attempts)
					return
				}
				assert.ErrorIs(t, r.err, ErrBody)
				assert.Equal(t, NotSent, r.report.Outcome)
				assert.Empty(t, s.Requests())
			})
		}
	}
}

func TestAGetBodyThatFailsIsErrBody(t *testing.T) {
	failure := errors.New("file is gone")
	for _, intent := range []string{"", "charge"} {
		for good := range 3 { // calls that succeed before it fails
			sends := 0
			base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
				sends++
				io.Copy(io.Discard, r.Body)
				return answerOf(503, "busy"), nil
			})
			pol := quick(KeysHonored)
			pol.MaxBodyBytes = 5 // not held: GetBody is asked for each attempt
			req := post(t, t.Context(), intent, "http://up.example/", "amount=100")
			asked := 0
			req.GetBody = func() (io.ReadCloser, error) {
				if asked++; asked > good {
					return nil, failure
				}
				return io.NopCloser(strings.NewReader("amount=100")), nil
			}
			r := do(contract(t, &Transport{Base: base, Policy: pol}), req)
			want := good
			if intent != "" {
				want = max(0, good-1) // the first is for the fingerprint
			}
			if intent != "" && good > 0 {
				want = sends // how often the bytes are looked at before is ours
			}
			assert.Equal(t, want, sends)
			assert.ErrorIs(t, r.err, failure)
			assert.ErrorIs(t, r.err, ErrBody)
			assert.Equal(t, sends, r.report.Attempts)
			if sends == 0 {
				assert.Equal(t, NotSent, r.report.Outcome)
			} else {
				assert.Equal(t, Unknown, r.report.Outcome)
			}
		}
	}
}

// A 1 GiB upload stays within a few MiB.
func TestAStreamedUploadIsNotHeld(t *testing.T) {
	size := int64(1 << 30)
	if testing.Short() || raceEnabled {
		size = 64 << 20
	}
	var before, most uint64
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		buf := make([]byte, 1<<20)
		var n int64
		for {
			m, err := r.Body.Read(buf)
			if n/(16<<20) != (n+int64(m))/(16<<20) {
				most = max(most, heap())
			}
			if n += int64(m); err == io.EOF {
				break
			}
		}
		assert.Equal(t, size, n)
		return answerOf(200, ""), nil
	})
	for _, known := range []int64{size, -1} {
		runtime.GC()
		before, most = heap(), 0
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://up.example/", io.NopCloser(io.LimitReader(zeros{}, size)))
		require.NoError(t, err)
		req.ContentLength = known
		r := do(contract(t, &Transport{Base: base}), req)
		require.NoError(t, r.err)
		assert.Equal(t, Done, r.report.Outcome)
		require.NotZero(t, most)
		held := int64(most) - int64(before)
		t.Logf("length %d: %d KiB", known, held>>10)
		assert.Less(t, held, int64(8<<20))
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// Trailers, which the body's reader fills in at its end, go with every
// attempt.
func TestTrailersGoWithEveryAttempt(t *testing.T) {
	for name, limit := range map[string]int64{"buffered": 1 << 20, "streamed": Off} {
		t.Run(name, func(t *testing.T) {
			var got []string
			s := faulty.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				if got = append(got, r.Trailer.Get("X-Sum")); len(got) == 1 && limit != Off {
					w.WriteHeader(503)
				}
			}), nil)
			defer s.Close()
			pol := quick(KeysHonored)
			pol.MaxBodyBytes = limit
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, nil)
			require.NoError(t, err)
			req.Trailer = http.Header{"X-Sum": nil}
			req.ContentLength = -1
			trailer := req.Trailer
			req.Body = io.NopCloser(io.MultiReader(strings.NewReader("amount=100"), atEOF(func() { trailer["X-Sum"] = []string{"abc"} })))
			// Not through the contract's wrapper: the body changes the trailer.
			tr := &Transport{Base: s.Transport(), Policy: pol}
			defer tr.CloseIdleConnections()
			r := do(tr.Client(), req)
			require.NoError(t, r.err)
			assert.Equal(t, 200, r.status)
			for _, sum := range got {
				assert.Equal(t, "abc", sum)
			}
			if limit != Off {
				assert.Len(t, got, 2)
			}
		})
	}
}

type atEOF func()

func (f atEOF) Read([]byte) (int, error) { f(); return 0, io.EOF }

// A body given up by the caller while it is buffered: a pipe blocks until its
// writer ends it, and its error is told.
func TestAPipeThatItsWriterBreaksIsNotSent(t *testing.T) {
	r, w := io.Pipe()
	failure := errors.New("producer failed")
	go func() { io.WriteString(w, "half"); w.CloseWithError(failure) }()
	base := roundTripFunc(func(*http.Request) (*http.Response, error) { t.Error("sent"); return answerOf(200, ""), nil })
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://up.example/", r)
	res := do(contract(t, &Transport{Base: base}), req)
	assert.ErrorIs(t, res.err, failure)
	assert.ErrorIs(t, res.err, ErrBody)
	assert.Equal(t, NotSent, res.report.Outcome)
}

// Half a streamed upload, and the caller goes away: the reading end is closed,
// so that nothing waits for its producer.
func TestACancelledUploadLetsGoOfItsBody(t *testing.T) {
	s := faulty.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }), nil)
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	body, w := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL, body)
	require.NoError(t, err)
	produced := make(chan error, 1)
	go func() {
		io.WriteString(w, "half")
		cancel()
		// net/http may wait for its writer, which waits for us: go on until
		// it has let go.
		for {
			if _, err := io.WriteString(w, "more"); err != nil {
				produced <- err
				return
			}
		}
	}()
	r := do(contract(t, &Transport{Base: s.Transport(), Policy: Policy{MaxBodyBytes: Off}}), req)
	assert.ErrorIs(t, r.err, context.Canceled)
	assert.ErrorIs(t, <-produced, io.ErrClosedPipe)
}
