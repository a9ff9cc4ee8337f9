package oncehttp

import (
	"errors"
	"fmt"
	"net/http"
	"time"
)

// outcomeOf says what is known after the last answer, or after none. turnedAway
// tells a rejection that the same request may be called again after.
func (c *call) outcomeOf(resp *http.Response, j judgement) (o Outcome, turnedAway bool) {
	// What settles: nothing was in doubt, or the answer ends the doubt, or
	// the method makes the last answer the truth.
	settles := !c.doubt || j.final || c.class == safe
	switch {
	case j.kind == VerdictDone && settles:
		return Done, false
	case j.kind == VerdictRejected && settles:
		return Rejected, j.turnedAway
	case j.kind == VerdictNotProcessed && resp != nil && (!c.doubt || c.class == safe):
		return Rejected, true
	case resp != nil || c.doubt:
		return Unknown, false
	case c.answered:
		return Rejected, true // turned away once, and not sent since
	}
	return NotSent, false
}

// conclude ends the call with its last answer or error: it settles the intent
// and hands the answer over.
func (c *call) conclude(resp *http.Response, j judgement, reason, err error) (*http.Response, error) {
	o, turnedAway := c.outcomeOf(resp, j)
	if resp == nil {
		if gone := c.over(); gone != nil && !errors.Is(err, gone) {
			err = joinCause(gone, err)
		}
		if c.bodyFailed {
			reason = ErrBody
		}
		if o = c.settle(o, turnedAway, nil); c.overtakenBy != nil {
			// Another run of the intent has its answer: it is ours too.
			c.fill(o, nil, func(r *Report) { r.Replayed, r.Status = true, c.overtakenBy.Status })
			return c.replay(c.overtakenBy), nil
		}
		return nil, c.end(o, reason, err)
	}
	if reason == nil && (j.kind == VerdictDone || j.kind == VerdictRejected) {
		c.up.budget.earn()
	}
	c.fill(o, reason, func(r *Report) {
		r.Replayed = r.Replayed || j.replay
	})
	resp.Request = c.answerRequest()
	if c.timer != nil {
		c.timer.Stop()
	}
	whole := c.saved || resp.Body == http.NoBody || resp == c.last
	if whole {
		c.cancelAttempt()
	} else {
		c.respBody.ReadCloser, c.respBody.call = resp.Body, c
		resp.Body = &c.respBody
	}
	if whole || o != Done {
		var saved *SavedResponse
		if c.saved && (o == Done || o == Rejected) {
			saved = &SavedResponse{Status: resp.StatusCode, Header: allowed(resp.Header, savedHeaders), Body: c.savedBody}
		}
		if known := c.settle(o, turnedAway, saved); known != o {
			c.report.set(func(r *Report) { r.Outcome = known })
		}
	}
	return resp, nil
}

func joinCause(cause, err error) error {
	if err == nil {
		return cause
	}
	return fmt.Errorf("%w: %w", cause, err)
}

// bodyEnded runs once, when the caller has read the answer's body to its end,
// has closed it, or cannot read on. Until then Done was provisional.
func (c *call) bodyEnded(err error) {
	c.cancelAttempt()
	o := c.report.get().Outcome
	known := o
	if err != nil && o == Done && c.becameGet == "" {
		known = Unknown
	}
	if known = c.settle(known, false, nil); known != o {
		c.report.set(func(r *Report) { r.Outcome = known })
	}
}

// end makes the *Error of a call that returns no response, and closes the
// request's body.
func (c *call) end(o Outcome, reason, err error) error {
	c.closeBody()
	c.leaveHere()
	c.fill(o, reason, nil)
	return &Error{Report: c.report.get(), Err: err}
}

// fill brings the report up to date.
func (c *call) fill(o Outcome, reason error, more func(*Report)) {
	attempts := c.attempts
	if c.prev != nil {
		before := c.prev.report.get()
		attempts += before.Attempts
		if c.becameGet != "" {
			o = before.Outcome // the GET that a 303 leads to tells nothing about the POST
		}
	}
	c.report.set(func(r *Report) {
		r.Outcome, r.Reason, r.Attempts = o, reason, attempts
		if c.status != 0 {
			r.Status = c.status
		}
		r.RetryAt, r.Waited = c.retryAt, c.waited
		if more != nil {
			more(r)
		}
	})
}

// abandon cleans up when a panic of the base or of a hook goes through us. What
// the attempt did is not known.
func (c *call) abandon() {
	c.leave(errBreakerExcluded)
	c.cancelAttempt()
	if c.current != nil {
		c.current.Body.Close()
	}
	c.closeBody()
	o := NotSent
	if c.attempts > 0 || c.doubt {
		o = Unknown
	}
	c.settle(o, false, nil)
}

// closeBody closes the request's body, if an attempt does not still have it.
func (c *call) closeBody() {
	c.body.close()
	if !c.bodyTaken && c.req != nil && c.req.Body != nil {
		c.bodyTaken = true
		c.req.Body.Close()
	}
}

// Key returns the idempotency key of req's intent, made and persisted if it
// has none yet: for APIs that want it in the body. The request needs a named
// intent (WithIntent) or has the key in it already; nothing is sent. The body
// is not looked at, and stays open.
func (t *Transport) Key(req *http.Request) (string, error) {
	c, err := t.about(req)
	if err != nil {
		return "", err
	}
	key, ok, err := callersKey(req.Header, c.pol.KeyHeader)
	if err == nil && ok {
		err = checkKey(key, c.pol.KeyMaxLen)
	}
	if err == nil && !ok {
		key, err = c.pol.newKey(c.ctx, Intent{Name: c.name, Upstream: c.up.name, Scope: c.scope, RecordID: c.id})
	}
	if err != nil {
		return "", c.end(NotSent, ErrInvalid, err)
	}
	now := time.Now()
	stored, _, err := c.st.store.Create(c.ctx, Record{
		ID: c.id, Upstream: c.up.name, Scope: c.scope, Intent: c.name, Key: key, State: StateReserved,
		Owner: ownerToken(c.st.owner, c.st.life), Updated: wall(now), Expires: wall(now.Add(retention)),
	})
	if err != nil {
		return "", c.end(NotSent, ErrStore, err)
	}
	if ok && stored.Key != key {
		return "", c.end(NotSent, ErrIntentMismatch, nil)
	}
	return stored.Key, nil
}

// Settle ends the intent of req, because the caller learnt elsewhere what
// became of it, for instance from a webhook: Done or Rejected for good, or
// NotSent, so that it may be called again. note is kept in the record. An
// intent that has ended already must have ended the same way, else the error
// is ErrSettled; one that is under way is ErrInFlight. Of req, which is not
// sent, only the URL's host, the header's key and the context count; in a
// webhook's handler a request made with http.NewRequestWithContext and
// WithIntent will do.
func (t *Transport) Settle(req *http.Request, o Outcome, note string) error {
	c, err := t.about(req)
	if err != nil {
		return err
	}
	if o == Unknown || o > Done {
		return c.end(NotSent, ErrInvalid, errors.New("only Done, Rejected and NotSent settle an intent"))
	}
	want := settledState(o, false)
	for {
		rec, err := c.st.store.Get(c.ctx, c.id)
		if err != nil {
			return c.end(Unknown, ErrStore, err)
		}
		now := time.Now()
		switch {
		case rec.State == want:
			return nil
		case rec.State == StateDone || rec.State == StateRejected:
			return c.end(rec.outcome(), ErrSettled, nil)
		case rec.State == StateSending && now.Before(rec.Lease):
			c.retryAt = rec.Lease
			return c.end(Unknown, ErrInFlight, nil)
		}
		rec.State, rec.Note, rec.Lease, rec.Request = want, note, time.Time{}, nil
		rec.Response, rec.Status = nil, 0 // of an answer that was not the last word
		rec.Owner = ownerToken(c.st.owner, c.st.life)
		rec.Updated, rec.Expires = wall(now), wall(now.Add(retention))
		if _, err = c.st.store.Update(c.ctx, rec); err == nil || !errors.Is(err, ErrConflict) {
			if err != nil {
				return c.end(Unknown, ErrStore, err)
			}
			return nil
		}
	}
}

// about finds the named intent of a request that is not sent.
func (t *Transport) about(req *http.Request) (*call, error) {
	c := &call{st: t.settings(), req: req, bodyTaken: true}
	if req == nil {
		return nil, c.end(NotSent, ErrInvalid, errors.New("the request is nil"))
	}
	c.ctx = req.Context()
	err := c.st.err
	if err == nil {
		err = checkURL(req.URL)
	}
	if err == nil {
		err = c.who()
	}
	if err != nil {
		return nil, c.end(NotSent, ErrInvalid, err)
	}
	if c.st.scope != nil {
		c.scope = c.st.scope(req)
	}
	name, named := c.ctx.Value(intentKey{}).(string)
	if named {
		c.name = name
		c.id = recordID(kindName, c.up.name, c.scope, name)
		if err := checkIntentName(name); err != nil {
			return nil, c.end(NotSent, ErrInvalid, err)
		}
		return c, nil
	}
	key, ok, err := callersKey(req.Header, c.pol.KeyHeader)
	if err == nil && !ok {
		err = errors.New("the request has no named intent; use WithIntent")
	}
	if err != nil {
		return nil, c.end(NotSent, ErrInvalid, err)
	}
	c.id = recordID(kindKey, c.up.name, c.scope, key)
	return c, nil
}
