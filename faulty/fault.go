package faulty

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// A Fault is what befalls one request. The zero value is no fault. Faults
// are values: comparable with ==, and safe to share.
//
// Unless it says otherwise a fault strikes before the handler, which then
// does not run; AfterHandler moves it behind the handler.
type Fault struct {
	kind   kind
	after  bool
	delay  time.Duration // stall
	n      int           // truncate: bytes; status: the code
	code   Code          // rstStream
	header string        // status: lines of "Name: value"; a string keeps Fault comparable
}

type kind uint8

const (
	pass kind = iota
	loseRequest
	dropRequest
	resetBeforeBody
	resetAfterBody
	closeStale
	dropConn
	truncate
	truncateChunked
	stall
	status
	rstStream
	goAway
	drain
)

// Pass is no fault: the request is served.
func Pass() Fault { return Fault{} }

// LoseRequest loses the request on its way: the handler never runs. In a
// Transport it is a refused dial, so the client can prove that nothing was
// sent. A Server learns of a request only by reading it, so there it is
// ResetBeforeBody; to refuse whole connections before anything is read see
// [Server.Refuse].
func LoseRequest() Fault { return Fault{kind: loseRequest} }

// DropRequest reads the whole request and closes the connection without an
// answer. The handler does not run, but the client cannot know.
func DropRequest() Fault { return Fault{kind: dropRequest} }

// LoseResponse runs the handler and closes the connection before the first
// byte of its answer. It equals DropRequest().AfterHandler().
//
// Over HTTP/2 this fault, DropRequest and the resets strike the one stream,
// with RST_STREAM INTERNAL_ERROR; DropConn takes the connection down.
func LoseResponse() Fault { return DropRequest().AfterHandler() }

// ResetBeforeBody resets the connection (TCP RST) after the request's
// header, while its body may still be on the way.
func ResetBeforeBody() Fault { return Fault{kind: resetBeforeBody} }

// ResetAfterBody reads the whole request and resets the connection (TCP
// RST).
func ResetAfterBody() Fault { return Fault{kind: resetAfterBody} }

// CloseStale closes a keep-alive connection just as a request arrives on
// it, after reading that request whole: the race every server with an idle
// timeout has. It strikes only on a reused connection; the first request of
// each is served. A Transport counts its first request as the first of its
// one connection. Over HTTP/2 the whole connection closes.
func CloseStale() Fault { return Fault{kind: closeStale} }

// DropConn reads the whole request and closes the client's connection; over
// HTTP/2 all its other streams lose their answers too. Requests that the
// client still sends on it are recorded and not handled.
func DropConn() Fault { return Fault{kind: dropConn} }

// Truncate runs the handler and sends the first n bytes of its answer's
// body under a Content-Length that promises more, then closes the
// connection (over HTTP/2: resets the stream). Answers that cannot have a
// body, as to HEAD, pass unharmed.
func Truncate(n int) Fault { return Fault{kind: truncate, after: true, n: n} }

// TruncateChunked is Truncate for an answer without Content-Length: the
// last chunk is missing.
func TruncateChunked(n int) Fault { return Fault{kind: truncateChunked, after: true, n: n} }

// Stall reads the whole request, waits for d and then serves it. Zero or
// less waits until the client goes away. A client that goes away first is
// not served. With AfterHandler it is the finished answer that waits.
func Stall(d time.Duration) Fault { return Fault{kind: stall, delay: max(d, 0)} }

// Status reads the whole request and answers with a status code and header
// fields, given as name, value, name, value. It panics if a value is
// missing or a field has a line break. With AfterHandler it replaces the
// handler's answer: Status(502).AfterHandler() is a gateway that lost it.
func Status(code int, header ...string) Fault {
	if len(header)%2 != 0 {
		panic("faulty: Status: a header name without a value")
	}
	var lines strings.Builder
	for i := 0; i < len(header); i += 2 {
		if strings.ContainsAny(header[i]+header[i+1], "\r\n") || strings.Contains(header[i], ":") {
			panic("faulty: Status: malformed header field " + header[i])
		}
		fmt.Fprintf(&lines, "%s: %s\n", header[i], header[i+1])
	}
	return Fault{kind: status, n: code, header: lines.String()}
}

// RSTStream answers with an HTTP/2 RST_STREAM frame. RSTStream(RefusedStream)
// promises that nothing was processed, so that its AfterHandler is a lie
// that RFC 9113 section 8.7 forbids. Over HTTP/1 it is DropRequest.
func RSTStream(code Code) Fault { return Fault{kind: rstStream, code: code} }

// GoAway answers with an HTTP/2 GOAWAY frame (NO_ERROR) whose last stream
// lies before this one: not processed. Later streams of the connection
// share that fate. If one of them is already being served the frame has to
// name it, and this stream is refused with REFUSED_STREAM, which tells the
// client the same. With AfterHandler the frame names this stream as
// processed and the connection closes without its answer. Over HTTP/1 it is
// DropRequest.
func GoAway() Fault { return Fault{kind: goAway} }

// Drain serves the request and announces that the connection takes no more:
// a graceful GOAWAY over HTTP/2, Connection: close over HTTP/1.
func Drain() Fault { return Fault{kind: drain} }

// AfterHandler returns f moved behind the handler, which then runs to its
// end first. It changes nothing where that makes no sense: Pass, Drain,
// LoseRequest and ResetBeforeBody do not have such a form, LoseResponse and
// Truncate have no other.
func (f Fault) AfterHandler() Fault {
	switch f.kind {
	case pass, drain, loseRequest, resetBeforeBody:
	default:
		f.after = true
	}
	return f
}

// String names the fault for test output, for example "status 502 after
// handler".
func (f Fault) String() string {
	s := [...]string{"pass", "lose request", "drop request", "reset before body", "reset after body",
		"close stale", "drop conn", "truncate", "truncate chunked", "stall", "status", "RST_STREAM",
		"GOAWAY", "drain"}[f.kind]
	switch f.kind {
	case dropRequest:
		if f.after {
			return "lose response"
		}
	case truncate, truncateChunked:
		return fmt.Sprintf("%s at %d", s, f.n)
	case stall:
		if f.delay > 0 {
			s += " " + f.delay.String()
		}
	case status:
		s = fmt.Sprintf("%s %d", s, f.n)
	case rstStream:
		s += " " + f.code.String()
	}
	if f.after {
		s += " after handler"
	}
	return s
}

// readsBody reports whether the request is read whole before the fault
// strikes; a handler that ran first may have left some of it.
func (f Fault) readsBody() bool {
	switch f.kind {
	case dropRequest, resetAfterBody, closeStale, dropConn, stall, status:
		return true
	}
	return f.after && f.kind != truncate && f.kind != truncateChunked
}

// writeStatus sends the answer of a status fault.
func (f Fault) writeStatus(w http.ResponseWriter) {
	for line := range strings.Lines(f.header) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		w.Header().Add(name, value)
	}
	w.WriteHeader(f.n)
	io.WriteString(w, http.StatusText(f.n)+"\n") // refused where no body may be
}

// A Code is an HTTP/2 error code, RFC 9113 section 7.
type Code uint32

// The codes that decide whether a client may send again. RefusedStream
// alone says that the request was not processed.
const (
	ProtocolError   Code = 0x1
	InternalError   Code = 0x2
	RefusedStream   Code = 0x7
	Cancel          Code = 0x8
	EnhanceYourCalm Code = 0xb
)

// String returns the code's name in RFC 9113, or its number.
func (c Code) String() string {
	switch c {
	case ProtocolError:
		return "PROTOCOL_ERROR"
	case InternalError:
		return "INTERNAL_ERROR"
	case RefusedStream:
		return "REFUSED_STREAM"
	case Cancel:
		return "CANCEL"
	case EnhanceYourCalm:
		return "ENHANCE_YOUR_CALM"
	}
	return fmt.Sprintf("0x%x", uint32(c))
}
