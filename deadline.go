package oncehttp

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"
)

// minAttempt is the least time an attempt needs to be worth starting: with
// less left it could only become one more answer that nobody waits for.
const minAttempt = 10 * time.Millisecond

// probeTimeout bounds a breaker's probe where no attempt timeout is set: while
// a probe hangs, nobody else may try.
const probeTimeout = 30 * time.Second

// errAttemptTimeout is the cause of an attempt's end by Policy.AttemptTimeout.
var errAttemptTimeout error = attemptTimeout{}

type attemptTimeout struct{}

func (attemptTimeout) Error() string   { return "attempt timeout" }
func (attemptTimeout) Timeout() bool   { return true }
func (attemptTimeout) Temporary() bool { return true }

// callUntil is when a call must have ended: the caller's deadline or the end
// of MaxElapsed, whichever is earlier; zero if there is neither.
func callUntil(ctx context.Context, maxElapsed time.Duration, start time.Time) time.Time {
	deadline, ok := ctx.Deadline()
	if maxElapsed == Off {
		return deadline
	}
	if until := start.Add(maxElapsed); !ok || until.Before(deadline) {
		return until
	}
	return deadline
}

// fits reports whether an attempt that starts after wait has time to run.
func fits(now time.Time, wait time.Duration, until time.Time) bool {
	return until.IsZero() || wait <= until.Sub(now)-minAttempt
}

// attemptLimit is how long the attempt that starts now may take; zero is for
// ever.
func attemptLimit(timeout time.Duration, now, until time.Time, probing bool) time.Duration {
	if timeout == Off {
		timeout = 0
		if probing {
			timeout = probeTimeout
		}
	}
	if left := until.Sub(now); !until.IsZero() && (timeout == 0 || left < timeout) {
		return left
	}
	return timeout
}

// setDeadlineHeader tells the upstream how many milliseconds we shall wait,
// rounded down: work that is late anyway need not be started.
func setDeadlineHeader(h http.Header, name string, limit time.Duration) {
	if name != "" && limit > 0 {
		h.Set(name, strconv.FormatInt(limit.Milliseconds(), 10))
	}
}

// over returns why the caller no longer waits, or nil. Only the caller's
// context, and http.Client's older Request.Cancel, decide: an error that says
// "deadline exceeded" can be the attempt's or the server's.
func (c *call) over() error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	select {
	case <-c.canceled():
		if d, ok := c.ctx.Deadline(); ok && !time.Now().Before(d.Add(-minAttempt)) {
			return context.DeadlineExceeded
		}
		return context.Canceled
	default:
		return nil
	}
}

// canceled is http.Client's older way to cancel a request. It closes the
// channel, of a request of its own, when Client.Timeout is over.
func (c *call) canceled() <-chan struct{} {
	//lint:ignore SA1019 net/http still uses it towards RoundTrippers
	return c.req.Cancel
}

// overReason is the reason for an end by the caller.
func overReason(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return ErrDeadline
	}
	return context.Canceled
}

// sleep waits for d, or less if the caller goes away, and returns over's word.
func (c *call) sleep(d time.Duration) error {
	if d <= 0 {
		return c.over()
	}
	start := time.Now()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.ctx.Done():
	case <-c.canceled():
	}
	c.waited += time.Since(start)
	return c.over()
}
