package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/internal/memnet"
)

// payURL is where the tests' requests go.
const payURL = "http://pay.example/charges"

// fetch makes a GET.
func fetch(t testing.TB, ctx context.Context) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, payURL, nil)
	require.NoError(t, err)
	return req
}

// overMemnet serves h in memory and returns a base that reaches it.
func overMemnet(t testing.TB, h http.HandlerFunc) *http.Transport {
	l := memnet.Listen()
	srv := &http.Server{Handler: h}
	served := make(chan struct{})
	go func() { defer close(served); srv.Serve(l) }()
	base := &http.Transport{DialContext: l.DialContext}
	t.Cleanup(func() {
		base.CloseIdleConnections()
		srv.Close()
		<-served
	})
	return base
}

// blackHole is a handler that never answers. A server notices that its client
// has gone only once it has read the body.
func blackHole(_ http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

// hung waits until the request's context is over and returns its error, as a
// base whose upstream does not answer.
func hung(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// unguarded retries without asking the budget or the breaker.
func unguarded(p Policy) Policy {
	p.Budget.Ratio, p.Breaker.FailureRatio = Off, Off
	return p
}

// nap waits in virtual time, or until the request is given up.
func nap(r *http.Request, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-r.Context().Done():
		return r.Context().Err()
	}
}

// cases.md A14, A40, A70: whatever the deadline, the Retry-After and the time
// that an answer takes, a call returns at the instant when nothing more can
// come of it, and never after its deadline.
func TestTenThousandCallsEndByTheirDeadlineAndNeverSendEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(14, 40))
		logUniform := func(least time.Duration, doublings int) time.Duration {
			d := least << rnd.IntN(doublings)
			return d + time.Duration(rnd.Int64N(int64(d)))
		}
		sends, refused, waited := 0, 0, 0
		for n := range 10_000 {
			limit := logUniform(time.Millisecond, 16)
			service := time.Duration(rnd.IntN(2)) * logUniform(time.Millisecond, 13)
			asked := time.Duration(rnd.IntN(3)-1) * logUniform(time.Millisecond, 15)
			asked = asked.Truncate(time.Millisecond)

			start, calls := time.Now(), 0
			until := start.Add(limit)
			var ended time.Time
			base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
				now := time.Now()
				calls++
				assert.GreaterOrEqual(t, until.Sub(now), minAttempt, "an attempt starts with less than 10 ms left")
				if calls > 1 {
					assert.GreaterOrEqual(t, now.Sub(ended), asked, "a send earlier than Retry-After")
				}
				defer func() { ended = time.Now() }()
				if err := nap(r, service); err != nil {
					return nil, err
				}
				if asked < 0 {
					return answerOf(503, "down"), nil
				}
				return answerOf(503, "down", "Retry-After-Ms", fmt.Sprint(asked.Milliseconds())), nil
			})
			p := unguarded(Policy{MaxAttempts: 1 + rnd.IntN(6), MaxElapsed: Off})
			ctx, cancel, client := context.Background(), func() {}, &http.Client{}
			switch n % 3 {
			case 0:
				ctx, cancel = context.WithDeadline(ctx, until)
			case 1:
				p.MaxElapsed = limit
			case 2:
				client.Timeout = limit
			}
			tr := &Transport{Base: base, Policy: p}
			client.Transport = strict{t, tr}
			r := do(client, fetch(t, ctx))
			now := time.Now()
			cancel()

			require.False(t, now.After(until), "case %d returned %v after its deadline", n, now.Sub(until))
			if calls == 0 {
				require.True(t, now.Equal(start), "case %d sent nothing and yet waited %v", n, now.Sub(start))
				require.Less(t, limit, minAttempt)
				refused++
				continue
			}
			require.True(t, now.Equal(ended), "case %d slept %v towards a deadline after its last answer", n, now.Sub(ended))
			if calls > 1 {
				waited++
			}
			if r.err == nil {
				require.Equal(t, "down", r.body)
			}
			sends += calls
		}
		// The cases must have met each situation often enough to prove something.
		require.Greater(t, refused, 100)
		require.Greater(t, waited, 1000)
		require.Greater(t, sends, 15_000)
	})
}

// cases.md A43: cancelling did not interrupt the sleep between attempts.
func TestACancelDuringAWaitReturnsAtThatInstant(t *testing.T) {
	for name, status := range map[string]int{"backoff": 503, "Retry-After": 429} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sends := 0
				tr := &Transport{Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
					sends++
					return answerOf(status, "", "Retry-After", "3"), nil
				})}
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(150*time.Millisecond, cancel)
				start := time.Now()
				r := do(contract(t, tr), post(t, ctx, "charge:1", payURL, "{}"))
				require.Equal(t, 150*time.Millisecond, time.Since(start))
				require.ErrorIs(t, r.err, context.Canceled)
				require.NotErrorIs(t, r.err, ErrDeadline)
				require.Equal(t, 150*time.Millisecond, r.report.Waited)
				require.Equal(t, 1, sends)

				time.Sleep(time.Hour)
				require.Equal(t, 1, sends, "sent after the cancel")
			})
		})
	}
}

// cases.md A14 (backoff of 5 s, deadline 600 ms), A40 (3,600 s at start-up), A70
// (292.052427053 s, deadline 60 s), A71 (600 s above our 60).
func TestAWaitThatWouldMissTheDeadlineReturnsTheRealAnswerAtOnce(t *testing.T) {
	for name, c := range map[string]struct {
		status     int
		retryAfter string
		deadline   time.Duration // 0: none
		policy     Policy
		retryIn    time.Duration
	}{
		"A14 backoff longer than the deadline":     {503, "", 600 * time.Millisecond, Policy{BaseDelay: 1 << 40, MaxDelay: 1 << 60, MaxElapsed: Off}, -1},
		"A14 Retry-After longer than the deadline": {429, "3600", 600 * time.Millisecond, Policy{MaxRetryAfter: 2 * time.Hour}, -1},
		"A40 an hour, with the defaults":           {503, "3600", 0, Policy{}, time.Hour},
		"A70 nine decimals, a minute left":         {429, "292.052427053", time.Minute, Policy{MaxRetryAfter: time.Hour}, -1},
		"A71 ten minutes against our one":          {503, "600", 0, Policy{}, 10 * time.Minute},
		"Off waits for none":                       {503, "1", 0, Policy{MaxRetryAfter: Off}, time.Second},
		"longer than MaxElapsed":                   {503, "30", 0, Policy{MaxElapsed: 20 * time.Second, AttemptTimeout: 5 * time.Second}, -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sends := 0
				tr := &Transport{Policy: c.policy, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
					sends++
					nap(r, 10*time.Millisecond)
					resp := answerOf(c.status, `{"error":"why"}`, "X-Why", "because")
					if c.retryAfter != "" {
						resp.Header.Set("Retry-After", c.retryAfter)
					}
					return resp, nil
				})}
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				start := time.Now()
				resp, err := contract(t, tr).Do(fetch(t, ctx))
				require.NoError(t, err)
				require.Equal(t, 10*time.Millisecond, time.Since(start))
				require.Equal(t, 1, sends)
				require.Equal(t, "because", resp.Header.Get("X-Why"))
				r := finish(resp, nil)
				require.Equal(t, c.status, r.status)
				require.Equal(t, `{"error":"why"}`, r.body)
				require.Equal(t, ErrDeadline, r.report.Reason)
				require.Zero(t, r.report.Waited)
				require.True(t, r.report.RetryAt.After(time.Now()), "RetryAt tells when calling again makes sense")
				if c.retryIn > 0 {
					require.Equal(t, time.Now().Add(c.retryIn), r.report.RetryAt)
				}
			})
		})
	}
}

func TestTheFiveTimeoutsAreToldApart(t *testing.T) {
	for name, c := range map[string]struct {
		client, attempt, elapsed, header, ctx time.Duration
		took                                  time.Duration // at least
		attempts                              int
		reason                                error
		is, isNot                             error
	}{
		"http.Client.Timeout":   {client: 2 * time.Second, took: 2 * time.Second, attempts: 1, reason: ErrDeadline},
		"the caller's deadline": {ctx: 2 * time.Second, took: 2 * time.Second, attempts: 1, reason: ErrDeadline, is: context.DeadlineExceeded},
		"MaxElapsed":            {elapsed: 2 * time.Second, took: 2 * time.Second, attempts: 1, reason: ErrDeadline, is: errAttemptTimeout, isNot: context.DeadlineExceeded},
		"AttemptTimeout":        {attempt: 2 * time.Second, took: 6 * time.Second, attempts: 3, reason: ErrAttempts, is: errAttemptTimeout, isNot: context.DeadlineExceeded},
		"ResponseHeaderTimeout": {header: 2 * time.Second, took: 6 * time.Second, attempts: 3, reason: ErrAttempts, isNot: errAttemptTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := overMemnet(t, blackHole)
				base.ResponseHeaderTimeout = c.header
				tr := &Transport{Base: base, Policy: Policy{AttemptTimeout: c.attempt, MaxElapsed: c.elapsed, Keys: KeysHonored}}
				client := contract(t, tr)
				client.Timeout = c.client
				var rep Report
				ctx := WithReport(t.Context(), &rep)
				if c.ctx > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.ctx)
					defer cancel()
				}
				start := time.Now()
				_, err := client.Do(post(t, ctx, "charge:1", payURL, "{}"))
				took := time.Since(start)
				require.Error(t, err)
				var timeout interface{ Timeout() bool }
				require.True(t, errors.As(err, &timeout) && timeout.Timeout(), "%v", err)
				require.GreaterOrEqual(t, took, c.took)
				require.Less(t, took, c.took+time.Second, "two backoffs are below 200 and 400 ms")
				if c.attempts == 1 {
					require.Equal(t, c.took, took)
				}
				// net/http flattens our error under Client.Timeout: the Report survives.
				require.Equal(t, c.reason, rep.Reason)
				require.Equal(t, c.attempts, rep.Attempts)
				require.Equal(t, Unknown, rep.Outcome)
				require.Equal(t, "charge:1", rep.Intent)
				if c.is != nil {
					require.ErrorIs(t, err, c.is)
				}
				if c.isNot != nil {
					require.NotErrorIs(t, err, c.isNot)
				}
			})
		})
	}
}

// cases.md A15: one clock for all attempts never let a timed-out one be retried.
func TestAnAttemptThatTimesOutIsRetriedWithinClientTimeout(t *testing.T) {
	for name, c := range map[string]struct {
		attempt  time.Duration
		attempts int
	}{
		"with AttemptTimeout the second answers": {500 * time.Millisecond, 2},
		"Client.Timeout alone leaves one":        {0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sends := 0
				base := overMemnet(t, func(w http.ResponseWriter, r *http.Request) {
					if sends++; sends == 1 {
						<-r.Context().Done()
					} else {
						time.Sleep(10 * time.Millisecond)
					}
				})
				tr := &Transport{Base: base, Policy: Policy{AttemptTimeout: c.attempt}}
				client := contract(t, tr)
				client.Timeout = 2 * time.Second
				var rep Report
				r := do(client, fetch(t, WithReport(t.Context(), &rep)))
				require.Equal(t, c.attempts, rep.Attempts)
				require.Equal(t, c.attempts == 2, r.err == nil, "%v", r.err)
			})
		})
	}
}

// cases.md A73: the server's and our own deadline errors look alike; only the
// caller's context tells.
func TestOnlyTheCallersContextDecidesThatTimeIsOver(t *testing.T) {
	lookalike := fmt.Errorf("rpc: %w", context.DeadlineExceeded)
	t.Run("alive: the error may be retried", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sends := 0
			tr := &Transport{Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
				if sends++; sends == 1 {
					return nil, lookalike
				}
				return answerOf(200, "ok"), nil
			})}
			r := do(contract(t, tr), fetch(t, t.Context()))
			require.NoError(t, r.err)
			require.Equal(t, 2, sends)
		})
	})
	t.Run("over: no further attempt, no token", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sends := 0
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			tr := &Transport{Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
				sends++
				<-ctx.Done()
				return nil, lookalike
			})}
			r := do(contract(t, tr), fetch(t, ctx))
			require.ErrorIs(t, r.err, context.DeadlineExceeded)
			require.ErrorIs(t, r.err, ErrDeadline)
			require.Equal(t, 1, sends)
			require.Equal(t, 10.0, tr.Upstream("pay.example").Tokens)

			r = do(contract(t, tr), fetch(t, ctx))
			require.ErrorIs(t, r.err, context.DeadlineExceeded)
			require.Equal(t, 1, sends, "sent with a context that was over")
		})
	})
}

// contextsOf is a base that remembers the contexts of its attempts.
func contextsOf(base http.RoundTripper, seen *[]context.Context) http.RoundTripper {
	var mu sync.Mutex
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		mu.Lock()
		*seen = append(*seen, r.Context())
		mu.Unlock()
		return base.RoundTrip(r)
	})
}

// roundTripper is a roundTripFunc that leaves the body to the one below.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// cases.md A16: the per-attempt timeout killed the body that the caller was
// reading; small bodies hid it.
func TestAttemptTimeoutNeverCutsABodyThatTheCallerReads(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				chunk := bytes.Repeat([]byte("0123456789abcdef"), 1<<10)
				base := overMemnet(t, func(w http.ResponseWriter, r *http.Request) {
					for range 64 {
						w.Write(chunk)
						w.(http.Flusher).Flush()
						time.Sleep(50 * time.Millisecond)
					}
				})
				var ctxs []context.Context
				tr := &Transport{Base: contextsOf(base, &ctxs), Policy: Policy{AttemptTimeout: 200 * time.Millisecond, MaxElapsed: Off}}
				req := fetch(t, t.Context())
				if method == http.MethodPost {
					req = post(t, t.Context(), "charge:1", payURL, "{}")
				}
				start := time.Now()
				resp, err := contract(t, tr).Do(req)
				require.NoError(t, err)
				time.Sleep(time.Second) // the caller is slow, too
				require.NoError(t, ctxs[0].Err())
				all, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.Len(t, all, 1<<20)
				require.GreaterOrEqual(t, time.Since(start), 3*time.Second)
				require.ErrorIs(t, ctxs[0].Err(), context.Canceled, "at EOF the attempt is over")
				require.NoError(t, resp.Body.Close())
				require.Len(t, ctxs, 1)
				require.Equal(t, Done, OutcomeOf(resp, nil))
			})
		})
	}
}

func TestTheAttemptsContextEndsAtEOFOrCloseAndNotBefore(t *testing.T) {
	for name, end := range map[string]func(io.ReadCloser){
		"EOF":                 func(b io.ReadCloser) { io.Copy(io.Discard, b) },
		"Close, nothing read": func(b io.ReadCloser) { b.Close() },
		"Close, half read":    func(b io.ReadCloser) { b.Read(make([]byte, 2)); b.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ctxs []context.Context
				tr := &Transport{Base: contextsOf(roundTripFunc(func(*http.Request) (*http.Response, error) {
					return answerOf(200, "four"), nil
				}), &ctxs)}
				resp, err := contract(t, tr).Do(fetch(t, t.Context()))
				require.NoError(t, err)
				time.Sleep(time.Hour)
				require.NoError(t, ctxs[0].Err(), "before the body has ended")
				end(resp.Body)
				require.Error(t, ctxs[0].Err(), "afterwards")
				resp.Body.Close()
			})
		})
	}
}

func TestDeadlineHeaderTellsTheMillisecondsLeftForTheAttempt(t *testing.T) {
	for name, c := range map[string]struct {
		attempt, elapsed, deadline time.Duration
		want                       []string
	}{
		"the attempt's timeout":     {2 * time.Second, 0, 0, []string{"2000", "2000"}},
		"the caller's deadline":     {0, 0, 2500 * time.Millisecond, []string{"2500", "500"}},
		"the end of MaxElapsed":     {0, 2999 * time.Millisecond, 0, []string{"2999", "999"}},
		"rounded down":              {1999999 * time.Microsecond, 0, 0, []string{"1999", "1999"}},
		"nothing limits: no header": {Off, Off, 0, []string{"", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []string
				tr := &Transport{
					Policy: Policy{AttemptTimeout: c.attempt, MaxElapsed: c.elapsed, DeadlineHeader: "x-deadline-ms", BaseDelay: 1, MaxDelay: 1},
					Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
						got = append(got, r.Header.Get("X-Deadline-Ms"))
						if len(got) == 2 {
							return answerOf(200, ""), nil
						}
						if c.want[0] != c.want[1] {
							nap(r, 2*time.Second)
						}
						return answerOf(503, ""), nil
					}),
				}
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				require.NoError(t, do(contract(t, tr), fetch(t, ctx)).err)
				require.Equal(t, c.want, got)
			})
		})
	}
}

// An attempt that no longer has 10 ms could only become an answer that nobody
// waits for: a slot that comes free in the last moment is not taken.
func TestAFreeSlotInTheLastTenMillisecondsStartsNoAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var starts []time.Time
		tr := &Transport{Policy: Policy{MaxInFlight: 1}, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			starts = append(starts, time.Now())
			nap(r, 995*time.Millisecond)
			return answerOf(200, ""), nil
		})}
		client := contract(t, tr)
		start := time.Now()
		go do(client, fetch(t, t.Context()))
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := do(client, fetch(t, ctx))
		require.ErrorIs(t, r.err, ErrDeadline)
		require.Equal(t, NotSent, r.report.Outcome)
		require.False(t, time.Now().After(start.Add(time.Second)))
		require.Len(t, starts, 1, "an attempt started with 5 ms left")
	})
}

// cases.md A74: callers that had timed out piled up behind a limiter.
func TestAThousandCallersWithFiftyMillisecondsAllReturn(t *testing.T) {
	for name, c := range map[string]struct {
		store  KeyStore
		policy Policy
		before func(*Transport)
		reason error
		is     error
		took   time.Duration
	}{
		"open breaker": {
			before: func(tr *Transport) { trip(tr.settings().upstreams.get("pay.example")) },
			reason: ErrOpen,
		},
		"empty budget": {
			policy: Policy{Breaker: Breaker{FailureRatio: Off}, BaseDelay: 1, MaxDelay: 1},
			before: func(tr *Transport) { tr.settings().upstreams.get("pay.example").budget.left = 0 },
			reason: ErrBudget,
		},
		"blocked store": {
			store:  &flakyStore{create: hangs, get: hangs},
			reason: ErrStore, is: context.DeadlineExceeded, took: 50 * time.Millisecond,
		},
		"a full house": {
			policy: Policy{MaxInFlight: 1},
			before: func(tr *Transport) { tr.settings().upstreams.get("pay.example").limits.slot <- struct{}{} },
			reason: ErrDeadline, took: 50*time.Millisecond - minAttempt,
		},
	} {
		t.Run(name, func(t *testing.T) {
			// That no goroutine stays behind is what the bubble's end checks.
			synctest.Test(t, func(t *testing.T) {
				c.policy.Keys = KeysHonored
				tr := &Transport{Store: c.store, Policy: c.policy, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
					return answerOf(503, ""), nil
				})}
				c.before = cmpFunc(c.before)
				c.before(tr)
				client := contract(t, tr)
				start := time.Now()
				var all sync.WaitGroup
				for n := range 1000 {
					all.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
						defer cancel()
						r := do(client, post(t, ctx, fmt.Sprint("charge:", n), payURL, "{}"))
						assert.LessOrEqual(t, time.Since(start), 50*time.Millisecond)
						assert.GreaterOrEqual(t, time.Since(start), c.took)
						assert.Equal(t, c.reason, r.report.Reason)
						if c.is != nil {
							assert.ErrorIs(t, r.err, c.is)
						}
					})
				}
				all.Wait()
				require.LessOrEqual(t, time.Since(start), 50*time.Millisecond)
			})
		})
	}
}

func cmpFunc(f func(*Transport)) func(*Transport) {
	if f == nil {
		return func(*Transport) {}
	}
	return f
}

// cases.md A96: the waits' timers stayed alive after the cancel.
func TestTenThousandCancelledWaitsLeaveNothingBehind(t *testing.T) {
	cancelled := func() {
		synctest.Test(t, func(t *testing.T) {
			tr := &Transport{
				Policy: unguarded(Policy{MaxRetryAfter: 2 * time.Hour, MaxElapsed: Off}),
				Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
					return answerOf(503, "", "Retry-After", "3600"), nil
				}),
			}
			client := tr.Client()
			var all sync.WaitGroup
			start := time.Now()
			for range 10_000 {
				all.Go(func() {
					ctx, cancel := context.WithCancel(t.Context())
					time.AfterFunc(time.Millisecond, cancel)
					_, err := client.Do(fetch(t, ctx))
					assert.ErrorIs(t, err, context.Canceled)
				})
			}
			all.Wait()
			require.Equal(t, time.Millisecond, time.Since(start))
		})
	}
	cancelled() // the runtime keeps its 10,000 goroutine descriptors for the next time
	// What leaks, leaks every time; the runtime's own descriptors do not.
	grown := int64(math.MaxInt64)
	for range 4 {
		before := heapInUse()
		cancelled()
		grown = min(grown, heapInUse()-before)
	}
	require.Less(t, grown, int64(1<<20))
}

func heapInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A context that is over already ends the call before anything else is asked.
func TestAContextThatIsOverSendsAndStoresNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &flakyStore{}
		tr := &Transport{Store: store, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
			t.Error("sent")
			return answerOf(200, ""), nil
		})}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		// http.Client looks at the context itself; a RoundTripper may be called with it.
		resp, err := strict{t, tr}.RoundTrip(post(t, ctx, "charge:1", payURL, "{}"))
		require.Nil(t, resp)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, NotSent, OutcomeOf(nil, err))
		require.Zero(t, store.calls())
	})
}
