package oncehttp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

func TestPeekLeavesTheBodyWhole(t *testing.T) {
	const body = "0123456789"
	broken := errors.New("broken off")
	for name, c := range map[string]struct {
		body  io.Reader
		peeks []int
		want  []string
		err   error // of the last peek
		rest  string
		end   error
	}{
		"less than there is": {strings.NewReader(body), []int{4}, []string{"0123"}, nil, body, nil},
		"exactly all":        {strings.NewReader(body), []int{10}, []string{body}, nil, body, nil},
		"more than there is": {strings.NewReader(body), []int{99}, []string{body}, io.EOF, body, nil},
		"twice":              {strings.NewReader(body), []int{2, 6}, []string{"01", "012345"}, nil, body, nil},
		"nothing":            {strings.NewReader(body), []int{0}, []string{""}, nil, body, nil},
		"negative":           {strings.NewReader(body), []int{-7}, []string{""}, nil, body, nil},
		"an empty body":      {strings.NewReader(""), []int{3}, []string{""}, io.EOF, "", nil},
		"a body that breaks off": {io.MultiReader(strings.NewReader("012"), failingReader{broken}), []int{9}, []string{"012"},
			broken, "012", broken},
	} {
		t.Run(name, func(t *testing.T) {
			closes := 0
			resp := &http.Response{Body: &bodyOf{c.body, func() { closes++ }}}
			a := Attempt{Response: resp}
			var err error
			for i, n := range c.peeks {
				var got []byte
				got, err = a.Peek(n)
				assert.Equal(t, c.want[i], string(got))
				for j := range got {
					got[j] = 'X' // what Peek gave is the caller's
				}
			}
			assert.Equal(t, c.err, err)
			rest, err := io.ReadAll(resp.Body)
			assert.Equal(t, c.rest, string(rest))
			assert.Equal(t, c.end, err)
			assert.Zero(t, closes)
			resp.Body.Close()
			assert.Equal(t, 1, closes)
		})
	}
}

func TestPeekIsBoundedAndNeedsABody(t *testing.T) {
	long := strings.Repeat("x", maxPeek+5)
	resp := answerOf(200, long)
	got, err := Attempt{Response: resp}.Peek(1 << 40)
	assert.NoError(t, err)
	assert.Len(t, got, maxPeek)
	all, _ := io.ReadAll(resp.Body)
	assert.Len(t, all, len(long))
	for _, a := range []Attempt{{}, {Err: io.EOF}, {Response: &http.Response{}}} {
		got, err := a.Peek(5)
		assert.Empty(t, got)
		assert.Equal(t, io.EOF, err)
	}
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

// bodyOf is a body with a Close of its own.
type bodyOf struct {
	io.Reader
	close func()
}

func (b *bodyOf) Close() error { b.close(); return nil }

// What Peek has read is still there for the caller, over a socket, for saved
// answers, for discarded ones and for those of any length.
func TestTheCallerReadsWhatClassifyHasPeekedAt(t *testing.T) {
	for _, size := range []int{0, 10, 70_000, 2 << 20} {
		for _, contentType := range []string{"application/json", "text/plain"} {
			for _, name := range []string{"", "charge"} {
				body := strings.Repeat("b", size)
				s := faulty.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", contentType)
					io.WriteString(w, body)
				}), faulty.InOrder(faulty.Status(503)))
				pol := quick(KeysHonored)
				var peeked []string
				pol.Classify = func(a Attempt) Verdict {
					b, _ := a.Peek(5)
					peeked = append(peeked, string(b))
					return Verdict{}
				}
				r := do(contract(t, &Transport{Base: s.Transport(), Policy: pol}), post(t, t.Context(), name, s.URL, "100"))
				require.NoError(t, r.err)
				assert.NoError(t, r.read)
				assert.Len(t, r.body, size)
				assert.Equal(t, []string{"Servi", body[:min(5, size)]}, peeked)
				assert.Equal(t, Done, r.report.Outcome)
				s.Close()
			}
		}
	}
}

// Classify overrules the table in every direction.
func TestClassifyOverrulesTheTable(t *testing.T) {
	for _, c := range []struct {
		name    string
		status  int // 0: an error
		verdict Verdict
		keys    KeyMode
		want    want
	}{
		{"a 409 that means done", 409, Verdict{Kind: VerdictDone}, KeysSent, want{1, 409, Done, nil, StateDone}},
		{"a 500 that means done", 500, Verdict{Kind: VerdictDone}, KeysSent, want{1, 500, Done, nil, StateDone}},
		{"a 200 that means declined", 200, Verdict{Kind: VerdictRejected}, KeysSent, want{1, 200, Rejected, nil, StateRejected}},
		{"a 503 that is final", 503, Verdict{Kind: VerdictRejected}, KeysHonored, want{1, 503, Rejected, nil, StateRejected}},
		{"a 404 that is a judgement", 404, Verdict{Kind: VerdictRejected}, KeysSent, want{1, 404, Rejected, nil, StateRejected}},
		{"a 503 that was not processed", 503, Verdict{Kind: VerdictNotProcessed}, KeysSent, want{3, 503, Rejected, ErrAttempts, StateNotSent}},
		{"a 400 that was not processed", 400, Verdict{Kind: VerdictNotProcessed}, KeysOff, want{3, 400, Rejected, ErrAttempts, StateNotSent}},
		{"a 429 that may have been", 429, Verdict{Kind: VerdictAmbiguous}, KeysSent, want{1, 429, Unknown, ErrUnsafe, StateOpen}},
		{"a 429 that may have been, keyed", 429, Verdict{Kind: VerdictAmbiguous}, KeysHonored, want{3, 429, Unknown, ErrAttempts, StateOpen}},
		{"a 200 that may not have been", 200, Verdict{Kind: VerdictAmbiguous}, KeysHonored, want{3, 200, Unknown, ErrAttempts, StateOpen}},
		{"a 400 that is a transient failure", 400, Verdict{Kind: VerdictAmbiguous}, KeysHonored, want{3, 400, Unknown, ErrAttempts, StateOpen}},
		{"a first 202 that is in progress", 202, Verdict{Kind: VerdictInProgress}, KeysHonored, want{11, 202, Unknown, ErrAttempts, StateOpen}},
		{"in progress where keys are not honoured", 409, Verdict{Kind: VerdictInProgress}, KeysSent, want{1, 409, Unknown, ErrUnsafe, StateOpen}},
		{"stop a 503", 503, Verdict{Stop: true}, KeysHonored, want{1, 503, Unknown, nil, StateOpen}},
		{"stop a 429", 429, Verdict{Stop: true}, KeysHonored, want{1, 429, Rejected, nil, StateNotSent}},
		{"stop what was not processed", 503, Verdict{Kind: VerdictNotProcessed, Stop: true}, KeysHonored, want{1, 503, Rejected, nil, StateNotSent}},
		{"an error that proves nothing was done", 0, Verdict{Kind: VerdictNotProcessed}, KeysSent, want{3, 0, NotSent, ErrAttempts, StateNotSent}},
		{"an error that means done", 0, Verdict{Kind: VerdictDone}, KeysSent, want{1, 0, Done, nil, StateDone}},
		{"an error that means rejected", 0, Verdict{Kind: VerdictRejected}, KeysHonored, want{1, 0, Rejected, nil, StateRejected}},
		{"stop an error", 0, Verdict{Stop: true}, KeysHonored, want{1, 0, Unknown, nil, StateOpen}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := 0
			base := roundTripFunc(func(*http.Request) (*http.Response, error) {
				if n++; c.status == 0 {
					return nil, io.ErrUnexpectedEOF
				}
				return answerOf(c.status, "body"), nil
			})
			pol := quick(c.keys)
			pol.Classify = func(a Attempt) Verdict {
				assert.Equal(t, c.status == 0, a.Response == nil)
				assert.Equal(t, c.status == 0, a.Err != nil)
				assert.Equal(t, n, a.N)
				return c.verdict
			}
			store := &MemoryStore{}
			r := do(contract(t, &Transport{Base: base, Policy: pol, Store: store}), post(t, t.Context(), "charge", "http://up.example/", "100"))
			records, err := store.List(t.Context(), Query{})
			require.NoError(t, err)
			require.Len(t, records, 1)
			assert.Equal(t, c.want, want{n, r.status, r.report.Outcome, r.report.Reason, records[0].State})
			if c.status != 0 {
				assert.Equal(t, "body", r.body)
			}
		})
	}
}

// A profile's own verdict settles an earlier doubt: that is what it is for.
func TestAProfilesVerdictSettlesEarlierDoubt(t *testing.T) {
	for _, c := range []struct {
		kind    VerdictKind
		outcome Outcome
	}{{VerdictRejected, Rejected}, {VerdictDone, Done}, {VerdictDefault, Unknown}} {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return nil, io.ErrUnexpectedEOF
			}
			return answerOf(422, `{"code":"CARD_DECLINED"}`), nil
		})
		pol := quick(KeysHonored)
		var seen []Attempt
		pol.Classify = func(a Attempt) Verdict {
			seen = append(seen, a)
			if a.Response == nil {
				return Verdict{}
			}
			if b, _ := a.Peek(100); !bytes.Contains(b, []byte("CARD_DECLINED")) {
				return Verdict{}
			}
			return Verdict{Kind: c.kind}
		}
		r := do(contract(t, &Transport{Base: base, Policy: pol}), post(t, t.Context(), "charge", "http://up.example/", "100"))
		assert.Equal(t, c.outcome, r.report.Outcome)
		require.Len(t, seen, 2)
		assert.False(t, seen[0].Repeat || seen[0].Ambiguous)
		assert.True(t, seen[1].Repeat && seen[1].Ambiguous)
		assert.Equal(t, 2, seen[1].N)
	}
}

// A72: 413 with Retry-After is retried where a policy opts in.
func TestClassifyOptsInToA413WithRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return answerOf(413, "", "Retry-After", "1"), nil
			}
			return answerOf(200, ""), nil
		})
		pol := Policy{Classify: func(a Attempt) Verdict {
			if a.Response != nil && a.Response.StatusCode == 413 && a.Response.Header.Get("Retry-After") != "" {
				return Verdict{Kind: VerdictNotProcessed}
			}
			return Verdict{}
		}}
		start := time.Now()
		r := do(contract(t, &Transport{Base: base, Policy: pol}), post(t, t.Context(), "", "http://up.example/", "100"))
		assert.Equal(t, 200, r.status)
		assert.GreaterOrEqual(t, time.Since(start), time.Second)
	})
}

func TestClassifysWaitIsWaitedForAndBounded(t *testing.T) {
	for _, c := range []struct {
		wait, took time.Duration
		sends      int
		reason     error
	}{
		{0, 2 * time.Second, 2, nil}, // what the answer asks for
		{5 * time.Second, 5 * time.Second, 2, nil},
		{time.Second, time.Second, 2, nil}, // Classify knows better than the header
		{2 * time.Minute, 0, 1, ErrDeadline},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			base := roundTripFunc(func(*http.Request) (*http.Response, error) {
				if n++; n == 1 {
					return answerOf(503, "", "Retry-After", "2"), nil
				}
				return answerOf(200, ""), nil
			})
			start := time.Now()
			pol := Policy{Classify: func(a Attempt) Verdict { return Verdict{Wait: c.wait} }}
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://up.example/", nil)
			r := do(contract(t, &Transport{Base: base, Policy: pol}), req)
			assert.Equal(t, c.sends, n)
			assert.Equal(t, c.reason, r.report.Reason)
			assert.Equal(t, c.took, time.Since(start).Truncate(time.Second))
		})
	}
}

// A hint of the upstream comes before Classify, as far as it forbids.
func TestAHintNotToRetryBeatsClassify(t *testing.T) {
	n := 0
	base := roundTripFunc(func(*http.Request) (*http.Response, error) {
		n++
		return answerOf(503, "", "X-Should-Retry", "false"), nil
	})
	pol := quick(KeysHonored)
	pol.Classify = func(Attempt) Verdict { return Verdict{Kind: VerdictAmbiguous} }
	r := do(contract(t, &Transport{Base: base, Policy: pol}), post(t, t.Context(), "", "http://up.example/", "100"))
	assert.Equal(t, 1, n)
	assert.Equal(t, Unknown, r.report.Outcome)
}

func TestAnOddHintIsNoHint(t *testing.T) {
	for _, value := range []string{"", "maybe", "no way", "2"} {
		n := 0
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return answerOf(503, "", "X-Should-Retry", value), nil
			}
			return answerOf(200, ""), nil
		})
		r := do(contract(t, &Transport{Base: base, Policy: quick(KeysHonored)}), post(t, t.Context(), "", "http://up.example/", "100"))
		assert.Equal(t, 200, r.status, value)
	}
}

func TestUnknownMethodsAreTreatedLikePost(t *testing.T) {
	for _, method := range []string{http.MethodPatch, "PURGE", "post", "get", "REPORT"} {
		for keys, sends := range map[KeyMode]int{KeysSent: 1, KeysHonored: 2} {
			n, key := 0, ""
			base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
				key = strings.Join(append(r.Header["Idempotency-Key"], r.Header[strings.ToLower("Idempotency-Key")]...), ",")
				if n++; n == 1 {
					return nil, io.ErrUnexpectedEOF
				}
				return answerOf(200, ""), nil
			})
			req, err := http.NewRequestWithContext(t.Context(), method, "http://up.example/", strings.NewReader("x"))
			require.NoError(t, err)
			do(contract(t, &Transport{Base: base, Policy: quick(keys)}), req)
			assert.Equal(t, sends, n, "%s %d", method, keys)
			assert.Len(t, key, 36, method)
		}
	}
}

// The texts that net/http has no type for, each as it really comes.
func TestNetHTTPsLocalRefusalsAreNotSentAndFinal(t *testing.T) {
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetHTTP2(true)
	defer h2.CloseIdleConnections()
	for name, c := range map[string]struct {
		base   *http.Transport
		target string
		change func(*http.Request)
		text   string
	}{
		"unknown scheme":     {base, "gopher://up.example/", nil, "unsupported protocol scheme"},
		"bad header name":    {base, "http://up.example/", func(r *http.Request) { r.Header["bad name"] = []string{"x"} }, "net/http: invalid header field name"},
		"bad header value":   {base, "http://up.example/", func(r *http.Request) { r.Header.Set("X", "a\nb") }, "net/http: invalid header field value"},
		"bad method":         {base, "http://up.example/", func(r *http.Request) { r.Method = "A B" }, "net/http: invalid method"},
		"bad trailer":        {base, "http://up.example/", func(r *http.Request) { r.Trailer = http.Header{"bad name": nil} }, "net/http: invalid trailer field name"},
		"no host, by scheme": {base, "mailto:me", nil, "unsupported protocol scheme"},
	} {
		t.Run(name, func(t *testing.T) {
			make := func() *http.Request {
				req := post(t, t.Context(), "charge", c.target, "100")
				if c.change != nil {
					c.change(req)
				}
				return req
			}
			_, bare := c.base.RoundTrip(make())
			require.ErrorContains(t, bare, c.text, "net/http says so still")
			assert.True(t, refusedLocally(bare) && neverSent(bare) && permanent(bare))
			tr := &Transport{Base: c.base, Policy: quick(KeysSent), UpstreamOf: func(*http.Request) string { return "up" }}
			resp, err := strict{t, tr}.RoundTrip(make())
			r := finish(resp, err)
			assert.Equal(t, NotSent, r.report.Outcome)
			assert.LessOrEqual(t, r.report.Attempts, 1)
		})
	}
}

func TestNetHTTPsHandshakeTimeoutIsNotSent(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close() // accepts, by the kernel, and says nothing
	base := &http.Transport{TLSHandshakeTimeout: time.Millisecond}
	defer base.CloseIdleConnections()
	_, bare := base.RoundTrip(post(t, t.Context(), "", "https://"+silent.Addr().String(), "x"))
	require.EqualError(t, bare, "net/http: TLS handshake timeout")
	assert.True(t, neverSent(bare))
	assert.False(t, permanent(bare))
	r := do(contract(t, &Transport{Base: base, Policy: quick(KeysSent)}), post(t, t.Context(), "charge", "https://"+silent.Addr().String(), "x"))
	assert.Equal(t, NotSent, r.report.Outcome)
	assert.Equal(t, ErrAttempts, r.report.Reason)
	assert.Equal(t, 3, r.report.Attempts)
}

func TestNetHTTPsProxyRefusalIsRecognised(t *testing.T) {
	for status, permanently := range map[int]bool{403: true, 407: true, 502: false, 503: false, 504: false} {
		// net/http's dialConn: the text after the status code of the proxy's status line.
		err := errors.New(http.StatusText(status))
		assert.Equal(t, status, proxyRefusal(err))
		assert.Equal(t, permanently, permanent(err))
	}
	assert.Zero(t, proxyRefusal(io.EOF))
}

// A base that is itself an http.Client may run into a redirect loop.
func TestTooManyRedirectsOfABaseAreFinal(t *testing.T) {
	s := faulty.NewServer(http.RedirectHandler("/", http.StatusFound), nil)
	defer s.Close()
	inner := s.Client()
	n := 0
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		n++
		return inner.Do(r.Clone(r.Context()))
	})
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
	r := do(contract(t, &Transport{Base: base, Policy: quick(KeysSent)}), req)
	assert.Error(t, r.err)
	assert.Equal(t, 1, n)
}

// What dials below are recognised by type, for bases without hooks.
func TestErrorsThatProveNothingWasSent(t *testing.T) {
	dns := &net.DNSError{Err: "no such host", IsNotFound: true}
	for _, c := range []struct {
		err              error
		never, permanent bool
	}{
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, true, false},
		{&net.OpError{Op: "proxyconnect", Err: errors.New("refused")}, true, false},
		{&net.OpError{Op: "read", Err: errors.New("reset")}, false, false},
		{&net.OpError{Op: "write", Err: errors.New("broken pipe")}, false, false},
		{dns, true, true},
		{&url.Error{Op: "Post", URL: "http://x", Err: &net.OpError{Op: "dial", Err: dns}}, true, true},
		{&net.DNSError{IsTimeout: true}, true, false},
		{&net.DNSError{IsTemporary: true, IsNotFound: true}, true, false},
		{&tls.CertificateVerificationError{Err: errors.New("x")}, true, true},
		{fmt.Errorf("a: %w", fmt.Errorf("b: %w", &tls.CertificateVerificationError{Err: errors.New("x")})), true, true},
		{io.EOF, false, false},
		{context.DeadlineExceeded, false, false},
		{errors.New("http2: client connection lost"), false, false},
	} {
		assert.Equal(t, c.never, neverSent(c.err), "%v", c.err)
		assert.Equal(t, c.permanent, permanent(c.err), "%v", c.err)
	}
}
