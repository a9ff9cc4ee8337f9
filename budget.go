package oncehttp

import (
	"math"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Budget caps how many retries one upstream gets from this process. Retries
// help against a single failure and do harm against an overload, where they
// are the load that keeps it going; a cap on attempts alone does not help, as
// it multiplies the load by that number just when it must not grow.
//
// With the defaults, whatever the upstream does:
//
//	attempts ≤ 1.1 × first tries + 10 + seconds/10
//	attempts ≤       first tries + 10 + seconds/10   while nothing succeeds
//
// A retry spends one token before it waits. Without a token the last answer
// is returned at once, with the reason ErrBudget.
//
// Tokens are earned by a call's success and not by its being made, which would
// hold the first bound as well but grant 10 % more load to an upstream that is
// down. Simulated at 85 % load after a stall of 10 s, with no breaker: back to
// normal after 50 to 60 s when earning on success (as without any retry), 130
// to 140 s when earning on request, never without a budget.
type Budget struct {
	// Ratio is how many tokens each call earns that ends without a retryable
	// verdict, counted in millionths. Zero means 0.1; Off means no budget.
	Ratio float64

	// Burst is the size of the bucket, in tokens. It is full at the start and
	// does not drain, so that a new or rarely used client can retry. Zero
	// means 10.
	Burst int

	// MinPerSecond is how many retries a second are allowed even when the
	// bucket is empty. Without them a client that makes a call a minute, too
	// few to earn anything, could never retry again after an outage. It
	// starts empty and does not add up. Zero means 0.1.
	MinPerSecond float64
}

// micro is one token. Millionths in an integer, because ten times 0.1 has to be
// a whole token, and in a float64 it is not.
const micro = 1_000_000

// budget is the bucket of one upstream. A nil *budget has no limit.
type budget struct {
	ratio, burst int64 // in micro-tokens

	mu      sync.Mutex // guards what follows
	left    int64      // micro-tokens; 0 <= left <= burst, and no clock changes it
	reserve *rate.Limiter
	seen    time.Time // the last time we were told, see reserveTime
	at      time.Time // the same on the reserve's own clock, which never steps
}

// newBudget takes resolved values: a zero here is a zero. It returns nil if
// b turns the budget off.
func newBudget(b Budget, now time.Time) *budget {
	if b.Ratio == Off {
		return nil
	}
	burst := int64(max(b.Burst, 0))
	burst = min(burst, math.MaxInt64/micro) * micro
	reserve := rate.NewLimiter(rate.Limit(b.MinPerSecond), 1)
	reserve.AllowN(now, 1) // a Limiter starts full; our promise counts from empty
	return &budget{
		ratio:   int64(math.Round(min(max(b.Ratio, 0), 1) * micro)),
		burst:   burst,
		left:    burst,
		reserve: reserve,
		seen:    now,
		at:      now,
	}
}

// take spends one token, for a retry that has not begun to wait. The bucket
// goes first: its tokens keep, those of the reserve do not add up.
func (b *budget) take(now time.Time) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left >= micro {
		b.left -= micro
		return true
	}
	return b.reserve.AllowN(b.reserveTime(now), 1)
}

// reserveTime moves the reserve's own clock forward by the time since the last
// call, and returns it. b.mu is held.
//
// A rate.Limiter that is told an earlier time gives nothing until that time
// has come again: an hour after a wall clock was set back by an hour. So a
// step back counts as no time passed, and we go on from there. A reading that
// is less than a second old is no step, but a goroutine that lost the race to
// the lock; going back to it would count that moment twice, and let more
// through than we promise. A step forward is worth one token at most.
func (b *budget) reserveTime(now time.Time) time.Time {
	switch passed := now.Sub(b.seen); {
	case passed > 0:
		b.at = b.at.Add(passed)
		b.seen = now
	case passed < -time.Second:
		b.seen = now
	}
	return b.at
}

// earn books a call that ended without a retryable verdict.
func (b *budget) earn() {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left += min(b.ratio, b.burst-b.left)
}

// tokens returns what is in the bucket, for metrics; +Inf without a budget, so
// that "less than one token left" is never true of it.
func (b *budget) tokens() float64 {
	if b == nil {
		return math.Inf(1)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return float64(b.left) / micro
}
