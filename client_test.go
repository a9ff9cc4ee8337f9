package oncehttp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// A56: the same request, 50 times, with and without a header map.
func TestARequestCanBeSentFiftyTimesAndStaysAsItIs(t *testing.T) {
	for name, req := range map[string]*http.Request{
		"as little as works": {URL: mustURL(t, "http://up.example/")},
		"POST, nil header":   {Method: http.MethodPost, URL: mustURL(t, "http://up.example/")},
		"POST with a header": {Method: http.MethodPost, URL: mustURL(t, "http://u:p@up.example/?q=1"), Header: http.Header{"X-A": {"b"}}},
		"with the key":       {Method: http.MethodPost, URL: mustURL(t, "http://up.example/"), Header: http.Header{"idempotency-KEY": {"k"}}},
		"DELETE":             {Method: http.MethodDelete, URL: mustURL(t, "http://up.example/"), Host: "other.example"},
		"a body by hand": {Method: http.MethodPost, URL: mustURL(t, "http://up.example/"), Header: http.Header{}, ContentLength: 3,
			Body: opaque("abc"), GetBody: func() (io.ReadCloser, error) { return opaque("abc"), nil }},
	} {
		for _, keys := range []KeyMode{KeysSent, KeysHonored, KeysOff} {
			t.Run(fmt.Sprint(name, "/", keys), func(t *testing.T) {
				seen := map[string]bool{}
				base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
					n := 0
					for k, v := range r.Header {
						if strings.EqualFold(k, "Idempotency-Key") {
							n += len(v)
							seen[strings.Join(v, ",")] = true
						}
					}
					assert.LessOrEqual(t, n, 1, "one key header")
					return answerOf(204, ""), nil
				})
				before := *req
				header, nilHeader := maps.Clone(req.Header), req.Header == nil
				client := contract(t, &Transport{Base: base, Policy: quick(keys)})
				for range 50 {
					resp, err := client.Transport.RoundTrip(req)
					r := finish(resp, err)
					require.NoError(t, r.err)
				}
				assert.Equal(t, nilHeader, req.Header == nil)
				assert.Equal(t, header, maps.Clone(req.Header))
				assert.Same(t, before.URL, req.URL)
				assert.Equal(t, before.ContentLength, req.ContentLength)
				assert.True(t, before.Body == req.Body)
				assert.Equal(t, before.GetBody == nil, req.GetBody == nil)
				if req.Header == nil && req.Method == http.MethodPost && keys != KeysOff {
					assert.Len(t, seen, 50, "fifty anonymous intents")
				}
			})
		}
	}
}

// A57: the body is closed on every path, and a refusal says what is known.
func TestTheBodyIsClosedOnEveryPath(t *testing.T) {
	failure := errors.New("failure")
	ok := roundTripFunc(func(*http.Request) (*http.Response, error) { return answerOf(200, "ok"), nil })
	down := roundTripFunc(func(*http.Request) (*http.Response, error) { return nil, failure })
	overloaded := roundTripFunc(func(*http.Request) (*http.Response, error) { return answerOf(503, ""), nil })
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancelLate := context.WithTimeout(t.Context(), time.Hour)
	defer cancelLate()
	named := func(name string) context.Context { return WithIntent(t.Context(), name) }
	before := func(n int) func(*Transport) {
		return func(tr *Transport) {
			for i := range n {
				do(tr.Client(), post(t, t.Context(), "", "http://up.example/", fmt.Sprint(i)))
			}
		}
	}
	for _, c := range []struct {
		name    string
		tr      *Transport
		before  func(*Transport)
		ctx     context.Context
		change  func(*http.Request)
		outcome Outcome
		reason  error
	}{
		{name: "done", tr: &Transport{Base: ok}, outcome: Done},
		{name: "the base fails", tr: &Transport{Base: down, Policy: quick(KeysHonored)}, outcome: Unknown, reason: ErrAttempts},
		{name: "503 to the end", tr: &Transport{Base: overloaded, Policy: quick(KeysHonored)}, outcome: Unknown, reason: ErrAttempts},
		{name: "the breaker is open", tr: &Transport{Base: down, Policy: Policy{Breaker: Breaker{MinCalls: 1}}}, before: before(1), outcome: NotSent, reason: ErrOpen},
		{name: "the budget is empty", tr: &Transport{Base: overloaded, Policy: Policy{Keys: KeysHonored, BaseDelay: 1, Budget: Budget{Burst: 1, MinPerSecond: 1e-9}}},
			before: before(1), outcome: Unknown, reason: ErrBudget},
		{name: "the store fails", tr: &Transport{Base: ok, Store: brokenStore{}}, outcome: NotSent, reason: ErrStore},
		{name: "a setting cannot work", tr: &Transport{Base: ok, Policy: Policy{MaxAttempts: -7}}, outcome: NotSent, reason: ErrInvalid},
		{name: "a call's policy cannot work", tr: &Transport{Base: ok}, ctx: WithPolicy(t.Context(), Policy{MaxInFlight: 1}), outcome: NotSent, reason: ErrInvalid},
		{name: "the caller has gone", tr: &Transport{Base: ok}, ctx: canceled, outcome: NotSent, reason: context.Canceled},
		{name: "no time for the rate limit", tr: &Transport{Base: ok, Policy: Policy{RateLimit: 1e-6}}, before: before(1), ctx: late, outcome: NotSent, reason: ErrDeadline},
		{name: "Prepare fails", tr: &Transport{Base: ok, Prepare: func(*http.Request) error { return failure }}, outcome: NotSent},
		{name: "NewKey fails", tr: &Transport{Base: ok, Policy: Policy{NewKey: func(context.Context, Intent) (string, error) { return "", failure }}},
			outcome: NotSent, reason: ErrInvalid},
		{name: "no upstream name", tr: &Transport{Base: ok, UpstreamOf: func(*http.Request) string { return "" }}, outcome: NotSent, reason: ErrInvalid},
		{name: "a bad key", tr: &Transport{Base: ok}, change: func(r *http.Request) { r.Header.Set("Idempotency-Key", "ключ") }, outcome: NotSent, reason: ErrInvalid},
		{name: "two keys", tr: &Transport{Base: ok}, change: func(r *http.Request) { r.Header["Idempotency-Key"] = []string{"a", "b"} }, outcome: NotSent, reason: ErrInvalid},
		{name: "a bad intent name", tr: &Transport{Base: ok}, ctx: named(""), outcome: NotSent, reason: ErrInvalid},
		{name: "Fingerprint fails", tr: &Transport{Base: ok, Policy: Policy{Fingerprint: func(*http.Request, []byte) ([32]byte, error) { return [32]byte{}, failure }}},
			ctx: named("a"), outcome: NotSent, reason: ErrBody},
		{name: "the intent is another's", tr: &Transport{Base: ok}, ctx: named("a"),
			before:  func(tr *Transport) { do(tr.Client(), post(t, t.Context(), "a", "http://up.example/", "other")) },
			outcome: NotSent, reason: ErrIntentMismatch},
		{name: "the intent has ended", tr: &Transport{Base: ok}, ctx: named("a"),
			before:  func(tr *Transport) { do(tr.Client(), post(t, t.Context(), "a", "http://up.example/", "amount=100")) },
			outcome: Done},
		{name: "a nil URL", tr: &Transport{Base: ok}, change: func(r *http.Request) { r.URL = nil }, outcome: NotSent, reason: ErrInvalid},
		{name: "no scheme", tr: &Transport{Base: ok}, change: func(r *http.Request) { r.URL.Scheme = "" }, outcome: NotSent, reason: ErrInvalid},
		{name: "no host", tr: &Transport{Base: ok}, change: func(r *http.Request) { r.URL.Host = "" }, outcome: NotSent, reason: ErrInvalid},
		{name: "CONNECT", tr: &Transport{Base: ok}, change: func(r *http.Request) { r.Method = http.MethodConnect }, outcome: Done},
		{name: "CONNECT that Prepare refuses", tr: &Transport{Base: ok, Prepare: func(*http.Request) error { return failure }},
			change: func(r *http.Request) { r.Method = http.MethodConnect }, outcome: NotSent},
		{name: "a GET with a body", tr: &Transport{Base: overloaded, Policy: quick(KeysSent)}, change: func(r *http.Request) { r.Method = http.MethodGet }, outcome: Unknown, reason: ErrAttempts},
	} {
		for _, getBody := range []bool{true, false} {
			t.Run(fmt.Sprint(c.name, "/GetBody ", getBody), func(t *testing.T) {
				tr := &Transport{Base: c.tr.Base, Policy: c.tr.Policy, Store: c.tr.Store, Prepare: c.tr.Prepare, UpstreamOf: c.tr.UpstreamOf}
				if c.before != nil {
					c.before(tr)
				}
				ctx := c.ctx
				if ctx == nil {
					ctx = t.Context()
				}
				req := post(t, ctx, "", "http://up.example/", "amount=100")
				closes := &watchedBody{ReadCloser: req.Body, closed: make(chan struct{})}
				req.Body = closes
				if !getBody {
					req.GetBody = nil
				}
				if c.change != nil {
					c.change(req)
				}
				resp, err := strict{t, tr}.RoundTrip(req)
				r := finish(resp, err)
				assert.EqualValues(t, 1, closes.closes.Load(), "closed once")
				assert.Equal(t, c.outcome, r.report.Outcome, "%v", r.err)
				assert.Equal(t, c.reason, r.report.Reason, "%v", r.err)
				if r.err != nil && c.reason != nil {
					assert.ErrorIs(t, r.err, c.reason)
				}
				assert.Zero(t, tr.Upstream("up.example").InFlight)
			})
		}
	}
}

// brokenStore confirms nothing.
type brokenStore struct{ KeyStore }

var errBroken = errors.New("disk full")

func (brokenStore) Create(context.Context, Record) (Record, bool, error) {
	return Record{}, false, errBroken
}
func (brokenStore) Get(context.Context, string) (Record, error)    { return Record{}, errBroken }
func (brokenStore) Update(context.Context, Record) (Record, error) { return Record{}, errBroken }

func TestIncompleteRequestsAreRefusedByAClearError(t *testing.T) {
	base := roundTripFunc(func(*http.Request) (*http.Response, error) { t.Error("sent"); return answerOf(200, ""), nil })
	tr := &Transport{Base: base}
	for _, c := range []struct {
		req  *http.Request
		says string
	}{
		{nil, "the request is nil"},
		{&http.Request{}, "no URL"},
		{&http.Request{URL: &url.URL{}}, "no scheme"},
		{&http.Request{URL: &url.URL{Scheme: "http"}}, "no host"},
		{&http.Request{URL: &url.URL{Scheme: "https", Path: "/x"}, Method: "POST"}, "no host"},
	} {
		resp, err := strict{t, tr}.RoundTrip(c.req)
		r := finish(resp, err)
		require.ErrorIs(t, r.err, ErrInvalid)
		assert.ErrorContains(t, r.err, c.says)
		assert.Equal(t, NotSent, r.report.Outcome)
	}
}

// The answer's body can be read after RoundTrip has returned, and the
// attempt's context ends with it: not before, and not later.
func TestTheAttemptsContextEndsWithTheAnswersBody(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		for name, end := range map[string]func(*http.Response){
			"EOF":   func(r *http.Response) { io.Copy(io.Discard, r.Body) },
			"Close": func(r *http.Response) { r.Body.Close() },
		} {
			t.Run(method+"/"+name, func(t *testing.T) {
				var attempt context.Context
				base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
					attempt = r.Context()
					resp := answerOf(200, strings.Repeat("x", 1000))
					resp.ContentLength = -1
					return resp, nil
				})
				req, err := http.NewRequestWithContext(t.Context(), method, "http://up.example/", nil)
				require.NoError(t, err)
				resp, err := contract(t, &Transport{Base: base, Policy: quick(KeysHonored)}).Do(req)
				require.NoError(t, err)
				require.NoError(t, attempt.Err())
				_, err = resp.Body.Read(make([]byte, 10))
				require.NoError(t, err)
				require.NoError(t, attempt.Err(), "not while it is read")
				end(resp)
				assert.ErrorIs(t, attempt.Err(), context.Canceled)
				assert.NoError(t, resp.Request.Context().Err(), "the caller's is the caller's")
				resp.Body.Close()
			})
		}
	}
}

// A16, over a socket: a body that comes in pieces for longer than an attempt
// may take is not cut.
func TestAttemptTimeoutDoesNotCutABodyThatIsBeingRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := faulty.NewMemoryServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for range 16 {
				io.WriteString(w, strings.Repeat("x", 64<<10))
				http.NewResponseController(w).Flush()
				wait(context.Background(), 50*time.Millisecond)
			}
		}), nil)
		defer s.Close()
		tr := &Transport{Base: s.Transport(), Policy: Policy{AttemptTimeout: 100 * time.Millisecond}}
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
		r := do(contract(t, tr), req)
		require.NoError(t, r.err)
		assert.NoError(t, r.read)
		assert.Len(t, r.body, 1<<20)
		tr.CloseIdleConnections()
	})
}

func TestTwoHundredConcurrentCallsShareOneTransport(t *testing.T) {
	l := newLedger(true)
	s := faulty.NewServer(l, faulty.Random(200, 0.1, faulty.Status(503), faulty.LoseResponse(), faulty.CloseStale()))
	defer s.Close()
	pol := quick(KeysHonored)
	pol.MaxAttempts = 10
	client := contract(t, &Transport{Base: s.Transport(), Policy: pol})
	shared, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
	require.NoError(t, err)
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			if i%4 == 0 {
				assert.NoError(t, do(client, shared).err) // a GET without a body may be shared
				return
			}
			intent := ""
			if i%2 == 0 {
				intent = fmt.Sprint("charge:", i)
			}
			body := fmt.Sprint("amount=", i)
			r := do(client, post(t, t.Context(), intent, s.URL, body))
			assert.NoError(t, r.err)
			assert.Equal(t, Done, r.report.Outcome)
			assert.Equal(t, 1, l.effects(body))
		})
	}
	all.Wait()
}

// A protocol switch is one attempt, and the connection becomes the caller's.
func TestAnUpgradePassesThroughUntouched(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "echo" || r.Header.Get("Idempotency-Key") != "" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		io.Copy(conn, rw)
	}))
	defer s.Close()
	base := &http.Transport{}
	tr := &Transport{Base: base, Policy: Policy{AttemptTimeout: time.Nanosecond, MaxElapsed: time.Nanosecond}}
	for _, connection := range []string{"Upgrade", "keep-alive, upgrade"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
		require.NoError(t, err)
		req.Header.Set("Connection", connection)
		req.Header.Set("Upgrade", "echo")
		resp, err := contract(t, tr).Do(req)
		require.NoError(t, err)
		require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
		assert.Equal(t, Done, OutcomeOf(resp, nil))
		rw, ok := resp.Body.(io.ReadWriteCloser)
		require.True(t, ok, "%T", resp.Body)
		for _, word := range []string{"hello\n", "again\n"} {
			io.WriteString(rw, word)
			line, err := bufio.NewReader(rw).ReadString('\n')
			require.NoError(t, err)
			assert.Equal(t, word, line)
		}
		rw.Close()
	}
}

func TestConnectAndUpgradeAreOneAttemptWithTheCallersOwnRequest(t *testing.T) {
	for name, req := range map[string]*http.Request{
		"CONNECT": {Method: http.MethodConnect, URL: mustURL(t, "http://proxy.example"), Host: "up.example:443", Header: http.Header{}},
		"Upgrade": {Method: http.MethodPost, URL: mustURL(t, "http://up.example"), Header: http.Header{"Connection": {"upgrade"}, "Upgrade": {"h2c"}}},
	} {
		var given []*http.Request
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			given = append(given, r)
			return nil, io.ErrUnexpectedEOF
		})
		req.Body = opaque("stream")
		resp, err := (&Transport{Base: base, Policy: quick(KeysHonored)}).RoundTrip(req)
		r := finish(resp, err)
		assert.ErrorIs(t, r.err, io.ErrUnexpectedEOF, name)
		assert.Equal(t, Unknown, r.report.Outcome)
		require.Len(t, given, 1)
		assert.Same(t, req, given[0])
		refused := &Transport{Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
			return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
		})}
		_, err = refused.RoundTrip(req)
		assert.Equal(t, NotSent, OutcomeOf(nil, err))
	}
}

// Retry at one layer: 3 sends, not 9, whatever is between the two Transports.
func TestATransportInsideAnotherSendsOnce(t *testing.T) {
	for _, keys := range []KeyMode{KeysSent, KeysHonored} {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			sends := 0
			sent := map[string]bool{}
			base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
				sends++
				for k, v := range r.Header {
					if strings.EqualFold(k, "Idempotency-Key") {
						sent[strings.Join(v, ",")] = true
					}
				}
				return answerOf(503, "down"), nil
			})
			innerStore := &MemoryStore{}
			inner := &Transport{Base: base, Policy: quick(keys), Store: innerStore}
			between := &http.Client{Transport: inner}
			outer := &Transport{Policy: quick(keys), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
				return between.Do(r.Clone(r.Context()))
			})}
			req, _ := http.NewRequestWithContext(WithIntent(t.Context(), "charge"), method, "http://up.example/", nil)
			r := do(contract(t, outer), req)
			require.NoError(t, r.err)
			want := 3
			if method == http.MethodPost && keys == KeysSent {
				want = 1
			}
			assert.Equal(t, want, sends)
			assert.Equal(t, want, r.report.Attempts)
			assert.Equal(t, "down", r.body)
			if method == http.MethodPost {
				assert.Len(t, sent, 1, "the outer one's key goes through")
			}
			records, _ := innerStore.List(t.Context(), Query{})
			assert.Empty(t, records, "the intent is the outer one's")
		}
	}
}

// Provably unsent stays so through a Transport inside.
func TestADialErrorOfATransportInsideIsRetried(t *testing.T) {
	n := 0
	inner := &Transport{Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
		if n++; n == 1 {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}
		}
		return answerOf(201, "ok"), nil
	})}
	r := do(contract(t, &Transport{Base: inner, Policy: quick(KeysSent)}), post(t, t.Context(), "", "http://up.example/", "x"))
	require.NoError(t, r.err)
	assert.Equal(t, 2, n)
}

// What runs under a response's request context is a call of its own.
func TestAResponsesContextDoesNotCarryTheMarkOfAnAttempt(t *testing.T) {
	n := 0
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		if n++; n == 1 {
			return answerOf(200, "first"), nil
		}
		return answerOf(503, ""), nil
	})
	client := contract(t, &Transport{Base: base, Policy: quick(KeysHonored)})
	resp, err := client.Do(post(t, t.Context(), "charge", "http://up.example/", "x"))
	require.NoError(t, err)
	resp.Body.Close()
	req, _ := http.NewRequestWithContext(resp.Request.Context(), http.MethodGet, "http://up.example/status", nil)
	do(client, req)
	assert.Equal(t, 4, n, "it retries")
}

// A token request that Prepare or a base makes with the attempt's context is
// not the charge: no intent, no key of it, no retries of its own.
func TestARequestInsideAnAttemptIsNotTheCharge(t *testing.T) {
	var tokenKeys []string
	store := &MemoryStore{}
	tr := &Transport{Policy: quick(KeysHonored), Store: store}
	tr.Base = roundTripFunc(func(r *http.Request) (*http.Response, error) {
		if r.URL.Path == "/token" {
			tokenKeys = append(tokenKeys, r.Header.Get("Idempotency-Key"))
			return answerOf(503, "no token"), nil
		}
		return answerOf(200, "charged"), nil
	})
	asked := 0
	tr.Prepare = func(r *http.Request) error {
		if r.URL.Path == "/token" {
			return nil
		}
		asked++
		r.Header.Set("Authorization", "t")
		req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, "http://up.example/token", strings.NewReader("grant"))
		require.NoError(t, err)
		assert.Equal(t, 503, do(tr.Client(), req).status)
		return nil
	}
	var report Report
	r := do(contract(t, tr), post(t, WithReport(t.Context(), &report), "charge", "http://up.example/charges", "100"))
	require.NoError(t, r.err)
	assert.Len(t, tokenKeys, 1)
	assert.Equal(t, 1, asked)
	assert.Equal(t, "charge", report.Intent, "the token call has not overwritten the caller's report")
	assert.Equal(t, 200, report.Status)
	records, _ := store.List(t.Context(), Query{})
	require.Len(t, records, 1)
	assert.Equal(t, StateDone, records[0].State)
	assert.NotContains(t, tokenKeys, records[0].Key)
}

// A59, A100: the hook's change is what goes on the wire, and each attempt gets
// its own.
func TestPrepareSignsEveryAttempt(t *testing.T) {
	for _, start := range []func(http.Handler, faulty.Script) *faulty.Server{faulty.NewServer, faulty.NewHTTP2Server} {
		s := start(newLedger(true), faulty.InOrder(faulty.Status(503), faulty.LoseResponse()))
		n := 0
		tr := &Transport{Base: s.Transport(), Policy: quick(KeysHonored), Prepare: func(r *http.Request) error {
			n++
			assert.Empty(t, r.Header.Get("Authorization"), "a pristine copy")
			b, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			r.Header.Set("Authorization", fmt.Sprint(n, " ", string(b), " ", r.Header.Get("Idempotency-Key")))
			return nil
		}}
		r := do(contract(t, tr), post(t, t.Context(), "", s.URL, "amount=100"))
		require.NoError(t, r.err)
		sent := s.Requests()
		require.Len(t, sent, 3)
		for i, d := range sent {
			assert.Equal(t, fmt.Sprint(i+1, " amount=100 ", sent[0].Header.Get("Idempotency-Key")), d.Header.Get("Authorization"))
			assert.Equal(t, "amount=100", string(d.Body))
		}
		s.Close()
	}
}

func TestPrepareCannotChangeWhatMakesTheIntent(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*http.Request)
		sends  int
	}{
		"the path":          {func(r *http.Request) { r.URL.Path = "/refunds" }, 0},
		"the URL":           {func(r *http.Request) { r.URL = &url.URL{Scheme: "http", Host: "other.example"} }, 0},
		"no URL":            {func(r *http.Request) { r.URL = nil }, 0},
		"the method":        {func(r *http.Request) { r.Method = http.MethodPut }, 0},
		"the host":          {func(r *http.Request) { r.Host = "other.example" }, 0},
		"the key":           {func(r *http.Request) { r.Header.Set("Idempotency-Key", "mine") }, 0},
		"no key":            {func(r *http.Request) { r.Header.Del("Idempotency-Key") }, 0},
		"a second key":      {func(r *http.Request) { r.Header.Add("Idempotency-Key", "mine") }, 0},
		"a key, other case": {func(r *http.Request) { r.Header["idempotency-key"] = []string{"mine"} }, 0},
		"no header":         {func(r *http.Request) { r.Header = nil }, 0},
		"the body":          {func(r *http.Request) { r.Body = opaque("amount=1"); r.ContentLength = 8 }, 1},
		"GetBody":           {func(r *http.Request) { r.GetBody = func() (io.ReadCloser, error) { return opaque("amount=1"), nil } }, 1},
		"the length":        {func(r *http.Request) { r.ContentLength = 3 }, 1},
		"a signature":       {func(r *http.Request) { r.Header.Set("X-Signature", "s") }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
				n++
				b, _ := io.ReadAll(r.Body)
				assert.Equal(t, "amount=100", string(b))
				assert.EqualValues(t, 10, r.ContentLength)
				assert.Nil(t, r.GetBody)
				assert.Equal(t, "http://up.example/charges", r.URL.String())
				return answerOf(200, ""), nil
			})
			tr := &Transport{Base: base, Policy: quick(KeysHonored), Prepare: func(r *http.Request) error { c.change(r); return nil }}
			r := do(contract(t, tr), post(t, t.Context(), "charge", "http://up.example/charges", "amount=100"))
			assert.Equal(t, c.sends, n)
			if c.sends == 0 {
				assert.ErrorIs(t, r.err, ErrInvalid)
				assert.ErrorContains(t, r.err, "Prepare changed")
				assert.Equal(t, NotSent, r.report.Outcome)
			}
		})
	}
}

func TestAFailingPrepareSaysWhatEarlierAttemptsLeft(t *testing.T) {
	failure := errors.New("no token")
	for _, c := range []struct {
		status  int // of the first attempt
		outcome Outcome
	}{{503, Unknown}, {429, Rejected}} {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) { n++; return answerOf(c.status, ""), nil })
		prepared := 0
		pol := quick(KeysHonored)
		pol.Breaker = Breaker{MinCalls: 2}
		tr := &Transport{Base: base, Policy: pol, Prepare: func(*http.Request) error {
			if prepared++; prepared > 1 {
				return failure
			}
			return nil
		}}
		r := do(contract(t, tr), post(t, t.Context(), "charge", "http://up.example/", "x"))
		assert.ErrorIs(t, r.err, failure)
		assert.Equal(t, c.outcome, r.report.Outcome)
		assert.Equal(t, 1, n)
		assert.Equal(t, 1, r.report.Attempts)
		assert.Equal(t, "closed", tr.Upstream("up.example").Breaker, "the hook's failure is not the upstream's")
	}
}

// A58: whatever an inner transport does to its request, the next attempt gets
// a pristine one.
func TestEveryAttemptGetsAPristineRequest(t *testing.T) {
	n := 0
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		n++
		assert.Equal(t, []string{"caller"}, r.Header["X-From"])
		assert.Empty(t, r.Header["X-Attempt"])
		assert.Equal(t, "http://up.example/charges?q=1", r.URL.String())
		assert.Equal(t, http.MethodPost, r.Method)
		r.Header.Set("X-Attempt", fmt.Sprint(n))
		r.Header["X-From"][0] = "changed"
		r.Header.Del("Idempotency-Key")
		r.URL.Path, r.URL.RawQuery, r.Method, r.Host = "/other", "", "PUT", "other"
		return answerOf(503, ""), nil
	})
	req := post(t, t.Context(), "", "http://up.example/charges?q=1", "x")
	req.Header.Set("X-From", "caller")
	do(contract(t, &Transport{Base: base, Policy: quick(KeysHonored)}), req)
	assert.Equal(t, 3, n)
}

// A55: an attempt that was given up may still read its header and URL while
// the next one writes its own. The race detector is the judge.
func TestAnAbandonedAttemptSharesNothingWithTheNext(t *testing.T) {
	var still sync.WaitGroup
	stop := make(chan struct{})
	n := 0
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		n++
		still.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					for k, v := range r.Header {
						_ = k + strings.Join(v, "")
					}
					_ = r.URL.String()
				}
			}
		})
		if n < 3 {
			return nil, io.ErrUnexpectedEOF
		}
		return answerOf(200, ""), nil
	})
	tr := &Transport{Base: base, Policy: quick(KeysHonored), Prepare: func(r *http.Request) error {
		r.Header.Set("X-Attempt", fmt.Sprint(n))
		return nil
	}}
	req := post(t, t.Context(), "", "http://up.example/", "x")
	req.Header.Set("X-From", "caller")
	assert.Equal(t, 200, do(contract(t, tr), req).status)
	close(stop)
	still.Wait()
}

func TestABaseThatBreaksItsContractIsHeldToIt(t *testing.T) {
	var closed atomic.Int32
	failure := errors.New("failure")
	for name, c := range map[string]struct {
		base    func() (*http.Response, error)
		status  int
		outcome Outcome
		closes  int32
	}{
		"neither answer nor error": {func() (*http.Response, error) { return nil, nil }, 0, Unknown, 0},
		"both": {func() (*http.Response, error) {
			resp := answerOf(200, "x")
			resp.Body = &closeCounter{ReadCloser: resp.Body, closed: &closed}
			return resp, failure
		}, 0, Unknown, 1},
		"both, without a body": {func() (*http.Response, error) { return &http.Response{StatusCode: 200}, failure }, 0, Unknown, 0},
		"no body":              {func() (*http.Response, error) { return &http.Response{StatusCode: 204, Header: http.Header{}}, nil }, 204, Done, 0},
		"no body, no header":   {func() (*http.Response, error) { return &http.Response{StatusCode: 200}, nil }, 200, Done, 0},
		"a status of zero":     {func() (*http.Response, error) { return &http.Response{}, nil }, 0, Unknown, 0},
	} {
		for _, intent := range []string{"", "charge"} {
			t.Run(name+"/"+intent, func(t *testing.T) {
				closed.Store(0)
				base := roundTripFunc(func(*http.Request) (*http.Response, error) { return c.base() })
				tr := &Transport{Base: base, Policy: quick(KeysSent)}
				resp, err := strict{t, tr}.RoundTrip(post(t, t.Context(), intent, "http://up.example/", "x"))
				r := finish(resp, err)
				assert.Equal(t, c.status, r.status, "%v", r.err)
				assert.Equal(t, c.outcome, r.report.Outcome)
				assert.Equal(t, c.closes, closed.Load())
			})
		}
	}
}

// A53: a panic goes through, with the body closed, the slots given back and
// the intent left in doubt.
func TestAPanicGoesThroughAndLeavesNothingTaken(t *testing.T) {
	panicking := roundTripFunc(func(*http.Request) (*http.Response, error) { panic("boom") })
	for name, c := range map[string]struct {
		tr    *Transport
		state State
	}{
		"in the base":   {&Transport{Base: panicking, Policy: Policy{MaxInFlight: 1, Breaker: Breaker{MinCalls: 1}}}, StateOpen},
		"in Prepare":    {&Transport{Prepare: func(*http.Request) error { panic("boom") }, Policy: Policy{MaxInFlight: 1}}, StateNotSent},
		"in Classify":   {&Transport{Base: roundTripFunc(func(*http.Request) (*http.Response, error) { return answerOf(200, ""), nil }), Policy: Policy{MaxInFlight: 1, Classify: func(Attempt) Verdict { panic("boom") }}}, StateOpen},
		"in UpstreamOf": {&Transport{UpstreamOf: func(*http.Request) string { panic("boom") }}, 0},
		"in Scope":      {&Transport{Scope: func(*http.Request) string { panic("boom") }}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			store := &MemoryStore{}
			c.tr.Store = store
			for range 2 { // the second would wait for a slot that was not given back
				req := post(t, t.Context(), "charge", "http://up.example/", "x")
				body := &watchedBody{ReadCloser: req.Body, closed: make(chan struct{})}
				req.Body = body
				func() {
					defer func() { assert.Equal(t, "boom", recover()) }()
					c.tr.RoundTrip(req)
				}()
				assert.Positive(t, body.closes.Load())
				if c.state == StateOpen {
					break // not declared: the intent is not sent again
				}
			}
			records, _ := store.List(t.Context(), Query{})
			if c.state == 0 {
				assert.Empty(t, records)
				return
			}
			require.Len(t, records, 1)
			assert.Equal(t, c.state.String(), records[0].State.String())
			state := c.tr.Upstream("up.example")
			assert.Zero(t, state.InFlight)
			assert.Equal(t, "closed", state.Breaker)
		})
	}
}

func TestClientSetsNoTimeoutAndValidateIsWhatCallsSay(t *testing.T) {
	tr := &Transport{Policy: Policy{BaseDelay: time.Second, MaxDelay: time.Millisecond}}
	assert.Zero(t, tr.Client().Timeout)
	want := tr.Validate()
	require.ErrorContains(t, want, "BaseDelay is above MaxDelay")
	r := do(tr.Client(), post(t, t.Context(), "", "http://up.example/", "x"))
	assert.ErrorIs(t, r.err, ErrInvalid)
	assert.ErrorContains(t, r.err, want.Error())
	assert.NoError(t, (&Transport{}).Validate())
	assert.ErrorContains(t, (&Transport{Upstreams: map[string]Policy{"A.example": {}, "a.example.": {}}}).Validate(), "one")
	assert.Error(t, (&Transport{Upstreams: map[string]Policy{"": {}}}).Validate())
}

func TestTheZeroTransportWorks(t *testing.T) {
	s := faulty.NewServer(newLedger(false), nil)
	defer s.Close()
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	r := do((&Transport{}).Client(), post(t, t.Context(), "charge", s.URL, "100"))
	require.NoError(t, r.err)
	assert.Equal(t, 201, r.status)
	assert.Equal(t, Done, r.report.Outcome)
}
