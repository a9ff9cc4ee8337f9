package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// Transport is an http.RoundTripper that makes calls safe to retry. Its zero
// value works. Set the fields before the first call: they are read once, then.
// It is safe for concurrent use, and one Transport is meant to be shared: what
// it learns about an upstream helps all its callers.
type Transport struct {
	// Base sends the attempts. Nil means http.DefaultTransport. A Transport
	// of this package further down sends only once inside our attempts.
	Base http.RoundTripper

	// Policy is for upstreams that Upstreams does not name, and gives the
	// zero fields of those that it does.
	Policy Policy

	// Upstreams has a policy by the upstream's name. Names are normalised
	// like hosts: lower case, no trailing dot.
	Upstreams map[string]Policy

	// UpstreamOf names the upstream of a request. Nil means its URL's host,
	// lower case, with no trailing dot and without the scheme's default port.
	// Give an endpoint that must not share an intent or a budget with the
	// rest of its host, such as a token endpoint, a name of its own.
	UpstreamOf func(*http.Request) string

	// Scope says who may share a key, for instance the merchant's account. It
	// is part of what identifies an intent. Nil means one scope for all.
	Scope func(*http.Request) string

	// Store keeps the intents. Nil means a MemoryStore of its own. Anything
	// but a *MemoryStore counts as durable.
	Store KeyStore

	// Owner is unique among the running processes on one store and stable
	// over restarts, such as a pod's name: what an earlier life of it left
	// behind is taken over at once, without waiting for its lease. "" means
	// that every process is new.
	Owner string

	// Prepare is called with each attempt's own request, to sign it or to
	// put a fresh token in. It may set headers, and read the body if that can
	// be read again; it cannot change the key, the URL or the body. Its error
	// ends the call.
	Prepare func(*http.Request) error

	// Trace is told what happens. Nil costs nothing.
	Trace *Trace

	once sync.Once
	st   *settings // set by once
}

// settings is what a Transport does with its fields at its first use.
type settings struct {
	err        error // the settings cannot work
	base       http.RoundTripper
	plainH1    bool
	plainBase  bool // net/http's own Transport gets what we send, nobody between
	upstreamOf func(*http.Request) string
	scope      func(*http.Request) string
	store      KeyStore
	durable    bool
	owner      string
	life       string
	prepare    func(*http.Request) error
	trace      *Trace
	upstreams  *registry
	here       here
}

func (t *Transport) settings() *settings {
	t.once.Do(func() {
		st := &settings{
			err: t.Validate(), base: t.Base, upstreamOf: t.UpstreamOf, scope: t.Scope, store: t.Store,
			owner: t.Owner, life: processLife(), prepare: t.Prepare, trace: t.Trace,
		}
		if st.base == nil {
			st.base = http.DefaultTransport
		}
		st.plainH1 = speaksPlainH1(st.base)
		_, st.plainBase = st.base.(*http.Transport)
		if st.upstreamOf == nil {
			st.upstreamOf = upstreamOfHost
		}
		if st.store == nil {
			st.store = &MemoryStore{}
		}
		_, inMemory := st.store.(*MemoryStore)
		st.durable = !inMemory
		written := make(map[string]Policy, len(t.Upstreams))
		for name, p := range t.Upstreams {
			written[normalName(name)] = p.or(t.Policy)
		}
		byDefault := t.Policy
		st.upstreams = newRegistry(maxUpstreams, func(name string) Policy {
			if p, ok := written[name]; ok {
				return p
			}
			return byDefault
		})
		t.st = st
	})
	return t.st
}

// Client returns an http.Client that uses t. It sets no Timeout: that would
// cover all attempts and waits together. Use the context's deadline,
// Policy.AttemptTimeout and Policy.MaxElapsed.
func (t *Transport) Client() *http.Client {
	return &http.Client{Transport: t}
}

// Validate reports the first setting that cannot work. RoundTrip calls it
// once, and fails every call with what it says.
func (t *Transport) Validate() error {
	check := func(where string, written, merged Policy) error {
		err := written.validate()
		if err == nil {
			err = merged.contradiction()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", where, err)
		}
		return nil
	}
	if err := check("Policy", t.Policy, t.Policy); err != nil {
		return err
	}
	seen := make(map[string]string, len(t.Upstreams))
	for name, p := range t.Upstreams {
		normal := normalName(name)
		if normal == "" {
			return errors.New("a name in Upstreams is empty")
		}
		if other, ok := seen[normal]; ok {
			return fmt.Errorf("the names %q and %q in Upstreams are one", other, name)
		}
		seen[normal] = name
		if err := check(fmt.Sprintf("Upstreams[%q]", name), p, p.or(t.Policy)); err != nil {
			return err
		}
	}
	return nil
}

// CloseIdleConnections closes the base's, if it can.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.settings().base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// Upstream returns a snapshot of what calls to the upstream of that name
// share. It does not create it.
func (t *Transport) Upstream(name string) UpstreamState {
	u := t.settings().upstreams.peek(normalName(name))
	if u == nil {
		return UpstreamState{}
	}
	return u.snapshot(time.Now())
}

// RoundTrip implements http.RoundTripper. Any answer of the upstream is
// returned as a response, also when retrying it did not help: ReportOf says
// why that stopped. Every other end is an *Error.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	c := &call{st: t.settings(), req: req}
	var resp *http.Response
	var err error
	finished := false
	defer func() {
		if !finished { // a panic of the base or of a hook goes through us
			if resp != nil {
				resp.Body.Close()
			}
			c.abandon()
		}
	}()
	resp, err = c.do()
	c.closeBody()
	rep := c.report.get()
	if r, ok := c.context().Value(reportKey{}).(*Report); ok && r != nil {
		*r = rep
	}
	c.st.trace.callDone(c.context(), rep)
	finished = true
	return resp, err
}

// call is one RoundTrip.
type call struct {
	st     *settings
	req    *http.Request // the caller's: never changed
	ctx    context.Context
	inside insideContext
	answer answerContext
	start  time.Time
	until  time.Time // zero: never

	// who and what
	up         *upstream
	pol        *Policy
	method     string
	class      methodClass
	prev       *call  // of a redirect: the hop before
	becameGet  string // of a redirect that made a GET of it: the header that had the key
	scope      string
	name       string // of the intent
	id         string // of the record; "" if there is none
	named      bool   // other calls can be for the same intent
	callersKey bool   // the request came with the key
	bodyTaken  bool   // the request's Body is no longer ours to close
	bodyFailed bool   // GetBody failed in an attempt
	key        string
	print      [32]byte
	body       requestBody

	// the record, while it is ours
	rec  Record
	held bool
	// isHere: this run is registered in settings.here
	isHere bool
	// overtakenBy: the answer of the run that ended the intent before us
	overtakenBy *SavedResponse

	// how it goes
	n, tries, polls, fives int
	deadConns              int
	attempts, status       int
	firstSent              time.Time
	doubt                  bool // a send, of this call or an earlier one, may have had its effect
	answered               bool // an answer said that it was turned away
	waited                 time.Duration
	retryAt                time.Time
	last                   *http.Response // an answer that was to be retried, in memory
	lastErr                error
	lastJudgement          judgement
	report                 liveReport

	// the attempt under way
	attemptCtx  context.Context
	cancel      context.CancelCauseFunc
	timer       *time.Timer
	limit       time.Duration
	slots       bool // admit's, to be given back
	breakerDone func(error)
	current     *http.Response // being judged
	stale       bool
	saved       bool // the answer is complete, in savedBody
	savedBody   []byte
	respBody    answerBody
	answerReq   http.Request
}

func (c *call) context() context.Context {
	if c.ctx == nil {
		return context.Background()
	}
	return c.ctx
}

// do carries the call through, in the order of the design: who, what, claim,
// attempts, settle.
func (c *call) do() (*http.Response, error) {
	if c.req == nil {
		return nil, c.end(NotSent, ErrInvalid, errors.New("the request is nil"))
	}
	c.ctx = c.req.Context()
	c.inside.Context, c.answer.Context, c.answer.call = c.ctx, c.ctx, c
	c.start = time.Now()
	c.method, c.class = c.req.Method, classOf(c.req.Method)
	if c.st.err != nil {
		return nil, c.end(NotSent, ErrInvalid, fmt.Errorf("the Transport's settings: %w", c.st.err))
	}
	if err := checkURL(c.req.URL); err != nil {
		return nil, c.end(NotSent, ErrInvalid, err)
	}
	if err := c.who(); err != nil {
		return nil, c.end(NotSent, ErrInvalid, err)
	}
	inside, _ := c.ctx.Value(insideKey{}).(bool)
	if inside && c.ctx.Value(intentKey{}) != nil {
		// An intent of its own, made inside an attempt: claimed, and sent once.
		once := *c.pol
		once.MaxAttempts = 1
		c.pol, inside = &once, false
	}
	if inside || c.req.Method == http.MethodConnect || isUpgrade(c.req.Header) {
		return c.passThrough()
	}
	c.until = callUntil(c.ctx, c.pol.MaxElapsed, c.start)
	if err := c.over(); err != nil {
		return nil, c.end(NotSent, overReason(err), err)
	}
	c.prev = redirectedFrom(c.req)
	if c.prev == nil && c.class != safe && c.leavesUnseen() {
		return nil, c.end(Unknown, ErrRedirect, errors.New("and the call that was redirected is not known: something above replaced its response's request"))
	}
	if err := c.what(); err != nil {
		return nil, err
	}
	if c.prev != nil && c.class != safe && (c.prev.key != "" || c.prev.id != "") {
		if err := c.follow(); err != nil {
			return nil, err
		}
	} else if c.id != "" {
		if resp, err := c.claim(); resp != nil || err != nil {
			return resp, err
		}
	}
	return c.loop()
}

// who finds the upstream and the policy.
func (c *call) who() error {
	name := normalName(c.st.upstreamOf(c.req))
	if name == "" {
		return errors.New("UpstreamOf returned no name")
	}
	c.up = c.st.upstreams.get(name)
	c.pol = &c.up.policy
	if over, ok := c.ctx.Value(policyKey{}).(*Policy); ok {
		pol, err := withOverride(over, c.up.written)
		if err != nil {
			return err
		}
		c.pol = pol
	}
	c.report.set(func(r *Report) { r.Upstream = c.up.name })
	return nil
}

// what finds the intent, its key and the body.
func (c *call) what() error {
	key, hasKey, err := callersKey(c.req.Header, c.pol.KeyHeader)
	if err != nil && c.class != safe {
		return c.end(NotSent, ErrInvalid, err)
	}
	hop := c.prev != nil
	name, named := c.ctx.Value(intentKey{}).(string)
	if c.class == safe || hop {
		named, hasKey = false, false
	}
	if hop && c.class == safe {
		c.becameGet = c.prev.becameGet
		if c.prev.class != safe {
			c.becameGet = c.prev.pol.KeyHeader
		}
	}
	if c.becameGet != "" {
		before := c.prev.report.get()
		c.report.set(func(r *Report) { r.Intent, r.RecordID = before.Intent, before.RecordID })
	}
	if named {
		if err := checkIntentName(name); err != nil {
			return c.end(NotSent, ErrInvalid, err)
		}
	}
	hasKey = hasKey && c.pol.Keys != KeysOff && (named || c.class == unsafe)
	if hasKey {
		if err := checkKey(key, c.pol.KeyMaxLen); err != nil {
			return c.end(NotSent, ErrInvalid, err)
		}
		c.key, c.callersKey = key, true
	}
	if c.st.scope != nil {
		c.scope = c.st.scope(c.req)
	}
	c.named = named || hasKey
	c.bodyTaken = true
	body, err := openBody(c.req, c.pol.MaxBodyBytes, c.named || c.pol.SaveRequest && c.st.durable)
	if err != nil {
		return c.end(NotSent, ErrBody, err)
	}
	c.body = body
	if c.named && body.stream != nil {
		if named {
			return c.end(NotSent, ErrBody, fmt.Errorf("a named intent needs a body of at most MaxBodyBytes (%d), or GetBody", c.pol.MaxBodyBytes))
		}
		// The caller's key names it, but it cannot be compared with what the
		// key was used for before: nothing is known about earlier sends.
		c.named, c.doubt = false, true
	}
	if hop {
		return nil
	}
	switch {
	case named:
		c.name = name
		c.id = recordID(kindName, c.up.name, c.scope, name)
	case c.named:
		c.id = recordID(kindKey, c.up.name, c.scope, key)
	case c.st.durable && c.class == unsafe && c.pol.Keys != KeysOff:
		if c.id, err = c.anonymousID(); err != nil {
			return c.end(NotSent, ErrInvalid, err)
		}
	}
	if c.key == "" && c.pol.Keys != KeysOff && (named || c.class == unsafe) {
		in := Intent{Name: c.name, Upstream: c.up.name, Scope: c.scope, RecordID: c.id}
		if in.RecordID == "" && c.pol.NewKey != nil {
			in.RecordID, err = c.anonymousID()
		}
		if err == nil {
			c.key, err = c.pol.newKey(c.ctx, in)
		}
		if err != nil {
			return c.end(NotSent, ErrInvalid, err)
		}
	}
	c.report.set(func(r *Report) { r.Intent, r.RecordID = c.name, c.id })
	if c.named {
		if c.print, err = c.fingerprint(); err != nil {
			return c.end(NotSent, ErrBody, fmt.Errorf("fingerprint: %w", err))
		}
	}
	return nil
}

// anonymousID is the record id of an intent that nothing else identifies.
func (c *call) anonymousID() (string, error) {
	random, err := randomKey()
	return recordID(kindAnon, c.up.name, c.scope, random), err
}

// fingerprint tells this request from others that use the intent.
func (c *call) fingerprint() ([32]byte, error) {
	u := c.req.URL
	target := u.EscapedPath() + "?" + u.RawQuery
	host := normalName(u.Host)
	switch {
	case c.pol.Fingerprint != nil && c.body.get != nil:
		return [32]byte{}, errors.New("the body is larger than MaxBodyBytes, and Policy.Fingerprint needs it whole")
	case c.pol.Fingerprint != nil:
		return c.pol.Fingerprint(c.req, c.body.buf)
	case c.body.get != nil:
		r, err := c.body.get()
		if err != nil {
			return [32]byte{}, err
		}
		defer r.Close()
		return fingerprintStream(c.method, u.Scheme, host, target, r)
	}
	return fingerprint(c.method, u.Scheme, host, target, c.req.Header.Get("Content-Type"), c.body.buf), nil
}

// passThrough makes one attempt and wraps nothing. It is for CONNECT and
// Upgrade, whose connection becomes the caller's own, and for calls that are
// part of an attempt already: retries belong to one layer.
func (c *call) passThrough() (*http.Response, error) {
	req := c.req
	if c.st.prepare != nil {
		req = c.req.Clone(c.ctx)
		if err := c.st.prepare(req); err != nil {
			return nil, c.end(NotSent, nil, fmt.Errorf("the Prepare hook: %w", err))
		}
	}
	c.bodyTaken = true // it is the base's now
	c.attempts = 1
	g := &guard{up: c.up}
	inside, _ := c.ctx.Value(insideKey{}).(bool)
	if inside {
		req = req.WithContext(g.watch(c.ctx, false)) // net/http may send it again by itself
	}
	mayRepeat := !inside && c.class != safe && (req.Header["Idempotency-Key"] != nil || req.Header["X-Idempotency-Key"] != nil)
	resp, err := roundTrip(c.st.base, req)
	if err != nil {
		o := Unknown
		if g.nothingSent(err) && !mayRepeat {
			o = NotSent
		}
		return nil, c.end(o, nil, err)
	}
	o, _ := c.outcomeOf(resp, judgeStatus(resp.StatusCode, situation{class: c.class, method: c.method}))
	c.report.set(func(r *Report) { r.Outcome, r.Attempts, r.Status = o, 1, resp.StatusCode })
	resp.Request = c.answerRequest()
	return resp, nil
}

func isUpgrade(h http.Header) bool {
	if len(h["Upgrade"]) == 0 {
		return false
	}
	for _, v := range h["Connection"] {
		for _, token := range strings.Split(v, ",") {
			if strings.EqualFold(strings.TrimSpace(token), "upgrade") {
				return true
			}
		}
	}
	return false
}

// checkURL refuses what no base can send, before a record is made of it.
func checkURL(u *url.URL) error {
	switch {
	case u == nil:
		return errors.New("the request has no URL")
	case u.Scheme == "":
		return errors.New("the request's URL has no scheme")
	case u.Host == "" && (u.Scheme == "http" || u.Scheme == "https"):
		return errors.New("the request's URL has no host")
	}
	return nil
}

// answerContext is the context of a response's request: the caller's, and the
// way back to the call.
type answerContext struct {
	context.Context
	call *call
}

func (a *answerContext) Value(key any) any {
	if _, ok := key.(answerKey); ok {
		return a.call
	}
	return a.Context.Value(key)
}

// answerRequest is what a response's Request is: the caller's, with the way
// back to the call.
func (c *call) answerRequest() *http.Request {
	c.answerReq = *c.req.WithContext(&c.answer)
	return &c.answerReq
}
