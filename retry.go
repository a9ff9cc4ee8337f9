package oncehttp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// loop makes attempts until one of them, or something else, ends the call.
func (c *call) loop() (*http.Response, error) {
	for {
		if reason, err := c.admit(); reason != nil {
			return c.conclude(c.last, c.lastJudgement, reason, cmp.Or(err, c.lastErr))
		}
		resp, j, err := c.attempt()
		wait, reason := c.next(resp, j, err)
		if reason != nil || wait < 0 {
			return c.conclude(resp, j, reason, err)
		}
		drained := time.Now()
		c.last, c.lastErr, c.lastJudgement = c.discard(resp), err, j
		wait = max(0, wait-time.Since(drained))
		if !fits(time.Now(), wait, c.until) {
			return c.conclude(c.last, j, ErrDeadline, err)
		}
		if reason, err := c.pause(wait, j.asked); reason == ErrStore {
			return c.conclude(c.last, j, reason, err)
		} else if reason != nil {
			return c.conclude(nil, j, reason, err) // who has gone gets no answer
		}
	}
}

// admit asks all who may refuse the next attempt. It returns the reason to
// stop, or nil and the attempt holds its slots.
func (c *call) admit() (reason, err error) {
	if reason, err := c.mayStart(0); reason != nil {
		return reason, err
	}
	if err := c.renew(0); err != nil {
		return ErrStore, fmt.Errorf("renewing the lease: %w", err)
	}
	now := time.Now()
	if retryAt, open := c.up.breaker.open(now); open {
		c.retryAt = retryAt
		return ErrOpen, nil
	}
	limited := c.up.limits.slot != nil
	if wait, giveBack := c.up.limits.reserve(now); wait > 0 {
		limited = true
		reason, err := c.mayStart(wait)
		if reason == nil {
			reason, err = c.pause(wait, false)
		} else if reason == ErrDeadline {
			c.retryAt = now.Add(wait)
		}
		if reason != nil {
			giveBack()
			return reason, err
		}
	}
	waited, ok := c.up.limits.acquire(c.ctx, c.until, c.canceled())
	c.waited += waited
	if !ok {
		return c.overOr(ErrDeadline), c.over()
	}
	if limited {
		if reason, err := c.mayStart(0); reason != nil {
			c.up.limits.release()
			return reason, err
		}
	}
	done, ok := c.up.breaker.allow()
	if !ok {
		c.up.limits.release()
		c.tellBreakerChange()
		c.retryAt, _ = c.up.breaker.open(time.Now())
		return ErrOpen, nil
	}
	c.slots, c.breakerDone = true, done
	c.up.inFlight.Add(1)
	c.tellBreakerChange()
	return nil, nil
}

// mayStart reports why no attempt may start after wait: the caller has gone, no
// time would be left, or the key could be forgotten by then.
func (c *call) mayStart(wait time.Duration) (reason, err error) {
	if err := c.over(); err != nil {
		return overReason(err), err
	}
	now := time.Now()
	switch {
	case !fits(now, wait, c.until):
		return ErrDeadline, nil
	case c.keyExpired(now.Add(wait)):
		return ErrKeyExpired, nil
	}
	return nil, nil
}

// windowEnd is when the upstream may forget the key of a send that is in doubt;
// zero if there is none, or it never does.
func (c *call) windowEnd() time.Time {
	first := c.firstSent
	if c.held {
		first = c.rec.FirstSent
	}
	if !c.doubt || c.class != unsafe || c.pol.KeyWindow == Off || first.IsZero() {
		return time.Time{}
	}
	return first.Add(c.pol.KeyWindow)
}

// keyExpired reports whether a send at that time could be taken as new, because
// the upstream may have forgotten the key of an earlier one.
func (c *call) keyExpired(at time.Time) bool {
	switch {
	case !c.doubt || c.class != unsafe:
		return false
	case c.held:
		return !c.rec.insideWindow(c.pol, at)
	}
	return c.pol.KeyWindow != Off && !c.firstSent.IsZero() && at.Sub(c.firstSent) >= c.pol.KeyWindow
}

// overOr is the caller's end as a reason, or other if the caller still waits.
func (c *call) overOr(other error) error {
	if err := c.over(); err != nil {
		return overReason(err)
	}
	return other
}

// leave gives back what admit took. It runs on every path, panics included,
// and only once.
func (c *call) leave(result error) {
	if !c.slots {
		return
	}
	c.slots = false
	c.up.inFlight.Add(-1)
	c.up.limits.release()
	if c.breakerDone != nil {
		c.breakerDone(result)
		c.tellBreakerChange()
	}
}

func (c *call) tellBreakerChange() {
	if c.st.trace == nil {
		return
	}
	if from, to, ok := c.up.breaker.changed(); ok {
		c.st.trace.breakerChange(c.up.name, from, to)
	}
}

// attempt sends the request once and judges what came of it.
func (c *call) attempt() (*http.Response, judgement, error) {
	end := endUpstream
	var replay bool
	var resp *http.Response
	var err error
	result := errBreakerExcluded // for panics
	defer func() { c.leave(result) }()

	start := time.Now()
	if c.n++; c.firstSent.IsZero() {
		c.firstSent = start
	}
	ctx := c.attemptContext(start)
	info := AttemptInfo{Upstream: c.up.name, RecordID: c.id, Method: c.method, N: c.n}
	ctx = c.st.trace.attemptStart(ctx, info)

	clone, g, err := c.clone(ctx)
	j := judgement{kind: VerdictNotProcessed, stop: true}
	if err == nil {
		c.attempts++
		c.current, err = roundTrip(c.st.base, clone)
		resp, j, err = c.judge(c.current, err, g)
	} else {
		end = endLocal
	}
	if err != nil {
		c.cancelAttempt()
		switch {
		case c.over() == nil:
		case !errors.Is(c.over(), context.DeadlineExceeded):
			end = endCanceled
		case time.Since(start) < hungAfter:
			end = endCallerDeadline
		}
		if errors.Is(err, errAttemptTimeout) && c.limit != c.pol.AttemptTimeout && time.Since(start) < hungAfter {
			end = endCallerDeadline // the end of MaxElapsed cut it short
		}
	}
	status := 0
	if resp != nil {
		status, replay = resp.StatusCode, j.replay
		c.status = status
	}
	if result = breakerResult(status, replay, err, end); c.stale {
		result = errBreakerExcluded // of the pool, not of the upstream
	}
	info.Status, info.Err, info.Elapsed, info.Verdict = status, err, time.Since(start), j.kind
	c.st.trace.attemptDone(ctx, info)
	c.current = nil
	return resp, j, err
}

// roundTrip holds the base to its contract: a response or an error.
func roundTrip(base http.RoundTripper, req *http.Request) (*http.Response, error) {
	resp, err := base.RoundTrip(req)
	switch {
	case err != nil && resp != nil:
		if resp.Body != nil {
			resp.Body.Close()
		}
		return nil, err
	case err == nil && resp == nil:
		return nil, errors.New("the base RoundTripper returned neither a response nor an error")
	case err == nil && resp.Body == nil:
		resp.Body = http.NoBody
	}
	return resp, err
}

// attemptContext starts the attempt's clock. The context carries no intent,
// policy or report, and the mark that makes a Transport inside send only once.
func (c *call) attemptContext(now time.Time) context.Context {
	ctx, cancel := context.WithCancelCause(&c.inside)
	c.attemptCtx, c.cancel, c.timer, c.stale = ctx, cancel, nil, false
	c.limit = attemptLimit(c.pol.AttemptTimeout, now, c.until, c.up.breaker.probing())
	if end := c.windowEnd(); !end.IsZero() && (c.limit == 0 || end.Sub(now) < c.limit) {
		c.limit = end.Sub(now) // a slow dial must not carry the key past its window
	}
	if deadline, ok := c.ctx.Deadline(); c.limit > 0 && (!ok || now.Add(c.limit).Before(deadline)) {
		// Not where the caller's own deadline is what limits: that the
		// context ends then has to be seen as the caller's doing.
		c.timer = time.AfterFunc(c.limit, func() { cancel(errAttemptTimeout) })
	}
	return ctx
}

func (c *call) cancelAttempt() {
	if c.timer != nil {
		c.timer.Stop()
	}
	if c.cancel != nil {
		c.cancel(context.Canceled)
	}
}

// insideContext is what Base and Prepare see of the caller's context.
type insideContext struct{ context.Context }

type insideKey struct{}

func (c *insideContext) Value(key any) any {
	switch key.(type) {
	case intentKey, policyKey, reportKey:
		return nil
	case insideKey:
		return true
	}
	return c.Context.Value(key)
}

// attemptRequest is what one attempt has of its own, in one allocation. It is
// never used again: a connection may hold on to it.
type attemptRequest struct {
	req   http.Request
	url   url.URL
	key   [1]string
	guard guard
}

// clone makes the attempt's own request. Header and URL are deep copies: an
// attempt that was given up may still be writing them when the next starts.
func (c *call) clone(ctx context.Context) (*http.Request, *guard, error) {
	a := new(attemptRequest)
	var g *guard
	if c.class != safe {
		g = &a.guard
		g.cancel, g.up, g.plainH1 = c.cancel, c.up, c.st.plainH1 || c.up.proto.Load() == 1
	}
	a.req, a.url = *c.req.WithContext(ctx), *c.req.URL
	clone := &a.req
	clone.URL = &a.url
	clone.Header = c.req.Header.Clone()
	if clone.Header == nil {
		clone.Header = make(http.Header, 2)
	}
	if c.becameGet != "" {
		deleteHeader(clone.Header, c.becameGet)
	}
	if c.key != "" && c.class != safe {
		deleteHeader(clone.Header, c.pol.KeyHeader)
		a.key[0] = c.key
		clone.Header[http.CanonicalHeaderKey(c.pol.KeyHeader)] = a.key[:]
	}
	setDeadlineHeader(clone.Header, c.pol.DeadlineHeader, c.limit)
	if c.body.stream == nil && clone.Trailer != nil {
		clone.Trailer = clone.Trailer.Clone()
	}
	if err := c.prepare(clone); err != nil {
		return nil, nil, err
	}
	if err := c.body.attach(clone); err != nil {
		c.bodyFailed = true
		return nil, nil, err
	}
	clone.GetBody = nil
	if g != nil {
		// Not before Prepare: what that sends, for a token, proves nothing here.
		a.req = *a.req.WithContext(g.watch(ctx, !c.st.plainBase && (c.body.none || !c.honored())))
		g.arm(clone, c.honored(), c.st.plainBase)
	}
	return clone, g, nil
}

// honored reports whether sending the key again is safe.
func (c *call) honored() bool {
	return c.pol.Keys == KeysHonored && c.key != ""
}

// prepare runs the caller's hook on the attempt's clone and makes sure that
// it changed nothing that makes the intent.
func (c *call) prepare(clone *http.Request) error {
	if c.st.prepare == nil {
		return nil
	}
	clone.Body, clone.GetBody = nil, nil
	if c.body.replayable() && c.body.stream == nil && !c.body.none {
		// A signer may read the body; what is sent is attached afterwards.
		if err := c.body.attach(clone); err != nil {
			c.bodyFailed = true
			return err
		}
		defer clone.Body.Close()
	}
	u, method, host := *clone.URL, clone.Method, clone.Host
	if err := c.st.prepare(clone); err != nil {
		return fmt.Errorf("the Prepare hook: %w", err)
	}
	key, _, err := callersKey(clone.Header, c.pol.KeyHeader)
	switch {
	case clone.URL == nil || *clone.URL != u || clone.Method != method || clone.Host != host:
		return fmt.Errorf("%w: Prepare changed the method, the URL or the host; it may only set headers", ErrInvalid)
	case err != nil || c.key != "" && c.class != safe && key != c.key:
		return fmt.Errorf("%w: Prepare changed the idempotency key; it may only set other headers", ErrInvalid)
	}
	return nil
}

// judge says what an attempt's result means. An answer that is final and will
// be saved is read here, under the attempt's timeout: one that breaks off is
// not an answer.
func (c *call) judge(resp *http.Response, err error, g *guard) (*http.Response, judgement, error) {
	var v Verdict
	if err == nil && resp.ProtoMajor > 0 {
		c.up.proto.Store(int32(resp.ProtoMajor))
	}
	sent := true
	if err != nil {
		// What was sent is judged by the base's own error; the caller gets
		// one that says who ended the attempt.
		sent = !neverSent(err)
		if g != nil {
			sent = !g.nothingSent(err)
			c.stale = g.stale() && g.reused.Load()
		}
		switch {
		case g != nil && g.vetoed.Load():
			err = errHiddenSend
		case context.Cause(c.attemptCtx) == errAttemptTimeout && c.over() == nil:
			err = errAttemptTimeout
		}
	}
	if c.pol.Classify != nil {
		v = c.pol.Classify(Attempt{Request: c.req, Response: resp, Err: err, N: c.n,
			Repeat: c.doubt || c.n > 1, Ambiguous: c.doubt})
	}
	if v.Kind > VerdictInProgress {
		v.Kind = VerdictAmbiguous // not a kind we know
	}
	if err != nil {
		j := judgeError(err, sent)
		if v.Kind != VerdictDefault {
			j.kind, j.final, j.stop = v.Kind, true, false
		}
		if v.Wait > 0 {
			j.wait, j.asked = v.Wait, true
		}
		j.stop = j.stop || v.Stop
		return nil, j, err
	}
	j := judgeAnswer(resp, v, c.situation(), time.Now())
	if resp.StatusCode == http.StatusConflict && j.kind == VerdictRejected && !j.final && c.class == unsafe && c.honored() &&
		(c.callersKey || c.pol.NewKey != nil) {
		// A key that others can know may be at work elsewhere, under another store.
		j.kind, j.stop = VerdictAmbiguous, true
	}
	if j.kind == VerdictDone || j.kind == VerdictRejected {
		if err := c.keep(resp); err != nil {
			resp.Body.Close()
			if context.Cause(c.attemptCtx) == errAttemptTimeout && c.over() == nil {
				err = errAttemptTimeout
			}
			// What its header asked for still holds.
			j.kind, j.final, j.turnedAway = VerdictAmbiguous, false, false
			return nil, j, fmt.Errorf("reading the answer: %w", err)
		}
	}
	return resp, j, nil
}

func (c *call) situation() situation {
	return situation{class: c.class, method: c.method, honored: c.honored(), doubt: c.doubt}
}

// keep reads the answer to a named intent, if it is to be saved.
func (c *call) keep(resp *http.Response) error {
	limit := c.pol.MaxResponseBytes
	if !c.named || limit == Off || resp.ContentLength > limit || resp.Body == http.NoBody {
		c.saved = c.named && limit != Off && resp.Body == http.NoBody
		return nil
	}
	if resp.ContentLength < 0 && !readable(resp.Header.Get("Content-Type")) {
		return nil
	}
	buf, all, err := readUpTo(resp.Body, limit, resp.ContentLength)
	switch {
	case err != nil:
		return err
	case all:
		resp.Body.Close()
		resp.Body = newMemoryBody(buf)
		c.savedBody, c.saved = buf, true
	default:
		resp.Body = &peekedBody{r: io.MultiReader(bytes.NewReader(buf), resp.Body), Closer: resp.Body}
	}
	return nil
}

// readable reports whether an answer of this type ends by itself, unlike a
// stream of events.
func readable(contentType string) bool {
	t, _, _ := mime.ParseMediaType(contentType)
	return t == "application/json" || t == "application/xml" || t == "text/xml" || t == "text/json" ||
		t == "application/x-www-form-urlencoded" || strings.HasSuffix(t, "+json") || strings.HasSuffix(t, "+xml")
}

// next decides whether to go on. A reason, or a negative wait, ends the call:
// with a reason if retrying stopped, without if the answer is final.
func (c *call) next(resp *http.Response, j judgement, err error) (wait time.Duration, reason error) {
	now := time.Now()
	if j.asked {
		c.retryAt = now.Add(j.wait)
	}
	if err != nil && c.over() != nil {
		c.doubt = c.doubt || j.kind == VerdictAmbiguous || j.kind == VerdictInProgress
		return 0, overReason(c.over())
	}
	switch j.kind {
	case VerdictDone, VerdictRejected:
		return -1, nil
	case VerdictAmbiguous, VerdictInProgress:
		c.doubt = true
	case VerdictNotProcessed:
		c.answered = c.answered || resp != nil
	}
	if j.stop {
		return -1, nil
	}
	if c.stale && j.kind == VerdictNotProcessed && err != nil && c.body.replayable() && c.deadConns < maxDeadConns {
		c.deadConns++
		// A dead connection from the pool: nothing was sent, and every such
		// try removes one. net/http goes on in the same way.
		c.attempts--
		c.n--
		return 0, nil
	}
	switch {
	case j.kind != VerdictNotProcessed && c.class == unsafe && !c.honored():
		return 0, ErrUnsafe
	case !c.body.replayable():
		return 0, ErrBody
	case j.kind == VerdictInProgress:
		if c.polls++; c.polls > maxPolls {
			return 0, ErrAttempts
		}
		wait = backoffBound(time.Second, c.pol.MaxDelay, c.polls-1)
	default:
		if resp != nil && resp.StatusCode == http.StatusInternalServerError && c.class == unsafe {
			if c.fives++; c.fives > 1 {
				// Some upstreams save a 500 and play it back for ever.
				return 0, ErrAttempts
			}
		}
		if c.tries++; c.tries >= c.pol.MaxAttempts {
			return 0, ErrAttempts
		}
		wait = backoff(c.pol.BaseDelay, c.pol.MaxDelay, c.tries-1, rand.Int64N)
	}
	if j.asked {
		if j.wait > max(c.pol.MaxRetryAfter, 0) {
			return 0, ErrDeadline
		}
		if j.kind == VerdictInProgress {
			wait = max(wait, j.wait)
		} else {
			wait = j.wait + min(wait, math.MaxInt64-j.wait)
		}
	}
	if !fits(now, wait, c.until) {
		c.retryAt = now.Add(wait)
		return 0, ErrDeadline
	}
	if c.keyExpired(now.Add(wait)) {
		return 0, ErrKeyExpired
	}
	if retryAt, open := c.up.breaker.open(now); open {
		c.retryAt = retryAt
		return 0, ErrOpen
	}
	if gone := c.over(); gone != nil {
		return 0, overReason(gone)
	}
	if !c.up.budget.take(now) {
		return 0, ErrBudget
	}
	return wait, nil
}

// maxDeadConns bounds how many dead connections of the pool one call removes.
const maxDeadConns = 100

// maxPolls is how often we ask again for work in progress.
const maxPolls = 10

// pause keeps the lease alive and waits. It returns the reason to stop, or nil.
func (c *call) pause(wait time.Duration, asked bool) (reason, err error) {
	c.st.trace.wait(c.ctx, WaitInfo{Upstream: c.up.name, RecordID: c.id, N: c.n + 1, Delay: wait, Asked: asked})
	if err := c.renew(wait); err != nil {
		return ErrStore, fmt.Errorf("renewing the lease: %w", err)
	}
	if err := c.sleep(wait); err != nil {
		return overReason(err), err
	}
	return nil, nil
}

const (
	drainBytes = 16 << 10
	drainTime  = 100 * time.Millisecond
)

// discard drains a response that will be followed by another attempt, so that
// its connection can be used again, within bounds: some bodies never end. It
// returns the response with its body in memory if that was all of it: should
// nothing follow, it is the last answer.
func (c *call) discard(resp *http.Response) *http.Response {
	if resp == nil {
		return nil
	}
	defer c.cancelAttempt()
	defer resp.Body.Close()
	if resp.ContentLength > drainBytes {
		return nil
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	cancel := c.cancel // this attempt's: the timer may fire when the next has begun
	timer := time.AfterFunc(drainTime, func() { cancel(context.Canceled) })
	defer timer.Stop()
	buf, all, err := readUpTo(resp.Body, drainBytes, resp.ContentLength)
	if err != nil || !all {
		return nil
	}
	last := *resp
	last.Body = newMemoryBody(buf)
	return &last
}
