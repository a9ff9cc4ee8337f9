package oncehttp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

type spanKey struct{}

func TestHooksAreCalledInOrderWithWhatHappened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log []string
		note := func(format string, args ...any) { log = append(log, fmt.Sprintf(format, args...)) }
		base := answers(503, 0, 201)
		id := recordID(kindName, "pay.example", "", "charge:1")
		n := 0
		inner := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			note("send in span %v", r.Context().Value(spanKey{}))
			nap(r, 100*time.Millisecond)
			return base.RoundTrip(r)
		})
		tr := &Transport{Base: inner, Policy: Policy{Keys: KeysHonored}, Trace: &Trace{
			AttemptStart: func(ctx context.Context, a AttemptInfo) context.Context {
				n++
				note("start %+v", a)
				require.Nil(t, ctx.Value(spanKey{}))
				return context.WithValue(ctx, spanKey{}, n)
			},
			AttemptDone: func(ctx context.Context, a AttemptInfo) {
				require.Equal(t, a.N, ctx.Value(spanKey{}), "the attempt's own context")
				require.Equal(t, 100*time.Millisecond, a.Elapsed)
				note("done %s %s %s N=%d status=%d err=%v verdict=%d", a.Upstream, a.RecordID, a.Method, a.N, a.Status, a.Err, a.Verdict)
			},
			Wait: func(ctx context.Context, w WaitInfo) {
				require.Positive(t, w.Delay+1)
				w.Delay = 0
				note("wait %+v", w)
			},
			CallDone: func(ctx context.Context, r Report) {
				require.Positive(t, r.Waited)
				r.Waited = 0
				note("call %v attempts=%d status=%d record=%s intent=%s", r.Outcome, r.Attempts, r.Status, r.RecordID, r.Intent)
			},
			StoreError:    func(context.Context, string, string, error) { note("store") },
			BreakerChange: func(string, string, string) { note("breaker") },
		}}
		require.NoError(t, do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}")).err)
		start := func(n int) string {
			return fmt.Sprintf("start %+v", AttemptInfo{Upstream: "pay.example", RecordID: id, Method: "POST", N: n})
		}
		wait := func(n int) string {
			return fmt.Sprintf("wait %+v", WaitInfo{Upstream: "pay.example", RecordID: id, N: n})
		}
		require.Equal(t, []string{
			start(1), "send in span 1", "done pay.example " + id + " POST N=1 status=503 err=<nil> verdict=4", wait(2),
			start(2), "send in span 2", "done pay.example " + id + " POST N=2 status=0 err=connection reset by peer verdict=4", wait(3),
			start(3), "send in span 3", "done pay.example " + id + " POST N=3 status=201 err=<nil> verdict=1",
			"call done attempts=3 status=201 record=" + id + " intent=charge:1",
		}, log)
	})
}

func TestTraceIsToldThatAWaitWasAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var waits []WaitInfo
		n := 0
		tr := &Transport{Trace: &Trace{Wait: func(_ context.Context, w WaitInfo) { waits = append(waits, w) }},
			Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
				switch n++; n {
				case 1:
					return answerOf(429, "", "Retry-After", "7"), nil
				case 2:
					return answerOf(503, ""), nil
				}
				return answerOf(200, ""), nil
			})}
		start := time.Now()
		do(contract(t, tr), fetch(t, t.Context()))
		require.Len(t, waits, 2)
		require.True(t, waits[0].Asked)
		require.GreaterOrEqual(t, waits[0].Delay, 7*time.Second)
		require.False(t, waits[1].Asked)
		require.Equal(t, waits[0].Delay+waits[1].Delay, time.Since(start), "the delay told is the delay kept")
	})
}

func TestCallDoneIsCalledWhateverEndsTheCall(t *testing.T) {
	for name, c := range map[string]struct {
		tr  *Transport
		req *http.Request
	}{
		"bad settings":    {&Transport{Policy: Policy{BaseDelay: -1}}, fetch(t, t.Context())},
		"a nil request":   {&Transport{}, nil},
		"no URL":          {&Transport{}, &http.Request{}},
		"a failing store": {&Transport{Store: &flakyStore{create: fails}}, post(t, t.Context(), "x", payURL, "{}")},
		"a bad key": {&Transport{}, func() *http.Request {
			r := post(t, t.Context(), "", payURL, "")
			r.Header.Set("Idempotency-Key", " ")
			return r
		}()},
	} {
		var got []Report
		c.tr.Base = answers(200)
		c.tr.Trace = &Trace{CallDone: func(ctx context.Context, r Report) {
			require.NotNil(t, ctx)
			got = append(got, r)
		}}
		_, err := c.tr.RoundTrip(c.req)
		require.Error(t, err, name)
		require.Len(t, got, 1, name)
		require.Equal(t, NotSent, got[0].Outcome)
		var e *Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, e.Report, got[0])
	}
}

func TestJoinedTracesNestAsSpansDo(t *testing.T) {
	var log []string
	one := func(name string) *Trace {
		type key string
		return &Trace{
			AttemptStart: func(ctx context.Context, _ AttemptInfo) context.Context {
				log = append(log, "start "+name)
				return context.WithValue(ctx, key(name), true)
			},
			AttemptDone: func(ctx context.Context, _ AttemptInfo) {
				require.Equal(t, true, ctx.Value(key(name)))
				log = append(log, "done "+name)
			},
			Wait:          func(context.Context, WaitInfo) { log = append(log, "wait "+name) },
			CallDone:      func(context.Context, Report) { log = append(log, "call "+name) },
			StoreError:    func(context.Context, string, string, error) { log = append(log, "store "+name) },
			BreakerChange: func(string, string, string) { log = append(log, "breaker "+name) },
		}
	}
	j := JoinTraces(nil, one("a"), &Trace{}, nil, one("b"))
	ctx := j.attemptStart(t.Context(), AttemptInfo{})
	j.attemptDone(ctx, AttemptInfo{})
	j.wait(ctx, WaitInfo{})
	j.callDone(ctx, Report{})
	j.storeError(ctx, "", "", nil)
	j.breakerChange("", "", "")
	require.Equal(t, []string{"start a", "start b", "done b", "done a", "wait a", "wait b", "call a", "call b",
		"store a", "store b", "breaker a", "breaker b"}, log)

	for _, empty := range []*Trace{nil, {}, JoinTraces(), JoinTraces(nil, nil)} {
		require.Equal(t, t.Context(), empty.attemptStart(t.Context(), AttemptInfo{}))
		empty.attemptDone(ctx, AttemptInfo{})
		empty.wait(ctx, WaitInfo{})
		empty.callDone(ctx, Report{})
		empty.storeError(ctx, "", "", errDisk)
		empty.breakerChange("", "", "")
	}
}

func TestAnAttemptStartThatReturnsNoContextChangesNothing(t *testing.T) {
	tr := &Transport{Base: answers(200), Trace: &Trace{AttemptStart: func(context.Context, AttemptInfo) context.Context { return nil }}}
	require.NoError(t, do(contract(t, tr), fetch(t, t.Context())).err)
}

func TestLogTraceWarnsOfWhatDidNotEndWell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		base := answers(503, 201, 0)
		store := &flakyStore{}
		tr := &Transport{Base: base, Store: store, Policy: Policy{Breaker: Breaker{MinCalls: 3}},
			Trace: LogTrace(slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))}
		client := contract(t, tr)
		do(client, fetch(t, t.Context()))
		store.update = fails
		do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		do(client, post(t, t.Context(), "", payURL, "{}"))

		type line struct {
			Level, Msg, Upstream, Outcome, Reason, Error, Op, From, To, Record string
			Attempt, Status, Attempts                                          int
		}
		var got []string
		for raw := range bytes.Lines(out.Bytes()) {
			var l line
			require.NoError(t, json.Unmarshal(raw, &l))
			got = append(got, strings.TrimSpace(strings.Join([]string{l.Level, l.Msg, l.Outcome, l.Reason, l.Op, l.To}, " ")))
			if l.Op == "" {
				require.Equal(t, "pay.example", l.Upstream)
			}
		}
		require.Contains(t, got, "DEBUG oncehttp: attempt")
		require.Contains(t, got, "DEBUG oncehttp: wait")
		require.Contains(t, got, "DEBUG oncehttp: call done")
		require.Contains(t, got, "WARN oncehttp: key store   settle")
		require.Contains(t, got, "WARN oncehttp: call unknown not safe to send again")
		require.Contains(t, got, "WARN oncehttp: breaker    open")
	})
}

// cases.md A24 (CVE-2024-6104): whatever becomes of a call, what we write
// shows nothing of the URL's userinfo and query, of header values, bodies and
// keys.
func TestASecretAppearsNowhereInWhatWeWrite(t *testing.T) {
	const secret = "canary"
	target := "https://canary-user:canary-pass@pay.example/charges?api_key=canary-query&filter='canary-quoted'"
	lost := &url.Error{Op: "Post", URL: target, Err: errLost}
	type world struct {
		tr    *Transport
		store *flakyStore
		req   *http.Request
	}
	again := func(t *testing.T, w *world) { finish(w.tr.RoundTrip(renew(t, w.req))) }
	for name, prepare := range map[string]func(*testing.T, *world){
		"success":                 func(*testing.T, *world) {},
		"a saved answer":          again,
		"503 for ever":            func(_ *testing.T, w *world) { w.tr.Base = status(503) },
		"429":                     func(_ *testing.T, w *world) { w.tr.Base = status(429) },
		"422":                     func(_ *testing.T, w *world) { w.tr.Base = status(422) },
		"401":                     func(_ *testing.T, w *world) { w.tr.Base = status(401) },
		"lost":                    func(_ *testing.T, w *world) { w.tr.Base = fail(lost) },
		"lost, keys only sent":    func(_ *testing.T, w *world) { w.tr.Base, w.tr.Policy.Keys = fail(lost), KeysSent },
		"an error that names all": func(_ *testing.T, w *world) { w.tr.Base = fail(fmt.Errorf("sdk: %w", errors.Join(lost, lost))) },
		"open breaker":            func(_ *testing.T, w *world) { trip(w.tr.settings().upstreams.get("pay.example")) },
		"attempt timeout":         func(_ *testing.T, w *world) { w.tr.Base, w.tr.Policy.AttemptTimeout = roundTripFunc(hung), time.Second },
		"MaxElapsed":              func(_ *testing.T, w *world) { w.tr.Base, w.tr.Policy.MaxElapsed = roundTripFunc(hung), time.Second },
		"a long Retry-After": func(_ *testing.T, w *world) {
			w.tr.Base = roundTripFunc(func(*http.Request) (*http.Response, error) { return answerOf(503, "", "Retry-After", "9999"), nil })
		},
		"the store is down": func(_ *testing.T, w *world) {
			w.store.create, w.store.get = failsWith("postgres://u:canary@db/x"), failsWith("postgres://u:canary@db/x")
		},
		"the store cannot settle":   func(_ *testing.T, w *world) { w.store.update = failsWith("postgres://u:canary@db/x") },
		"another request":           func(t *testing.T, w *world) { again(t, w); w.req.URL.RawQuery += "2" },
		"in doubt, past the window": func(t *testing.T, w *world) { w.tr.Base = fail(lost); again(t, w); time.Sleep(time.Hour) },
		"in doubt, not honoured":    func(t *testing.T, w *world) { w.tr.Base, w.tr.Policy.Keys = fail(lost), KeysSent; again(t, w) },
		"answered, not saved":       func(t *testing.T, w *world) { w.tr.Policy.MaxResponseBytes = Off; again(t, w) },
		"a key that cannot be":      func(_ *testing.T, w *world) { w.req.Header.Set("Idempotency-Key", "canary key\r\n") },
		"two keys":                  func(_ *testing.T, w *world) { w.req.Header.Add("Idempotency-Key", "canary-key-2") },
		"a key that is too long":    func(_ *testing.T, w *world) { w.tr.Policy.KeyMaxLen = 5 },
		"Prepare fails":             func(_ *testing.T, w *world) { w.tr.Prepare = func(*http.Request) error { return lost } },
		"Prepare changes the key": func(_ *testing.T, w *world) {
			w.tr.Prepare = func(r *http.Request) error { r.Header.Set("Idempotency-Key", "canary-2"); return nil }
		},
		"the body cannot be read":  func(_ *testing.T, w *world) { w.req.Body, w.req.GetBody = io.NopCloser(iotest.ErrReader(errDisk)), nil },
		"GetBody fails":            func(_ *testing.T, w *world) { w.req.GetBody = func() (io.ReadCloser, error) { return nil, errDisk } },
		"a body that is too large": func(_ *testing.T, w *world) { w.req.GetBody, w.tr.Policy.MaxBodyBytes = nil, 3 },
		"a scheme that cannot be":  func(_ *testing.T, w *world) { w.tr.Base = &http.Transport{}; w.req.URL.Scheme = "ftp" },
		"a header that cannot be": func(_ *testing.T, w *world) {
			w.tr.Base = &http.Transport{}
			w.req.Header.Set("Authorization", "canary\n")
		},
		"settings that cannot work": func(_ *testing.T, w *world) { w.tr.Policy.KeyHeader = "a b" },
		"a base with no answer": func(_ *testing.T, w *world) {
			w.tr.Base = roundTripFunc(func(*http.Request) (*http.Response, error) { return nil, nil })
		},
		"an answer that breaks off": func(_ *testing.T, w *world) {
			w.tr.Base = roundTripFunc(func(*http.Request) (*http.Response, error) {
				resp := brokenAnswer("{")
				resp.Header.Set("Content-Type", "application/json")
				return resp, nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var written bytes.Buffer
				var mu sync.Mutex
				note := func(v any) {
					mu.Lock()
					defer mu.Unlock()
					fmt.Fprintf(&written, "trace %+v\n", v)
				}
				log := slog.New(slog.NewTextHandler(writeFunc(func(p []byte) (int, error) {
					mu.Lock()
					defer mu.Unlock()
					return written.Write(p)
				}), &slog.HandlerOptions{Level: slog.LevelDebug}))
				w := &world{store: &flakyStore{}}
				w.tr = &Transport{
					Store: w.store, Policy: Policy{Keys: KeysHonored, SaveRequest: true},
					Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
						return answerOf(201, `{"card":"canary-answer"}`, "Content-Type", "application/json", "Set-Cookie", "canary",
							"X-Token", "canary", "Location", "https://u:canary@pay.example/"), nil
					}),
					Trace: JoinTraces(LogTrace(log), &Trace{
						AttemptStart:  func(ctx context.Context, a AttemptInfo) context.Context { note(a); return ctx },
						AttemptDone:   func(_ context.Context, a AttemptInfo) { a.Err = nil; note(a) }, // the base's, raw
						Wait:          func(_ context.Context, i WaitInfo) { note(i) },
						CallDone:      func(_ context.Context, r Report) { note(r) },
						BreakerChange: func(u, from, to string) { note(u + from + to) },
					}),
				}
				w.req = post(t, t.Context(), "charge:1", target, `{"card":"canary-body"}`)
				w.req.Header = http.Header{"Authorization": {"Bearer canary-token"}, "Idempotency-Key": {"canary-key"},
					"Cookie": {"canary"}, "X-Api-Key": {"canary"}, "Content-Type": {"application/json"}}
				prepare(t, w)
				resp, err := w.tr.RoundTrip(w.req)
				note(err)
				note(OutcomeOf(resp, err))
				r := finish(resp, err)
				note(r.report)
				note(w.tr.Upstream("pay.example"))
				if _, err := w.tr.Key(w.req); err != nil {
					note(err)
				}
				if err := w.tr.Settle(w.req, Rejected, "looked up"); err != nil {
					note(err)
				}
				require.NotContains(t, written.String(), secret)
				require.NotEmpty(t, written.String())

				w.store.create, w.store.get, w.store.update = nil, nil, nil
				for _, rec := range all(t, w.store) {
					if rec.Request != nil {
						require.NotContains(t, fmt.Sprint(rec.Request.Header), secret)
						require.NotContains(t, rec.Request.URL, "canary-user")
						require.NotContains(t, rec.Request.URL, "canary-pass")
					}
					if rec.Response != nil {
						require.NotContains(t, fmt.Sprint(rec.Response.Header), secret)
					}
					rec.Key, rec.Request, rec.Response = "", nil, nil // what a record is for
					require.NotContains(t, fmt.Sprintf("%+v", rec), secret)
				}
			})
		})
	}
}

type writeFunc func([]byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

func failsWith(text string) fault {
	return func(context.Context, func() error) error { return errors.New("cannot connect to " + text) }
}

// renew is a request as it was, with a body that was not read yet.
func renew(t testing.TB, req *http.Request) *http.Request {
	t.Helper()
	again := req.Clone(req.Context())
	body, err := req.GetBody()
	require.NoError(t, err)
	again.Body = body
	return again
}
