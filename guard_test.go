package oncehttp

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// bodies are the kinds of request body that net/http treats differently.
var bodies = map[string]func() io.Reader{
	"GetBody": func() io.Reader { return strings.NewReader("amount=100") },
	"no GetBody": func() io.Reader {
		return opaque("amount=100")
	},
	"no body": func() io.Reader { return nil },
}

// warm opens n connections to the server and leaves them idle.
func warm(t testing.TB, client *http.Client, s *faulty.Server, n int) {
	t.Helper()
	var arrived sync.WaitGroup
	arrived.Add(n)
	s.SetScript(nil)
	s.SetHandler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		arrived.Done()
		arrived.Wait() // so that none of them can share a connection
	}))
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+"/warm", nil)
			if assert.NoError(t, err) {
				assert.NoError(t, do(client, req).err)
			}
		})
	}
	all.Wait()
	s.SetHandler(nil)
}

// DESIGN.md §6, and A08: net/http sends nothing behind our back, whatever the
// protocol, body, number of idle connections, declaration and key header.
func TestSendsAreAttempts(t *testing.T) {
	faults := map[string][]faulty.Fault{
		"h1": {faulty.CloseStale(), faulty.DropRequest(), faulty.ResetAfterBody()},
		"h2": {faulty.CloseStale(), faulty.DropConn(), faulty.RSTStream(faulty.ProtocolError), faulty.RSTStream(faulty.InternalError),
			faulty.RSTStream(faulty.RefusedStream), faulty.GoAway()},
	}
	for proto, start := range map[string]func(http.Handler, faulty.Script) *faulty.Server{"h1": faulty.NewServer, "h2": faulty.NewHTTP2Server} {
		for kind, body := range bodies {
			for _, idle := range []int{1, 5, 20} {
				if proto == "h2" && idle > 1 {
					continue // they share one connection
				}
				t.Run(fmt.Sprint(proto, "/", kind, "/", idle, " idle"), func(t *testing.T) {
					s := start(nil, nil)
					t.Cleanup(s.Close)
					for _, f := range faults[proto] {
						for _, keys := range []KeyMode{KeysSent, KeysHonored, KeysOff} {
							headers := []string{"Idempotency-Key", "X-Idempotency-Key", "PayPal-Request-Id"}
							if keys == KeysOff {
								headers = []string{""} // the caller's own, below
							}
							for _, header := range headers {
								checkSends(t, s, f, keys, header, body, idle)
							}
						}
					}
				})
			}
		}
	}
}

func checkSends(t *testing.T, s *faulty.Server, f faulty.Fault, keys KeyMode, header string, body func() io.Reader, idle int) {
	t.Helper()
	pol := quick(keys)
	pol.KeyHeader = header
	tr := &Transport{Base: s.Transport(), Policy: pol}
	defer tr.CloseIdleConnections()
	client := contract(t, tr)
	warm(t, client, s, idle)
	s.SetScript(faulty.Always(f))
	before := len(s.Requests())
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/charges", body())
	require.NoError(t, err)
	if keys == KeysOff {
		req.Header.Set("Idempotency-Key", "the-callers-own")
	}
	r := do(client, req)
	sent := s.Requests()[before:]
	what := fmt.Sprintf("%v, keys %d, %s: %v", f, keys, header, r.err)
	assert.Len(t, sent, r.report.Attempts, what)
	assert.LessOrEqual(t, len(sent), 3, what)
	assert.NotEmpty(t, sent, what)
	if keys != KeysHonored && f != faulty.RSTStream(faulty.RefusedStream) && f != faulty.GoAway() {
		assert.Len(t, sent, 1, what)
	}
	if r.err != nil {
		// The veto is our own doing, not the caller's.
		assert.NotContains(t, r.err.Error(), "context canceled", what)
		assert.NotErrorIs(t, r.err, context.Canceled, what)
	}
	for _, d := range sent {
		if header != "" {
			assert.NotEmpty(t, d.Header.Get(header), "the key is on the wire under its name: %v", d.Header)
		}
	}
}

// That the matrix can fail: what net/http does on the same faults by itself.
func TestABareClientSendsBehindItsCallersBack(t *testing.T) {
	s := faulty.NewServer(nil, nil)
	defer s.Close()
	for _, kind := range []string{"GetBody", "no body"} {
		base := s.Transport()
		client := &http.Client{Transport: base}
		warm(t, client, s, 5)
		s.SetScript(faulty.Always(faulty.CloseStale()))
		before := len(s.Requests())
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, bodies[kind]())
		require.NoError(t, err)
		req.Header.Set("Idempotency-Key", "k")
		assert.NoError(t, do(client, req).err)
		assert.Len(t, s.Requests()[before:], 6, kind)
	}
	h2 := faulty.NewHTTP2Server(nil, faulty.InOrder(faulty.RSTStream(faulty.ProtocolError), faulty.GoAway(), faulty.RSTStream(faulty.ProtocolError)))
	defer h2.Close()
	assert.NoError(t, do(h2.Client(), post(t, t.Context(), "", h2.URL, "amount=100")).err)
	assert.Len(t, h2.Requests(), 4)
}

// A77, and the peers of standards.md §1.9.3 that net/http sends to for ever.
func TestHTTP2PeersThatNeverAnswerAreBoundedByMaxAttempts(t *testing.T) {
	for _, f := range []faulty.Fault{faulty.RSTStream(faulty.ProtocolError), faulty.GoAway(), faulty.RSTStream(faulty.RefusedStream), faulty.DropConn()} {
		for kind, body := range bodies {
			for _, keys := range []KeyMode{KeysSent, KeysHonored} {
				t.Run(fmt.Sprint(f, "/", kind, "/", keys), func(t *testing.T) {
					s := faulty.NewHTTP2Server(nil, faulty.Always(f))
					t.Cleanup(s.Close)
					pol := quick(keys)
					pol.MaxAttempts = 4
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, body())
					require.NoError(t, err)
					r := do(contract(t, &Transport{Base: s.Transport(), Policy: pol}), req)
					require.Error(t, r.err)
					assert.Len(t, s.Requests(), r.report.Attempts)
					assert.NotContains(t, r.err.Error(), "context canceled")
					unprocessed := f == faulty.GoAway() || f == faulty.RSTStream(faulty.RefusedStream)
					switch {
					case keys == KeysHonored:
						assert.Len(t, s.Requests(), 4)
					case unprocessed && kind != "no body":
						assert.Len(t, s.Requests(), 4)
						assert.Equal(t, NotSent, r.report.Outcome)
					default:
						assert.Len(t, s.Requests(), 1)
						assert.Equal(t, Unknown, r.report.Outcome)
						assert.Equal(t, ErrUnsafe, r.report.Reason)
					}
				})
			}
		}
	}
}

// oldConns are the connections that a base opened before they died.
type oldConns struct {
	dead atomic.Bool
	open sync.WaitGroup
}

// deadConn is a connection whose other end has gone without the client
// noticing: reading blocks, and writing fails before a byte is out.
type deadConn struct {
	net.Conn
	old  *oldConns
	once sync.Once
}

func (c *deadConn) Write(p []byte) (int, error) {
	if c.old.dead.Load() {
		return 0, &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", syscall.EPIPE)}
	}
	return c.Conn.Write(p)
}

func (c *deadConn) Close() error {
	c.once.Do(c.old.open.Done)
	return c.Conn.Close()
}

// dying makes base's connections die together; those dialled after are well.
func dying(base *http.Transport) *oldConns {
	old := new(oldConns)
	base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil || old.dead.Load() {
			return c, err
		}
		old.open.Add(1)
		return &deadConn{Conn: c, old: old}, nil
	}
	return old
}

// Promise 11: wherever a bare http.Client delivers because nothing was
// processed, we deliver.
func TestEverythingThatABareClientDeliversSafelyIsDelivered(t *testing.T) {
	// Each fault strikes a warmed-up client.
	type fault struct {
		name   string
		start  func(http.Handler, faulty.Script) *faulty.Server
		strike func(s *faulty.Server, old *oldConns)
	}
	faults := []fault{
		{"stale connections, nothing written", faulty.NewServer, func(_ *faulty.Server, old *oldConns) { old.dead.Store(true) }},
		{"stale connections, nothing written, TLS", faulty.NewTLSServer, func(_ *faulty.Server, old *oldConns) { old.dead.Store(true) }},
		// The client is given the time to notice: before, a bare one fails too.
		{"connections closed while idle", faulty.NewServer, func(s *faulty.Server, old *oldConns) { s.CloseIdle(); old.open.Wait() }},
		{"connections closed while idle, h2", faulty.NewHTTP2Server, func(s *faulty.Server, old *oldConns) { s.CloseIdle(); old.open.Wait() }},
		{"graceful GOAWAY, served, h2", faulty.NewHTTP2Server, func(s *faulty.Server, _ *oldConns) { s.SetScript(faulty.InOrder(faulty.Drain())) }},
		{"graceful GOAWAY, not processed, h2", faulty.NewHTTP2Server, func(s *faulty.Server, _ *oldConns) { s.SetScript(faulty.InOrder(faulty.GoAway())) }},
		{"REFUSED_STREAM once, h2", faulty.NewHTTP2Server, func(s *faulty.Server, _ *oldConns) {
			s.SetScript(faulty.InOrder(faulty.RSTStream(faulty.RefusedStream)))
		}},
	}
	const bare = KeyMode(99)
	for _, f := range faults {
		for kind, body := range bodies {
			for _, idle := range []int{1, 5, 20} {
				if idle > 1 && strings.Contains(f.name, "h2") {
					continue // they share one connection
				}
				t.Run(fmt.Sprint(f.name, "/", kind, "/", idle, " idle"), func(t *testing.T) {
					delivered := map[KeyMode]result{}
					for _, keys := range []KeyMode{bare, KeysSent, KeysHonored, KeysOff} {
						s := f.start(nil, nil)
						t.Cleanup(s.Close)
						base := s.Transport()
						old := dying(base)
						client := &http.Client{Transport: base}
						tr := &Transport{Base: base, Policy: quick(keys)}
						if keys != bare {
							client = contract(t, tr)
						}
						warm(t, client, s, idle)
						l := newLedger(true)
						s.SetHandler(l)
						f.strike(s, old)
						req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/charges", body())
						require.NoError(t, err)
						delivered[keys] = do(client, req)
						assert.LessOrEqual(t, len(l.deliveries()), 1)
						base.CloseIdleConnections()
					}
					if delivered[bare].err != nil {
						return
					}
					for _, keys := range []KeyMode{KeysSent, KeysHonored, KeysOff} {
						r := delivered[keys]
						if keys != KeysHonored && kind == "no body" && (f.name == "graceful GOAWAY, not processed, h2" || f.name == "REFUSED_STREAM once, h2") {
							// The documented exception: the veto hides what it was.
							assert.Equal(t, Unknown, r.report.Outcome)
							assert.Equal(t, ErrUnsafe, r.report.Reason)
							continue
						}
						assert.NoError(t, r.err, "keys %d: a bare client delivers", keys)
						assert.Equal(t, 201, r.status, "keys %d", keys)
						assert.Equal(t, Done, r.report.Outcome)
					}
				})
			}
		}
	}
}

// A connection that is dead before a byte was written is no attempt, also for
// requests that name their intent, and the upstream is asked only once.
func TestADeadConnectionFromThePoolIsNoAttempt(t *testing.T) {
	for _, keys := range []KeyMode{KeysSent, KeysHonored} {
		s := faulty.NewServer(nil, nil)
		base := s.Transport()
		old := dying(base)
		store := &MemoryStore{}
		tr := &Transport{Base: base, Policy: quick(keys), Store: store}
		client := contract(t, tr)
		warm(t, client, s, 2)
		old.dead.Store(true)
		r := do(client, post(t, t.Context(), "charge", s.URL, "100"))
		require.NoError(t, r.err)
		assert.Equal(t, Done, r.report.Outcome)
		records, _ := store.List(t.Context(), Query{})
		require.Len(t, records, 1)
		assert.Equal(t, StateDone, records[0].State)
		if keys == KeysSent {
			assert.Equal(t, 1, r.report.Attempts, "sends")
			assert.Equal(t, 1, records[0].Attempts)
		}
		tr.CloseIdleConnections()
		s.Close()
	}
}

// A11: without GetBody net/http cannot go on after a GOAWAY; we can.
func TestAGoAwayDoesNotLoseABodyWithoutGetBody(t *testing.T) {
	for _, keys := range []KeyMode{KeysSent, KeysHonored} {
		l := newLedger(true)
		s := faulty.NewHTTP2Server(l, faulty.InOrder(faulty.GoAway()))
		client := contract(t, &Transport{Base: s.Transport(), Policy: quick(keys)})
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, opaque("amount=100"))
		require.NoError(t, err)
		r := do(client, req)
		require.NoError(t, r.err)
		assert.Equal(t, 2, r.report.Attempts, "the repeat is counted")
		sent := s.Requests()
		require.Len(t, sent, 2)
		assert.Equal(t, sent[0].Header["Idempotency-Key"], sent[1].Header["Idempotency-Key"])
		assert.Equal(t, "amount=100", string(sent[1].Body))
		assert.NotEqual(t, sent[0].RemoteAddr, sent[1].RemoteAddr, "a new connection")
		assert.Equal(t, 1, l.effects("amount=100"))
		s.Close()
	}
}

// A19: the server closes idle connections just as they are used again.
func TestKeyedPostsSurviveConnectionsThatCloseAsTheyAreUsed(t *testing.T) {
	l := newLedger(true)
	s := faulty.NewServer(l, faulty.Random(19, 0.3, faulty.CloseStale()))
	defer s.Close()
	client := contract(t, &Transport{Base: s.Transport(), Policy: quick(KeysHonored)})
	var closing sync.WaitGroup
	repeated := 0
	for i := range 500 {
		if i%7 == 0 {
			closing.Go(s.CloseIdle)
		}
		body := fmt.Sprint("charge ", i)
		r := do(client, post(t, t.Context(), "", s.URL, body))
		require.NoError(t, r.err)
		require.Equal(t, Done, r.report.Outcome)
		require.LessOrEqual(t, r.report.Attempts, 2)
		require.Equal(t, 1, l.effects(body))
		repeated += r.report.Attempts - 1
	}
	closing.Wait()
	assert.Greater(t, repeated, 50, "the server did close")
}

// A46: no stream that the server refused is sent again with an empty body.
func TestARefusedStreamIsSentAgainWithItsWholeBody(t *testing.T) {
	body := strings.Repeat("0123456789", 2000)
	s := faulty.NewHTTP2Server(nil, func(n int, _ *http.Request) faulty.Fault {
		if n%2 == 1 {
			return faulty.RSTStream(faulty.RefusedStream)
		}
		return faulty.Pass()
	})
	defer s.Close()
	var served atomic.Int32
	s.SetHandler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil || string(b) != body || r.ContentLength != int64(len(body)) {
			t.Errorf("got %d bytes of %d: %v", len(b), r.ContentLength, err)
		}
		served.Add(1)
	}))
	for _, keys := range []KeyMode{KeysSent, KeysHonored} {
		client := contract(t, &Transport{Base: s.Transport(), Policy: quick(keys)})
		for range 100 {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, opaque(body))
			require.NoError(t, err)
			r := do(client, req)
			require.NoError(t, r.err)
			require.Equal(t, 2, r.report.Attempts)
		}
	}
	assert.EqualValues(t, 200, served.Load())
}

// A76: a server that says GOAWAY at every 50th stream, from several callers.
func TestBodiesAreWholeAfterGoAway(t *testing.T) {
	s := faulty.NewHTTP2Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		io.Copy(h, r.Body)
		if fmt.Sprintf("%x", h.Sum(nil)) != r.Header.Get("X-Sum") {
			w.WriteHeader(http.StatusBadRequest)
		}
	}), func(n int, _ *http.Request) faulty.Fault {
		if n%50 == 0 {
			return faulty.GoAway()
		}
		return faulty.Pass()
	})
	defer s.Close()
	pol := quick(KeysHonored)
	pol.MaxAttempts = 10
	client := contract(t, &Transport{Base: s.Transport(), Policy: pol})
	var next atomic.Int32
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := next.Add(1); i <= 1000; i = next.Add(1) {
				body := strings.Repeat(fmt.Sprintf("%010d", i), 1024)
				req := post(t, t.Context(), "", s.URL, body)
				req.Header.Set("X-Sum", fmt.Sprintf("%x", sha256.Sum256([]byte(body))))
				r := do(client, req)
				assert.NoError(t, r.err)
				assert.Equal(t, 200, r.status, "the hash is right")
			}
		})
	}
	all.Wait()
	bySum := map[string]string{}
	for _, d := range s.Requests() {
		sum, key := d.Header.Get("X-Sum"), d.Header.Get("Idempotency-Key")
		if was, ok := bySum[sum]; ok {
			assert.Equal(t, was, key, "duplicates have equal keys")
		}
		bySum[sum] = key
	}
	assert.Len(t, bySum, 1000)
}

// The texts that tell HTTP/2's two safe cases from the unsafe one, from the
// real net/http.
func TestNetHTTPsUnprocessedStreamsAreRecognised(t *testing.T) {
	for f, safe := range map[faulty.Fault]bool{
		faulty.RSTStream(faulty.RefusedStream):   true,
		faulty.GoAway():                          true,
		faulty.RSTStream(faulty.ProtocolError):   false,
		faulty.RSTStream(faulty.InternalError):   false,
		faulty.RSTStream(faulty.Cancel):          false,
		faulty.RSTStream(faulty.EnhanceYourCalm): false,
		faulty.DropConn():                        false,
		faulty.GoAway().AfterHandler():           false,
	} {
		s := faulty.NewHTTP2Server(nil, faulty.Always(f))
		req := post(t, t.Context(), "", s.URL, "amount=100")
		req.GetBody = nil
		_, err := s.Transport().RoundTrip(req)
		require.Error(t, err)
		assert.Equal(t, safe, unprocessedH2(err), "%v: %v", f, err)
		s.Close()
	}
}

// The caller's own httptrace is told of every attempt.
func TestTheCallersHttptraceStillFires(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		for kind, body := range bodies {
			if method == http.MethodGet && kind != "no body" {
				continue
			}
			s := faulty.NewServer(nil, faulty.InOrder(faulty.Status(503)))
			var getConn, gotConn, wroteHeaders, wroteRequest, firstByte atomic.Int32
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
				GetConn:              func(string) { getConn.Add(1) },
				GotConn:              func(httptrace.GotConnInfo) { gotConn.Add(1) },
				WroteHeaders:         func() { wroteHeaders.Add(1) },
				WroteRequest:         func(httptrace.WroteRequestInfo) { wroteRequest.Add(1) },
				GotFirstResponseByte: func() { firstByte.Add(1) },
			})
			req, err := http.NewRequestWithContext(ctx, method, s.URL, body())
			require.NoError(t, err)
			r := do(contract(t, &Transport{Base: s.Transport(), Policy: quick(KeysHonored)}), req)
			require.NoError(t, r.err)
			for name, n := range map[string]*atomic.Int32{"GetConn": &getConn, "GotConn": &gotConn, "WroteHeaders": &wroteHeaders,
				"WroteRequest": &wroteRequest, "GotFirstResponseByte": &firstByte} {
				assert.EqualValues(t, 2, n.Load(), "%s, %s, %s", method, kind, name)
			}
			s.Close()
		}
	}
}

// The key that is on the wire is the same whether its name was hidden from
// net/http or not, and inner RoundTrippers can read it where keys are honoured.
func TestTheKeyIsReadableByInnerTransportsWhereKeysAreHonored(t *testing.T) {
	var seen http.Header
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) { seen = r.Header; return answerOf(200, ""), nil })
	do(contract(t, &Transport{Base: base, Policy: quick(KeysHonored)}), post(t, t.Context(), "", "http://up.example", "x"))
	assert.Len(t, seen.Get("Idempotency-Key"), 36)
	do(contract(t, &Transport{Base: base, Policy: quick(KeysSent)}), post(t, t.Context(), "", "http://up.example", "x"))
	assert.Len(t, seen[strings.ToLower("Idempotency-Key")], 1, "the same on the wire, and unknown to net/http's replay rule")
	assert.Empty(t, seen.Get("Idempotency-Key"))
}

// A connection with nothing written and the attempt's own time-out must not be
// taken for each other.
func TestACallCancelledOnADeadConnectionIsTheCallersEnd(t *testing.T) {
	s := faulty.NewServer(nil, faulty.Always(faulty.Stall(0)))
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { cancel() }})
	r := do(contract(t, &Transport{Base: s.Transport(), Policy: quick(KeysHonored)}), post(t, ctx, "charge", s.URL, "100"))
	assert.ErrorIs(t, r.err, context.Canceled)
	assert.Equal(t, Unknown, r.report.Outcome)
	assert.Equal(t, 1, r.report.Attempts)
}

// A RoundTripper between us and net/http that copies the header by name makes
// the hidden names canonical again: net/http's replay rule must not come back
// with them, neither as sends of its own nor as a proof that nothing was sent.
func TestAWrapperThatCanonicalisesHeaderNamesBringsNoHiddenSendsBack(t *testing.T) {
	for kind, body := range bodies {
		for _, keys := range []KeyMode{KeysSent, KeysHonored, KeysOff} {
			t.Run(fmt.Sprint(kind, "/", keys), func(t *testing.T) {
				s := faulty.NewServer(nil, nil)
				t.Cleanup(s.Close)
				wrapper := canonicalising{s.Transport()}
				client := contract(t, &Transport{Base: wrapper, Policy: quick(keys)})
				warm(t, client, s, 5)
				s.SetScript(faulty.Always(faulty.CloseStale()))
				before := len(s.Requests())
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/charges", body())
				require.NoError(t, err)
				req.Header.Set("X-Idempotency-Key", "the-callers-own")
				r := do(client, req)
				sent := len(s.Requests()) - before
				assert.Equal(t, sent, r.report.Attempts, "sends are attempts")
				assert.Equal(t, Unknown, r.report.Outcome)
				if keys == KeysHonored {
					assert.Equal(t, 3, sent)
				} else {
					assert.Equal(t, 1, sent, "each is a charge")
				}
			})
		}
	}
}

type canonicalising struct{ *http.Transport }

func (c canonicalising) RoundTrip(r *http.Request) (*http.Response, error) {
	clone := r.Clone(r.Context())
	clone.Header = http.Header{}
	for name, values := range r.Header {
		for _, v := range values {
			clone.Header.Add(name, v)
		}
	}
	return c.Transport.RoundTrip(clone)
}
