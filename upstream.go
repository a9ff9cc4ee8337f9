package oncehttp

import (
	"container/list"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// maxUpstreams bounds the state that hosts we are sent to can make us keep.
const maxUpstreams = 10_000

// upstream is what calls to one upstream share.
type upstream struct {
	name     string
	written  Policy // as the caller wrote it, for WithPolicy to override
	policy   Policy // resolved
	budget   *budget
	breaker  *breaker
	limits   limits
	inFlight atomic.Int64
	proto    atomic.Int32 // major HTTP version of the last answer; 0 none yet
}

func newUpstream(name string, written Policy, now time.Time) *upstream {
	u := &upstream{name: name, written: written, policy: written.resolve()}
	u.budget = newBudget(u.policy.Budget, now)
	u.breaker = newBreaker(name, u.policy.Breaker)
	u.limits = newLimits(&u.policy)
	return u
}

// UpstreamState is a snapshot for metrics.
type UpstreamState struct {
	Known    bool      // false: never called, or forgotten since
	Tokens   float64   // left in the retry budget; +Inf if it is off
	Breaker  string    // "closed", "open", "half-open" or "off"
	RetryAt  time.Time // when open: of the next probe
	InFlight int       // attempts that wait for an answer
}

func (u *upstream) snapshot(now time.Time) UpstreamState {
	s := UpstreamState{Known: true, Tokens: u.budget.tokens(), Breaker: u.breaker.name(), InFlight: int(u.inFlight.Load())}
	s.RetryAt, _ = u.breaker.open(now)
	return s
}

// registry finds an upstream's state by name and keeps at most max of them:
// the least recently used one whose breaker is not open goes. An idle upstream
// with a full bucket and a closed breaker equals a new one. If all are open,
// new names share one budget, breaker and limits.
type registry struct {
	policyOf func(name string) Policy
	max      int

	mu     sync.Mutex
	byName map[string]*list.Element // guarded by mu
	lru    list.List                // guarded by mu: of *upstream, the latest used first
	shared *upstream                // guarded by mu: what names without an entry share
}

func newRegistry(max int, policyOf func(string) Policy) *registry {
	return &registry{max: max, policyOf: policyOf, byName: make(map[string]*list.Element)}
}

func (r *registry) get(name string) *upstream {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.byName[name]; ok {
		r.lru.MoveToFront(e)
		return e.Value.(*upstream)
	}
	now := time.Now()
	if r.lru.Len() >= r.max && !r.evict(now) {
		if r.shared == nil {
			r.shared = newUpstream("(others)", r.policyOf(""), now)
		}
		u := &upstream{name: name, written: r.policyOf(name), budget: r.shared.budget, breaker: r.shared.breaker, limits: r.shared.limits}
		u.policy = u.written.resolve()
		return u
	}
	u := newUpstream(name, r.policyOf(name), now)
	r.byName[name] = r.lru.PushFront(u)
	return u
}

// evict is called with mu held.
func (r *registry) evict(now time.Time) bool {
	for e := r.lru.Back(); e != nil; e = e.Prev() {
		u := e.Value.(*upstream)
		if _, open := u.breaker.open(now); !open {
			r.lru.Remove(e)
			delete(r.byName, u.name)
			return true
		}
	}
	return false
}

func (r *registry) peek(name string) *upstream {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.byName[name]; ok {
		return e.Value.(*upstream)
	}
	return nil
}

// upstreamOfHost is the default Transport.UpstreamOf: the host, so that a
// policy, a budget or a breaker is found under whatever spelling.
func upstreamOfHost(req *http.Request) string {
	name := normalName(req.URL.Host)
	switch req.URL.Scheme {
	case "http":
		return strings.TrimSuffix(name, ":80")
	case "https":
		return strings.TrimSuffix(name, ":443")
	}
	return name
}

// normalName lower-cases a host[:port] and removes the root's trailing dot.
func normalName(name string) string {
	name = strings.ToLower(name)
	host, port, ok := strings.Cut(name, ":")
	if !ok {
		return strings.TrimSuffix(name, ".")
	}
	if strings.HasSuffix(host, ".") {
		return strings.TrimSuffix(host, ".") + ":" + port
	}
	return name
}
