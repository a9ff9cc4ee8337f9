package oncehttp

import (
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	defaultBudget = Budget{Ratio: 0.1, Burst: 10, MinPerSecond: 0.1}
	budgetStart   = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
)

// sendUntilDone makes up to 4 sends, all at once, each of which fails with the
// given probability. It returns their number and whether the last succeeded.
func sendUntilDone(b *budget, take func() bool, failure float64, rnd *rand.Rand) (sends int, ok bool) {
	for sends = 1; ; sends++ {
		if rnd.Float64() >= failure {
			b.earn()
			return sends, true
		}
		if sends == 4 || !take() {
			return sends, false
		}
	}
}

func TestAttemptsStayWithinTheBudgetsPromise(t *testing.T) {
	// broken plays 2,000 calls through outages, and reports whether the sends
	// ever went over: 1 a call, 0.1 a success (so 1.1 a call at most, and 1
	// while nothing succeeds), 10, and one in 10 s.
	broken := func(seed uint64, take func(*budget, time.Time) bool) bool {
		rnd := rand.New(rand.NewPCG(seed, 0))
		b := newBudget(defaultBudget, budgetStart)
		now := budgetStart
		failure := []float64{0, 0.01, 0.1, 0.5, 0.9, 1}[rnd.IntN(6)]
		pause := []time.Duration{1, time.Millisecond, time.Second, time.Minute}[rnd.IntN(4)]
		sends, promised := 0, 10.0
		for range 2000 {
			now = now.Add(time.Duration(rnd.Int64N(int64(pause))))
			n, ok := sendUntilDone(b, func() bool { return take(b, now) }, failure, rnd)
			sends += n
			promised++
			if ok {
				promised += 0.1
			}
			const grace = 1e-6 // for adding 0.1 up in a float64
			if float64(sends) > promised+now.Sub(budgetStart).Seconds()/10+grace {
				return true
			}
			if rnd.IntN(500) == 0 { // the outage begins or ends
				failure = 1 - failure
			}
		}
		return false
	}
	caught := 0
	for seed := range uint64(200) {
		require.False(t, broken(seed, (*budget).take), "seed %d", seed)
		// Negative control: every hundredth retry is not booked.
		n := 0
		if broken(seed, func(b *budget, now time.Time) bool { n++; return n%100 == 0 || b.take(now) }) {
			caught++
		}
	}
	require.Greater(t, caught, 50, "the property does not see a leak of 1 %")
}

// A49: the bucket existed, but was not wired in; here it is the arithmetic.
func TestOutageOfNoTimeCostsTenRetries(t *testing.T) {
	b := newBudget(defaultBudget, budgetStart)
	rnd := rand.New(rand.NewPCG(1, 1))
	sends, unbudgeted := 0, 0
	for range 1000 {
		n, _ := sendUntilDone(b, func() bool { return b.take(budgetStart) }, 1, rnd)
		sends += n
		n, _ = sendUntilDone(nil, func() bool { return (*budget)(nil).take(budgetStart) }, 1, rnd)
		unbudgeted += n
	}
	require.Equal(t, 1010, sends)
	require.Equal(t, 4000, unbudgeted)
}

// A50: a budget that is only a share of the traffic lets a quiet client retry
// nothing. Each call of these 10 hours fails once, which 0.1 earned never pays.
func TestOneCallAMinuteCanAlwaysRetry(t *testing.T) {
	retried := func(b Budget) (n int) {
		bucket := newBudget(b, budgetStart)
		for minute := range 600 {
			if bucket.take(budgetStart.Add(time.Duration(minute) * time.Minute)) {
				n++
				bucket.earn()
			}
		}
		return n
	}
	require.Equal(t, 600, retried(defaultBudget))
	require.Less(t, retried(Budget{Ratio: 0.1, Burst: 10}), 12, "without the reserve")
}

func TestTenSuccessesEarnExactlyOneRetry(t *testing.T) {
	b := newBudget(Budget{Ratio: 0.1, Burst: 10}, budgetStart)
	for range 10 {
		require.True(t, b.take(budgetStart))
	}
	for round := range 1000 {
		require.False(t, b.take(budgetStart))
		for i := range 10 {
			require.False(t, b.take(budgetStart), "round %d, after %d", round, i)
			b.earn()
		}
		require.Equal(t, 1.0, b.tokens())
		require.True(t, b.take(budgetStart))
	}
}

func TestBucketIsFullAtStartAndNeverFuller(t *testing.T) {
	b := newBudget(Budget{Ratio: 0.3, Burst: 1}, budgetStart)
	require.True(t, b.full())
	b.earn()
	require.Equal(t, 1.0, b.tokens())
	require.True(t, b.take(budgetStart))
	require.False(t, b.full())
	for _, want := range []float64{0.3, 0.6, 0.9, 1, 1} {
		require.Zero(t, int(b.tokens()))
		b.earn()
		require.Equal(t, want, b.tokens())
		if want == 1 {
			require.True(t, b.full())
			break
		}
	}
}

func TestReserveStartsEmptyAndDoesNotAddUp(t *testing.T) {
	b := newBudget(Budget{MinPerSecond: 0.1}, budgetStart) // no bucket at all
	at := func(d time.Duration) time.Time { return budgetStart.Add(d) }
	require.False(t, b.take(at(0)))
	require.False(t, b.take(at(9*time.Second)))
	require.True(t, b.take(at(10*time.Second)))
	require.False(t, b.take(at(19*time.Second)))
	require.True(t, b.take(at(20*time.Second)))
	require.True(t, b.take(at(time.Hour)))
	require.False(t, b.take(at(time.Hour)), "an hour is worth one retry, not 360")
}

func TestBucketIsSpentBeforeTheReserve(t *testing.T) {
	b := newBudget(defaultBudget, budgetStart)
	later := budgetStart.Add(time.Minute)
	for left := 9; left >= 0; left-- {
		require.True(t, b.take(later))
		require.EqualValues(t, left, b.tokens())
	}
	require.True(t, b.take(later))
	require.False(t, b.take(later))
}

func TestBudgetThatIsOffNeverRefuses(t *testing.T) {
	b := newBudget(Budget{Ratio: Off, Burst: 10, MinPerSecond: 0.1}, budgetStart)
	require.Nil(t, b)
	for range 10_000 {
		require.True(t, b.take(budgetStart))
	}
	b.earn()
	require.True(t, b.full())
	require.True(t, math.IsInf(b.tokens(), 1))
}

// A90: the wall clock went back by 11 s, the number of tokens went below zero,
// and a quiet caller was locked out.
func TestClockThatStepsDoesNotLockOutOrGiveAway(t *testing.T) {
	for _, step := range []time.Duration{-time.Hour, -11 * time.Second, time.Hour} {
		b := newBudget(defaultBudget, budgetStart)
		now := budgetStart
		for b.take(now) {
		}
		require.Zero(t, b.tokens())

		now = now.Add(step)
		require.Equal(t, step > 0, b.take(now), "after %v", step)
		require.False(t, b.take(now), "a step of %v is worth a token at most", step)
		now = now.Add(10 * time.Second)
		require.True(t, b.take(now), "locked out after %v", step)
		require.Zero(t, b.tokens())
	}

	rnd := rand.New(rand.NewPCG(5, 6))
	b := newBudget(defaultBudget, budgetStart)
	now := budgetStart
	for range 100_000 {
		switch rnd.IntN(6) {
		case 0:
			now = now.Add(time.Hour)
		case 1:
			now = now.Add(-time.Hour)
		case 2:
			now = now.Add(time.Duration(rnd.Int64N(int64(time.Second))))
		case 3:
			b.earn()
		default:
			b.take(now)
		}
		if tokens := b.tokens(); tokens < 0 || tokens > 10 {
			t.Fatalf("%v tokens", tokens)
		}
	}
}

// Callers read the clock before they have the lock. If the time went back to
// that of the one who came late, each such moment would be counted twice.
func TestCallersOutOfOrderDoNotEarnTimeTwice(t *testing.T) {
	b := newBudget(Budget{MinPerSecond: 0.1}, budgetStart)
	granted := 0
	const elapsed = 100 * time.Second
	for d := time.Duration(0); d < elapsed; d += time.Millisecond {
		for _, late := range []time.Duration{0, -time.Millisecond, -time.Second, 0} {
			if b.take(budgetStart.Add(d + late)) {
				granted++
			}
		}
	}
	require.LessOrEqual(t, granted, 10)
	require.GreaterOrEqual(t, granted, 9)
}

func TestBudgetUnderConcurrentCallers(t *testing.T) {
	b := newBudget(defaultBudget, budgetStart)
	var granted atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for i := range 1000 {
				if b.take(budgetStart) {
					granted.Add(1)
				}
				if i%10 == 0 {
					b.earn()
				}
				_, _ = b.tokens(), b.full()
			}
		})
	}
	wg.Wait()
	// 16 x 100 earned 0.1 each, less what a full bucket could not take.
	require.LessOrEqual(t, granted.Load(), int64(10+160))
	require.Greater(t, granted.Load(), int64(10))
	require.Less(t, b.tokens(), 10.0+1)
}

func TestBudgetClampsWhatCannotBeCounted(t *testing.T) {
	b := newBudget(Budget{Ratio: 1, Burst: math.MaxInt, MinPerSecond: 0.1}, budgetStart)
	b.earn()
	require.True(t, b.full())
	require.True(t, b.take(budgetStart))
	b.earn()
	require.True(t, b.full())
	require.Positive(t, b.tokens())

	b = newBudget(Budget{Ratio: -2, Burst: -5, MinPerSecond: -1}, budgetStart)
	b.earn()
	require.Zero(t, b.tokens())
	require.False(t, b.take(budgetStart.Add(time.Hour)))
}

func TestBudgetCostsNoAllocation(t *testing.T) {
	b := newBudget(defaultBudget, budgetStart)
	now := budgetStart
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		now = now.Add(time.Second)
		b.take(now)
		b.earn()
	}))
}

// full reports whether the bucket is as it was at the start, so that forgetting
// it and making a new one gives no retry away.
func (b *budget) full() bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left == b.burst
}
