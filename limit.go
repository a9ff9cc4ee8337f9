package oncehttp

import (
	"context"
	"time"

	"golang.org/x/time/rate"
)

// limits are an upstream's rate and in-flight limits; nil fields do not limit.
type limits struct {
	rate *rate.Limiter
	slot chan struct{} // holds one element per attempt in flight
}

func newLimits(p *Policy) limits {
	var l limits
	if p.RateLimit > 0 {
		l.rate = rate.NewLimiter(p.RateLimit, p.RateBurst)
	}
	if p.MaxInFlight > 0 {
		l.slot = make(chan struct{}, p.MaxInFlight)
	}
	return l
}

// reserve books a place at the rate limit and returns how long it is until
// then. giveBack, for a caller that will not wait, may be nil.
func (l *limits) reserve(now time.Time) (wait time.Duration, giveBack func()) {
	if l.rate == nil {
		return 0, nil
	}
	r := l.rate.ReserveN(now, 1)
	return r.DelayFrom(now), func() { r.CancelAt(time.Now()) }
}

// acquire waits for an in-flight slot as long as an attempt still fits before
// until, or until ctx ends or over is closed.
func (l *limits) acquire(ctx context.Context, until time.Time, over <-chan struct{}) (waited time.Duration, ok bool) {
	if l.slot == nil {
		return 0, true
	}
	select {
	case l.slot <- struct{}{}:
		return 0, true
	default:
	}
	start := time.Now()
	var expired <-chan time.Time
	if !until.IsZero() {
		timer := time.NewTimer(time.Until(until) - minAttempt)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case l.slot <- struct{}{}:
		ok = true
	case <-ctx.Done():
	case <-over:
	case <-expired:
	}
	return time.Since(start), ok
}

func (l *limits) release() {
	if l.slot != nil {
		<-l.slot
	}
}
