package oncehttp

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// cases.md A97: the limiter slept beyond the context.
func TestARateLimitThatTheDeadlineMissesReturnsAtOnceAndGivesThePlaceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, base := &flakyStore{}, answers(201)
		tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored, RateLimit: 0.1}}
		client := contract(t, tr)
		start := time.Now()
		require.NoError(t, do(client, post(t, t.Context(), "charge:1", payURL, "{}")).err)

		for range 100 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			r := do(client, post(t, ctx, "charge:2", payURL, "{}"))
			cancel()
			require.ErrorIs(t, r.err, ErrDeadline)
			require.Equal(t, NotSent, r.report.Outcome)
			require.Equal(t, start.Add(10*time.Second), r.report.RetryAt)
			require.Zero(t, time.Since(start), "an error at once")
		}
		var second Record
		for _, rec := range all(t, store) {
			if rec.Intent == "charge:2" {
				second = rec
			}
		}
		require.Equal(t, StateNotSent, second.State, "the intent is not marked as sent")
		require.Zero(t, second.Attempts)

		// 100 places were given back: the next call waits for the second one.
		r := do(client, post(t, t.Context(), "charge:2", payURL, "{}"))
		require.NoError(t, r.err)
		require.Equal(t, 10*time.Second, time.Since(start))
		require.Equal(t, []string{all(t, store)[0].Key, second.Key}, base.sent(), "no key was consumed")
	})
}

func TestACancelWhileWaitingForTheRateLimitGivesThePlaceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{Base: status(200), Policy: Policy{RateLimit: 0.1}}
		client := contract(t, tr)
		start := time.Now()
		do(client, fetch(t, t.Context()))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		require.ErrorIs(t, do(client, fetch(t, ctx)).err, context.Canceled)
		require.Equal(t, time.Second, time.Since(start))
		require.NoError(t, do(client, fetch(t, t.Context())).err)
		require.Equal(t, 10*time.Second, time.Since(start))
	})
}

func TestRateLimitSpacesTheSendsOfOneUpstream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var sends []time.Time
		tr := &Transport{Policy: Policy{RateLimit: 10, RateBurst: 5}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			sends = append(sends, time.Now())
			return answerOf(200, ""), nil
		})}
		client := contract(t, tr)
		start := time.Now()
		var all sync.WaitGroup
		for range 45 {
			all.Go(func() { do(client, fetch(t, t.Context())) })
		}
		all.Wait()
		for n, at := range sends {
			require.Equal(t, max(0, time.Duration(n-4)*100*time.Millisecond), at.Sub(start), "send %d", n)
		}
	})
}

func TestMaxInFlightIsNeverExceeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most atomic.Int64
		n := atomic.Int64{}
		tr := &Transport{Policy: unguarded(Policy{MaxInFlight: 7, MaxElapsed: Off}), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			in := now.Add(1)
			for m := most.Load(); in > m && !most.CompareAndSwap(m, in); m = most.Load() {
			}
			defer now.Add(-1)
			switch n.Add(1) % 5 {
			case 0:
				nap(r, time.Minute)
				return nil, errors.Join(errLost, r.Context().Err())
			case 1:
				nap(r, 10*time.Millisecond)
				return answerOf(503, ""), nil
			case 2:
				panic("boom")
			}
			nap(r, 30*time.Millisecond)
			return answerOf(200, ""), nil
		})}
		client := contract(t, tr)
		var all sync.WaitGroup
		for n := range 200 {
			all.Go(func() {
				defer func() { recover() }()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if n%4 == 0 {
					time.AfterFunc(time.Duration(n)*time.Millisecond, cancel)
				}
				do(client, fetch(t, ctx))
			})
		}
		all.Wait()
		require.EqualValues(t, 7, most.Load())
		require.Zero(t, tr.Upstream("pay.example").InFlight)
		require.Empty(t, tr.settings().upstreams.get("pay.example").limits.slot, "every slot came back")
	})
}

// Reading the answer holds no slot: it is the caller's time.
func TestABodyThatIsReadSlowlyHoldsNoSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{Base: status(200), Policy: Policy{MaxInFlight: 1}}
		client := contract(t, tr)
		resp, err := client.Do(fetch(t, t.Context()))
		require.NoError(t, err)
		require.NoError(t, do(client, fetch(t, t.Context())).err)
		require.NoError(t, resp.Body.Close())
	})
}

func TestWaitingForASlotEndsWithTheCaller(t *testing.T) {
	for name, c := range map[string]struct {
		ctx    func(context.Context) (context.Context, context.CancelFunc)
		client time.Duration
		policy Policy
		is     error
	}{
		"cancel": {ctx: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return ctx, cancel
		}, is: context.Canceled},
		"MaxElapsed": {policy: Policy{MaxElapsed: time.Second}, is: ErrDeadline},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c.policy.MaxInFlight = 1
				tr := &Transport{Base: status(200), Policy: c.policy}
				tr.settings().upstreams.get("pay.example").limits.slot <- struct{}{}
				ctx, cancel := t.Context(), func() {}
				if c.ctx != nil {
					ctx, cancel = c.ctx(ctx)
				}
				defer cancel()
				start := time.Now()
				r := do(contract(t, tr), fetch(t, ctx))
				require.ErrorIs(t, r.err, c.is)
				require.Equal(t, NotSent, r.report.Outcome)
				require.LessOrEqual(t, time.Since(start), time.Second)
			})
		})
	}
}

func TestUpstreamsDoNotShareTheirLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{Policy: Policy{MaxInFlight: 1, RateLimit: 1}, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			nap(r, 100*time.Millisecond)
			return answerOf(200, ""), nil
		})}
		client := contract(t, tr)
		start := time.Now()
		var all sync.WaitGroup
		for _, host := range []string{"a", "b", "c"} {
			all.Go(func() {
				req := fetch(t, t.Context())
				req.URL.Host = host
				assert.NoError(t, do(client, req).err)
			})
		}
		all.Wait()
		require.Equal(t, 100*time.Millisecond, time.Since(start))
	})
}
