package faulty

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// exchange is one request at a Server.
type exchange struct {
	s  *Server
	w  http.ResponseWriter
	r  *http.Request
	e  *Request
	c  net.Conn // as net/http knows it: over HTTP/2 the proxy's back side
	p  *proxy   // nil over HTTP/1
	id uint32   // stream
}

// serve is the server's handler: it asks the script and plays the fault.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.begin()
	defer s.end()
	x := &exchange{s: s, w: w, r: r, c: r.Context().Value(connKey{}).(net.Conn)}
	reused := s.enter(x.c)
	defer s.leave(x.c)
	if back, ok := x.c.(backConn); ok {
		x.p = back.proxy
		x.id, reused = x.p.claim(r)
	}
	x.e = newRequest(r)
	x.e.Path = r.RequestURI
	x.e.RemoteAddr = r.RemoteAddr
	x.e.Reused = reused
	r.Body = s.journal.wrap(r.Body, x.e)

	var f Fault
	if x.p == nil {
		f = s.nextFault(x.e, r)
	} else if lost, ok := x.p.lost(x.id); ok {
		f = lost
		s.journal.add(x.e)
	} else {
		f = x.p.admit(x.id, s.nextFault(x.e, r))
	}
	if f.kind == closeStale && !reused {
		f = Pass()
	}
	s.journal.update(func() { x.e.Fault = f })
	x.play(f)
}

// play reads, handles and then strikes, as far as the fault asks for each.
func (x *exchange) play(f Fault) {
	switch f.kind {
	case pass:
		x.handle(x.w)
		return
	case drain:
		x.drain()
		x.handle(x.w)
		return
	}
	var a *answer
	if f.after {
		a = new(answer)
		x.handle(a)
	}
	if f.readsBody() || x.p == nil && (f.kind == rstStream || f.kind == goAway) {
		x.readBody()
	}
	x.strike(f, a)
}

func (x *exchange) strike(f Fault, a *answer) {
	switch f.kind {
	case status:
		f.writeStatus(x.w)
	case stall:
		if !x.wait(f.delay) {
			panic(http.ErrAbortHandler)
		}
		if a != nil {
			a.writeTo(x.w, x.r.Method)
		} else {
			x.handle(x.w)
		}
	case truncate, truncateChunked:
		x.truncate(f, a)
	default:
		if x.p != nil {
			x.p.strike(x.id, f)
		} else {
			x.hangUp(f.kind == loseRequest || f.kind == resetBeforeBody || f.kind == resetAfterBody)
		}
		panic(http.ErrAbortHandler)
	}
}

// handle runs the user's handler.
func (x *exchange) handle(w http.ResponseWriter) {
	x.s.journal.update(func() { x.e.Handled = true })
	x.s.currentHandler().ServeHTTP(w, x.r)
}

// readBody reads what is left of the body and keeps it for a handler that
// is still to come. Having read it all is also what lets net/http notice
// that the client has gone. If it breaks off, so does the exchange.
func (x *exchange) readBody() {
	if t, ok := x.r.Body.(*tap); ok && t.isClosed() {
		return // by the handler
	}
	body, err := io.ReadAll(x.r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	x.r.Body = io.NopCloser(bytes.NewReader(body))
}

// wait waits for d, zero meaning for ever, and reports whether the client
// and the server are still there.
func (x *exchange) wait(d time.Duration) bool {
	var over <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-over:
		return true
	case <-x.r.Context().Done():
	case <-x.s.closing:
	}
	return false
}

// truncate sends the beginning of the answer. The panic then makes net/http
// close the connection, or reset the stream, without ending the body.
func (x *exchange) truncate(f Fault, a *answer) {
	body := a.finish(x.r.Method)
	if !mayHaveBody(x.r.Method, a.code) {
		a.writeTo(x.w, x.r.Method)
		return
	}
	sent := body[:min(max(f.n, 0), len(body))]
	if f.kind == truncate {
		a.sent.Set("Content-Length", strconv.Itoa(max(len(body), len(sent)+1)))
	} else {
		a.sent.Del("Content-Length")
	}
	header := x.w.Header()
	for name, values := range a.sent {
		header[name] = values
	}
	x.w.WriteHeader(a.code)
	x.w.Write(sent)
	http.NewResponseController(x.w).Flush()
	panic(http.ErrAbortHandler)
}

// drain announces that the connection takes no more requests.
func (x *exchange) drain() {
	if x.p != nil {
		x.p.drain()
	} else {
		x.w.Header().Set("Connection", "close")
	}
}

// hangUp closes an HTTP/1 connection. A handler may have hijacked it before.
func (x *exchange) hangUp(rst bool) {
	c, _, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		return
	}
	if rst {
		reset(c)
	} else {
		c.Close()
	}
}
