package oncehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	"golang.org/x/time/rate"
)

// Off turns off what a zero would give its default: no attempt timeout, no
// budget, no breaker. Each field of Policy that takes it says so.
const Off = -1

// KeyMode says what an upstream is known to do with idempotency keys.
type KeyMode uint8

const (
	// KeysSent is the zero value: POST, PATCH and unknown methods carry a
	// key, which helps an upstream that knows it, but it is not relied on:
	// after an ambiguous failure they are not sent again.
	KeysSent KeyMode = iota
	// KeysHonored declares that the upstream executes a key at most once
	// within Policy.KeyWindow. Declare it from the provider's documentation.
	KeysHonored
	// KeysOff sends no key. A key that is already in the request stays.
	KeysOff
)

// Policy is how one upstream is called. The zero value is a good one. Every
// zero field falls back, from WithPolicy to the upstream's entry in
// Transport.Upstreams, to Transport.Policy, to the default named here. Off
// works only where it is named; every other negative is an error of Validate.
type Policy struct {
	// MaxAttempts bounds the sends of one call, the first included. Zero
	// means 3; Off means 1. Asking again for work in progress does not count,
	// nor does a connection that turned out to be dead before a byte was
	// written.
	MaxAttempts int

	// AttemptTimeout bounds one attempt, from its start until the answer's
	// header has come, and for named intents its body where that is saved
	// (see MaxResponseBytes). It never cuts a body that the caller reads.
	// Zero means 30 s; Off means none.
	AttemptTimeout time.Duration

	// MaxElapsed bounds a whole call: attempts and waits. The context's
	// deadline bounds it too. Zero means 2 min; Off means none.
	MaxElapsed time.Duration

	// BaseDelay and MaxDelay shape the wait before the n-th retry: uniform in
	// [0, min(MaxDelay, BaseDelay·2ⁿ⁻¹)), which is "full jitter". Zero means
	// 200 ms and 10 s.
	BaseDelay, MaxDelay time.Duration

	// MaxRetryAfter is the longest Retry-After we obey; an answer that asks
	// for more is returned to the caller at once. We never retry earlier than
	// asked. Zero means 60 s; Off means that no Retry-After is waited for.
	MaxRetryAfter time.Duration

	// Budget caps how many retries the upstream gets from this process.
	Budget Budget

	// Breaker stops calling an upstream that fails.
	Breaker Breaker

	// RateLimit is how many sends a second may start, RateBurst how many of
	// them at once. Zero means no limit; a burst of zero then means 1.
	RateLimit rate.Limit
	RateBurst int

	// MaxInFlight bounds the attempts that wait for an answer at one time.
	// Zero means no limit.
	MaxInFlight int

	// Keys says what the upstream does with idempotency keys. KeysSent, the
	// zero, falls back like every zero: declare KeysHonored for an upstream,
	// not in Transport.Policy, unless it holds for all.
	Keys KeyMode

	// KeyHeader is the header that carries the key. Zero means
	// "Idempotency-Key".
	KeyHeader string

	// KeyMaxLen is the longest key, in bytes, that the upstream takes. Zero
	// means 255, which is also the most.
	KeyMaxLen int

	// KeyWindow is how long, from the first send, the upstream remembers a
	// key. Past it nothing is sent under that key: it would be taken as new.
	// Zero means 15 min, which is less than most keep theirs; Off means that
	// it remembers for ever.
	KeyWindow time.Duration

	// NewKey makes the key of a new intent. Zero means a random UUID
	// (version 4); DerivedKey is the other ready one. What it
	// returned for an intent's first call is persisted and wins; it may be
	// asked again by later calls.
	NewKey func(context.Context, Intent) (string, error)

	// Fingerprint tells requests apart that use one intent name. Zero means
	// SHA-256 over method, scheme, host, path, query and body, JSON bodies
	// canonicalised. It gets the body's bytes and must not change the request.
	Fingerprint func(*http.Request, []byte) ([32]byte, error)

	// MaxBodyBytes is the largest body without GetBody that is buffered, so
	// that it can be sent again. A larger one is streamed, once. Zero means
	// 1 MiB; Off means that none is buffered.
	MaxBodyBytes int64

	// MaxResponseBytes is the largest answer to a named intent that is saved.
	// Such an answer is read before RoundTrip returns if its length is known
	// and not larger, or if it is JSON, XML or a form. Zero means 256 KiB; Off
	// means that none is saved.
	MaxResponseBytes int64

	// SaveRequest keeps the request's bytes in the key store until the intent
	// has ended, for Recover. Of its header only an allow-list is kept.
	SaveRequest bool

	// WaitInFlight makes a call for an intent that is already under way wait
	// for it instead of returning ErrInFlight.
	WaitInFlight bool

	// FollowElsewhere lets a keyed request follow a 307 or 308 to another
	// upstream, or from https to http, under the same key.
	FollowElsewhere bool

	// DeadlineHeader is the header that tells the upstream how many
	// milliseconds we shall wait for its answer. Zero means none is sent.
	DeadlineHeader string

	// Classify is asked first what an attempt's result means; the zero
	// Verdict leaves it to the built-in rules. It must be safe for concurrent
	// use.
	Classify func(Attempt) Verdict
}

const (
	defaultKeyHeader = "Idempotency-Key"
	maxKeyLen        = 255
)

// defaults holds what zero means.
var defaults = Policy{
	MaxAttempts:      3,
	AttemptTimeout:   30 * time.Second,
	MaxElapsed:       2 * time.Minute,
	BaseDelay:        200 * time.Millisecond,
	MaxDelay:         10 * time.Second,
	MaxRetryAfter:    time.Minute,
	Budget:           Budget{Ratio: 0.1, Burst: 10, MinPerSecond: 0.1},
	Breaker:          Breaker{FailureRatio: 0.5, MinCalls: 20, OpenFor: 5 * time.Second, Probes: 1},
	KeyHeader:        defaultKeyHeader,
	KeyMaxLen:        maxKeyLen,
	KeyWindow:        15 * time.Minute,
	MaxBodyBytes:     1 << 20,
	MaxResponseBytes: 256 << 10,
}

// or returns p with its zero fields taken from q. Keys, and the booleans,
// cannot tell "not set" from their zero: a true, or a mode, wins.
func (p Policy) or(q Policy) Policy {
	p.MaxAttempts = cmp.Or(p.MaxAttempts, q.MaxAttempts)
	p.AttemptTimeout = cmp.Or(p.AttemptTimeout, q.AttemptTimeout)
	p.MaxElapsed = cmp.Or(p.MaxElapsed, q.MaxElapsed)
	p.BaseDelay = cmp.Or(p.BaseDelay, q.BaseDelay)
	p.MaxDelay = cmp.Or(p.MaxDelay, q.MaxDelay)
	p.MaxRetryAfter = cmp.Or(p.MaxRetryAfter, q.MaxRetryAfter)
	p.Budget.Ratio = cmp.Or(p.Budget.Ratio, q.Budget.Ratio)
	p.Budget.Burst = cmp.Or(p.Budget.Burst, q.Budget.Burst)
	p.Budget.MinPerSecond = cmp.Or(p.Budget.MinPerSecond, q.Budget.MinPerSecond)
	p.Breaker.FailureRatio = cmp.Or(p.Breaker.FailureRatio, q.Breaker.FailureRatio)
	p.Breaker.MinCalls = cmp.Or(p.Breaker.MinCalls, q.Breaker.MinCalls)
	p.Breaker.Window = cmp.Or(p.Breaker.Window, q.Breaker.Window)
	p.Breaker.OpenFor = cmp.Or(p.Breaker.OpenFor, q.Breaker.OpenFor)
	p.Breaker.Probes = cmp.Or(p.Breaker.Probes, q.Breaker.Probes)
	p.RateLimit = cmp.Or(p.RateLimit, q.RateLimit)
	p.RateBurst = cmp.Or(p.RateBurst, q.RateBurst)
	p.MaxInFlight = cmp.Or(p.MaxInFlight, q.MaxInFlight)
	p.Keys = cmp.Or(p.Keys, q.Keys)
	p.KeyHeader = cmp.Or(p.KeyHeader, q.KeyHeader)
	p.KeyMaxLen = cmp.Or(p.KeyMaxLen, q.KeyMaxLen)
	p.KeyWindow = cmp.Or(p.KeyWindow, q.KeyWindow)
	if p.NewKey == nil {
		p.NewKey = q.NewKey
	}
	if p.Fingerprint == nil {
		p.Fingerprint = q.Fingerprint
	}
	p.MaxBodyBytes = cmp.Or(p.MaxBodyBytes, q.MaxBodyBytes)
	p.MaxResponseBytes = cmp.Or(p.MaxResponseBytes, q.MaxResponseBytes)
	p.SaveRequest = p.SaveRequest || q.SaveRequest
	p.WaitInFlight = p.WaitInFlight || q.WaitInFlight
	p.FollowElsewhere = p.FollowElsewhere || q.FollowElsewhere
	p.DeadlineHeader = cmp.Or(p.DeadlineHeader, q.DeadlineHeader)
	if p.Classify == nil {
		p.Classify = q.Classify
	}
	return p
}

// resolve fills what the caller left zero. A default yields to what the
// caller wrote: a BaseDelay of 20 s lifts the default MaxDelay.
func (p Policy) resolve() Policy {
	r := p.or(defaults)
	if p.MaxDelay == 0 {
		r.MaxDelay = max(r.MaxDelay, r.BaseDelay)
	}
	if p.BaseDelay == 0 {
		r.BaseDelay = min(r.BaseDelay, r.MaxDelay)
	}
	if p.MaxElapsed == 0 && r.AttemptTimeout > r.MaxElapsed {
		r.MaxElapsed = r.AttemptTimeout
	}
	if r.MaxAttempts == Off {
		r.MaxAttempts = 1
	}
	if p.Breaker.Window == 0 {
		// gobreaker books a result in the bucket where its attempt started: a
		// window shorter than an attempt would never see a hung one.
		r.Breaker.Window = max(30*time.Second, 2*r.AttemptTimeout)
	}
	if r.RateLimit > 0 {
		r.RateBurst = max(r.RateBurst, 1)
	}
	return r
}

// validate reports the first value of one written policy that cannot work.
func (p *Policy) validate() error {
	for _, f := range []struct {
		name  string
		value float64
		off   bool // Off is allowed
	}{
		{"MaxAttempts", float64(p.MaxAttempts), true},
		{"AttemptTimeout", float64(p.AttemptTimeout), true},
		{"MaxElapsed", float64(p.MaxElapsed), true},
		{"BaseDelay", float64(p.BaseDelay), false},
		{"MaxDelay", float64(p.MaxDelay), false},
		{"MaxRetryAfter", float64(p.MaxRetryAfter), true},
		{"Budget.Ratio", p.Budget.Ratio, true},
		{"Budget.Burst", float64(p.Budget.Burst), false},
		{"Budget.MinPerSecond", p.Budget.MinPerSecond, false},
		{"Breaker.FailureRatio", p.Breaker.FailureRatio, true},
		{"Breaker.MinCalls", float64(p.Breaker.MinCalls), false},
		{"Breaker.Window", float64(p.Breaker.Window), false},
		{"Breaker.OpenFor", float64(p.Breaker.OpenFor), false},
		{"Breaker.Probes", float64(p.Breaker.Probes), false},
		{"RateLimit", float64(p.RateLimit), false},
		{"RateBurst", float64(p.RateBurst), false},
		{"MaxInFlight", float64(p.MaxInFlight), false},
		{"KeyMaxLen", float64(p.KeyMaxLen), false},
		{"KeyWindow", float64(p.KeyWindow), true},
		{"MaxBodyBytes", float64(p.MaxBodyBytes), true},
		{"MaxResponseBytes", float64(p.MaxResponseBytes), true},
	} {
		switch {
		case math.IsNaN(f.value) || math.IsInf(f.value, 0):
			return fmt.Errorf("%s is not a number", f.name)
		case f.value < 0 && f.off && f.value != Off:
			return fmt.Errorf("%s is negative; use 0 for the default or Off", f.name)
		case f.value < 0 && !f.off:
			return fmt.Errorf("%s is negative", f.name)
		}
	}
	switch {
	case p.Budget.Ratio > 1:
		return errors.New("the Budget.Ratio is above 1: every call would earn more than a retry")
	case p.Breaker.FailureRatio > 1:
		return errors.New("the Breaker.FailureRatio is above 1: the breaker would never open; use Off")
	case p.Breaker.MinCalls > math.MaxUint32 || p.Breaker.Probes > math.MaxUint32:
		return errors.New("the Breaker.MinCalls or Breaker.Probes is above 2^32-1")
	case p.KeyMaxLen > maxKeyLen:
		return fmt.Errorf("the KeyMaxLen is above %d", maxKeyLen)
	case p.Keys > KeysOff:
		return errors.New("the Keys value is not a KeyMode")
	case p.Keys == KeysOff && (p.KeyHeader != "" || p.NewKey != nil || p.KeyWindow != 0 || p.KeyMaxLen != 0):
		return errors.New("the Keys value is KeysOff, but KeyHeader, KeyMaxLen, KeyWindow or NewKey is set")
	case p.KeyHeader != "" && !isToken(p.KeyHeader):
		return errors.New("the KeyHeader is not a header name")
	case p.DeadlineHeader != "" && !isToken(p.DeadlineHeader):
		return errors.New("the DeadlineHeader is not a header name")
	}
	return nil
}

// contradiction reports two values of a merged policy, both written by the
// caller, that cannot both hold.
func (p *Policy) contradiction() error {
	switch {
	case p.BaseDelay > 0 && p.MaxDelay > 0 && p.BaseDelay > p.MaxDelay:
		return errors.New("the BaseDelay is above MaxDelay")
	case p.AttemptTimeout > 0 && p.MaxElapsed > 0 && p.AttemptTimeout > p.MaxElapsed:
		return errors.New("the AttemptTimeout is above MaxElapsed")
	case p.RateBurst > 0 && p.RateLimit == 0:
		return errors.New("the RateBurst is set without RateLimit")
	}
	return nil
}

// isToken reports whether s is a token of RFC 9110 §5.6.2.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case c == '!' || c == '#' || c == '$' || c == '%' || c == '&' || c == '\'' || c == '*' ||
			c == '+' || c == '-' || c == '.' || c == '^' || c == '_' || c == '`' || c == '|' || c == '~':
		default:
			return false
		}
	}
	return s != ""
}

// WithPolicy returns a context whose calls use the fields that p sets before
// the upstream's. It cannot change what calls share: a Budget, Breaker,
// RateLimit, RateBurst or MaxInFlight in p makes the call fail.
func WithPolicy(ctx context.Context, p Policy) context.Context {
	return context.WithValue(ctx, policyKey{}, &p)
}

type policyKey struct{}

// withOverride returns the policy of one call: what WithPolicy set, over the
// upstream's as the caller wrote it.
func withOverride(over *Policy, written Policy) (*Policy, error) {
	if over.Budget != (Budget{}) || over.Breaker != (Breaker{}) || over.RateLimit != 0 || over.RateBurst != 0 || over.MaxInFlight != 0 {
		return nil, errors.New("WithPolicy: Budget, Breaker, RateLimit, RateBurst and MaxInFlight belong to the upstream; set them in Transport.Upstreams")
	}
	p := over.or(written)
	if err := cmp.Or(over.validate(), p.contradiction()); err != nil {
		return nil, fmt.Errorf("WithPolicy: %w", err)
	}
	p = p.resolve()
	return &p, nil
}
