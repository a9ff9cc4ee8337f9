package oncehttp

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// A Verdict is what the result of one attempt means. Its zero value leaves
// the judgement to the built-in rules.
type Verdict struct {
	Kind VerdictKind
	Wait time.Duration // at least so long before the next attempt; zero: what the answer asks for, or backoff
	Stop bool          // do not send again, whatever the kind
}

// VerdictKind is the part of a Verdict that decides.
type VerdictKind uint8

const (
	// VerdictDefault leaves the kind to the built-in rules.
	VerdictDefault VerdictKind = iota
	// VerdictDone: it was done, now or by an earlier send under the key.
	VerdictDone
	// VerdictRejected: it was judged and not done; that is final.
	VerdictRejected
	// VerdictNotProcessed: it was turned away unprocessed; may be sent again,
	// by any method.
	VerdictNotProcessed
	// VerdictAmbiguous: it may have been done; sent again only where that is
	// safe.
	VerdictAmbiguous
	// VerdictInProgress: an earlier send under the key is still at work; ask
	// again later.
	VerdictInProgress
)

// An Attempt is what Policy.Classify judges: either Response or Err is set.
// The response may be looked at, and its body only by Peek.
type Attempt struct {
	Request   *http.Request // the caller's; not to be changed
	Response  *http.Response
	Err       error
	N         int  // 1 for the first attempt of the call
	Repeat    bool // the key was sent before, in this call or an earlier one
	Ambiguous bool // and what became of that is in doubt
}

// maxPeek bounds Attempt.Peek.
const maxPeek = 64 << 10

// Peek returns the first n bytes of the response's body, at most 64 KiB, and
// leaves the body whole. Fewer come with io.EOF or the error that ended it.
func (a Attempt) Peek(n int) ([]byte, error) {
	if a.Response == nil || a.Response.Body == nil {
		return nil, io.EOF
	}
	buf := make([]byte, max(0, min(n, maxPeek)))
	read, err := io.ReadFull(a.Response.Body, buf)
	if errors.Is(err, io.ErrUnexpectedEOF) && read < len(buf) {
		// ReadFull's own word for "shorter than n"; a truncated body shows
		// itself again when it is read.
		err = io.EOF
	}
	buf = buf[:read]
	a.Response.Body = &peekedBody{r: io.MultiReader(bytes.NewReader(buf), a.Response.Body), Closer: a.Response.Body}
	return bytes.Clone(buf), err
}

type peekedBody struct {
	r io.Reader
	io.Closer
}

func (b *peekedBody) Read(p []byte) (int, error) { return b.r.Read(p) }

// methodClass is what RFC 9110 §9.2 says of a method.
type methodClass uint8

const (
	safe       methodClass = iota // GET, HEAD, OPTIONS, TRACE
	idempotent                    // PUT, DELETE
	unsafe                        // POST, PATCH and what we do not know
)

func classOf(method string) methodClass {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return safe
	case http.MethodPut, http.MethodDelete:
		return idempotent
	}
	return unsafe
}

// judgement is a Verdict with what follows from it for this call.
type judgement struct {
	kind       VerdictKind
	stop       bool
	wait       time.Duration // the least wait that was asked for
	asked      bool          // whether a wait was asked for
	replay     bool          // the answer is marked as a copy
	turnedAway bool          // of a rejection: the same request may be called again
	final      bool          // of a rejection or Done: it settles earlier doubt
	permanent  bool          // of an error: the next attempt would fail alike
}

// situation is what the rules need to know besides the answer.
type situation struct {
	class   methodClass
	method  string
	honored bool // keys are honoured and the request has one
	doubt   bool // an earlier send under the key, in any call, is in doubt
}

// judgeAnswer applies the table: hints first, then Classify's verdict, then
// the status. It is pure.
func judgeAnswer(resp *http.Response, v Verdict, s situation, now time.Time) judgement {
	j := judgeStatus(resp.StatusCode, s)
	if resp.Header != nil {
		j.replay = strings.EqualFold(resp.Header.Get("Idempotent-Replayed"), "true")
		if j.replay && (j.kind == VerdictRejected || j.kind == VerdictInProgress) {
			// The upstream's saved answer is what became of the first send.
			j = judgement{kind: VerdictRejected, final: true, replay: true}
		}
		if j.replay && j.kind == VerdictAmbiguous {
			j.stop = true // a stored failure comes back for ever
		}
		j.wait, j.asked = retryAfter(resp.Header, now)
	}
	if v.Kind != VerdictDefault {
		j.kind, j.final, j.turnedAway, j.stop = v.Kind, true, v.Kind == VerdictNotProcessed, false
	}
	if hint, ok := retryHint(resp.Header); ok && j.kind != VerdictDone {
		switch {
		case !hint:
			j.stop = true
		case v.Kind == VerdictDefault && (j.kind == VerdictRejected || j.kind == VerdictAmbiguous) && !j.replay:
			j = judgement{kind: VerdictAmbiguous, wait: j.wait, asked: j.asked}
		}
	}
	if v.Wait > 0 {
		j.wait, j.asked = v.Wait, true
	}
	j.stop = j.stop || v.Stop
	return j
}

// judgeStatus is the status table of the design, row by row.
func judgeStatus(status int, s situation) judgement {
	switch {
	case status == http.StatusTooManyRequests:
		return judgement{kind: VerdictNotProcessed, turnedAway: true}
	case status == http.StatusMisdirectedRequest, status == http.StatusTooEarly:
		return judgement{kind: VerdictNotProcessed, turnedAway: true}
	case status >= 200 && status < 300, status == http.StatusSwitchingProtocols:
		return judgement{kind: VerdictDone, final: true}
	case status == http.StatusSeeOther:
		return judgement{kind: VerdictDone}
	case s.class != safe && (status == http.StatusMovedPermanently || status == http.StatusFound):
		// Most web frameworks answer a POST that they carried out with 302;
		// RFC 9110 §15.4.3 lets it mean both.
		return judgement{kind: VerdictAmbiguous, stop: true}
	case status == http.StatusRequestTimeout, status == http.StatusInternalServerError, status == http.StatusBadGateway,
		status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		return judgement{kind: VerdictAmbiguous}
	case status >= 500 || status < 200:
		return judgement{kind: VerdictAmbiguous, stop: true}
	case status == http.StatusConflict && s.class == unsafe && s.honored && s.doubt:
		return judgement{kind: VerdictInProgress}
	case s.method == http.MethodDelete && s.doubt && (status == http.StatusNotFound || status == http.StatusGone):
		// The first DELETE did it: this is what a repeat finds.
		return judgement{kind: VerdictDone, final: true}
	case status == http.StatusPaymentRequired:
		return judgement{kind: VerdictRejected, final: s.class == unsafe && s.honored}
	}
	return judgement{kind: VerdictRejected, turnedAway: turnsAway(status)}
}

// turnsAway reports whether a status says that the request was not looked at,
// so that the same one may be called again once a credential, a size or a
// route is mended. The rest of 3xx and 4xx judges the request itself.
func turnsAway(status int) bool {
	switch status {
	case 401, 403, 404, 405, 407, 411, 413, 415, 417, 421, 425, 426, 428, 429, 431:
		return true
	}
	return status >= 300 && status < 400
}

// retryHint reads what some upstreams say in so many words.
func retryHint(h http.Header) (retry, ok bool) {
	for _, name := range [...]string{"X-Should-Retry", "Stripe-Should-Retry", "Transient-Error"} {
		if v := h[name]; len(v) > 0 {
			if b, err := strconv.ParseBool(strings.TrimSpace(v[0])); err == nil {
				return b, true
			}
		}
	}
	return false, false
}

// judgeError says what an error of the base means; sent is false if there is
// proof that the upstream saw nothing.
func judgeError(err error, sent bool) judgement {
	j := judgement{kind: VerdictAmbiguous, permanent: permanent(err)}
	if !sent {
		j.kind = VerdictNotProcessed
	}
	j.stop = j.permanent
	return j
}

// permanent reports whether trying again must fail in the same way.
func permanent(err error) bool {
	if certificateError(err) || proxyRefusal(err) == http.StatusForbidden || proxyRefusal(err) == http.StatusProxyAuthRequired {
		return true
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return dns.IsNotFound && !dns.IsTimeout && !dns.IsTemporary
	}
	var u *url.Error
	if errors.As(err, &u) && strings.HasPrefix(u.Err.Error(), "stopped after ") {
		return true // a base that is itself an http.Client: too many redirects
	}
	return refusedLocally(err)
}

// refusedLocally reports whether net/http itself refused the request. It has
// no type for this; a test pins the texts.
func refusedLocally(err error) bool {
	text := baseText(err)
	return strings.HasPrefix(text, "unsupported protocol scheme") ||
		strings.HasPrefix(text, "net/http: invalid ") ||
		strings.HasPrefix(text, "http: no Host") ||
		strings.HasPrefix(text, "http2: unsupported scheme")
}

// neverSent reports whether err's type alone proves that nothing was sent, for
// bases that do not run httptrace's hooks.
func neverSent(err error) bool {
	var op *net.OpError
	if errors.As(err, &op) && (op.Op == "dial" || op.Op == "proxyconnect") {
		return true
	}
	var dns *net.DNSError
	return errors.As(err, &dns) || certificateError(err) || refusedLocally(err) ||
		baseText(err) == "net/http: TLS handshake timeout"
}

// certificateError finds every form in which Go tells of a bad certificate;
// which one has changed between releases.
func certificateError(err error) bool {
	var (
		verification *tls.CertificateVerificationError
		authority    x509.UnknownAuthorityError
		invalid      x509.CertificateInvalidError
		host         x509.HostnameError
		roots        x509.SystemRootsError
		constraint   x509.ConstraintViolationError
		critical     x509.UnhandledCriticalExtension
	)
	return errors.As(err, &verification) || errors.As(err, &authority) || errors.As(err, &invalid) ||
		errors.As(err, &host) || errors.As(err, &roots) || errors.As(err, &constraint) || errors.As(err, &critical)
}

// proxyRefusal returns the status of a proxy that refused CONNECT, or 0.
// net/http gives it as an error whose whole text is the reason phrase.
func proxyRefusal(err error) int {
	text := baseText(err)
	for code := 400; code < 600; code++ {
		if s := http.StatusText(code); s != "" && strings.EqualFold(s, text) {
			return code
		}
	}
	return 0
}

// baseText is the text of net/http's own error, also if a Transport of this
// package below us has wrapped it.
func baseText(err error) string {
	var e *Error
	if errors.As(err, &e) && e.Err != nil {
		err = e.Err
	}
	return err.Error()
}
