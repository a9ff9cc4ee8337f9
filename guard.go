package oncehttp

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync/atomic"
)

// net/http sends requests again by itself, and a second POST is a second
// charge. Which it does, and how each way is closed here:
//
//   - HTTP/1, stale keep-alive connection: a request whose header map holds
//     "Idempotency-Key" or "X-Idempotency-Key" and whose body can be had again
//     goes out once per idle connection (Request.isReplayable). Without a
//     GetBody on the attempt's clone it does not; a request without a body
//     always could, so its key stands in the map under the lower-case name:
//     the same on the wire, and unknown to that rule.
//   - HTTP/2: REFUSED_STREAM, GOAWAY and PROTOCOL_ERROR are repeated, key or
//     not, hundreds of times for some peers (http2shouldRetryRequest). Without
//     GetBody they are not, and the error's text tells which it was; without a
//     body the attempt is cancelled in the second GotConn hook, which runs
//     before a byte is written (http2clientStream.encodeAndWriteHeaders looks
//     at the context under its write lock).
//
// What net/http does when not one byte was written, on either protocol, is
// harmless and is let be; where it cannot go on because GetBody is missing, a
// GetBody that returns errNothingWritten proves that it wanted to (HTTP/1, with
// the key's name in lower case and nobody between us and net/http: there it is
// the only case left in which it asks).
type guard struct {
	trace    httptrace.ClientTrace
	cancel   context.CancelCauseFunc
	up       *upstream
	bodiless bool
	plainH1  bool // a connection without TLS is known to speak HTTP/1

	getConns atomic.Int32 // times net/http looked for a connection
	gotConns atomic.Int32 // times it had one
	h1       atomic.Bool  // the connection surely speaks HTTP/1
	reused   atomic.Bool  // it had served before
	vetoed   atomic.Bool  // a hidden send was prevented
	asked    atomic.Bool  // GetBody was asked for
	unhidden atomic.Bool  // a RoundTripper between gave the key its canonical name back
}

var (
	errHiddenSend     = errors.New("the connection was lost before an answer, and net/http was kept from sending again")
	errNothingWritten = errors.New("the connection was dead before anything was written")
)

// watch returns the context to send the attempt with. A trace of the caller's
// own is called too. With names set, the header is looked at as it is written.
func (g *guard) watch(ctx context.Context, names bool) context.Context {
	if names {
		g.trace.WroteHeaderField = g.wroteHeaderField
	}
	g.trace.GetConn = g.getConn
	g.trace.GotConn = g.gotConn
	return httptrace.WithClientTrace(ctx, &g.trace)
}

// arm prepares an attempt's clone, which has its body and its key already, and
// no GetBody. Where keys are honoured and something else than net/http gets the
// clone, the key keeps its canonical name, for it to read. Only where net/http
// itself gets the clone does its asking for GetBody prove anything: a wrapper
// that retries or logs in again asks after it has sent.
func (g *guard) arm(clone *http.Request, declared, plainBase bool) {
	g.bodiless = clone.Body == nil || clone.Body == http.NoBody
	canonical := declared && !plainBase && !g.bodiless
	if !canonical {
		hideKeys(clone.Header)
	}
	proto := g.up.proto.Load()
	if !g.bodiless && plainBase && (proto == 1 || proto == 0 && clone.URL.Scheme == "http") {
		clone.GetBody = func() (io.ReadCloser, error) {
			g.asked.Store(true)
			return nil, errNothingWritten
		}
	}
}

// wroteHeaderField sees the names as net/http's replay rule did. A RoundTripper
// between that copies the header by Set or Add makes them canonical again.
func (g *guard) wroteHeaderField(name string, _ []string) {
	if name == "Idempotency-Key" || name == "X-Idempotency-Key" {
		g.unhidden.Store(true)
	}
}

func (g *guard) getConn(string) { g.getConns.Add(1) }

func (g *guard) gotConn(info httptrace.GotConnInfo) {
	g.reused.Store(info.Reused)
	h1 := g.plainH1
	if c, ok := info.Conn.(interface{ ConnectionState() tls.ConnectionState }); ok {
		h1 = c.ConnectionState().NegotiatedProtocol != "h2"
	}
	g.h1.Store(h1)
	if g.gotConns.Add(1) > 1 && g.bodiless && (!h1 || g.unhidden.Load()) {
		g.vetoed.Store(true)
		g.cancel(errHiddenSend)
		if h1 {
			// Cancelling alone races with HTTP/1's write loop. The connection
			// is this request's alone, and net/http closes it for the cancel.
			info.Conn.Close()
		}
	}
}

// nothingSent reports whether err proves that the upstream saw nothing of the
// attempt's request.
func (g *guard) nothingSent(err error) bool {
	switch {
	case g.vetoed.Load():
		return false
	case g.getConns.Load() > 0 && g.gotConns.Load() == 0:
		// net/http looked for a connection and never had one. A base that
		// does not run the hooks proves nothing this way.
		return true
	case g.gotConns.Load() == 0:
		return neverSent(err)
	case g.stale():
		return true
	}
	return unprocessedH2(err)
}

// stale reports whether the attempt met a dead keep-alive connection and wrote
// nothing to it.
func (g *guard) stale() bool {
	return g.asked.Load() && g.h1.Load() && !g.unhidden.Load()
}

// unprocessedH2 finds the two cases in which HTTP/2 guarantees that a stream
// was not processed (RFC 9113 §8.7). net/http gives them as text only, when
// GetBody is nil; a test pins that text. PROTOCOL_ERROR, which it would repeat
// too, guarantees nothing.
func unprocessedH2(err error) bool {
	_, cause, ok := strings.Cut(err.Error(), "cannot retry err [")
	if !ok {
		return false
	}
	cause, _, _ = strings.Cut(cause, "]")
	return strings.Contains(cause, "; REFUSED_STREAM") || strings.Contains(cause, "graceful shutdown GOAWAY")
}

// hideKeys moves the two names that net/http's replay rule looks for to their
// lower-case form. Header names are case-insensitive on the wire.
func hideKeys(h http.Header) {
	for _, name := range [...]string{"Idempotency-Key", "X-Idempotency-Key"} {
		if v, ok := h[name]; ok {
			delete(h, name)
			h[strings.ToLower(name)] = v
		}
	}
}

// speaksPlainH1 reports whether every connection of base without TLS surely
// speaks HTTP/1: net/http's unencrypted HTTP/2 has to be asked for.
func speaksPlainH1(base http.RoundTripper) bool {
	t, ok := base.(*http.Transport)
	return ok && (t.Protocols == nil || !t.Protocols.UnencryptedHTTP2())
}
