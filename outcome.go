package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Outcome is what is known about the effect of a call, or of an intent.
type Outcome uint8

const (
	// Unknown is the zero value and the cautious one: the upstream may or may
	// not have acted. Calling again for the same intent is safe; calling
	// under a new name is not.
	Unknown Outcome = iota
	// NotSent means that there is positive proof, for every attempt, that the
	// upstream never saw the request.
	NotSent
	// Rejected means that the upstream said it did not do it.
	Rejected
	// Done means that the upstream said it did it.
	Done
)

// String returns "unknown", "not sent", "rejected" or "done".
func (o Outcome) String() string {
	switch o {
	case NotSent:
		return "not sent"
	case Rejected:
		return "rejected"
	case Done:
		return "done"
	}
	return "unknown"
}

// A Report says what happened to one call. It holds nothing secret: no key,
// no query, no header, no body.
type Report struct {
	Outcome  Outcome       // what is known; provisional until the response's body has ended
	Reason   error         // why retrying stopped (one of the Err values, or context.Canceled); nil if the answer was final
	Attempts int           // times the request was sent, or may have been, in this call; redirect hops add up
	Status   int           // the last answer's status code, 0 if there was none
	Replayed bool          // the answer is a copy: from the key store, or so marked by the upstream
	RetryAt  time.Time     // when calling again can make sense; zero if nothing is known
	Waited   time.Duration // spent between attempts and on the rate and in-flight limits
	Upstream string        // its name, see Transport.UpstreamOf
	Intent   string        // its name, "" if anonymous
	RecordID string        // its id in the key store, "" if it has no record
}

// The reasons why a call stopped. Each is found by errors.Is in an *Error,
// and stands in Report.Reason where the last answer was returned as a response.
var (
	// ErrAttempts: Policy.MaxAttempts sends were made, or as many polls of
	// work in progress as we allow.
	ErrAttempts = errors.New("no attempt left")
	// ErrBudget: the upstream's retry budget is spent. Retrying is what would
	// keep it down.
	ErrBudget = errors.New("retry budget is spent")
	// ErrOpen: the upstream's circuit breaker is open.
	ErrOpen = errors.New("circuit breaker is open")
	// ErrDeadline: the caller's deadline, or Policy.MaxElapsed, is over or
	// would be before the next attempt; or Retry-After asks for longer than
	// Policy.MaxRetryAfter.
	ErrDeadline = errors.New("no time for another attempt (deadline, MaxElapsed or MaxRetryAfter)")
	// ErrUnsafe: another send could repeat the effect, because the upstream
	// is not declared to honour keys (Policy.Keys).
	ErrUnsafe = errors.New("not safe to send again")
	// ErrBody: the request's body cannot be read, fingerprinted or sent again.
	ErrBody = errors.New("request body cannot be used")
	// ErrIntentMismatch: the intent's name or key was used for another request.
	ErrIntentMismatch = errors.New("intent belongs to another request")
	// ErrInFlight: another run of the intent is under way.
	ErrInFlight = errors.New("intent is in flight")
	// ErrKeyExpired: the intent's key may be past the upstream's window, so
	// that sending it again could be taken as new.
	ErrKeyExpired = errors.New("idempotency key may have expired")
	// ErrSettled: the intent has ended and its answer was not saved.
	ErrSettled = errors.New("intent is settled")
	// ErrStore: the key store did not confirm the claim.
	ErrStore = errors.New("key store failed")
	// ErrRedirect: the upstream redirected a keyed request to where it may
	// not follow (Policy.FollowElsewhere).
	ErrRedirect = errors.New("redirect leaves the upstream")
	// ErrInvalid: the request, its key or intent, or the Transport's settings
	// cannot work.
	ErrInvalid = errors.New("cannot work as given")
)

// An Error is returned by RoundTrip for every call that ends without a
// response. errors.Is finds both Reason and the cause; Outcome is what the
// caller has to act on.
type Error struct {
	Report
	Err error // the last attempt's error, or what was wrong; may be nil
}

// Error says what is known, why it stopped and what the last failure was. It
// never holds a header, a query, a body or a key.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("oncehttp: ")
	known := map[Outcome][2]string{
		Unknown: {"outcome unknown", " at "}, NotSent: {"not sent", " to "}, Rejected: {"rejected", " by "}, Done: {"done", " at "},
	}[e.Outcome]
	b.WriteString(known[0])
	if e.Upstream != "" {
		b.WriteString(known[1])
		b.WriteString(e.Upstream)
	}
	if e.Attempts > 1 {
		fmt.Fprintf(&b, " after %d attempts", e.Attempts)
	}
	if e.Reason != nil {
		b.WriteString(": ")
		b.WriteString(e.Reason.Error())
	}
	if e.Err != nil && e.Err != e.Reason {
		b.WriteString(": ")
		b.WriteString(safeText(e.Err))
	}
	if advice := e.advice(); advice != "" {
		b.WriteString(" (")
		b.WriteString(advice)
		b.WriteString(")")
	}
	return b.String()
}

// advice says what to do, where the outcome and the reason tell.
func (e *Error) advice() string {
	switch {
	case errors.Is(e.Reason, ErrInFlight):
		return "call again for the same intent later, or set WaitInFlight"
	case errors.Is(e.Reason, ErrSettled):
		return "nothing was sent; look the result up at the upstream"
	case errors.Is(e.Reason, ErrUnsafe), errors.Is(e.Reason, ErrKeyExpired):
		return "it may have been done: look it up at the upstream, then tell Transport.Settle"
	case e.Outcome == Unknown && e.Intent != "":
		return "it may have been done: call again for the same intent"
	case e.Outcome == Unknown:
		return "it may have been done"
	}
	return ""
}

// Unwrap returns Reason and Err, without nils.
func (e *Error) Unwrap() []error {
	errs := make([]error, 0, 2)
	for _, err := range []error{e.Reason, e.Err} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// Timeout reports whether time ran out: the caller's, or an attempt's.
// http.Client and net.Error users ask for it.
func (e *Error) Timeout() bool {
	if e.Reason == ErrDeadline {
		return true
	}
	var t interface{ Timeout() bool }
	return errors.As(e.Err, &t) && t.Timeout()
}

// safeText is err's text with every URL in it cut down to scheme and host:
// net/url, and many RoundTrippers, put the whole URL into their errors, with
// the userinfo and the query.
func safeText(err error) string {
	text := err.Error()
	for e := range errorTree(err) {
		if u, ok := e.(*url.Error); ok && u.URL != "" {
			// Known exactly, whatever characters it holds.
			text = strings.ReplaceAll(text, strings.Trim(strconv.Quote(u.URL), `"`), hostOnly(u.URL))
			text = strings.ReplaceAll(text, u.URL, hostOnly(u.URL))
		}
	}
	return urlInText.ReplaceAllStringFunc(text, hostOnly)
}

// hostOnly cuts a URL, and what stands around it up to the next space, down to
// scheme and host. What follows a bare host, such as a quote, stays.
func hostOnly(raw string) string {
	scheme, rest, _ := strings.Cut(raw, "://")
	path := strings.IndexAny(rest, "/?#")
	authority := rest
	if path >= 0 {
		authority = rest[:path]
	}
	host := authority[strings.LastIndexByte(authority, '@')+1:]
	end := strings.IndexFunc(host, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune(".-:[]", r))
	})
	if end >= 0 && path >= 0 {
		host = host[:end]
	}
	return scheme + "://" + host
}

// errorTree yields err and everything that it wraps.
func errorTree(err error) iter.Seq[error] {
	return func(yield func(error) bool) { walkErrors(err, yield) }
}

func walkErrors(err error, yield func(error) bool) bool {
	if err == nil {
		return true
	}
	if !yield(err) {
		return false
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return walkErrors(e.Unwrap(), yield)
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			if !walkErrors(inner, yield) {
				return false
			}
		}
	}
	return true
}

var urlInText = regexp.MustCompile(`[A-Za-z][A-Za-z0-9+.-]*://\S+`)

// OutcomeOf tells the outcome of a call from what http.Client or RoundTrip
// returned. For answers and errors that are not ours it is Unknown. Before
// the response's body has ended, Done is provisional: reading it can still
// fail, and then the outcome becomes Unknown.
func OutcomeOf(resp *http.Response, err error) Outcome {
	var e *Error
	if errors.As(err, &e) {
		return e.Outcome
	}
	r, _ := ReportOf(resp)
	return r.Outcome
}

// ReportOf returns the report of the call that resp answers, as it stands now;
// false if resp did not come from a Transport of this package. It may be
// called at any time and by any goroutine.
func ReportOf(resp *http.Response) (Report, bool) {
	if resp == nil || resp.Request == nil {
		return Report{}, false
	}
	c, ok := resp.Request.Context().Value(answerKey{}).(*call)
	if !ok {
		return Report{}, false
	}
	return c.report.get(), true
}

// answerKey finds, in the context of a response's request, the call it answers.
type answerKey struct{}

// WithReport returns a context whose call fills *r when RoundTrip returns,
// whatever becomes of its error: under http.Client.Timeout net/http flattens
// errors to text. Use one Report for one call at a time; after redirects it
// is the last hop's.
func WithReport(ctx context.Context, r *Report) context.Context {
	return context.WithValue(ctx, reportKey{}, r)
}

type reportKey struct{}

// liveReport is a Report that the body's reader may still change after
// RoundTrip has returned.
type liveReport struct {
	mu sync.Mutex
	r  Report // guarded by mu
}

func (l *liveReport) get() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r
}

func (l *liveReport) set(change func(*Report)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.r)
}
