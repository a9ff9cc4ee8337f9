package faulty

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
)

// Handler returns a RoundTripper that runs h in memory, for examples and
// for tests without sockets. A nil handler answers 200. The handler gets what it would get from a
// server: a request of its own with canonical header names and without the
// client's context values. It runs in a goroutine of its own; the answer is
// returned whole once it has finished. If the client's context ends first,
// RoundTrip returns that error and the handler's context is cancelled. A
// handler that panics with http.ErrAbortHandler is an io.EOF to the client;
// other panics are errors that name the value. The same httptrace hooks
// fire as for a reused HTTP/1.1 connection.
func Handler(h http.Handler) http.RoundTripper { return handlerTransport{orOK(h)} }

// orOK is h, or a handler that answers 200 if h is nil.
func orOK(h http.Handler) http.Handler {
	if h == nil {
		return http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	}
	return h
}

type handlerTransport struct{ h http.Handler }

func (t handlerTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	if ctx.Err() != nil {
		closeBody(req)
		return nil, context.Cause(ctx)
	}
	traceSend(req, true)

	serverCtx, cancel := context.WithCancel(context.Background())
	stop := context.AfterFunc(ctx, cancel)
	r := serverRequest(req).WithContext(serverCtx)
	a := new(answer)
	done := make(chan error, 1)
	go func() {
		defer cancel()
		defer stop()
		defer closeBody(req)
		done <- run(t.h, a, r)
	}()
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		traceFirstByte(req)
		return a.response(req), nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// run runs the handler and turns a panic into an error.
func run(h http.Handler, w http.ResponseWriter, r *http.Request) (err error) {
	defer func() {
		switch p := recover(); p {
		case nil:
		case http.ErrAbortHandler:
			err = io.EOF
		default:
			err = fmt.Errorf("faulty: the handler panicked: %v", p)
		}
	}()
	h.ServeHTTP(w, r)
	return nil
}

// serverRequest is the client's request as a server would read it.
func serverRequest(req *http.Request) *http.Request {
	r := req.Clone(context.Background())
	r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/1.1", 1, 1
	r.Header = canonical(req.Header)
	if r.Host == "" {
		r.Host = req.URL.Host
	}
	r.Method = defaultMethod(req.Method)
	r.RequestURI = req.URL.RequestURI()
	r.URL.Scheme, r.URL.Host, r.URL.User, r.URL.Fragment = "", "", nil, ""
	r.RemoteAddr = "192.0.2.1:1234" // of the documentation network, as in httptest
	r.GetBody, r.Response = nil, nil
	//lint:ignore SA1019 http.Client still sets it under Client.Timeout
	r.Cancel = nil
	if r.Body == nil {
		r.Body = http.NoBody
	} else if r.Body != http.NoBody && r.ContentLength == 0 {
		r.ContentLength = -1 // in a client's request zero with a body means unknown
	}
	return r
}

func defaultMethod(m string) string {
	if m == "" {
		return http.MethodGet
	}
	return m
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		req.Body.Close()
	}
}

// answer is a ResponseWriter that keeps the answer, to send it later, cut
// or not at all.
type answer struct {
	header http.Header
	sent   http.Header // header as it was at WriteHeader
	code   int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = make(http.Header)
	}
	return a.header
}

func (a *answer) WriteHeader(code int) {
	if a.code == 0 && code >= 200 { // informational answers are dropped
		a.code, a.sent = code, a.Header().Clone()
	}
}

func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(p)
}

// Flush is here for handlers that insist on an http.Flusher.
func (a *answer) Flush() { a.WriteHeader(http.StatusOK) }

// finish fills in what a server adds by itself and returns the body as it
// goes on the wire.
func (a *answer) finish(method string) []byte {
	a.WriteHeader(http.StatusOK)
	if !mayHaveBody(method, a.code) {
		return nil
	}
	body := a.body.Bytes()
	if len(body) > 0 && a.sent["Content-Type"] == nil {
		a.sent.Set("Content-Type", http.DetectContentType(body))
	}
	return body
}

// response is the answer as a client gets it.
func (a *answer) response(req *http.Request) *http.Response {
	body := a.finish(defaultMethod(req.Method))
	length := int64(len(body))
	if mayHaveBody(req.Method, a.code) {
		if a.sent["Content-Length"] == nil {
			a.sent.Set("Content-Length", strconv.Itoa(len(body)))
		}
	} else if n, err := strconv.ParseInt(a.sent.Get("Content-Length"), 10, 64); err == nil && req.Method == http.MethodHead {
		length = n
	}
	return newResponse(req, a.code, a.sent, body, length)
}

// writeTo sends the answer.
func (a *answer) writeTo(w http.ResponseWriter, method string) {
	body := a.finish(method)
	maps.Copy(w.Header(), a.sent)
	w.WriteHeader(a.code)
	w.Write(body)
}

func newResponse(req *http.Request, code int, h http.Header, body []byte, length int64) *http.Response {
	return &http.Response{
		Status:        strconv.Itoa(code) + " " + http.StatusText(code),
		StatusCode:    code,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        h,
		Body:          io.NopCloser(bytes.NewReader(slices.Clone(body))),
		ContentLength: length,
		Request:       req,
	}
}

func mayHaveBody(method string, code int) bool {
	return method != http.MethodHead && code >= 200 && code != http.StatusNoContent && code != http.StatusNotModified
}
