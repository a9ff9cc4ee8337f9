package oncehttp

import (
	"errors"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// Breaker configures the circuit breaker of an upstream. Zero fields mean the
// defaults.
type Breaker struct {
	FailureRatio float64       // opens when so much of the window failed; zero 0.5; Off: no breaker
	MinCalls     int           // but not on fewer attempts than this; zero 20
	Window       time.Duration // rolling; zero 30 s or twice the attempt timeout, whichever is longer
	OpenFor      time.Duration // until the next probe, up to a fifth longer; zero 5 s
	Probes       int           // attempts let through then, all of which must succeed; zero 1
}

// breaker is gobreaker's two-step breaker and what it does not tell: when it
// will try again. A nil breaker is always closed.
type breaker struct {
	cb      *gobreaker.TwoStepCircuitBreaker[struct{}]
	state   atomic.Int32              // a gobreaker.State, as last reported
	seen    atomic.Int32              // what Trace was last told
	retryAt atomic.Pointer[time.Time] // when open, of the next probe; monotonic
}

// What an attempt tells the breaker. gobreaker takes errors.
var (
	errBreakerFailure  = errors.New("failure")
	errBreakerExcluded = errors.New("neither")
)

func newBreaker(name string, b Breaker) *breaker {
	if b.FailureRatio == Off {
		return nil
	}
	// Jittered once: processes that saw one outage do not probe together.
	openFor := b.OpenFor + rand.N(b.OpenFor/5+1)
	br := &breaker{}
	br.cb = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name:         name,
		MaxRequests:  uint32(b.Probes),
		Interval:     b.Window,
		BucketPeriod: max(b.Window/10, 1),
		Timeout:      openFor,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			// Excluded results and attempts under way are in Requests; the
			// ratio is over what is known.
			n := c.TotalSuccesses + c.TotalFailures
			return n >= uint32(b.MinCalls) && float64(c.TotalFailures) >= b.FailureRatio*float64(n)
		},
		IsExcluded: func(err error) bool { return err == errBreakerExcluded },
		OnStateChange: func(_ string, _, to gobreaker.State) {
			// gobreaker holds its lock here: only remember.
			if to == gobreaker.StateOpen {
				// gobreaker lets a probe through only after its timer's end.
				at := time.Now().Add(openFor + 1)
				br.retryAt.Store(&at)
			}
			br.state.Store(int32(to))
		},
	})
	return br
}

// allow asks for leave to send. done must be called exactly once, with nil,
// errBreakerFailure or errBreakerExcluded.
func (b *breaker) allow() (done func(error), ok bool) {
	if b == nil {
		return nil, true
	}
	done, err := b.cb.Allow()
	return done, err == nil
}

// open reports whether nothing but a probe may be sent, and when that may
// change. It takes no slot.
func (b *breaker) open(now time.Time) (retryAt time.Time, open bool) {
	if b == nil || gobreaker.State(b.state.Load()) != gobreaker.StateOpen {
		return time.Time{}, false
	}
	if at := b.retryAt.Load(); at != nil {
		return *at, now.Before(*at)
	}
	return time.Time{}, false
}

// probing reports whether an attempt that is let through now is a probe.
func (b *breaker) probing() bool {
	return b != nil && gobreaker.State(b.state.Load()) == gobreaker.StateHalfOpen
}

// name is the state for people and metrics.
func (b *breaker) name() string {
	if b == nil {
		return "off"
	}
	return b.cb.State().String()
}

// changed returns the change that Trace has not heard of yet.
func (b *breaker) changed() (from, to string, ok bool) {
	if b == nil {
		return "", "", false
	}
	now := b.state.Load()
	was := b.seen.Swap(now)
	return gobreaker.State(was).String(), gobreaker.State(now).String(), was != now
}

// breakerResult says what an attempt tells about the upstream's health. 4xx
// shows that it works; back-pressure and a caller that goes away show nothing.
// A stored failure that is played back is not a new one.
func breakerResult(status int, replay bool, err error, e attemptEnd) error {
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusRequestTimeout:
		return errBreakerExcluded
	case status >= 500 && !replay:
		return errBreakerFailure
	case err == nil:
		return nil
	case e == endLocal, e == endCanceled, e == endCallerDeadline:
		return errBreakerExcluded
	case certificateError(err), proxyRefusal(err) != 0, permanent(err):
		return errBreakerExcluded
	}
	return errBreakerFailure
}

// attemptEnd is who ended an attempt that has no answer.
type attemptEnd uint8

const (
	endUpstream       attemptEnd = iota // the upstream, or the way to it; or our attempt timeout
	endCanceled                         // the caller cancelled
	endCallerDeadline                   // the caller's deadline, after less than hungAfter
	endLocal                            // Prepare, Classify, the body: not the upstream at all
)

// hungAfter is how long an upstream must have kept a caller waiting before the
// caller's own deadline counts against it.
const hungAfter = time.Second
