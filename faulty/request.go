package faulty

import (
	"io"
	"net/http"
	"sync"
	"time"
)

// maxBody bounds the memory of a recorded body; tests of the kit's users
// compare payloads, not uploads.
const maxBody = 1 << 20

// A Request is the record of one request that arrived: one send.
type Request struct {
	Time         time.Time // when its header had been read
	Method, Host string
	Path         string      // path and query, as sent
	Header       http.Header // as received, names canonical
	Proto        string      // "HTTP/1.1" or "HTTP/2.0"
	RemoteAddr   string      // the client's end of the connection; "" in a Transport
	Reused       bool        // an earlier request arrived on the same connection
	Body         []byte      // what was read of the body so far, at most the first MiB
	BodySize     int64       // bytes read of the body so far
	BodyComplete bool        // the body was read to its end; true if there is none
	Fault        Fault       // what befell it; Pass for a CloseStale that did not strike
	Handled      bool        // the handler was started
}

// journal keeps the records of a Server or Transport.
type journal struct {
	mu      sync.Mutex // guards entries and the Requests in it
	entries []*Request
}

// add appends a record and returns how many there are now.
func (j *journal) add(e *Request) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.entries = append(j.entries, e)
	return len(j.entries)
}

// update runs a change of a record.
func (j *journal) update(change func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	change()
}

// requests returns copies that stay as they are.
func (j *journal) requests() []Request {
	j.mu.Lock()
	defer j.mu.Unlock()
	all := make([]Request, len(j.entries))
	for i, e := range j.entries {
		all[i] = *e
		all[i].Header = e.Header.Clone()
		all[i].Body = append([]byte(nil), e.Body...)
	}
	return all
}

// newRequest records r. Header names are made canonical, as a server would
// see them: a client may hold some in another case.
func newRequest(r *http.Request) *Request {
	return &Request{
		Time:         time.Now(),
		Method:       r.Method,
		Path:         r.URL.RequestURI(),
		Host:         r.Host,
		Header:       canonical(r.Header),
		Proto:        r.Proto,
		BodyComplete: r.Body == nil || r.Body == http.NoBody,
	}
}

func canonical(h http.Header) http.Header {
	c := make(http.Header, len(h))
	for name, values := range h {
		if len(values) > 0 { // an empty one is not sent
			name = http.CanonicalHeaderKey(name)
			c[name] = append(c[name], values...)
		}
	}
	return c
}

// tap records what passes through a request body.
type tap struct {
	io.ReadCloser
	j      *journal
	e      *Request
	closed bool // guarded by j.mu
}

// wrap returns body with e recording what is read of it.
func (j *journal) wrap(body io.ReadCloser, e *Request) io.ReadCloser {
	if body == nil || body == http.NoBody {
		return body
	}
	return &tap{ReadCloser: body, j: j, e: e}
}

func (t *tap) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	t.j.mu.Lock()
	defer t.j.mu.Unlock()
	t.e.BodySize += int64(n)
	t.e.Body = append(t.e.Body, p[:min(n, maxBody-len(t.e.Body))]...)
	if err == io.EOF {
		t.e.BodyComplete = true
	}
	return n, err
}

func (t *tap) Close() error {
	t.j.update(func() { t.closed = true })
	return t.ReadCloser.Close()
}

func (t *tap) isClosed() bool {
	t.j.mu.Lock()
	defer t.j.mu.Unlock()
	return t.closed
}
