package sqlstore

import (
	"context"
	"errors"
	"runtime"
	"sync"
)

// group lets concurrent writes share one transaction, and so one fsync. The
// caller that finds nobody at work leads: it takes all that is queued, commits
// it, and hands the lead to one of those who came meanwhile. There is no
// goroutine and no timer; a write that is alone waits for nobody.
type group struct {
	// commit makes the batch durable together and sets every op's err. It
	// returns errNotBegun, and has done nothing, if ctx, the leader's, ended
	// before it could begin.
	commit func(ctx context.Context, batch []*op) error

	mu      sync.Mutex
	queue   []*op // guarded by mu
	leading bool  // guarded by mu: someone leads, or has been told to
}

// op is one write.
type op struct {
	claim bool // must be durable before it is acknowledged
	apply func(context.Context, *writer) error
	err   error

	done     chan struct{} // closed when err is set
	lead     chan struct{} // closed when the lead is handed to this op's caller
	promoted bool          // guarded by group.mu: lead was closed
	gone     bool          // guarded by group.mu: its caller left while it was in a batch
}

// maxGroup bounds a transaction, and with it how long the first of a group
// waits for the last.
const maxGroup = 256

var errNotBegun = errors.New("the transaction was not begun")

// do commits o, alone or with others. If ctx ends first, o may or may not be
// committed.
func (g *group) do(ctx context.Context, o *op) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	o.done, o.lead = make(chan struct{}), make(chan struct{})
	g.mu.Lock()
	g.queue = append(g.queue, o)
	wait := g.leading
	g.leading = true
	g.mu.Unlock()
	if wait {
		select {
		case <-o.done:
			return o.err
		case <-o.lead:
		case <-ctx.Done():
			if g.withdraw(o) {
				return ctx.Err()
			}
			select {
			case <-o.done:
				return o.err
			default:
				return ctx.Err() // it is being committed
			}
		}
	}
	return g.leadWith(ctx, o)
}

// leadWith commits the queue, which o is in, and hands the lead on.
func (g *group) leadWith(ctx context.Context, o *op) error {
	// Those whose write was just committed are about to come with their next.
	runtime.Gosched()
	g.mu.Lock()
	n := min(len(g.queue), maxGroup)
	batch := g.queue[:n:n]
	g.queue = g.queue[n:]
	g.mu.Unlock()

	err := g.commit(ctx, batch)
	g.mu.Lock()
	defer g.mu.Unlock()
	if errors.Is(err, errNotBegun) {
		// Our time is over, not theirs.
		rest := make([]*op, 0, len(batch)+len(g.queue))
		for _, other := range batch {
			if other != o && !other.gone {
				rest = append(rest, other)
			}
		}
		g.queue = append(rest, g.queue...)
		g.handOn()
		return err
	}
	for _, other := range batch {
		close(other.done)
	}
	g.handOn()
	return o.err
}

// handOn is called with mu held.
func (g *group) handOn() {
	if len(g.queue) == 0 {
		g.leading = false
		return
	}
	g.queue[0].promoted = true
	close(g.queue[0].lead)
}

// withdraw takes o out of the queue, if it is still there.
func (g *group) withdraw(o *op) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, other := range g.queue {
		if other == o {
			g.queue = append(g.queue[:i:i], g.queue[i+1:]...)
			if o.promoted {
				g.handOn()
			}
			return true
		}
	}
	o.gone = true
	return false
}
