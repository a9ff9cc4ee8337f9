package oncehttp

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBackoffBoundDoublesUpToMaxDelay(t *testing.T) {
	for _, tt := range []struct {
		base, maxDelay time.Duration
		n              int
		want           time.Duration
	}{
		{200 * time.Millisecond, 10 * time.Second, 0, 200 * time.Millisecond},
		{200 * time.Millisecond, 10 * time.Second, 1, 400 * time.Millisecond},
		{200 * time.Millisecond, 10 * time.Second, 5, 6400 * time.Millisecond},
		{200 * time.Millisecond, 10 * time.Second, 6, 10 * time.Second},
		{time.Second, 8 * time.Second, 3, 8 * time.Second}, // meets the cap exactly
		{time.Second, 8*time.Second - 1, 3, 8*time.Second - 1},
		{1, math.MaxInt64, 62, 1 << 62},
		{1, math.MaxInt64, 63, math.MaxInt64},
		{1, math.MaxInt64, math.MaxInt, math.MaxInt64},
		{math.MaxInt64, math.MaxInt64, 0, math.MaxInt64},
		{math.MaxInt64, math.MaxInt64, 1, math.MaxInt64},
		{time.Hour, time.Second, 0, time.Second},
		{time.Second, time.Hour, -1, time.Second},
		{time.Second, time.Hour, math.MinInt, time.Second},
		{0, time.Hour, 3, 0},
		{time.Hour, 0, 3, 0},
		{-1, time.Hour, 3, 0},
		{time.Hour, -1, 3, 0},
		{math.MinInt64, math.MinInt64, math.MinInt, 0},
	} {
		require.Equal(t, tt.want, backoffBound(tt.base, tt.maxDelay, tt.n), "%v %v %d", tt.base, tt.maxDelay, tt.n)
	}
}

func TestBackoffIsUniformFromZeroToTheBound(t *testing.T) {
	const base, maxDelay, draws = 100 * time.Millisecond, 10 * time.Second, 100_000
	rnd := rand.New(rand.NewPCG(1, 2)).Int64N // seeded: a p of 0.001 fails one run in 1,000
	for n := range 9 {
		bound := backoffBound(base, maxDelay, n)
		full, quarter := make([]time.Duration, draws), make([]time.Duration, draws)
		for i := range draws {
			full[i] = backoff(base, maxDelay, n, rnd)
			quarter[i] = bound - bound/4 + time.Duration(rnd(int64(bound/4))) // 75-100 %, the negative control
		}
		requireUniform(t, full, quarter, bound)
	}
}

// requireUniform does a chi-square test at p = 0.001 over 100 equal parts of
// [0, bound), and fails too if it would not have rejected biased.
func requireUniform(t *testing.T, sample, biased []time.Duration, bound time.Duration) {
	t.Helper()
	const parts, critical = 100, 148.23 // 99 degrees of freedom
	chiSquare := func(sample []time.Duration) (sum float64) {
		counts := make([]float64, parts)
		for _, d := range sample {
			if d < 0 || d >= bound { // require is slow for 1,800,000 values
				t.Fatalf("%v is not in [0, %v)", d, bound)
			}
			counts[int64(float64(d)/float64(bound)*parts)]++
		}
		expected := float64(len(sample)) / parts
		for _, c := range counts {
			sum += (c - expected) * (c - expected) / expected
		}
		return sum
	}
	require.Less(t, chiSquare(sample), critical)
	require.Greater(t, chiSquare(biased), critical, "the test does not see biased jitter")
}

// A48: tasks that restarted together read one table together, again and again.
func TestClientsThatFailTogetherDoNotComeBackTogether(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4)).Int64N
	buckets := map[time.Duration]int{}
	for range 1000 {
		buckets[backoff(200*time.Millisecond, 10*time.Second, 3, rnd)/(10*time.Millisecond)]++
	}
	for at, clients := range buckets {
		require.Less(t, clients, 30, "in the 10 ms from %v", at*10*time.Millisecond)
	}
}

// A60, A86: the cap was applied to a product that had already overflowed, and
// from attempt 37 on the wait was negative.
func TestBackoffDoesNotOverflowAtAnyAttempt(t *testing.T) {
	highest := func(m int64) int64 { return m - 1 }
	for _, base := range []time.Duration{1, 100 * time.Millisecond, time.Hour, math.MaxInt64} {
		for _, maxDelay := range []time.Duration{1, 30 * time.Second, math.MaxInt64} {
			last := time.Duration(0)
			for n := range 201 {
				bound := backoffBound(base, maxDelay, n)
				require.LessOrEqual(t, last, bound, "%v %v %d", base, maxDelay, n)
				require.LessOrEqual(t, bound, maxDelay)
				require.Equal(t, bound-1, backoff(base, maxDelay, n, highest))
				require.Less(t, backoff(base, maxDelay, n, rand.Int64N), bound)
				last = bound
			}
			require.Equal(t, maxDelay, last, "the bound never reached the cap")
		}
	}
}

// A87: a longest wait of 1 ns panicked in the random function. A81: a zero
// left the sleep out; here it is the caller, Policy, who gives zero a default.
func TestBackoffDoesNotPanicWhenThereIsNothingToDraw(t *testing.T) {
	odd := []time.Duration{math.MinInt64, -1, 0, 1, 2}
	for _, base := range odd {
		for _, maxDelay := range odd {
			for _, n := range []int{math.MinInt, -1, 0, 1, 64, math.MaxInt} {
				d := backoff(base, maxDelay, n, rand.Int64N)
				require.True(t, 0 <= d && d <= max(maxDelay-1, 0), "%v %v %d: %v", base, maxDelay, n, d)
			}
		}
	}
	require.Zero(t, backoff(1, 1, 0, rand.Int64N))
}

// A88: an unseeded generator gave every process the same "random" waits.
func TestTwoProcessesWaitDifferently(t *testing.T) {
	const env, mark = "ONCEHTTP_TEST_PRINT_WAITS", "waits:"
	if os.Getenv(env) != "" {
		fmt.Print(mark)
		for n := range 5 {
			fmt.Print(" ", int64(backoff(time.Second, time.Hour, n, rand.Int64N)))
		}
		fmt.Println()
		return
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	waits := func() string {
		cmd := exec.Command(exe, "-test.run=^"+t.Name()+"$", "-test.count=1")
		cmd.Env = append(os.Environ(), env+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		_, line, found := strings.Cut(string(out), mark)
		require.True(t, found, "%s", out)
		line, _, _ = strings.Cut(line, "\n")
		require.Len(t, strings.Fields(line), 5)
		return line
	}
	require.NotEqual(t, waits(), waits())
}

func FuzzBackoff(f *testing.F) {
	f.Add(int64(time.Second), int64(time.Minute), 3, uint64(1))
	f.Add(int64(1), int64(math.MaxInt64), 63, uint64(2))
	f.Add(int64(math.MinInt64), int64(-1), -1, uint64(3))
	f.Fuzz(func(t *testing.T, base, maxDelay int64, n int, seed uint64) {
		b, m := time.Duration(base), time.Duration(maxDelay)
		bound := backoffBound(b, m, n)
		d := backoff(b, m, n, rand.New(rand.NewPCG(seed, 0)).Int64N)
		if b <= 0 || m <= 0 {
			require.Zero(t, bound)
			require.Zero(t, d)
			return
		}
		require.True(t, 0 < bound && bound <= m)
		require.True(t, 0 <= d && d < bound)
		require.GreaterOrEqual(t, bound, min(b, m))
		if n < math.MaxInt {
			require.LessOrEqual(t, bound, backoffBound(b, m, n+1))
		}
	})
}
