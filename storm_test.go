package oncehttp

import (
	"context"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// queueingUpstream finishes perSecond requests a second, first come first
// served, and works on for callers who have gone. While down it answers 503.
type queueingUpstream struct {
	mu        sync.Mutex
	perSecond int       // guarded by mu
	down      bool      // guarded by mu
	free      time.Time // guarded by mu: when the queue is empty
	sends     []int     // guarded by mu: by second since start
	start     time.Time
}

func (u *queueingUpstream) RoundTrip(req *http.Request) (*http.Response, error) {
	u.mu.Lock()
	now := time.Now()
	second := int(now.Sub(u.start) / time.Second)
	for len(u.sends) <= second {
		u.sends = append(u.sends, 0)
	}
	u.sends[second]++
	if u.down {
		u.mu.Unlock()
		return answerOf(503, ""), nil
	}
	if u.free.Before(now) {
		u.free = now
	}
	u.free = u.free.Add(time.Second / time.Duration(u.perSecond))
	ready := u.free
	u.mu.Unlock()
	timer := time.NewTimer(time.Until(ready))
	defer timer.Stop()
	select {
	case <-timer.C:
		return answerOf(200, "ok"), nil
	case <-req.Context().Done():
		return nil, req.Context().Err()
	}
}

// storm offers calls per second for so many seconds and returns what was sent
// and what succeeded in each second. at changes the upstream as time goes by.
func storm(t *testing.T, pol Policy, offered, seconds int, deadline time.Duration, at func(second int, u *queueingUpstream)) (sent, good []int) {
	synctest.Test(t, func(t *testing.T) {
		u := &queueingUpstream{perSecond: 100, start: time.Now()}
		tr := &Transport{Base: u, Policy: pol}
		client := tr.Client()
		var mu sync.Mutex
		good = make([]int, seconds+120)
		var all sync.WaitGroup
		for i := range offered * seconds {
			if i%offered == 0 {
				u.mu.Lock()
				at(i/offered, u)
				u.mu.Unlock()
			}
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), deadline)
				defer cancel()
				req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://pay.example/", nil)
				if r := do(client, req); r.err == nil && r.status == 200 {
					mu.Lock()
					good[int(time.Since(u.start)/time.Second)]++
					mu.Unlock()
				}
			})
			time.Sleep(time.Second / time.Duration(offered))
		}
		all.Wait()
		u.mu.Lock()
		sent = u.sends
		u.mu.Unlock()
	})
	return sent, good
}

func sum(xs []int) (n int) {
	for _, x := range xs {
		n += x
	}
	return n
}

// cases.md A20: time-outs made every server ask again, and the retries kept the
// upstream down.
func TestAnOutageIsNotMadeWorseByRetries(t *testing.T) {
	outage := func(second int, u *queueingUpstream) { u.down = second >= 10 && second < 20 }
	for _, c := range []struct {
		name string
		pol  Policy
		most float64 // of the offered load
	}{
		{"budget alone", Policy{Breaker: Breaker{FailureRatio: Off}}, 1.2},
		{"defaults", Policy{}, 1.2},
	} {
		t.Run(c.name, func(t *testing.T) {
			sent, good := storm(t, c.pol, 80, 40, 10*time.Second, outage)
			during, after := sum(sent[10:20]), sum(sent[20:30])
			t.Logf("sent in the 10 s of the outage %d, in the 10 s after it %d, of 800 calls each; goodput by second from its end %v",
				during, after, good[20:32])
			require.LessOrEqual(t, float64(during), c.most*800)
			require.LessOrEqual(t, float64(after), c.most*800)
			require.GreaterOrEqual(t, sum(good[27:32]), 5*75, "calls succeed again")
		})
	}
	// The negative control: without budget and breaker the same storm is worse.
	sent, _ := storm(t, Policy{Budget: Budget{Ratio: Off}, Breaker: Breaker{FailureRatio: Off}, MaxAttempts: 4}, 80, 40, 10*time.Second, outage)
	require.Greater(t, sum(sent[10:20]), 2400)
}

// cases.md A80: retries kept a system down after the trigger was gone.
func TestTheDefaultsLeaveTheBadStateByThemselves(t *testing.T) {
	trigger := func(second int, u *queueingUpstream) {
		u.perSecond = 100
		if second >= 10 && second < 20 {
			u.perSecond = 40
		}
	}
	recovered := func(good []int, seconds int) int {
		for s := 20; s+5 <= seconds; s++ {
			if sum(good[s:s+5]) >= 5*75 {
				return s - 20
			}
		}
		return -1
	}
	_, good := storm(t, Policy{}, 80, 80, 3*time.Second, trigger)
	back := recovered(good, 80)
	t.Logf("goodput back %d s after the slowdown ended: %v", back, good[8:50])
	require.GreaterOrEqual(t, back, 0, "never")
	require.LessOrEqual(t, back, 40)

	// The negative control: attempts time out, and all are made again.
	plain := Policy{Budget: Budget{Ratio: Off}, Breaker: Breaker{FailureRatio: Off}, MaxAttempts: 4, AttemptTimeout: 3 * time.Second}
	_, good = storm(t, plain, 80, 80, 13*time.Second, trigger)
	require.Equal(t, -1, recovered(good, 80), "without budget and breaker it stays down")
}
