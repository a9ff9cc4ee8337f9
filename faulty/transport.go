package faulty

import (
	"cmp"
	"context"
	"io"
	"net/http"
	"time"
)

// Transport is a RoundTripper that makes faults without sockets, around
// Base, with errors shaped as net/http's. It never sends again by itself.
// It is safe for concurrent use; the fields are not to be changed after the
// first request.
//
// Where a fault lets nothing reach Base although the request counts as
// written, the httptrace hooks that say so are fired.
type Transport struct {
	Base   http.RoundTripper // nil: http.DefaultTransport
	Script Script            // nil: no faults

	journal journal
}

// Requests returns the record of every request so far, in the order in
// which RoundTrip was called, except those whose context was over already.
// Handled says that Base was called, and a body is recorded as Base reads
// it.
func (t *Transport) Requests() []Request { return t.journal.requests() }

// CloseIdleConnections closes those of Base.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

// RoundTrip sends req through Base unless the script has a fault for it.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Context().Err() != nil {
		closeBody(req)
		return nil, context.Cause(req.Context())
	}
	e := newRequest(req)
	e.Method = defaultMethod(e.Method)
	e.Host = cmp.Or(e.Host, req.URL.Host)
	e.Proto = "HTTP/1.1"
	n := t.journal.add(e)
	var f Fault
	if t.Script != nil {
		f = t.Script(n, req)
	}
	if f.kind == closeStale && n == 1 {
		f = Pass()
	}
	t.journal.update(func() { e.Reused, e.Fault = n > 1, f })

	x := &trip{t: t, e: e, req: req}
	resp, err := x.play(f)
	if !x.handed {
		closeBody(req)
	}
	return resp, err
}

// trip is one request on its way through a Transport.
type trip struct {
	t      *Transport
	e      *Request
	req    *http.Request
	handed bool // Base has the request and closes its body
}

func (x *trip) play(f Fault) (*http.Response, error) {
	var resp *http.Response
	switch {
	case f.kind == pass, f.kind == drain:
		return x.send()
	case f.kind == loseRequest:
		return nil, dialError(x.req)
	case f.kind == stall && !f.after:
		if err := x.wait(f.delay); err != nil {
			traceSend(x.req, x.e.Reused) // it was on the wire all the time
			return nil, err
		}
		return x.send()
	case f.after:
		var err error
		if resp, err = x.send(); err != nil {
			return nil, err
		}
	default:
		traceSend(x.req, x.e.Reused)
		if f.readsBody() {
			if err := x.readBody(); err != nil {
				return nil, err
			}
		}
	}
	return x.strike(f, resp)
}

// strike makes the fault once the request has been read, or handled with
// the answer resp.
func (x *trip) strike(f Fault, resp *http.Response) (*http.Response, error) {
	switch f.kind {
	case truncate, truncateChunked:
		return cutResponse(x.req, resp, f), nil
	case stall:
		if err := x.wait(f.delay); err != nil {
			resp.Body.Close()
			return nil, err
		}
		return resp, nil
	}
	if resp != nil {
		resp.Body.Close()
	}
	if f.kind == status {
		return f.response(x.req), nil
	}
	return nil, strikeError(f, x.req)
}

// send hands the request to Base.
func (x *trip) send() (*http.Response, error) {
	x.handed = true
	x.t.journal.update(func() { x.e.Handled = true })
	r := x.req.WithContext(x.req.Context()) // a shallow copy: only Body is replaced
	r.Body = x.t.journal.wrap(r.Body, x.e)
	resp, err := x.t.base().RoundTrip(r)
	if resp != nil && resp.Request == r {
		resp.Request = x.req
	}
	return resp, err
}

func (x *trip) readBody() error {
	if x.req.Body == nil {
		return nil
	}
	_, err := io.Copy(io.Discard, x.t.journal.wrap(x.req.Body, x.e))
	return err
}

// wait waits for d, zero meaning for ever, or returns the context's error.
func (x *trip) wait(d time.Duration) error {
	var over <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-over:
		return nil
	case <-x.req.Context().Done():
		return context.Cause(x.req.Context())
	}
}

// response is the answer of a status fault.
func (f Fault) response(req *http.Request) *http.Response {
	a := new(answer)
	f.writeStatus(a)
	return a.response(req)
}

// cutResponse replaces the body of resp by one that ends too early.
func cutResponse(req *http.Request, resp *http.Response, f Fault) *http.Response {
	if !mayHaveBody(req.Method, resp.StatusCode) {
		return resp
	}
	if f.kind == truncateChunked {
		resp.ContentLength = -1
		resp.Header.Del("Content-Length")
	}
	resp.Body = &cutBody{resp.Body, int64(f.n)}
	return resp
}

type cutBody struct {
	io.ReadCloser
	left int64
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
