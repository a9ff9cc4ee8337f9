package oncehttp

import "time"

// backoff returns the wait before a retry; n counts the retries before it,
// from 0. It is "full jitter" in the words of the AWS Architecture Blog
// ("Exponential Backoff And Jitter"): uniform in [0, backoffBound). Jitter
// over a part of the bound only, such as its last quarter, keeps clients that
// failed together together.
//
// rnd(m) returns a uniform number in [0, m), like rand.Int64N of math/rand/v2,
// whose source is seeded per process and cannot be re-seeded by anyone. It is
// not called when there is nothing to choose from, because it may panic then.
func backoff(base, maxDelay time.Duration, n int, rnd func(int64) int64) time.Duration {
	bound := backoffBound(base, maxDelay, n)
	if bound <= 0 {
		return 0
	}
	return time.Duration(rnd(int64(bound)))
}

// backoffBound returns min(maxDelay, base·2ⁿ), or 0 if that is negative. It
// compares before it multiplies: a cap applied afterwards cannot repair a
// product that has already overflowed. A negative n counts as 0, so that a
// miscount never turns into a hot loop.
func backoffBound(base, maxDelay time.Duration, n int) time.Duration {
	if base <= 0 || maxDelay <= 0 {
		return 0
	}
	n = max(n, 0)
	if base > maxDelay>>n { // base·2ⁿ > maxDelay; Go shifts by 64 and more to 0
		return maxDelay
	}
	return base << n
}
