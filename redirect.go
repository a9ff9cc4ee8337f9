package oncehttp

import (
	"errors"
	"fmt"
	"net/http"
	"time"
)

// redirectedFrom returns the call whose answer made http.Client send req, if
// it was one of ours.
func redirectedFrom(req *http.Request) *call {
	if req.Response == nil || req.Response.Request == nil {
		return nil
	}
	c, _ := req.Response.Request.Context().Value(answerKey{}).(*call)
	return c
}

// leavesUnseen reports a redirect hop to another upstream whose first call we
// cannot find.
func (c *call) leavesUnseen() bool {
	if c.req.Response == nil || c.pol.FollowElsewhere {
		return false
	}
	from := c.req.Response.Request
	return from == nil || from.URL == nil || normalName(c.st.upstreamOf(from)) != c.up.name ||
		from.URL.Scheme == "https" && c.req.URL.Scheme != "https"
}

// follow is the claim of a redirect hop: 307 or 308 of a keyed request. The
// intent goes on, under the same key and record.
func (c *call) follow() error {
	downgrade := c.prev.req.URL.Scheme == "https" && c.req.URL.Scheme != "https"
	before := c.prev.report.get()
	c.report.set(func(r *Report) { r.Intent, r.RecordID, r.Status = before.Intent, before.RecordID, before.Status })
	c.key, c.name, c.id, c.named, c.print = c.prev.key, c.prev.name, c.prev.id, c.prev.named, c.prev.print
	c.doubt, c.answered = c.prev.doubt, true
	if before.Outcome == Done {
		return c.end(Done, ErrSettled, errors.New("the upstream redirected what it had done"))
	}
	if (c.prev.up.name != c.up.name || downgrade) && !c.prev.pol.FollowElsewhere {
		return c.end(before.Outcome, ErrRedirect, fmt.Errorf("from %s to %s", c.prev.up.name, c.up.name))
	}
	if c.id == "" {
		return nil
	}
	rec := c.prev.rec
	now := time.Now()
	rec.State, rec.Owner, rec.Lease, rec.Updated = StateSending, ownerToken(c.st.owner, c.st.life), c.lease(now, 0), wall(now)
	ctx, cancel := c.storeContext()
	defer cancel()
	stored, err := c.st.store.Update(ctx, rec)
	if err != nil {
		if got, gerr := c.st.store.Get(ctx, c.id); gerr == nil && got.Owner == rec.Owner {
			stored, err = got, nil // written all the same
		}
	}
	switch {
	case errors.Is(err, ErrConflict):
		return c.end(Unknown, ErrInFlight, err)
	case err != nil:
		c.st.trace.storeError(c.ctx, c.id, "claim", err)
		return c.end(before.Outcome, ErrStore, err)
	}
	c.hold(stored)
	return nil
}
