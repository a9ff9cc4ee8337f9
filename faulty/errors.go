package faulty

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"reflect"
	"syscall"
)

// dialError is what a closed port looks like to a client.
func dialError(req *http.Request) error {
	err := &net.OpError{Op: "dial", Net: "tcp", Addr: hostAddr(hostPort(req)),
		Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	if trace := httptrace.ContextClientTrace(req.Context()); trace != nil {
		if trace.GetConn != nil {
			trace.GetConn(hostPort(req))
		}
		if trace.ConnectStart != nil {
			trace.ConnectStart("tcp", hostPort(req))
		}
		if trace.ConnectDone != nil {
			trace.ConnectDone("tcp", hostPort(req), err)
		}
	}
	return err
}

// strikeError is the error that net/http returns for a fault, given that
// the request was written.
func strikeError(f Fault, req *http.Request) error {
	switch f.kind {
	case resetBeforeBody, resetAfterBody:
		return &net.OpError{Op: "read", Net: "tcp", Addr: hostAddr(hostPort(req)),
			Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	case dropConn:
		return io.ErrUnexpectedEOF // net/http's word for it over HTTP/2
	case rstStream:
		err := streamError{StreamID: 1, Code: f.code, Cause: errFromPeer}
		if f.code == RefusedStream || f.code == ProtocolError {
			return cannotRetry(err, req)
		}
		return err
	case goAway:
		if f.after {
			return errors.New(`http2: server sent GOAWAY and closed the connection; LastStreamID=1, ErrCode=NO_ERROR, debug=""`)
		}
		return cannotRetry(errGotGoAway, req)
	}
	return io.EOF
}

var (
	errFromPeer  = errors.New("received from peer")
	errGotGoAway = errors.New("http2: Transport received Server's graceful shutdown GOAWAY")
)

// cannotRetry flattens err to text where net/http does: where it would send
// again but cannot rewind the body.
func cannotRetry(err error, req *http.Request) error {
	if req.Body == nil || req.Body == http.NoBody || req.GetBody != nil {
		return err
	}
	return fmt.Errorf("http2: Transport: cannot retry err [%v] after Request.Body was written; define Request.GetBody to avoid this error", err)
}

// streamError is shaped as net/http's http2StreamError.
type streamError struct {
	StreamID uint32
	Code     Code
	Cause    error
}

func (e streamError) Error() string {
	return fmt.Sprintf("stream error: stream ID %d; %v; %v", e.StreamID, e.Code, e.Cause)
}

// As lets errors.As fill any struct with the same fields, as net/http does
// for a type that nobody can name.
func (e streamError) As(target any) bool {
	dst := reflect.ValueOf(target).Elem()
	if dst.Kind() != reflect.Struct {
		return false
	}
	src := reflect.ValueOf(e)
	if dst.NumField() != src.NumField() {
		return false
	}
	for i := range src.NumField() {
		from, to := src.Type().Field(i), dst.Type().Field(i)
		if from.Name != to.Name || !from.Type.ConvertibleTo(to.Type) {
			return false
		}
	}
	for i := range src.NumField() {
		dst.Field(i).Set(src.Field(i).Convert(dst.Field(i).Type()))
	}
	return true
}

// traceSend fires the hooks of a request that was written whole.
func traceSend(req *http.Request, reused bool) {
	trace := httptrace.ContextClientTrace(req.Context())
	if trace == nil {
		return
	}
	if trace.GetConn != nil {
		trace.GetConn(hostPort(req))
	}
	if trace.GotConn != nil {
		conn, other := net.Pipe() // a hook may ask the connection for its address
		conn.Close()
		other.Close()
		trace.GotConn(httptrace.GotConnInfo{Conn: conn, Reused: reused})
	}
	if trace.WroteHeaders != nil {
		trace.WroteHeaders()
	}
	if trace.WroteRequest != nil {
		trace.WroteRequest(httptrace.WroteRequestInfo{})
	}
}

func traceFirstByte(req *http.Request) {
	if trace := httptrace.ContextClientTrace(req.Context()); trace != nil && trace.GotFirstResponseByte != nil {
		trace.GotFirstResponseByte()
	}
}

// hostPort is the address that a client dials for req.
func hostPort(req *http.Request) string {
	port := req.URL.Port()
	if port == "" {
		port = map[string]string{"https": "443"}[req.URL.Scheme]
		if port == "" {
			port = "80"
		}
	}
	return net.JoinHostPort(req.URL.Hostname(), port)
}

// hostAddr is an address by name: nothing was looked up.
type hostAddr string

func (hostAddr) Network() string  { return "tcp" }
func (a hostAddr) String() string { return string(a) }
