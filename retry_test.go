package oncehttp

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// quick has next to no waits, and neither budget nor breaker: what is tested
// is the table.
func quick(keys KeyMode) Policy {
	return Policy{Keys: keys, BaseDelay: time.Millisecond, MaxDelay: 2 * time.Millisecond,
		Budget: Budget{Ratio: Off}, Breaker: Breaker{FailureRatio: Off}}
}

// column is a column of the retry table, GET apart from PUT and DELETE: after
// a doubt they are told different outcomes.
type column int

const (
	get column = iota
	put
	remove
	keyed
	undeclared
	keyless
)

var columns = map[column]struct {
	name, method string
	keys         KeyMode
}{
	get:        {"GET", http.MethodGet, KeysHonored},
	put:        {"PUT", http.MethodPut, KeysSent},
	remove:     {"DELETE", http.MethodDelete, KeysSent},
	keyed:      {"POST honoured", http.MethodPost, KeysHonored},
	undeclared: {"POST undeclared", http.MethodPost, KeysSent},
	keyless:    {"POST KeysOff", http.MethodPost, KeysOff},
}

// want is what one call must come to.
type want struct {
	sends   int
	status  int // 0: an error
	outcome Outcome
	reason  error
	state   State // of the record; GET has none
}

func done(sends int) want { return want{sends, 200, Done, nil, StateDone} }

// unsure ends in doubt: the last answer had this status, or there was none.
func unsure(sends, status int, reason error) want {
	return want{sends, status, Unknown, reason, StateOpen}
}

// turnedAway and judged are the two kinds of rejection.
func turnedAway(sends, status int, reason error) want {
	return want{sends, status, Rejected, reason, StateNotSent}
}

func judged(sends, status int) want { return want{sends, status, Rejected, nil, StateRejected} }

func unsent(reason error) want { return want{0, 0, NotSent, reason, StateNotSent} }

// row is a row of the retry table: what befalls the first sends, those after
// them are answered 200, and what each column must come to.
type row struct {
	name                  string
	faults                []faulty.Fault
	failures              []error // of the first dials, or of all if the last is always
	get, put, keyed, rest want
	remove                want // DELETE, where it differs from put
	only                  string
	refuse                int  // connections that the server closes at once
	distrust              bool // the client does not know the server's certificate
	hidden                bool // net/http may repeat a GET by itself
}

// errAlways, as the last failure, makes every dial fail like the one before it.
var errAlways = errors.New("always")

func (r row) want(c column) want {
	switch {
	case c == get:
		return r.get
	case c == remove && r.remove != (want{}):
		return r.remove
	case c == put, c == remove:
		return r.put
	case c == keyed:
		return r.keyed
	}
	return r.rest
}

// all gives every column the same.
func (r row) all(w want) row {
	r.get, r.put, r.keyed, r.rest = w, w, w, w
	return r
}

func dialFailure(err error) error {
	return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", err.(syscall.Errno))}
}

func retryTable() []row {
	refused := dialFailure(syscall.ECONNREFUSED)
	noHost := &net.DNSError{Err: "no such host", Name: "upstream.example", IsNotFound: true}
	dnsTimeout := &net.DNSError{Err: "i/o timeout", Name: "upstream.example", IsTimeout: true}
	dnsTemporary := &net.DNSError{Err: "server misbehaving", Name: "upstream.example", IsTemporary: true}

	rows := []row{
		row{name: "dial refused once", failures: []error{refused}}.all(done(1)),
		row{name: "dial refused always", failures: []error{refused, errAlways}}.all(unsent(ErrAttempts)),
		row{name: "NXDOMAIN", failures: []error{&net.OpError{Op: "dial", Net: "tcp", Err: noHost}}}.all(unsent(nil)),
		// A79: the timeout flag, not only IsTemporary.
		row{name: "DNS timeout", failures: []error{&net.OpError{Op: "dial", Net: "tcp", Err: dnsTimeout}}}.all(done(1)),
		row{name: "DNS timeout always", failures: []error{dnsTimeout, errAlways}}.all(unsent(ErrAttempts)),
		row{name: "DNS temporary", failures: []error{fmt.Errorf("wrapped: %w", dnsTemporary)}}.all(done(1)),
		row{name: "TLS handshake broken off", only: "tls", refuse: 1}.all(done(1)),
		// GETs run no trace, and this error has no type: not known is the cautious word for them.
		row{name: "TLS handshake always broken off", only: "tls", refuse: -1, get: unsure(0, 0, ErrAttempts),
			put: unsent(ErrAttempts), keyed: unsent(ErrAttempts), rest: unsent(ErrAttempts)},
		row{name: "bad certificate", only: "tls", distrust: true}.all(unsent(nil)),
		row{name: "REFUSED_STREAM", only: "h2", hidden: true, faults: []faulty.Fault{faulty.RSTStream(faulty.RefusedStream)}}.all(done(2)),
		row{name: "GOAWAY below the stream", only: "h2", hidden: true, faults: []faulty.Fault{faulty.GoAway()}}.all(done(2)),
	}
	for _, status := range []int{421, 425, 429} {
		f := faulty.Status(status)
		rows = append(rows,
			row{name: fmt.Sprint(status), faults: []faulty.Fault{f}}.all(done(2)),
			row{name: fmt.Sprint(status, " always"), faults: []faulty.Fault{f, f, f}}.all(turnedAway(3, status, ErrAttempts)))
	}
	rows = append(rows,
		row{name: "429 after an ambiguous attempt", faults: []faulty.Fault{faulty.Status(503), faulty.Status(429)},
			get: done(3), put: done(3), keyed: done(3), rest: unsure(1, 503, ErrUnsafe)},
		// It may come from in front of the key check: the doubt stays.
		row{name: "429 to the end after an ambiguous attempt", faults: []faulty.Fault{faulty.Status(503), faulty.Status(429), faulty.Status(429)},
			get: turnedAway(3, 429, ErrAttempts), put: unsure(3, 429, ErrAttempts), keyed: unsure(3, 429, ErrAttempts), rest: unsure(1, 503, ErrUnsafe)},
	)

	// Ambiguous without an answer.
	for name, f := range map[string]faulty.Fault{
		"lost response": faulty.LoseResponse(), "dropped request": faulty.DropRequest(), "reset after the body": faulty.ResetAfterBody(),
		"reset before the body": faulty.ResetBeforeBody(), "dropped connection": faulty.DropConn(),
	} {
		rows = append(rows,
			row{name: name, faults: []faulty.Fault{f}, get: done(2), put: done(2), keyed: done(2), rest: unsure(1, 0, ErrUnsafe)},
			row{name: name + " always", faults: []faulty.Fault{f, f, f},
				get: unsure(3, 0, ErrAttempts), put: unsure(3, 0, ErrAttempts), keyed: unsure(3, 0, ErrAttempts), rest: unsure(1, 0, ErrUnsafe)})
	}
	for _, code := range []faulty.Code{faulty.InternalError, faulty.Cancel, faulty.EnhanceYourCalm, faulty.ProtocolError} {
		rows = append(rows, row{name: "RST_STREAM " + code.String(), only: "h2", hidden: code == faulty.ProtocolError, faults: []faulty.Fault{faulty.RSTStream(code)},
			get: done(2), put: done(2), keyed: done(2), rest: unsure(1, 0, ErrUnsafe)})
	}

	// Ambiguous with an answer, which is what the caller gets in the end.
	for _, status := range []int{408, 500, 502, 503, 504} {
		f := faulty.Status(status)
		rows = append(rows, row{name: fmt.Sprint(status), faults: []faulty.Fault{f},
			get: done(2), put: done(2), keyed: done(2), rest: unsure(1, status, ErrUnsafe)})
		stop := unsure(3, status, ErrAttempts)
		keyedStop := stop
		if status == 500 {
			keyedStop.sends = 2 // A33: an upstream that saves its 500s plays them back for ever
		}
		rows = append(rows, row{name: fmt.Sprint(status, " always"), faults: []faulty.Fault{f, f, f},
			get: stop, put: stop, keyed: keyedStop, rest: unsure(1, status, ErrUnsafe)})
	}
	replayed500 := faulty.Status(500, "Idempotent-Replayed", "true")
	rows = append(rows,
		row{name: "500 then 503", faults: []faulty.Fault{faulty.Status(500), faulty.Status(503)},
			get: done(3), put: done(3), keyed: done(3), rest: unsure(1, 500, ErrUnsafe)},
		// A33, A34: a stored failure comes back for ever.
		row{name: "500 then a replayed 500", faults: []faulty.Fault{faulty.Status(500), replayed500}, only: "POST",
			keyed: unsure(2, 500, nil), rest: unsure(1, 500, ErrUnsafe)},
		row{name: "replayed 500", faults: []faulty.Fault{replayed500}, only: "POST", keyed: unsure(1, 500, nil), rest: unsure(1, 500, nil)},
		row{name: "replayed 400 after an ambiguous attempt", faults: []faulty.Fault{faulty.Status(503), faulty.Status(400, "Idempotent-Replayed", "true")},
			only: "POST", keyed: judged(2, 400), rest: unsure(1, 503, ErrUnsafe)},
	)
	for _, status := range []int{501, 505, 507, 599} {
		rows = append(rows, row{name: fmt.Sprint(status), faults: []faulty.Fault{faulty.Status(status)}}.all(unsure(1, status, nil)))
	}

	// Final answers: on the first send, and where they leave doubt.
	away := []int{401, 403, 404, 405, 407, 411, 413, 415, 417, 426, 428, 431}
	for _, status := range append([]int{400, 402, 406, 409, 410, 412, 422, 423, 451}, away...) {
		first := judged(1, status)
		if slices.Contains(away, status) {
			first = turnedAway(1, status, nil)
		}
		rows = append(rows, row{name: fmt.Sprint(status), faults: []faulty.Fault{faulty.Status(status)}}.all(first))

		after := row{name: fmt.Sprint(status, " after an ambiguous attempt"), faults: []faulty.Fault{faulty.Status(503), faulty.Status(status)},
			get: judged(2, status), put: unsure(2, status, nil), keyed: unsure(2, status, nil), rest: unsure(1, 503, ErrUnsafe)}
		switch status {
		case 402: // the upstream judged the charge itself: no key check answers so
			after.keyed = judged(2, 402)
		case 404, 410: // the first DELETE did it
			after.remove = want{2, status, Done, nil, StateDone}
		case 409: // in progress: asked again, 200 in the end
			after.keyed = done(3)
		}
		rows = append(rows, after)
	}
	inProgress := slices.Repeat([]faulty.Fault{faulty.Status(409)}, 12)
	rows = append(rows,
		// A72: 413 only where the policy says so, whatever it asks for.
		row{name: "413 with Retry-After", faults: []faulty.Fault{faulty.Status(413, "Retry-After", "1")}}.all(turnedAway(1, 413, nil)),
		// A07. Polls are no attempts: four of them, and MaxAttempts is three.
		row{name: "in progress four times after a lost response", faults: append([]faulty.Fault{faulty.LoseResponse()}, inProgress[:4]...), only: "POST",
			keyed: done(6), rest: unsure(1, 0, ErrUnsafe)},
		row{name: "in progress for ever", faults: append([]faulty.Fault{faulty.Status(503)}, inProgress...), only: "POST",
			keyed: unsure(12, 409, ErrAttempts), rest: unsure(1, 503, ErrUnsafe)},
	)
	for _, status := range []int{300, 304, 307, 308} {
		rows = append(rows, row{name: fmt.Sprint(status), faults: []faulty.Fault{faulty.Status(status)}}.all(turnedAway(1, status, nil)))
	}
	for _, status := range []int{301, 302} {
		// Most frameworks answer a POST that they carried out with 302.
		w := unsure(1, status, nil)
		rows = append(rows, row{name: fmt.Sprint(status), faults: []faulty.Fault{faulty.Status(status)},
			get: turnedAway(1, status, nil), put: w, keyed: w, rest: w})
	}
	rows = append(rows, row{name: "303", faults: []faulty.Fault{faulty.Status(303)}}.all(want{1, 303, Done, nil, StateDone}))

	// Hints come first.
	for _, hint := range []string{"X-Should-Retry", "Stripe-Should-Retry", "Transient-Error"} {
		rows = append(rows,
			row{name: "503 with " + hint + " false", faults: []faulty.Fault{faulty.Status(503, hint, "false")}}.all(unsure(1, 503, nil)),
			row{name: "429 with " + hint + " false", faults: []faulty.Fault{faulty.Status(429, hint, "false")}}.all(turnedAway(1, 429, nil)),
			row{name: "409 with " + hint + " true", faults: []faulty.Fault{faulty.Status(409, hint, "true")},
				get: done(2), put: done(2), keyed: done(2), rest: unsure(1, 409, ErrUnsafe)},
			row{name: "501 with " + hint + " true", faults: []faulty.Fault{faulty.Status(501, hint, "true")},
				get: done(2), put: done(2), keyed: done(2), rest: unsure(1, 501, ErrUnsafe)},
			row{name: "in progress with " + hint + " false", faults: []faulty.Fault{faulty.Status(503), faulty.Status(409, hint, "false")}, only: "POST",
				keyed: unsure(2, 409, nil), rest: unsure(1, 503, ErrUnsafe)},
		)
	}

	// A45: an answer that breaks off is none. GET's is not read by us.
	for name, f := range map[string]faulty.Fault{"truncated 200": faulty.Truncate(7), "truncated 200, chunked": faulty.TruncateChunked(7)} {
		rows = append(rows,
			row{name: name, faults: []faulty.Fault{f}, only: "named", put: done(2), keyed: done(2), rest: unsure(1, 0, ErrUnsafe)},
			row{name: name + " always", faults: []faulty.Fault{f, f, f}, only: "named",
				put: unsure(3, 0, ErrAttempts), keyed: unsure(3, 0, ErrAttempts), rest: unsure(1, 0, ErrUnsafe)})
	}
	return rows
}

// The retry table and the outcome rules of DESIGN.md §5, row by row, on real
// sockets.
func TestTheRetryTableRowByRow(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"id":"ch_1","amount":100}`)
	})
	for proto, start := range map[string]func(http.Handler, faulty.Script) *faulty.Server{
		"h1": faulty.NewServer, "h1 tls": faulty.NewTLSServer, "h2": faulty.NewHTTP2Server,
	} {
		t.Run(proto, func(t *testing.T) {
			s := start(handler, nil)
			t.Cleanup(s.Close)
			for _, r := range retryTable() {
				if proto == "h1 tls" && r.only != "tls" || proto == "h1" && r.only == "tls" || proto != "h2" && r.only == "h2" {
					continue
				}
				for c := get; c <= keyless; c++ {
					if r.only == "POST" && c < keyed || r.only == "named" && c == get {
						continue
					}
					if !t.Run(r.name+"/"+columns[c].name, func(t *testing.T) { checkRow(t, s, r, c) }) && t.Failed() && testing.Short() {
						return
					}
				}
			}
		})
	}
}

func checkRow(t *testing.T, s *faulty.Server, r row, c column) {
	const payload = `{"amount":100}`
	w, col := r.want(c), columns[c]
	s.SetScript(faulty.InOrder(r.faults...))
	s.Refuse(r.refuse)
	defer s.Refuse(0)
	before := len(s.Requests())

	base := s.Transport()
	failed := failDials(base, r.failures)
	if r.distrust {
		base.TLSClientConfig.RootCAs = x509.NewCertPool()
	}
	var attempts atomic.Int32
	store := &MemoryStore{}
	tr := &Transport{Base: base, Policy: quick(col.keys), Store: store,
		Trace: &Trace{AttemptStart: func(ctx context.Context, _ AttemptInfo) context.Context { attempts.Add(1); return ctx }}}
	t.Cleanup(tr.CloseIdleConnections)
	req, err := http.NewRequest(col.method, s.URL+"/charges", nil)
	require.NoError(t, err)
	if c != get && c != remove {
		req.Body, req.ContentLength = opaque(payload), int64(len(payload))
	}
	req = req.WithContext(WithIntent(t.Context(), "charge:order-1042"))

	resp, err := strict{t, tr}.RoundTrip(req)
	got := finish(resp, err)

	// What was sent: how often, with the same bytes and one key.
	sent := s.Requests()[before:]
	keys := map[string]bool{}
	for _, d := range sent {
		keys[d.Header.Get("Idempotency-Key")] = true
		if c != get && c != remove && d.BodyComplete {
			assert.Equal(t, payload, string(d.Body))
		}
		assert.LessOrEqual(t, len(d.Header.Values("Idempotency-Key")), 1)
	}
	assert.Len(t, sent, w.sends, "sends")
	if !(r.hidden && c == get) {
		assert.Equal(t, w.sends+int(failed.Load())+tlsFailures(r), got.report.Attempts, "Report.Attempts")
		assert.EqualValues(t, got.report.Attempts, attempts.Load(), "AttemptStart")
	}
	if w.sends > 0 {
		assert.Len(t, keys, 1, "one intent has one key")
		hasKey := c != get && c != keyless
		assert.Equal(t, !hasKey, keys[""], "keys are sent: %v", slices.Collect(maps.Keys(keys)))
	}

	if r.refuse < 0 && c == get && got.report.Outcome == NotSent {
		// GETs run no trace: whether it shows that nothing was sent depends on
		// whether the reset comes during the dial, where the error has a type.
		w.outcome = NotSent
	}

	// What the caller gets.
	assert.Equal(t, w.status, got.status, "status; error %v", got.err)
	assert.NoError(t, got.read)
	assert.Equal(t, w.outcome, got.report.Outcome, "outcome")
	assert.Equal(t, w.reason, got.report.Reason, "reason")
	assert.Equal(t, w.status == 200, strings.Contains(got.body, "ch_1"), "body %q", got.body)
	if w.status == 0 {
		var e *Error
		require.ErrorAs(t, got.err, &e)
		assert.Equal(t, w.outcome, OutcomeOf(nil, got.err))
		if w.reason != nil {
			assert.ErrorIs(t, got.err, w.reason)
		}
		assert.NotContains(t, got.err.Error(), "context canceled")
		assert.NotContains(t, got.err.Error(), "ContentLength")
	} else if w.status/100 != 3 && w.status != 200 {
		assert.NotEmpty(t, got.body, "the last answer's body")
	}

	// What is kept.
	records, err := store.List(t.Context(), Query{})
	require.NoError(t, err)
	if c == get {
		assert.Empty(t, records)
		return
	}
	require.Len(t, records, 1)
	assert.Equal(t, w.state.String(), records[0].State.String(), "record")
	if w.sends > 0 {
		assert.True(t, keys[records[0].Key], "the key sent is the record's")
	}
}

// tlsFailures is how many attempts ended before a connection was had.
func tlsFailures(r row) int {
	switch {
	case r.refuse < 0:
		return 3
	case r.distrust:
		return 1
	}
	return r.refuse
}

// failDials makes the first dials of base fail and counts those.
func failDials(base *http.Transport, failures []error) *atomic.Int32 {
	var n, failed atomic.Int32
	if len(failures) == 0 {
		return &failed
	}
	dial := (&net.Dialer{}).DialContext
	base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		i := int(n.Add(1)) - 1
		if failures[len(failures)-1] == errAlways {
			i = 0
		}
		if i < len(failures) {
			failed.Add(1)
			return nil, failures[i]
		}
		return dial(ctx, network, addr)
	}
	return &failed
}

// A01. The caller times out on a slow charge that succeeds, and asks again,
// and once more: one key, one charge.
func TestASlowChargeThatIsAskedForAgainIsMadeOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(true)
		l.delay = func(int) { wait(t.Context(), 3*time.Second) }
		tr := &Transport{Base: faulty.Handler(l), Policy: Policy{Keys: KeysHonored}}
		client := contract(t, tr)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		first := do(client, post(t, ctx, "charge:1", "http://up.example/charges", "100"))
		assert.Equal(t, Unknown, first.report.Outcome)
		assert.ErrorIs(t, first.err, context.DeadlineExceeded)

		second := do(client, post(t, t.Context(), "charge:1", "http://up.example/charges", "100"))
		third := do(client, post(t, t.Context(), "charge:1", "http://up.example/charges", "100"))
		for _, r := range []result{second, third} {
			require.NoError(t, r.err)
			assert.Equal(t, Done, r.report.Outcome)
			assert.True(t, r.report.Replayed)
		}
		assert.Equal(t, 1, l.effects("100"))
		assert.Len(t, keysOf(l.deliveries()), 1)
	})
}

func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// A02, A03: a POST that nobody declared safe is delivered once when its answer
// is lost, and when a gateway answers for it.
func TestPostIsSentOnceUnlessTheUpstreamHonorsKeys(t *testing.T) {
	for name, f := range map[string]faulty.Fault{
		"the response is lost":       faulty.LoseResponse(),
		"the edge answers 502":       faulty.Status(502).AfterHandler(),
		"500 after the commit":       faulty.Status(500).AfterHandler(),
		"the connection is dropped":  faulty.DropConn().AfterHandler(),
		"reset after the commit":     faulty.ResetAfterBody().AfterHandler(),
		"the answer breaks off":      faulty.Truncate(3),
		"the answer's chunk is lost": faulty.TruncateChunked(3),
	} {
		t.Run(name, func(t *testing.T) {
			for _, keys := range []KeyMode{KeysSent, KeysOff} {
				l := newLedger(false)
				s := faulty.NewServer(l, faulty.InOrder(f))
				client := contract(t, &Transport{Base: s.Transport(), Policy: quick(keys)})
				r := do(client, post(t, t.Context(), "charge", s.URL, "100"))
				assert.Equal(t, 1, l.effects("100"))
				assert.Equal(t, Unknown, r.report.Outcome)
				assert.Equal(t, ErrUnsafe, r.report.Reason)
				s.Close()
			}
		})
	}
}

// A06. Whatever rule leads to a retry: the same key, body and length.
func TestEveryRetryRuleSendsTheSameKeyAndBody(t *testing.T) {
	for _, start := range []func(http.Handler, faulty.Script) *faulty.Server{faulty.NewServer, faulty.NewHTTP2Server} {
		s := start(newLedger(true), faulty.InOrder(faulty.ResetAfterBody(), faulty.Status(503), faulty.Status(429)))
		pol := quick(KeysHonored)
		pol.MaxAttempts = 4
		client := contract(t, &Transport{Base: s.Transport(), Policy: pol})
		body := strings.Repeat("amount=100&", 1000)
		r := do(client, post(t, t.Context(), "", s.URL, body))
		require.NoError(t, r.err)
		assert.Equal(t, 201, r.status)
		sent := s.Requests()
		require.Len(t, sent, 4)
		for _, d := range sent {
			assert.Equal(t, sent[0].Header["Idempotency-Key"], d.Header["Idempotency-Key"])
			assert.Equal(t, body, string(d.Body))
			assert.Equal(t, fmt.Sprint(len(body)), d.Header.Get("Content-Length"))
		}
		s.Close()
	}
}

// A07. The first attempt times out while the charge runs; asking again says
// that it is in progress, and then how it ended. Polls wait 1 s, 2 s, 4 s.
func TestWorkInProgressIsAskedAfterUntilItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(true)
		l.delay = func(int) { wait(t.Context(), 5*time.Second) }
		var waits []WaitInfo
		tr := &Transport{Base: faulty.Handler(l), Policy: Policy{Keys: KeysHonored, AttemptTimeout: 500 * time.Millisecond},
			Trace: &Trace{Wait: func(_ context.Context, w WaitInfo) { waits = append(waits, w) }}}
		// faulty.Handler stops a handler whose client has gone; this one goes on.
		r := do(contract(t, tr), post(t, t.Context(), "charge", "http://up.example/", "100"))
		require.NoError(t, r.err)
		assert.Equal(t, 201, r.status)
		assert.Equal(t, Done, r.report.Outcome)
		assert.True(t, r.report.Replayed)
		assert.Equal(t, 1, l.effects("100"))
		assert.Len(t, keysOf(l.deliveries()), 1)
		require.GreaterOrEqual(t, len(waits), 4)
		for i, d := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
			assert.Equal(t, d, waits[i+1].Delay, "poll %d", i+1)
		}
	})
}

// A plain 409 to a first send is an answer, not a reason to ask again.
func TestPollingEndsAfterTenTimesInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return nil, io.ErrUnexpectedEOF
			}
			return answerOf(409, "in progress", "Retry-After", "3"), nil
		})
		pol := Policy{Keys: KeysHonored, Budget: Budget{Ratio: Off}}
		start := time.Now()
		r := do(contract(t, &Transport{Base: base, Policy: pol}), post(t, t.Context(), "charge", "http://up.example/", "100"))
		require.NoError(t, r.err)
		assert.Equal(t, 409, r.status)
		assert.Equal(t, "in progress", r.body)
		assert.Equal(t, Unknown, r.report.Outcome)
		assert.Equal(t, ErrAttempts, r.report.Reason)
		assert.Equal(t, 12, n, "one send, one repeat, ten polls")
		// max(3 s, 1 s·2ⁿ up to 10 s): 3+3+4+8 and six times 10, after a backoff below 200 ms.
		assert.Equal(t, 78*time.Second, time.Since(start).Truncate(time.Second))
	})
}

func TestEachPollCostsATokenOfTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return nil, io.ErrUnexpectedEOF
			}
			return answerOf(409, "in progress"), nil
		})
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored, Budget: Budget{Ratio: 0.1, Burst: 3, MinPerSecond: 1e-9}}}
		r := do(contract(t, tr), post(t, t.Context(), "charge", "http://up.example/", "100"))
		assert.Equal(t, 4, n, "one send and three tokens")
		assert.Equal(t, ErrBudget, r.report.Reason)
		assert.Equal(t, Unknown, r.report.Outcome)
		assert.Equal(t, "in progress", r.body)
	})
}

// Whatever made retrying stop, the caller gets the real last answer, unread
// and with its header (A17, A18).
func TestTheLastAnswerIsReturnedWholeWhateverStopsRetrying(t *testing.T) {
	const text = `{"error":{"message":"slow down","code":"rate_limited"}}`
	for name, c := range map[string]struct {
		pol    Policy
		sends  int
		reason error
	}{
		"attempts end": {Policy{}, 3, ErrAttempts},
		"the budget refuses": {Policy{MaxAttempts: 10, Budget: Budget{Burst: 1, MinPerSecond: 1e-9}}, 2,
			ErrBudget},
		"the breaker opens":        {Policy{MaxAttempts: 10, Breaker: Breaker{MinCalls: 2}, Budget: Budget{Ratio: Off}}, 2, ErrOpen},
		"Retry-After is too long":  {Policy{MaxRetryAfter: time.Second}, 1, ErrDeadline},
		"no Retry-After is obeyed": {Policy{MaxRetryAfter: Off}, 1, ErrDeadline},
		"the time is up":           {Policy{MaxElapsed: time.Second, AttemptTimeout: time.Second}, 1, ErrDeadline},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var closed, given atomic.Int32
				base := roundTripFunc(func(*http.Request) (*http.Response, error) {
					given.Add(1)
					resp := answerOf(503, text, "Retry-After", "2", "X-Request-Id", fmt.Sprint("req-", given.Load()))
					resp.Body = &closeCounter{ReadCloser: resp.Body, closed: &closed}
					return resp, nil
				})
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://up.example/", nil)
				require.NoError(t, err)
				start := time.Now()
				resp, err := contract(t, &Transport{Base: base, Policy: c.pol}).Do(req)
				took := time.Since(start)
				require.NoError(t, err)
				assert.Equal(t, given.Load()-1, closed.Load(), "all but the last are closed, that is not")
				assert.Equal(t, fmt.Sprint("req-", c.sends), resp.Header.Get("X-Request-Id"))
				r := finish(resp, err)
				assert.Equal(t, 503, r.status)
				assert.Equal(t, text, r.body)
				assert.NoError(t, r.read)
				assert.Equal(t, c.reason, r.report.Reason)
				assert.EqualValues(t, c.sends, given.Load())
				assert.Equal(t, c.sends, r.report.Attempts)
				assert.Equal(t, given.Load(), closed.Load(), "every answer is closed once")
				if c.reason != ErrAttempts {
					// Refused before the wait, not after it.
					assert.Less(t, took, time.Duration(c.sends)*3*time.Second)
					assert.GreaterOrEqual(t, took, time.Duration(c.sends-1)*2*time.Second)
				}
				if c.sends == 1 {
					assert.Zero(t, took, "no wait that would be for nothing")
				}
			})
		})
	}
}

type closeCounter struct {
	io.ReadCloser
	closed *atomic.Int32
	once   sync.Once
}

func (c *closeCounter) Close() error {
	c.once.Do(func() { c.closed.Add(1) })
	return c.ReadCloser.Close()
}

// A breaker that other calls have opened while this one waited: the answer
// that was to be retried is still the caller's.
func TestABreakerThatOpensDuringAWaitLeavesTheLastAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			return answerOf(503, "down at "+r.URL.Path, "Retry-After", "2"), nil
		})
		tr := &Transport{Base: base, Policy: Policy{Budget: Budget{Ratio: Off}, Breaker: Breaker{MinCalls: 4}}}
		client := contract(t, tr)
		got := make(chan result)
		for i := range 4 {
			go func() {
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprint("http://up.example/", i), nil)
				got <- do(client, req)
			}()
		}
		for range 4 {
			r := <-got
			require.NoError(t, r.err)
			assert.Equal(t, 503, r.status)
			assert.Contains(t, r.body, "down at /")
			assert.Equal(t, ErrOpen, r.report.Reason)
			assert.False(t, r.report.RetryAt.IsZero())
		}
	})
}

// A44: a discarded answer gives its connection back, also when it is the only
// one.
func TestRetriesShareOneConnection(t *testing.T) {
	s := faulty.NewServer(nil, faulty.InOrder(faulty.Status(503), faulty.Status(503)))
	defer s.Close()
	base := s.Transport()
	base.MaxConnsPerHost = 1
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
	require.NoError(t, err)
	r := do(contract(t, &Transport{Base: base, Policy: quick(KeysSent)}), req)
	require.NoError(t, r.err)
	assert.Equal(t, 200, r.status)
	sent := s.Requests()
	require.Len(t, sent, 3)
	for _, d := range sent {
		assert.Equal(t, sent[0].RemoteAddr, d.RemoteAddr)
	}
}

// A75: an error whose body never ends is left after 16 KiB, or after 100 ms if
// it does not come that fast.
func TestAnEndlessErrorBodyDoesNotHoldUpTheNextAttempt(t *testing.T) {
	for name, chunk := range map[string]int{"fast": 4096, "slow": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var first *endlessBody
				n := 0
				base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
					if n++; n > 1 {
						return answerOf(200, "ok"), nil
					}
					first = &endlessBody{ctx: r.Context(), chunk: chunk}
					return &http.Response{StatusCode: 500, Header: http.Header{}, Body: first, ContentLength: -1}, nil
				})
				start := time.Now()
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://up.example/", nil)
				r := do(contract(t, &Transport{Base: base}), req)
				require.NoError(t, r.err)
				assert.Equal(t, 200, r.status)
				assert.LessOrEqual(t, time.Since(start), 300*time.Millisecond, "the drain's 100 ms and the backoff's 200 ms")
				assert.LessOrEqual(t, first.read.Load(), int64(drainBytes+4096+512))
				assert.True(t, first.closed.Load())
			})
		})
	}
}

// endlessBody gives chunk bytes per read for ever, or nothing until its
// attempt is cancelled, as a connection does.
type endlessBody struct {
	ctx    context.Context
	chunk  int
	read   atomic.Int64
	closed atomic.Bool
}

func (b *endlessBody) Read(p []byte) (int, error) {
	if b.chunk == 0 {
		<-b.ctx.Done()
		return 0, b.ctx.Err()
	}
	n := min(len(p), b.chunk)
	b.read.Add(int64(n))
	return n, nil
}

func (b *endlessBody) Close() error { b.closed.Store(true); return nil }

// A75 on a socket: the connection is dropped rather than read for ever.
func TestAnEndlessErrorBodyOnASocketIsDropped(t *testing.T) {
	var n atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) > 1 {
			io.WriteString(w, "ok")
			return
		}
		w.WriteHeader(500)
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 4096)); err != nil {
				return
			}
		}
	}))
	defer s.Close()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
	r := do(contract(t, &Transport{Base: &http.Transport{}, Policy: quick(KeysSent)}), req)
	require.NoError(t, r.err)
	assert.Equal(t, "ok", r.body)
}

// A78: "client connection lost" has no type. Keyed it is retried, keyless not.
func TestALostHTTP2ConnectionIsAmbiguous(t *testing.T) {
	for keys, want := range map[KeyMode]want{KeysHonored: done(2), KeysSent: unsure(1, 0, ErrUnsafe)} {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return nil, errors.New("http2: client connection lost")
			}
			return answerOf(200, "ok"), nil
		})
		r := do(contract(t, &Transport{Base: base, Policy: quick(keys)}), post(t, t.Context(), "", "http://up.example/", "100"))
		assert.Equal(t, want.sends, n)
		assert.Equal(t, want.status, r.status)
		assert.Equal(t, want.outcome, r.report.Outcome)
		assert.Equal(t, want.reason, r.report.Reason)
	}
}

// A42: Retry-After is heeded on every status that is going to be retried, and
// on no other.
func TestRetryAfterIsHeededOnEveryStatusThatIsRetried(t *testing.T) {
	for _, status := range []int{408, 425, 429, 421, 500, 502, 503, 504} {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			base := roundTripFunc(func(*http.Request) (*http.Response, error) {
				if n++; n == 1 {
					return answerOf(status, "", "Retry-After", "7"), nil
				}
				return answerOf(200, "", "Retry-After", "7"), nil
			})
			start := time.Now()
			r := do(contract(t, &Transport{Base: base, Policy: Policy{Keys: KeysHonored}}), post(t, t.Context(), "", "http://up.example/", "x"))
			assert.Equal(t, 200, r.status)
			assert.GreaterOrEqual(t, time.Since(start), 7*time.Second, status)
			assert.Less(t, time.Since(start), 7*time.Second+200*time.Millisecond, status)
			assert.Equal(t, time.Since(start), r.report.Waited)
		})
	}
}

// A47: one handshake each, and the x509 error can be found, whatever wraps it.
func TestABadCertificateIsTriedOnceAndFound(t *testing.T) {
	handshakes := atomic.Int32{}
	s := faulty.NewTLSServer(nil, nil)
	defer s.Close()
	base := s.Transport()
	base.TLSClientConfig.RootCAs = x509.NewCertPool()
	base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		handshakes.Add(1)
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	for _, b := range []http.RoundTripper{base, roundTripFunc(func(r *http.Request) (*http.Response, error) {
		handshakes.Add(1)
		return nil, fmt.Errorf("outer: %w", fmt.Errorf("inner: %w", x509.HostnameError{Certificate: &x509.Certificate{}, Host: "x"}))
	})} {
		handshakes.Store(0)
		tr := &Transport{Base: b, Policy: quick(KeysHonored)}
		r := do(contract(t, tr), post(t, t.Context(), "charge", s.URL, "100"))
		assert.Equal(t, NotSent, r.report.Outcome)
		assert.EqualValues(t, 1, handshakes.Load())
		var host x509.HostnameError
		var authority x509.UnknownAuthorityError
		assert.True(t, errors.As(r.err, &host) || errors.As(r.err, &authority), "%v", r.err)
	}
	var host x509.HostnameError
	base = s.Transport()
	base.TLSClientConfig.ServerName = "other.example"
	r := do(contract(t, &Transport{Base: base, Policy: quick(KeysHonored)}), post(t, t.Context(), "charge", s.URL, "100"))
	assert.ErrorAs(t, r.err, &host)
	assert.Equal(t, NotSent, r.report.Outcome)
}

// A99. What a CONNECT proxy answers comes as an error whose text is all there
// is. Nothing was sent upstream, so that even an undeclared POST is safe.
func TestAProxysRefusalIsJudgedByItsStatus(t *testing.T) {
	s := faulty.NewTLSServer(newLedger(false), nil)
	defer s.Close()
	for status, want := range map[int]struct {
		connects int
		want     want
	}{
		407: {1, unsent(nil)},
		403: {1, unsent(nil)},
		503: {2, want{1, 201, Done, nil, StateDone}},
		502: {2, want{1, 201, Done, nil, StateDone}},
	} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			var connects atomic.Int32
			proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if connects.Add(1) == 1 {
					w.WriteHeader(status)
					return
				}
				tunnel(w, r)
			}))
			defer proxy.Close()
			base := s.Transport()
			base.Proxy = http.ProxyURL(mustURL(t, proxy.URL))
			store := &MemoryStore{}
			pol := quick(KeysSent)
			pol.Breaker = Breaker{MinCalls: 1, FailureRatio: 0.5}
			tr := &Transport{Base: base, Policy: pol, Store: store}
			before := len(s.Requests())
			r := do(contract(t, tr), post(t, t.Context(), "charge", s.URL, "100"))
			assert.EqualValues(t, want.connects, connects.Load())
			assert.Len(t, s.Requests()[before:], want.want.sends)
			assert.Equal(t, want.want.status, r.status, "%v", r.err)
			assert.Equal(t, want.want.outcome, r.report.Outcome)
			assert.Equal(t, want.want.reason, r.report.Reason)
			records, _ := store.List(t.Context(), Query{})
			require.Len(t, records, 1)
			assert.Equal(t, want.want.state, records[0].State)
			// Not charged to the upstream's breaker, which one failure opens.
			assert.Equal(t, "closed", tr.Upstream(mustURL(t, s.URL).Host).Breaker)
		})
	}
}

// tunnel is a CONNECT proxy's work.
func tunnel(w http.ResponseWriter, r *http.Request) {
	up, err := net.Dial("tcp", r.Host)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer up.Close()
	down, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer down.Close()
	io.WriteString(down, "HTTP/1.1 200 OK\r\n\r\n")
	go func() {
		io.Copy(up, buffered)
		up.(*net.TCPConn).CloseWrite()
	}()
	io.Copy(down, up)
}

// Hidden or not, a call whose context is over does not touch the store, the
// budget or the wire (A73).
func TestACallWhoseContextIsOverSendsNothing(t *testing.T) {
	for _, dead := range []error{context.Canceled, context.DeadlineExceeded} {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) { n++; return answerOf(200, ""), nil })
		ctx, cancel := context.WithCancel(t.Context())
		if dead == context.DeadlineExceeded {
			ctx, cancel = context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
		}
		cancel()
		store := &MemoryStore{}
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored}, Store: store}
		resp, err := strict{t, tr}.RoundTrip(post(t, ctx, "charge", "http://up.example/", "100"))
		r := finish(resp, err)
		assert.ErrorIs(t, r.err, dead)
		assert.Equal(t, NotSent, r.report.Outcome)
		assert.Zero(t, n)
		records, _ := store.List(t.Context(), Query{})
		assert.Empty(t, records)
	}
}

// A73: an error that says "deadline exceeded" is retried while the caller's
// context lives, and not once it is over.
func TestOnlyTheCallersContextSaysThatTimeIsUp(t *testing.T) {
	for _, alive := range []bool{true, false} {
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				if !alive {
					cancel()
				}
				return nil, fmt.Errorf("server says: %w", context.DeadlineExceeded)
			}
			return answerOf(200, ""), nil
		})
		pol := quick(KeysHonored)
		pol.Budget = Budget{}
		tr := &Transport{Base: base, Policy: pol}
		r := do(contract(t, tr), post(t, ctx, "charge", "http://up.example/", "100"))
		if alive {
			assert.Equal(t, 2, n)
			assert.Equal(t, Done, r.report.Outcome)
			assert.InDelta(t, 9.1, tr.Upstream("up.example").Tokens, 1e-6)
		} else {
			assert.Equal(t, 1, n)
			assert.Equal(t, Unknown, r.report.Outcome)
			assert.ErrorIs(t, r.err, context.Canceled)
			assert.EqualValues(t, 10, tr.Upstream("up.example").Tokens, "no token is spent")
		}
		cancel()
	}
}
