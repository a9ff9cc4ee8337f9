package oncehttp

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// How long a run holds its record beyond the time it may take, and how long
// where nothing bounds it.
const (
	leaseMargin   = 10 * time.Second
	leaseUnending = 60 * time.Second
	settleTimeout = 2 * time.Second
)

// processLife tells the lives of one Owner apart: it changes with every start
// of the process, and is one for all Transports in it.
var processLife = sync.OnceValue(func() string {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
})

var runs atomic.Uint64

// ownerToken names one run: "<owner> <life>-<n>". It is never reused, so that
// a write whose acknowledgement was lost can be recognised.
func ownerToken(owner, life string) string {
	b := make([]byte, 0, 64)
	b = append(append(append(b, owner...), ' '), life...)
	b = strconv.AppendUint(append(b, '-'), runs.Add(1), 36)
	return string(b)
}

// earlierLife reports whether theirs is a run of an earlier life of the
// process that mine belongs to: it cannot be at work any more.
func earlierLife(theirs, mine string) bool {
	owner, run := cutLast(theirs)
	me, myRun := cutLast(mine)
	life, _, _ := strings.Cut(run, "-")
	myLife, _, _ := strings.Cut(myRun, "-")
	return owner == me && owner != "" && life != myLife
}

func cutLast(token string) (owner, run string) {
	i := strings.LastIndexByte(token, ' ')
	if i < 0 {
		return "", token
	}
	return token[:i], token[i+1:]
}

// claim makes the intent ours, durably, before anything is sent. If there is
// nothing to send it returns the stored answer or an error.
func (c *call) claim() (*http.Response, error) {
	now := time.Now()
	rec := Record{
		ID: c.id, Upstream: c.up.name, Scope: c.scope, Intent: c.name, Key: c.key,
		State: StateSending, Owner: ownerToken(c.st.owner, c.st.life), Lease: c.lease(now, 0),
		FirstSent: wall(now), Updated: wall(now), Expires: wall(now.Add(retention)),
		Fingerprint: c.print,
	}
	if c.pol.SaveRequest {
		rec.Request = c.savedRequest()
	}
	ctx, cancel := c.storeContext()
	defer cancel()
	if err := c.enterHere(rec.Lease); err != nil {
		return nil, err
	}
	stored, created, err := c.st.store.Create(ctx, rec)
	known := NotSent // what a record that was seen says about earlier runs
	for pause := 5 * time.Millisecond; ; {
		if err != nil && !errors.Is(err, ErrConflict) {
			// It may have been written all the same: our token tells.
			c.st.trace.storeError(c.ctx, c.id, "claim", err)
		}
		if err != nil {
			var gerr error
			if stored, gerr = c.st.store.Get(ctx, c.id); gerr != nil {
				if c.named && !errors.Is(gerr, ErrNotFound) {
					// There may be a record, of a run that is in doubt: "not
					// sent" would let the caller pay another way.
					known = Unknown
				}
				return nil, c.end(known, ErrStore, fmt.Errorf("claim: %w", errors.Join(err, gerr)))
			}
			known = stored.outcome()
			if stored.Owner == rec.Owner {
				known = NotSent
			}
			if stored.Owner != rec.Owner && !errors.Is(err, ErrConflict) {
				return nil, c.end(known, ErrStore, fmt.Errorf("claim: %w", err))
			}
		}
		if created || stored.Owner == rec.Owner && stored.State == StateSending {
			c.hold(stored)
			return nil, nil
		}
		now = time.Now()
		known = stored.outcome()
		what := stored.decide(&rec, c.pol, now)
		if c.callersKey && stored.Key != rec.Key {
			what = nextMismatch
		}
		switch what {
		case nextSend, nextResend:
			c.doubt = what == nextResend
			stored, err = c.st.store.Update(ctx, stored.resume(&rec, what, c.lease(now, 0), now))
			continue
		case nextInFlight:
			if err := c.waitForOther(pause, stored.Lease); err != nil {
				return nil, err
			}
			pause = min(2*pause, time.Second)
			stored, err = c.st.store.Get(ctx, c.id)
			if errors.Is(err, ErrNotFound) {
				stored, created, err = c.st.store.Create(ctx, rec)
			}
			continue
		}
		return c.answerFrom(&stored, what, now)
	}
}

// here are the intents with a record in a durable store that have a run in this
// Transport, and until when. The store is the judge; this is for the one that
// has lost what it acknowledged: it must not give an intent that is under way a
// second key.
type here struct {
	mu   sync.Mutex
	runs map[string]hereRun // guarded by mu
}

type hereRun struct {
	call  *call
	until time.Time
}

// enter registers a run of id, unless there is one.
func (h *here) enter(c *call, until time.Time) (other time.Time, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if other, ok := h.runs[c.id]; ok && other.call != c && time.Now().Before(other.until) {
		return other.until, false
	}
	if h.runs == nil {
		h.runs = make(map[string]hereRun)
	}
	h.runs[c.id] = hereRun{c, until}
	return until, true
}

func (h *here) leave(c *call) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.runs[c.id].call == c {
		delete(h.runs, c.id)
	}
}

// enterHere waits for a run of the intent in this Transport, or refuses.
func (c *call) enterHere(until time.Time) error {
	if !c.st.durable || !c.named {
		return nil
	}
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		other, ok := c.st.here.enter(c, until)
		if ok {
			c.isHere = true
			return nil
		}
		if err := c.waitForOther(pause, other); err != nil {
			return err
		}
	}
}

func (c *call) leaveHere() {
	if c.isHere {
		c.isHere = false
		c.st.here.leave(c)
	}
}

// waitForOther pauses for another run of the intent, if the policy wants that,
// but not past the end of its lease.
func (c *call) waitForOther(pause time.Duration, lease time.Time) error {
	pause = max(time.Millisecond, min(pause, time.Until(lease)+time.Millisecond))
	switch {
	case !c.pol.WaitInFlight:
		c.retryAt = lease
		return c.end(Unknown, ErrInFlight, nil)
	case !fits(time.Now(), pause, c.until):
		return c.end(Unknown, ErrDeadline, ErrInFlight)
	}
	if err := c.sleep(pause); err != nil {
		return c.end(Unknown, overReason(err), err)
	}
	return nil
}

// mismatchAdvice says what became of the request that has the name already:
// calling under a new name is right after one of them only.
var mismatchAdvice = map[Outcome]string{
	Unknown:  "the earlier one may have been done; find that out before anything is sent under a new name",
	NotSent:  "the earlier one was not done; call it again, or use a new name for this one",
	Rejected: "the earlier one was rejected; a corrected request is a new intent and needs a new name",
	Done:     "the earlier one was done; a new name would do it twice",
}

// answerFrom ends a call that may not send: with the stored answer, or with
// the reason.
func (c *call) answerFrom(r *Record, what next, now time.Time) (*http.Response, error) {
	c.report.set(func(rep *Report) { rep.Status = r.Status })
	switch what {
	case nextAnswer:
		if r.Response == nil {
			return nil, c.end(r.outcome(), ErrSettled, nil)
		}
		c.report.set(func(rep *Report) { rep.Outcome, rep.Replayed = r.outcome(), true })
		return c.replay(r.Response), nil
	case nextMismatch:
		return nil, c.end(NotSent, ErrIntentMismatch, errors.New(mismatchAdvice[r.outcome()]))
	case nextUnsafe:
		return nil, c.end(Unknown, ErrUnsafe, nil)
	case nextExpired:
		var why error
		if now.Before(r.FirstSent) || now.Before(r.Updated) {
			c.retryAt = r.Updated
			why = errors.New("the clock reads earlier than the record, so the key's age is not known")
		}
		return nil, c.end(Unknown, ErrKeyExpired, why)
	}
	return nil, c.end(Unknown, ErrStore, fmt.Errorf("record %s has the state %d, which this version does not know", r.ID, r.State))
}

// resume is the record that a claim of an existing one writes.
func (r Record) resume(claim *Record, what next, lease, now time.Time) Record {
	r.State, r.Owner, r.Lease, r.Updated, r.Expires = StateSending, claim.Owner, lease, wall(now), claim.Expires
	r.Fingerprint = claim.Fingerprint
	r.Request, r.Response = claim.Request, nil
	if what == nextSend {
		if r.Key == "" {
			r.Key = claim.Key // it was called under KeysOff before
		}
		r.FirstSent = wall(now) // nothing was processed under the key: its window starts again
	}
	return r
}

// hold takes a record that is ours.
func (c *call) hold(stored Record) {
	c.rec, c.held = stored, true
	if c.pol.Keys != KeysOff {
		c.key = stored.Key // not so if it was made for the body (Transport.Key)
	}
}

// lease is until when a run that starts, or waits, now may be at work.
func (c *call) lease(now time.Time, ahead time.Duration) time.Time {
	if !c.until.IsZero() {
		return wall(c.until.Add(leaseMargin))
	}
	return wall(now.Add(ahead + leaseUnending))
}

// renew keeps a lease that nothing else bounds alive over the next wait or
// attempt. Without a confirmed lease nothing more may be sent: someone else
// may have taken over.
func (c *call) renew(ahead time.Duration) error {
	now := time.Now()
	if !c.held || !c.until.IsZero() || now.Add(ahead+leaseUnending/2).Before(c.rec.Lease) {
		return nil
	}
	ctx, cancel := c.storeContext()
	defer cancel()
	rec := c.rec
	rec.Lease, rec.Updated = c.lease(now, ahead), wall(now)
	stored, err := c.st.store.Update(ctx, rec)
	if err != nil {
		c.st.trace.storeError(c.ctx, c.id, "renew", err)
		got, gerr := c.st.store.Get(ctx, c.id)
		if gerr != nil || got.Owner != rec.Owner || got.Version != rec.Version+1 {
			return err
		}
		stored = got // written all the same
	}
	c.rec = stored
	if c.isHere {
		c.st.here.enter(c, stored.Lease)
	}
	return nil
}

// settle writes what the run ended with and gives the record up. It may end
// after the deadline, but no later than settleTimeout. If it cannot be
// written, the record stays Sending, and its lease leads it to recovery. It
// returns the outcome that is known now: another's, if we were overtaken.
func (c *call) settle(o Outcome, turnedAway bool, saved *SavedResponse) Outcome {
	defer c.leaveHere()
	if !c.held {
		return o
	}
	c.held = false
	now := time.Now()
	rec := c.rec
	rec.State, rec.Lease, rec.Updated, rec.Expires = settledState(o, turnedAway), time.Time{}, wall(now), wall(now.Add(retention))
	rec.Attempts += c.attempts
	rec.Status = c.status
	if rec.State != StateOpen {
		rec.Request, rec.Response = nil, saved
	}
	ctx, cancel := c.st.detached(c.ctx)
	defer cancel()
	stored, err := c.st.store.Update(ctx, rec)
	if err == nil {
		c.rec = stored
		return o
	}
	stored, gerr := c.st.store.Get(ctx, c.id)
	if gerr == nil && stored.Owner == rec.Owner && stored.State == rec.State {
		c.rec = stored // written after all
		return o
	}
	c.st.trace.storeError(c.ctx, c.id, "settle", err)
	if o != Done && gerr == nil && stored.Owner != rec.Owner {
		// We were overtaken: what the other run knows is what is known.
		if stored.State == StateDone || stored.State == StateRejected {
			c.overtakenBy = stored.Response
		}
		return stored.outcome()
	}
	return o
}

// storeContext bounds a store call by the call's own end.
func (c *call) storeContext() (context.Context, context.CancelFunc) {
	if !c.st.durable || c.until.IsZero() {
		return c.ctx, func() {}
	}
	return context.WithDeadline(c.ctx, c.until)
}

// detached is the context of a write that must be tried although the caller
// has gone.
func (st *settings) detached(ctx context.Context) (context.Context, context.CancelFunc) {
	if !st.durable {
		return context.Background(), func() {} // nothing in memory takes time
	}
	return context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
}

// wall drops the monotonic reading: records are compared across processes, and
// a stored time has microseconds.
func wall(t time.Time) time.Time {
	return t.Round(0).UTC().Truncate(time.Microsecond)
}

// savedHeaders and requestHeaders are all that a store gets to see of a
// header.
var (
	savedHeaders = []string{"Content-Type", "Content-Language", "Content-Encoding", "Etag", "Last-Modified", "Location",
		"Request-Id", "X-Request-Id", "Idempotent-Replayed"}
	requestHeaders = []string{"Content-Type", "Content-Language", "Content-Encoding", "Accept", "Accept-Language",
		"Stripe-Version", "Prefer"}
)

func allowed(h http.Header, names []string) http.Header {
	var kept http.Header
	for _, name := range names {
		if v := h[name]; len(v) > 0 {
			if kept == nil {
				kept = make(http.Header, 4)
			}
			kept[name] = append([]string(nil), v...)
		}
	}
	if loc := kept.Get("Location"); loc != "" {
		if u, err := url.Parse(loc); err != nil || u.User != nil {
			delete(kept, "Location")
		}
	}
	return kept
}

func (c *call) savedRequest() *SavedRequest {
	if c.body.stream != nil || c.body.get != nil {
		return nil // too large, by MaxBodyBytes
	}
	u := *c.req.URL
	u.User = nil
	return &SavedRequest{Method: c.req.Method, URL: u.String(), Header: allowed(c.req.Header, requestHeaders), Body: c.body.buf}
}

// replay makes a response of a saved answer.
func (c *call) replay(a *SavedResponse) *http.Response {
	c.body.close()
	c.leaveHere()
	h := a.Header
	if h == nil {
		h = make(http.Header)
	}
	return &http.Response{
		Status: fmt.Sprintf("%d %s", a.Status, http.StatusText(a.Status)), StatusCode: a.Status,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: newMemoryBody(a.Body), ContentLength: int64(len(a.Body)),
		Request: c.answerRequest(),
	}
}
