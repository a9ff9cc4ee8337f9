package oncehttp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
)

// requestBody hands every attempt its own reader of the caller's body: an
// attempt that was answered early may still be reading when the next starts.
type requestBody struct {
	none   bool
	buf    []byte                        // the whole body, if buffered
	get    func() (io.ReadCloser, error) // the caller's GetBody, if not buffered
	stream *streamedBody                 // neither: it can be sent once
	length int64                         // as Request.ContentLength
}

var errBodyLength = errors.New("the body's length is not the request's ContentLength")

// openBody takes over req.Body: from here on it is closed on every path. With
// whole set, the bytes are wanted for a fingerprint even if GetBody exists.
func openBody(req *http.Request, limit int64, whole bool) (requestBody, error) {
	if req.Body == nil || req.Body == http.NoBody {
		return requestBody{none: true}, nil
	}
	b := requestBody{length: req.ContentLength}
	if req.GetBody != nil {
		b.get = req.GetBody
		req.Body.Close()
		if !whole || limit == Off || req.ContentLength > limit {
			return b, nil
		}
		r, err := req.GetBody()
		if err != nil {
			return b, fmt.Errorf("GetBody: %w", err)
		}
		buf, all, err := readUpTo(r, limit, req.ContentLength)
		r.Close()
		if err == nil && all {
			err = b.buffered(buf, req)
		}
		return b, err
	}
	if limit == Off || req.ContentLength > limit {
		b.stream = &streamedBody{ReadCloser: req.Body}
		return b, nil
	}
	buf, all, err := readUpTo(req.Body, limit, req.ContentLength)
	if err != nil {
		req.Body.Close()
		return b, err
	}
	if !all {
		b.stream = &streamedBody{ReadCloser: &peekedBody{r: io.MultiReader(bytes.NewReader(buf), req.Body), Closer: req.Body}}
		return b, nil
	}
	req.Body.Close()
	return b, b.buffered(buf, req)
}

// buffered takes the whole body.
func (b *requestBody) buffered(buf []byte, req *http.Request) error {
	if req.ContentLength > 0 && int64(len(buf)) != req.ContentLength {
		return errBodyLength
	}
	b.buf, b.get = buf, nil
	if len(req.Trailer) == 0 && len(req.TransferEncoding) == 0 {
		b.length = int64(len(buf)) // known now, so it need not be sent chunked
		b.none = len(buf) == 0
	}
	return nil
}

// readUpTo reads at most limit bytes; all tells whether that was everything.
// length is how many are expected, if positive.
func readUpTo(r io.Reader, limit, length int64) (buf []byte, all bool, err error) {
	size := int64(512)
	if length > 0 {
		size = length
	}
	buf = make([]byte, 0, min(size, limit)+1) // one more, to see the end
	for {
		n, err := r.Read(buf[len(buf):min(int64(cap(buf)), limit+1)])
		buf = buf[:len(buf)+n]
		switch {
		case int64(len(buf)) > limit:
			return buf, false, nil
		case err == io.EOF: // not a wrapped one: that is a connection that broke off
			return buf, true, nil
		case err != nil:
			return buf, false, err
		case len(buf) == cap(buf):
			buf = append(buf, 0)[:len(buf)]
		}
	}
}

// attach gives an attempt's clone a fresh reader.
func (b *requestBody) attach(clone *http.Request) error {
	clone.ContentLength = b.length
	switch {
	case b.none:
		clone.Body, clone.ContentLength = nil, 0
	case b.stream != nil:
		clone.Body = b.stream.lend()
	case b.get != nil:
		r, err := b.get()
		if err != nil {
			return fmt.Errorf("GetBody: %w", err)
		}
		clone.Body = r
	default:
		clone.Body = io.NopCloser(bytes.NewReader(b.buf))
	}
	return nil
}

// replayable reports whether attach can be called again.
func (b *requestBody) replayable() bool {
	return b.stream == nil || !b.stream.touched()
}

// close releases the caller's body when the call is over. An attempt may still
// be reading a streamed one; it closes that itself then.
func (b *requestBody) close() {
	if b.stream != nil {
		b.stream.release()
	}
}

// A streamedBody survives the Close of an attempt that never read it, so that
// after a failed dial the next attempt can have it.
type streamedBody struct {
	io.ReadCloser

	mu       sync.Mutex
	read     bool      // guarded by mu: some of it is gone
	holder   *lentBody // guarded by mu: an attempt has it and will close it
	released bool      // guarded by mu: the call is over
	closed   bool      // guarded by mu
}

func (b *streamedBody) touched() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.read
}

func (b *streamedBody) lend() io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.holder != nil {
		b.holder.ended = true // of an attempt that answered before it read
	}
	b.holder = &lentBody{b: b}
	return b.holder
}

func (b *streamedBody) release() {
	b.giveBack(func() { b.released = true })
}

// giveBack closes the body once nobody can want it any more.
func (b *streamedBody) giveBack(change func()) error {
	b.mu.Lock()
	change()
	closeNow := !b.closed && b.holder == nil && (b.released || b.read)
	b.closed = b.closed || closeNow
	b.mu.Unlock()
	if !closeNow {
		return nil
	}
	return b.ReadCloser.Close()
}

// lentBody is what one attempt has of a streamedBody. net/http closes it to
// free a write loop that waits in Read, and may do so just before that begins.
type lentBody struct {
	b     *streamedBody
	ended bool // guarded by b.mu
}

func (l *lentBody) Read(p []byte) (int, error) {
	l.b.mu.Lock()
	if l.ended {
		l.b.mu.Unlock()
		return 0, http.ErrBodyReadAfterClose
	}
	l.b.read = true
	l.b.mu.Unlock()
	return l.b.ReadCloser.Read(p)
}

func (l *lentBody) Close() error {
	return l.b.giveBack(func() {
		l.ended = true
		if l.b.holder == l { // else the next attempt has it by now
			l.b.holder = nil
		}
	})
}

// memoryBody is the body of an answer that is in memory.
type memoryBody struct{ bytes.Reader }

func newMemoryBody(b []byte) *memoryBody {
	m := new(memoryBody)
	m.Reset(b)
	return m
}

func (*memoryBody) Close() error { return nil }

// answerBody is the body of the response that the caller gets. It tells the
// call, once, how reading it ended.
type answerBody struct {
	io.ReadCloser
	call  *call
	ended atomic.Bool
}

func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && b.ended.CompareAndSwap(false, true) {
		if err == io.EOF {
			b.call.bodyEnded(nil)
		} else {
			b.call.bodyEnded(err)
		}
	}
	return n, err
}

// Close before the end is not an error: the answer's status is known.
func (b *answerBody) Close() error {
	err := b.ReadCloser.Close()
	if b.ended.CompareAndSwap(false, true) {
		b.call.bodyEnded(nil)
	}
	return err
}
