package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// strict wraps a Transport and holds every call to the RoundTripper contract:
// the request is unmodified, its body is closed, the answer has a request and
// a body, and no slot of the upstream stays taken. Tests call through it.
type strict struct {
	t testing.TB
	*Transport
}

// contract returns a client whose every RoundTrip is checked.
func contract(t testing.TB, tr *Transport) *http.Client {
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: strict{t, tr}, CheckRedirect: nil}
}

func (s strict) RoundTrip(req *http.Request) (*http.Response, error) {
	if req == nil || req.URL == nil {
		return s.Transport.RoundTrip(req)
	}
	before, header, trailer := *req, req.Header.Clone(), req.Trailer.Clone()
	u := *req.URL
	var body *watchedBody
	var given io.ReadCloser
	if req.Body != nil && req.Body != http.NoBody {
		// The test's own request must keep its Body: only ours is looked at.
		body = &watchedBody{ReadCloser: req.Body, closed: make(chan struct{})}
		copied := *req
		req, given = &copied, body
		req.Body = body
	}
	resp, err := s.Transport.RoundTrip(req)
	if (resp == nil) == (err == nil) {
		s.t.Errorf("RoundTrip returned response %v and error %v", resp, err)
	}
	if *req.URL != u || req.URL != before.URL || !reflect.DeepEqual(req.Header, header) || req.Method != before.Method ||
		req.Host != before.Host || req.ContentLength != before.ContentLength || (req.GetBody == nil) != (before.GetBody == nil) ||
		given != nil && req.Body != given || given == nil && req.Body != before.Body {
		s.t.Errorf("RoundTrip modified the request: %v %v, header %v, was %v", req.Method, req.URL.Host, req.Header, header)
	}
	if len(trailer) == 0 && len(req.Trailer) != 0 {
		s.t.Error("RoundTrip modified the trailer")
	}
	if body != nil && err != nil && body.closes.Load() == 0 && !body.closedSoon() {
		s.t.Errorf("the body was not closed after %v", err)
	}
	if resp != nil {
		if resp.Body == nil || resp.Request == nil {
			s.t.Error("the response has no body or no request")
		}
		if body != nil {
			resp.Body = &checkedAnswer{ReadCloser: resp.Body, t: s.t, body: body}
		}
	}
	return resp, err
}

// watchedBody counts closes.
type watchedBody struct {
	io.ReadCloser
	closes atomic.Int32
	closed chan struct{}
}

func (b *watchedBody) Close() error {
	if b.closes.Add(1) == 1 {
		close(b.closed)
	}
	return b.ReadCloser.Close()
}

// closedSoon allows what the contract does: that the base closes the body in a
// goroutine of its own, after RoundTrip has returned.
func (b *watchedBody) closedSoon() bool {
	select {
	case <-b.closed:
		return true
	case <-time.After(time.Second):
		return false
	}
}

// checkedAnswer asserts, when the caller is done with the answer, that the
// request's body was closed.
type checkedAnswer struct {
	io.ReadCloser
	t    testing.TB
	body *watchedBody
}

func (a *checkedAnswer) Close() error {
	err := a.ReadCloser.Close()
	if !a.body.closedSoon() {
		a.t.Error("the request's body was not closed when the answer was")
	}
	return err
}

// roundTripFunc is a base made of a function.
type roundTripFunc func(*http.Request) (*http.Response, error)

func (f roundTripFunc) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	return f(r)
}

// answerOf makes a response for a roundTripFunc. Header are name, value pairs.
func answerOf(status int, body string, header ...string) *http.Response {
	h := http.Header{}
	for i := 0; i+1 < len(header); i += 2 {
		h.Add(header[i], header[i+1])
	}
	return &http.Response{StatusCode: status, Status: fmt.Sprintf("%d %s", status, http.StatusText(status)), Header: h,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body))}
}

// post makes a POST for an intent; "" is an anonymous one.
func post(t testing.TB, ctx context.Context, intent, target, body string) *http.Request {
	t.Helper()
	if intent != "" {
		ctx = WithIntent(ctx, intent)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, strings.NewReader(body))
	require.NoError(t, err)
	return req
}

// result reads a call's answer to its end and closes it.
type result struct {
	status int
	body   string
	read   error // of reading the body
	report Report
	err    error
}

func finish(resp *http.Response, err error) result {
	r := result{err: err}
	var e *Error
	if errors.As(err, &e) {
		r.report = e.Report
	}
	if resp != nil {
		var b []byte
		b, r.read = io.ReadAll(resp.Body)
		resp.Body.Close()
		r.status, r.body = resp.StatusCode, string(b)
		r.report, _ = ReportOf(resp)
	}
	return r
}

// call does one request through client.
func do(client *http.Client, req *http.Request) result {
	return finish(client.Do(req))
}

// ledger is an upstream that charges. It honours keys as the draft says if
// honors is set, and otherwise charges every POST it gets.
type ledger struct {
	honors bool
	delay  func(n int) // runs while a charge is under way

	mu      sync.Mutex
	seen    []delivery          // guarded by mu
	charges map[string]int      // guarded by mu: by body
	answers map[string]*charged // guarded by mu: by key
}

type delivery struct {
	method, path, key, body, proto string
	header                         http.Header
}

type charged struct {
	body, answer string
	done         bool
}

func newLedger(honors bool) *ledger {
	return &ledger{honors: honors, charges: map[string]int{}, answers: map[string]*charged{}}
}

func (l *ledger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	key := r.Header.Get("Idempotency-Key")
	l.mu.Lock()
	l.seen = append(l.seen, delivery{r.Method, r.URL.Path, key, string(body), r.Proto, r.Header.Clone()})
	n := len(l.seen)
	w.Header().Set("Content-Type", "application/json")
	if l.honors && key != "" {
		if a, ok := l.answers[key]; ok {
			defer l.mu.Unlock()
			switch {
			case a.body != string(body):
				w.WriteHeader(http.StatusUnprocessableEntity)
			case !a.done:
				w.WriteHeader(http.StatusConflict)
			default:
				w.Header().Set("Idempotent-Replayed", "true")
				w.WriteHeader(http.StatusCreated)
				io.WriteString(w, a.answer)
			}
			return
		}
	}
	a := &charged{body: string(body), answer: fmt.Sprintf(`{"charge":%d}`, n)}
	if l.honors && key != "" {
		l.answers[key] = a
	}
	l.charges[string(body)]++
	l.mu.Unlock()
	if l.delay != nil {
		l.delay(n)
	}
	l.mu.Lock()
	a.done = true
	l.mu.Unlock()
	w.WriteHeader(http.StatusCreated)
	io.WriteString(w, a.answer)
}

// effects is how often the body was charged.
func (l *ledger) effects(body string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.charges[body]
}

func (l *ledger) deliveries() []delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]delivery(nil), l.seen...)
}

// keysOf returns the distinct keys of deliveries.
func keysOf(ds []delivery) map[string]bool {
	keys := map[string]bool{}
	for _, d := range ds {
		keys[d.key] = true
	}
	return keys
}

// opaque hides a reader's type, so that net/http makes no GetBody.
func opaque(s string) io.ReadCloser {
	return io.NopCloser(struct{ io.Reader }{bytes.NewReader([]byte(s))})
}

func mustURL(t testing.TB, s string) *url.URL {
	t.Helper()
	u, err := url.Parse(s)
	require.NoError(t, err)
	return u
}
