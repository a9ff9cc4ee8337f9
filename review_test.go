package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

type rtf func(*http.Request) (*http.Response, error)

func (f rtf) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func ans(r *http.Request, code int, body string) *http.Response {
	return &http.Response{StatusCode: code, Status: fmt.Sprint(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), Request: r}
}

func rpost(ctx context.Context, url string) *http.Request {
	r, _ := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(`{"a":1}`))
	return r
}

// Found in review: a base that rewinds by GetBody
func TestAWrapperThatRetriesProvesNothingByAskingForGetBody(t *testing.T) {
	var hits atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == "POST" {
			hits.Add(1)
			panic(http.ErrAbortHandler) // charged, answer lost
		}
	}))
	defer srv.Close()
	inner := &http.Transport{}
	base := rtf(func(r *http.Request) (*http.Response, error) {
		resp, err := inner.RoundTrip(r)
		if err != nil && r.GetBody != nil { // an ordinary one-shot retrier
			b, gerr := r.GetBody()
			if gerr != nil {
				return nil, fmt.Errorf("rewind: %w", gerr)
			}
			r2 := r.Clone(r.Context())
			r2.Body = b
			return inner.RoundTrip(r2)
		}
		return resp, err
	})
	tr := &Transport{Base: base, Policy: Policy{BaseDelay: time.Millisecond, MaxElapsed: 3 * time.Second}}
	get, _ := http.NewRequest("GET", srv.URL, nil)
	if r, err := tr.Client().Do(get); err == nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	resp, err := tr.Client().Do(rpost(WithIntent(context.Background(), "x"), srv.URL))
	t.Logf("POST executions=%d outcome=%v err=%v", hits.Load(), OutcomeOf(resp, err), err)
	if hits.Load() != 1 {
		t.Fail()
	}
}

// 1b: digest-like wrapper on a reused connection: endless
func TestAWrapperThatLogsInAgainMakesNoLoopOfFreeSends(t *testing.T) {
	var hits atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == "POST" {
			hits.Add(1)
			w.WriteHeader(307)
		}
	}))
	defer srv.Close()
	inner := &http.Transport{}
	base := rtf(func(r *http.Request) (*http.Response, error) {
		resp, err := inner.RoundTrip(r)
		if err == nil && resp.StatusCode == 307 && r.GetBody != nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			b, gerr := r.GetBody()
			if gerr != nil {
				return nil, gerr
			}
			r2 := r.Clone(r.Context())
			r2.Body = b
			return inner.RoundTrip(r2)
		}
		return resp, err
	})
	tr := &Transport{Base: base, Policy: Policy{MaxElapsed: time.Second}}
	get, _ := http.NewRequest("GET", srv.URL, nil)
	if r, err := tr.Client().Do(get); err == nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	var rep Report
	resp, err := tr.Client().Do(rpost(WithReport(context.Background(), &rep), srv.URL))
	t.Logf("sends=%d attempts=%d outcome=%v err=%v", hits.Load(), rep.Attempts, OutcomeOf(resp, err), err)
	if hits.Load() > 3 {
		t.Fail()
	}
}

// Found in review: KeysOff record, then KeysHonored
func TestAnIntentThatHadNoKeyIsNotSentAgainWithout(t *testing.T) {
	var keys []string
	base := rtf(func(r *http.Request) (*http.Response, error) {
		keys = append(keys, fmt.Sprint(r.Header["Idempotency-Key"], r.Header[strings.ToLower("Idempotency-Key")]))
		if len(keys) == 1 {
			return nil, errors.New("connection reset")
		}
		return ans(r, 200, "{}"), nil
	})
	store := &MemoryStore{}
	ctx := WithIntent(context.Background(), "x")
	t1 := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysOff}}
	_, err := t1.RoundTrip(rpost(ctx, "http://a.example/"))
	t.Log(OutcomeOf(nil, err), err)
	t2 := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored}}
	resp, err := t2.RoundTrip(rpost(ctx, "http://a.example/"))
	t.Log(keys, OutcomeOf(resp, err), err)
	if len(keys) > 1 {
		t.Fail()
	}
}

// Found in review: BreakerChange panic
func TestAPanicInBreakerChangeLeavesNoSlotTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fail := true
		sends := 0
		base := rtf(func(r *http.Request) (*http.Response, error) {
			sends++
			if fail {
				return ans(r, 503, ""), nil
			}
			return ans(r, 200, "{}"), nil
		})
		boom := true
		tr := &Transport{Base: base, Policy: Policy{MaxAttempts: Off, MaxInFlight: 1, Breaker: Breaker{MinCalls: 1, OpenFor: 20 * time.Millisecond}},
			Trace: &Trace{BreakerChange: func(_, from, to string) {
				if to == "half-open" && boom {
					boom = false
					panic("hook")
				}
			}}}
		do := func() (o Outcome, err error) {
			defer func() {
				if p := recover(); p != nil {
					err = fmt.Errorf("panic %v", p)
				}
			}()
			ctx, c := context.WithTimeout(context.Background(), 200*time.Millisecond)
			defer c()
			r, err := tr.RoundTrip(rpost(ctx, "http://a.example/"))
			if err == nil {
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
			return OutcomeOf(r, err), err
		}
		do()
		fail = false
		time.Sleep(50 * time.Millisecond)
		_, err := do()
		t.Log(err)
		for range 3 {
			time.Sleep(50 * time.Millisecond)
			_, err = do()
			t.Log(sends, tr.Upstream("a.example"), err)
		}
		if err != nil {
			t.Fail()
		}
	})
}

// Found in review: a late Close of the first lend
func TestAStreamedBodyHasOneReaderAtATime(t *testing.T) {
	pr, pw := io.Pipe()
	defer pr.Close()
	go pw.Write([]byte("hello"))
	b := &streamedBody{ReadCloser: pr}
	l1 := b.lend()
	l2 := b.lend()
	p := make([]byte, 1)
	l2.Read(p)
	l1.Close()
	_, err := l2.Read(p)
	t.Log("l2 after the late close of l1:", err)
	if err != nil {
		t.Fail()
	}
}

// Found in review: Settle(Done) over a turned-away record
func TestSettleForgetsTheAnswerThatWasNotTheLastWord(t *testing.T) {
	base := rtf(func(r *http.Request) (*http.Response, error) { return ans(r, 401, `{"e":1}`), nil })
	tr := &Transport{Base: base}
	ctx := WithIntent(context.Background(), "x")
	r, err := tr.RoundTrip(rpost(ctx, "http://a.example/"))
	t.Log(OutcomeOf(r, err))
	if err := tr.Settle(rpost(ctx, "http://a.example/"), Done, "webhook"); err != nil {
		t.Fatal(err)
	}
	r, err = tr.RoundTrip(rpost(ctx, "http://a.example/"))
	if err == nil {
		t.Log("saved answer", r.StatusCode, OutcomeOf(r, err))
		t.Fail()
	}
}

// Found in review: 402 after doubt, undeclared
func TestA402SettlesNoDoubtWhereKeysAreNotHonored(t *testing.T) {
	n := 0
	base := rtf(func(r *http.Request) (*http.Response, error) {
		if n++; n == 1 {
			return nil, errors.New("connection reset")
		}
		return ans(r, 402, `{}`), nil
	})
	tr := &Transport{Base: base}
	req := func() *http.Request {
		r := rpost(context.Background(), "http://a.example/")
		r.Header.Set("Idempotency-Key", "k1")
		return r
	}
	_, err := tr.RoundTrip(req())
	t.Log(OutcomeOf(nil, err))
	r, err := tr.RoundTrip(req())
	t.Log(OutcomeOf(r, err))
	if OutcomeOf(r, err) != Unknown {
		t.Fail()
	}
}

// Found in review: Classify InProgress on an error, caller gone
func TestWorkInProgressIsADoubtAlsoWhenTheCallerHasGone(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	base := rtf(func(r *http.Request) (*http.Response, error) { cancel(); return nil, errors.New("read timeout") })
	tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored, Classify: func(a Attempt) Verdict {
		if a.Err != nil {
			return Verdict{Kind: VerdictInProgress}
		}
		return Verdict{}
	}}}
	_, err := tr.RoundTrip(rpost(WithIntent(ctx, "x"), "http://a.example/"))
	t.Log(OutcomeOf(nil, err))
	if OutcomeOf(nil, err) != Unknown {
		t.Fail()
	}
}

// Found in review: passThrough NotSent after a hidden re-send
func TestAnUpgradeThatNetHTTPSentTwiceIsNotToldAsNotSent(t *testing.T) {
	var hits atomic.Int32
	var ln net.Listener
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == "POST" {
			hits.Add(1)
			ln.Close()
			c, _, _ := w.(http.Hijacker).Hijack()
			c.Close()
		}
	}))
	ln = srv.Listener
	tr := &Transport{Base: &http.Transport{}}
	get, _ := http.NewRequest("GET", srv.URL, nil)
	r, err := tr.RoundTrip(get)
	if err == nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	req := rpost(context.Background(), srv.URL)
	req.Header.Set("Idempotency-Key", "k")
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "x")
	_, err = tr.RoundTrip(req)
	t.Log(hits.Load(), OutcomeOf(nil, err), err)
	if OutcomeOf(nil, err) == NotSent {
		t.Fail()
	}
}

// Found in review: the window was looked at before the attempt, and a slow dial
// carried the key past it.
func TestAnAttemptIsCutAtTheEndOfTheKeysWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, start := 0, time.Now()
		var cut time.Duration
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return nil, io.ErrUnexpectedEOF
			}
			<-r.Context().Done() // still dialling
			cut = time.Since(start)
			return nil, r.Context().Err()
		})
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored, KeyWindow: time.Second, BaseDelay: time.Millisecond}}
		r := do(contract(t, tr), post(t, t.Context(), "charge:1", "http://up.example/", "x"))
		if cut == 0 || cut > time.Second || r.report.Outcome != Unknown {
			t.Errorf("the second attempt ended after %v, outcome %v", cut, r.report.Outcome)
		}
	})
}

// Found in review: the timer of a discarded answer cancelled the next attempt.
func TestADiscardedAnswersTimerDoesNotCancelTheNextAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			if n++; n == 1 {
				a := answerOf(503, "")
				a.Body, a.ContentLength = io.NopCloser(readerFunc(func([]byte) (int, error) {
					<-time.After(drainTime) // ends as the timer fires
					return 0, io.EOF
				})), -1
				return a, nil
			}
			select {
			case <-r.Context().Done():
				return nil, context.Cause(r.Context())
			case <-time.After(10 * time.Millisecond):
			}
			return answerOf(200, "{}"), nil
		})
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored, BaseDelay: 1, MaxDelay: 1, MaxAttempts: 2}}
		if r := do(contract(t, tr), post(t, t.Context(), "charge:1", "http://up.example/", "x")); r.report.Outcome != Done {
			t.Error(r.report, r.err)
		}
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Found in review: what Prepare sends for a token was counted as the charge's own
// connection, or as proof that it had none.
func TestATokenFetchedInPrepareProvesNothingAboutTheCharge(t *testing.T) {
	sends := 0
	base := roundTripFunc(func(*http.Request) (*http.Response, error) {
		sends++
		return nil, io.ErrUnexpectedEOF // sent, and charged; this base runs no hooks
	})
	tr := &Transport{Base: base, Prepare: func(r *http.Request) error {
		req, _ := http.NewRequestWithContext(r.Context(), "GET", "http://127.0.0.1:1/token", nil)
		if resp, err := http.DefaultTransport.RoundTrip(req); err == nil {
			resp.Body.Close()
		}
		return nil // it goes on with the token that it has
	}}
	r := do(contract(t, tr), post(t, t.Context(), "", "http://up.example/", "x"))
	if sends != 1 || r.report.Outcome != Unknown {
		t.Errorf("%d sends, %v: %v", sends, r.report.Outcome, r.err)
	}
}

// Found in review: DESIGN §5 holds for a key that the caller put in, too.
func TestACallersKeyInDoubtIsNotSentAgainWhereKeysAreNotHonored(t *testing.T) {
	sends := 0
	base := roundTripFunc(func(*http.Request) (*http.Response, error) {
		sends++
		return nil, io.ErrUnexpectedEOF
	})
	client := contract(t, &Transport{Base: base})
	for i := range 2 {
		req := post(t, t.Context(), "", "http://up.example/", "x")
		req.Header.Set("Idempotency-Key", "mine")
		if r := do(client, req); sends != 1 || r.report.Outcome != Unknown || !errors.Is(r.err, ErrUnsafe) {
			t.Errorf("call %d: %d sends, %v: %v", i+1, sends, r.report.Outcome, r.err)
		}
	}
}

// Found in review: draining took time, and the whole wait was slept after it.
func TestDrainingCountsAgainstTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := roundTripFunc(func(*http.Request) (*http.Response, error) {
			a := answerOf(503, "", "Retry-After", "1")
			read := false
			a.ContentLength = -1
			a.Body = io.NopCloser(readerFunc(func(p []byte) (int, error) {
				if read {
					return 0, io.EOF
				}
				read = true
				<-time.After(80 * time.Millisecond)
				return copy(p, "busy"), nil
			}))
			return a, nil
		})
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored, BaseDelay: 1, MaxDelay: 1}}
		ctx, cancel := context.WithTimeout(t.Context(), 1012*time.Millisecond)
		defer cancel()
		r := do(contract(t, tr), post(t, ctx, "charge:1", "http://up.example/", "x"))
		if r.err != nil || r.status != 503 {
			t.Errorf("status %d, %v", r.status, r.err)
		}
	})
}

// Found in review: a 409 for a key that another process can know is no verdict.
func TestA409ForADerivedKeyIsNotTakenForARejection(t *testing.T) {
	base := roundTripFunc(func(*http.Request) (*http.Response, error) { return answerOf(409, "{}"), nil })
	tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored, NewKey: DerivedKey}}
	if r := do(contract(t, tr), post(t, t.Context(), "charge:1", "http://up.example/", "x")); r.report.Outcome != Unknown {
		t.Error(r.report.Outcome)
	}
}
