package oncehttp

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	raw "unsafe" // the package has a constant of that name

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/internal/memnet"
)

// trip opens a breaker by twenty failures, the least that the defaults need.
func trip(u *upstream) {
	for range defaults.Breaker.MinCalls {
		if done, ok := u.breaker.allow(); ok {
			done(errBreakerFailure)
		}
	}
}

// sendOnce makes what the breaker sees one attempt per call.
func sendOnce(base http.RoundTripper) *Transport {
	return &Transport{Base: base, Policy: Policy{MaxAttempts: Off}}
}

func status(code int) roundTripFunc {
	return func(*http.Request) (*http.Response, error) { return answerOf(code, ""), nil }
}

func fail(err error) roundTripFunc {
	return func(*http.Request) (*http.Response, error) { return nil, err }
}

func breakerOf(tr *Transport) string { return tr.Upstream("pay.example").Breaker }

// callEverySecond makes calls of as many callers, who do not wait for each other.
func callEverySecond(t *testing.T, tr *Transport, calls int, timeout time.Duration) {
	client := contract(t, tr)
	var all sync.WaitGroup
	for range calls {
		all.Go(func() {
			ctx := t.Context()
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			do(client, fetch(t, ctx))
		})
		time.Sleep(time.Second)
	}
	all.Wait()
}

func TestTheBreakerOpens(t *testing.T) {
	dead := func(t *testing.T) http.RoundTripper {
		l := memnet.Listen()
		l.Close()
		return &http.Transport{DialContext: l.DialContext}
	}
	black := func(t *testing.T) http.RoundTripper {
		return overMemnet(t, blackHole)
	}
	of := func(base http.RoundTripper) func(*testing.T) http.RoundTripper {
		return func(*testing.T) http.RoundTripper { return base }
	}
	for name, c := range map[string]struct {
		base    func(*testing.T) http.RoundTripper
		timeout time.Duration // of the callers
	}{
		"on 500":                              {of(status(500)), 0},
		"on 503":                              {of(status(503)), 0},
		"on 501":                              {of(status(501)), 0},
		"on refused connections":              {dead, 0},
		"on a hanging upstream, all defaults": {black, 0},
		"on a hanging upstream for callers with 5 s deadlines": {black, 5 * time.Second},
		"for callers with 1 s deadlines":                       {black, time.Second},
		"on resets":                                            {of(fail(syscall.ECONNRESET)), 0},
		"on EOF":                                               {of(fail(io.EOF)), 0},
		"on a DNS timeout":                                     {of(fail(&net.DNSError{Err: "timeout", IsTimeout: true})), 0},
		"on a temporary DNS failure":                           {of(fail(&net.DNSError{Err: "servfail", IsTemporary: true})), 0},
		"on a TLS handshake":                                   {of(fail(errors.New("remote error: tls: internal error"))), 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := c.base(t)
				tr := &Transport{Base: base}
				callEverySecond(t, tr, 19, c.timeout)
				if c.timeout > 0 {
					require.Equal(t, "closed", breakerOf(tr), "on fewer than 20")
				}
				callEverySecond(t, tr, 31, c.timeout)
				require.NotEqual(t, "closed", breakerOf(tr))
			})
		})
	}
}

func TestTheBreakerStaysClosed(t *testing.T) {
	refused := errors.New(http.StatusText(http.StatusProxyAuthRequired))
	for name, base := range map[string]roundTripFunc{
		// cases.md A51: validation errors of one client opened it for everyone.
		"A51 on 400":                      status(400),
		"A51 on 401":                      status(401),
		"A51 on 402":                      status(402),
		"A51 on 404":                      status(404),
		"A51 on 422":                      status(422),
		"on 429: back-pressure":           status(429),
		"on 408":                          status(408),
		"on 200":                          status(200),
		"on 304":                          status(304),
		"on an unknown authority":         fail(fmt.Errorf("tls: %w", x509.UnknownAuthorityError{})),
		"on a wrong host":                 fail(x509.HostnameError{Certificate: &x509.Certificate{}, Host: "pay.example"}),
		"on a proxy's 407":                fail(refused),
		"A99 on a proxy's 503 to CONNECT": fail(errors.New(http.StatusText(http.StatusServiceUnavailable))),
		"on a name that does not exist":   fail(&net.DNSError{Err: "no such host", IsNotFound: true}),
		"on a scheme that cannot be":      fail(errors.New(`unsupported protocol scheme "ftp"`)),
	} {
		t.Run(name, func(t *testing.T) {
			tr := sendOnce(base)
			client := contract(t, tr)
			for range 50 {
				do(client, fetch(t, t.Context()))
			}
			require.Equal(t, "closed", breakerOf(tr))
		})
	}
}

func TestErrorsOfTheCallersHooksDoNotOpenTheBreaker(t *testing.T) {
	tr := sendOnce(status(200))
	tr.Prepare = func(*http.Request) error { return errors.New("no token") }
	client := contract(t, tr)
	for range 50 {
		do(client, fetch(t, t.Context()))
	}
	require.Equal(t, "closed", breakerOf(tr))
}

// cases.md A21: users who navigated away opened it against a healthy backend.
func TestCallersCancelsDoNotOpenTheBreaker(t *testing.T) {
	for name, base := range map[string]roundTripFunc{
		"the error wraps the cancel": hung,
		"the error only says so": func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, errors.New("rpc: context canceled")
		},
	} {
		for end, ctxOf := range map[string]func(context.Context) (context.Context, context.CancelFunc){
			"cancelled": func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				time.AfterFunc(5*time.Second, cancel)
				return ctx, cancel
			},
			"a deadline below a second": func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, 999*time.Millisecond)
			},
		} {
			t.Run(name+", "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var healthy atomic.Bool
					tr := sendOnce(roundTripFunc(func(r *http.Request) (*http.Response, error) {
						if healthy.Load() {
							return answerOf(200, ""), nil
						}
						return base(r)
					}))
					client := contract(t, tr)
					cancelled := func(calls int) {
						var all sync.WaitGroup
						for range calls {
							all.Go(func() {
								ctx, cancel := ctxOf(t.Context())
								defer cancel()
								assert.Error(t, do(client, fetch(t, ctx)).err)
							})
						}
						all.Wait()
					}
					cancelled(50)
					require.Equal(t, "closed", breakerOf(tr))

					// A cancelled probe gives its slot back and leaves the breaker half-open.
					trip(tr.settings().upstreams.get("pay.example"))
					require.Equal(t, "open", breakerOf(tr))
					time.Sleep(6001 * time.Millisecond)
					cancelled(1)
					require.Equal(t, "half-open", breakerOf(tr))
					healthy.Store(true)
					require.NoError(t, do(client, fetch(t, t.Context())).err)
					require.Equal(t, "closed", breakerOf(tr))
				})
			})
		}
	}
}

// cases.md A22: in half-open all the waiting requests were let through, and a
// failed probe left it rejecting for ever.
func TestAtHalfOpenTwoHundredGoroutinesMakeExactlyOneProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sends atomic.Int32
		var answer atomic.Int32
		answer.Store(503)
		tr := sendOnce(roundTripFunc(func(r *http.Request) (*http.Response, error) {
			sends.Add(1)
			nap(r, 100*time.Millisecond)
			return answerOf(int(answer.Load()), ""), nil
		}))
		client := contract(t, tr)
		rush := func() (refused int) {
			sends.Store(0)
			var all sync.WaitGroup
			var open atomic.Int32
			for range 200 {
				all.Go(func() {
					if r := do(client, fetch(t, t.Context())); errors.Is(r.err, ErrOpen) {
						assert.Equal(t, NotSent, r.report.Outcome)
						open.Add(1)
					}
				})
			}
			all.Wait()
			return int(open.Load())
		}
		trip(tr.settings().upstreams.get("pay.example"))
		require.Equal(t, 200, rush(), "open: nothing passes")
		require.Zero(t, sends.Load())

		time.Sleep(6001 * time.Millisecond) // 5 s and up to a fifth
		require.Equal(t, 199, rush())
		require.EqualValues(t, 1, sends.Load())
		require.Equal(t, "open", breakerOf(tr), "the failed probe re-opens it")
		again := time.Until(tr.Upstream("pay.example").RetryAt)
		require.GreaterOrEqual(t, again, 5*time.Second, "with a fresh timer")
		require.LessOrEqual(t, again, 6*time.Second)
		require.Equal(t, 200, rush())

		answer.Store(200)
		time.Sleep(6001 * time.Millisecond)
		require.Equal(t, 199, rush())
		require.EqualValues(t, 1, sends.Load())
		require.Equal(t, "closed", breakerOf(tr))
		require.Zero(t, rush())
		require.EqualValues(t, 200, sends.Load())
	})
}

func TestEachOfTheConfiguredProbesIsOneSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sends atomic.Int32
		tr := sendOnce(roundTripFunc(func(r *http.Request) (*http.Response, error) {
			sends.Add(1)
			nap(r, time.Second)
			return answerOf(200, ""), nil
		}))
		tr.Policy.Breaker.Probes = 3
		client := contract(t, tr)
		trip(tr.settings().upstreams.get("pay.example"))
		time.Sleep(6001 * time.Millisecond)
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() { do(client, fetch(t, t.Context())) })
		}
		all.Wait()
		require.EqualValues(t, 3, sends.Load())
		require.Equal(t, "closed", breakerOf(tr))
	})
}

// cases.md A52: taking 4xx for success must not hide 503s; and the documented
// choice is that a 4xx shows a working upstream, so a probe answered so closes.
func TestFourHundredsHideNoFailuresAndCloseAHalfOpenBreaker(t *testing.T) {
	t.Run("alternating with 503 it opens", func(t *testing.T) {
		n := 0
		tr := sendOnce(roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n%2 == 1 {
				return answerOf(400, ""), nil
			}
			return answerOf(503, ""), nil
		}))
		client := contract(t, tr)
		for range 20 {
			require.NotEqual(t, "open", breakerOf(tr), "before the 20th")
			do(client, fetch(t, t.Context()))
		}
		require.Equal(t, "open", breakerOf(tr))
	})
	// cases.md A82: once open, ignored errors never closed it again.
	for _, code := range []int{400, 404, 422} {
		t.Run(fmt.Sprint("A82 a probe answered ", code), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tr := sendOnce(status(code))
				trip(tr.settings().upstreams.get("pay.example"))
				time.Sleep(6001 * time.Millisecond)
				do(contract(t, tr), fetch(t, t.Context()))
				require.Equal(t, "closed", breakerOf(tr))
			})
		})
	}
}

// Back-pressure is neither success nor failure.
func TestThrottlingIsNeutralForTheBreaker(t *testing.T) {
	for _, code := range []int{429, 408} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var answer atomic.Int32
				tr := sendOnce(roundTripFunc(func(*http.Request) (*http.Response, error) {
					return answerOf(int(answer.Load()), ""), nil
				}))
				client := contract(t, tr)
				calls := func(n, code int) {
					answer.Store(int32(code))
					for range n {
						do(client, fetch(t, t.Context()))
					}
				}
				calls(200, code)
				calls(19, 503)
				require.Equal(t, "closed", breakerOf(tr), "19 failures are too few to judge by")
				calls(1, 503)
				require.Equal(t, "open", breakerOf(tr), "200 neutral answers do not dilute 20 failures")

				time.Sleep(6001 * time.Millisecond)
				calls(5, code)
				require.Equal(t, "half-open", breakerOf(tr), "the slot comes back, nothing is proved")
				calls(1, 200)
				require.Equal(t, "closed", breakerOf(tr))
			})
		})
	}
}

// cases.md A53: a panic left the probe's slot taken for ever.
func TestAPanicInTheBaseGivesTheProbesSlotBack(t *testing.T) {
	for name, plant := range map[string]func(*Transport, func()){
		"in the base": func(tr *Transport, boom func()) {
			tr.Base = roundTripFunc(func(*http.Request) (*http.Response, error) { boom(); return answerOf(200, ""), nil })
		},
		"in Prepare": func(tr *Transport, boom func()) { tr.Prepare = func(*http.Request) error { boom(); return nil } },
		"in Classify": func(tr *Transport, boom func()) {
			tr.Policy.Classify = func(Attempt) Verdict { boom(); return Verdict{} }
		},
		"in a trace": func(tr *Transport, boom func()) {
			tr.Trace = &Trace{AttemptStart: func(ctx context.Context, _ AttemptInfo) context.Context { boom(); return ctx }}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				armed := true
				tr := sendOnce(status(200))
				tr.Policy.MaxInFlight = 1
				plant(tr, func() {
					if armed {
						panic("boom")
					}
				})
				client := contract(t, tr)
				trip(tr.settings().upstreams.get("pay.example"))
				time.Sleep(6001 * time.Millisecond)
				require.PanicsWithValue(t, "boom", func() { do(client, fetch(t, t.Context())) }, "the panic goes on")
				require.Zero(t, tr.Upstream("pay.example").InFlight)
				armed = false
				require.NoError(t, do(client, fetch(t, t.Context())).err, "the next call is admitted")
				require.Equal(t, "closed", breakerOf(tr))
			})
		})
	}
}

// cases.md A23: a probe that never ended held the only slot for six days.
func TestAProbeWithoutAnyTimeoutDoesNotHoldItsSlotForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sends atomic.Int32
		tr := &Transport{
			Policy: Policy{MaxAttempts: Off, AttemptTimeout: Off, MaxElapsed: Off},
			Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
				if sends.Add(1) == 1 {
					return hung(r)
				}
				return answerOf(200, ""), nil
			}),
		}
		client := contract(t, tr)
		trip(tr.settings().upstreams.get("pay.example"))
		time.Sleep(6001 * time.Millisecond)
		var probe sync.WaitGroup
		start := time.Now()
		probe.Go(func() {
			r := do(client, fetch(t, t.Context()))
			assert.ErrorIs(t, r.err, errAttemptTimeout)
			assert.Equal(t, probeTimeout, time.Since(start))
		})
		synctest.Wait()
		require.ErrorIs(t, do(client, fetch(t, t.Context())).err, ErrOpen)
		probe.Wait()
		require.Equal(t, "open", breakerOf(tr), "a probe that hung is a failure")
		time.Sleep(6001 * time.Millisecond)
		require.NoError(t, do(client, fetch(t, t.Context())).err)
		require.Equal(t, "closed", breakerOf(tr))
	})
}

// cases.md A84: a breaker outside the loop saw one failure per call, and probes
// cost three round trips.
func TestEachAttemptIsRecordedOnceAndTheLoopStopsWhenTheBreakerOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sends := 0
		var last time.Time
		tr := &Transport{Policy: Policy{Breaker: Breaker{MinCalls: 5}}, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			nap(r, time.Millisecond)
			sends++
			last = time.Now()
			return answerOf(503, "down"), nil
		})}
		client := contract(t, tr)
		r := do(client, fetch(t, t.Context()))
		require.Equal(t, ErrAttempts, r.report.Reason)
		counts := tr.settings().upstreams.get("pay.example").breaker.cb.Counts()
		require.EqualValues(t, 3, counts.TotalFailures)
		require.EqualValues(t, 3, counts.Requests)

		r = do(client, fetch(t, t.Context()))
		require.NoError(t, r.err)
		require.Equal(t, "down", r.body, "the real last answer")
		require.Equal(t, ErrOpen, r.report.Reason)
		require.Equal(t, 5, sends)
		require.Equal(t, last, time.Now(), "no sleep while open")
		require.Equal(t, "open", breakerOf(tr))
		require.Equal(t, tr.Upstream("pay.example").RetryAt, r.report.RetryAt)

		r = do(client, fetch(t, t.Context()))
		require.ErrorIs(t, r.err, ErrOpen)
		require.Equal(t, NotSent, r.report.Outcome)
		require.Equal(t, 5, sends)
		require.Equal(t, last, time.Now())
		require.Equal(t, 7.0, tr.Upstream("pay.example").Tokens, "three retries; the one that the breaker refused costs nothing")

		time.Sleep(6001 * time.Millisecond)
		r = do(client, fetch(t, t.Context()))
		require.Equal(t, 6, sends, "the probe is one send")
		require.Equal(t, ErrOpen, r.report.Reason)
	})
}

// cases.md A34: a stored failure that is played back is not a new one.
func TestReplayedFailuresDoNotOpenTheBreaker(t *testing.T) {
	tr := &Transport{Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
		return answerOf(500, "stored", "Idempotent-Replayed", "true"), nil
	})}
	client := contract(t, tr)
	for n := range 50 {
		r := do(client, post(t, t.Context(), fmt.Sprint("charge:", n), payURL, "{}"))
		require.Equal(t, 1, r.report.Attempts)
		require.True(t, r.report.Replayed)
	}
	require.Equal(t, "closed", breakerOf(tr))
}

func TestBreakerOffNeverOpens(t *testing.T) {
	tr := sendOnce(status(503))
	tr.Policy.Breaker.FailureRatio = Off
	client := contract(t, tr)
	for range 100 {
		require.Equal(t, 503, do(client, fetch(t, t.Context())).status)
	}
	require.Equal(t, "off", breakerOf(tr))
	require.Zero(t, tr.Upstream("pay.example").RetryAt)
}

func TestACallMadeAtRetryAtIsTheProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := sendOnce(status(200))
		client := contract(t, tr)
		trip(tr.settings().upstreams.get("pay.example"))
		r := do(client, fetch(t, t.Context()))
		require.ErrorIs(t, r.err, ErrOpen)
		time.Sleep(time.Until(r.report.RetryAt))
		require.NoError(t, do(client, fetch(t, t.Context())).err)
	})
}

func TestFailuresThatAreLongPastDoNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := sendOnce(status(503))
		client := contract(t, tr)
		for range 4 {
			for range 15 {
				do(client, fetch(t, t.Context()))
			}
			time.Sleep(2 * time.Minute)
		}
		require.Equal(t, "closed", breakerOf(tr))
	})
}

// stepped is now as time.Now gives it after the wall clock was moved by d:
// another wall reading, the same monotonic one. The layout of time.Time is
// wall (flag, 33 bits of seconds, 30 of nanoseconds), ext.
func stepped(now time.Time, d time.Duration) time.Time {
	(*(*uint64)(raw.Pointer(&now))) += uint64(int64(d/time.Second)) << 30
	return now
}

// cases.md A90: the wall clock is set by an hour. What is measured within the
// process goes by the monotonic clock.
func TestAClockThatIsSetNeitherClosesNorHoldsTheBreaker(t *testing.T) {
	u := newUpstream("pay.example", Policy{}, time.Now())
	now := time.Now()
	require.Equal(t, now.Add(-time.Hour).Unix(), stepped(now, -time.Hour).Unix())
	require.Zero(t, stepped(now, -time.Hour).Sub(now), "only the wall clock moves")

	trip(u)
	now = time.Now()
	for _, step := range []time.Duration{0, -time.Hour, time.Hour} {
		_, open := u.breaker.open(stepped(now, step))
		require.True(t, open, "at once, clock set by %v", step)
		_, open = u.breaker.open(stepped(now.Add(6001*time.Millisecond), step))
		require.False(t, open, "after its timer, clock set by %v", step)
	}
}

func TestTraceIsToldOfEachBreakerChangeOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var changes []string
		var answer atomic.Int32
		answer.Store(503)
		tr := sendOnce(roundTripFunc(func(*http.Request) (*http.Response, error) { return answerOf(int(answer.Load()), ""), nil }))
		tr.Trace = &Trace{BreakerChange: func(upstream, from, to string) {
			changes = append(changes, upstream+" "+from+" "+to)
		}}
		client := contract(t, tr)
		for range 25 {
			do(client, fetch(t, t.Context()))
		}
		require.Equal(t, []string{"pay.example closed open"}, changes)
		time.Sleep(6001 * time.Millisecond)
		answer.Store(200)
		do(client, fetch(t, t.Context()))
		require.Equal(t, []string{"pay.example closed open", "pay.example open half-open", "pay.example half-open closed"}, changes)
	})
}

// What an attempt tells, in one table: the design's paragraph on the breaker.
func TestWhatAnAttemptTellsTheBreaker(t *testing.T) {
	reset := syscall.ECONNRESET
	for _, c := range []struct {
		status int
		replay bool
		err    error
		end    attemptEnd
		want   error
	}{
		{200, false, nil, endUpstream, nil},
		{303, false, nil, endUpstream, nil},
		{404, false, nil, endUpstream, nil},
		{408, false, nil, endUpstream, errBreakerExcluded},
		{429, false, nil, endUpstream, errBreakerExcluded},
		{500, false, nil, endUpstream, errBreakerFailure},
		{599, false, nil, endUpstream, errBreakerFailure},
		{500, true, nil, endUpstream, nil},
		{0, false, reset, endUpstream, errBreakerFailure},
		{0, false, errAttemptTimeout, endUpstream, errBreakerFailure},
		{0, false, context.DeadlineExceeded, endUpstream, errBreakerFailure},
		{0, false, reset, endCanceled, errBreakerExcluded},
		{0, false, reset, endCallerDeadline, errBreakerExcluded},
		{0, false, reset, endLocal, errBreakerExcluded},
		{0, false, x509.UnknownAuthorityError{}, endUpstream, errBreakerExcluded},
		{0, false, &net.DNSError{IsNotFound: true}, endUpstream, errBreakerExcluded},
		{0, false, errors.New("Service Unavailable"), endUpstream, errBreakerExcluded},
	} {
		require.Equal(t, c.want, breakerResult(c.status, c.replay, c.err, c.end), "%+v", c)
	}
}
