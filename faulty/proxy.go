package faulty

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
)

// net/http's HTTP/2 server cannot be made to refuse a stream or to lie in a
// GOAWAY. So each client connection ends at a proxy, which passes frames to
// and from a net/http server on an in-memory connection of its own.
//
// The proxy does not decide: it cannot read headers, and dropping a header
// block would put the HPACK state of both ends out of step. It adds to
// every request a header field that names the stream, and
// passes it on. The server's handler (exchange.go) then has a decoded
// request, asks the script once, and has the proxy of that stream play what
// only frames can: it panics, net/http ends the stream with RST_STREAM
// INTERNAL_ERROR, and the proxy passes that on with another code or not at all.
type proxy struct {
	s      *Server
	client *tls.Conn
	back   net.Conn
	tls    tls.ConnectionState // written before the first request

	ready  chan struct{} // closed when the server's SETTINGS, which must come first, are written
	wmu    sync.Mutex    // held while writing to client, and guards hungUp; locked before mu
	hungUp bool          // nothing more is written

	mu       sync.Mutex          // guards all below; never held while writing, so that reading goes on
	open     map[uint32]struct{} // streams not ended by either side
	first    uint32              // first stream; the others reuse the connection
	last     uint32              // highest stream the client has opened
	admitted uint32              // highest stream that the handler may have run for
	cut      uint32              // streams above are not processed; it only falls
	cutBy    Fault               // why; never one that runs the handler
	codes    map[uint32]Code     // what RST_STREAM is to say
	idle     bool                // hang up as soon as no stream is open
}

const streamField = "faulty-stream"

// acceptHTTP2 accepts until the listener is closed.
func (s *Server) acceptHTTP2() {
	config := serverTLS("h2")
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.goServe(func() { s.serveHTTP2(tls.Server(c, config)) })
	}
}

// serveHTTP2 serves one client connection until the client or Close ends it.
func (s *Server) serveHTTP2(c *tls.Conn) {
	front, back := net.Pipe()
	p := &proxy{s: s, client: c, back: front, ready: make(chan struct{}), cut: maxStreamID,
		open: make(map[uint32]struct{}), codes: make(map[uint32]Code)}
	defer p.close()
	s.register(p)
	defer s.unregister(p)
	if c.Handshake() != nil || c.ConnectionState().NegotiatedProtocol != "h2" {
		back.Close()
		return
	}
	p.tls = c.ConnectionState()
	if !s.backend.serve(backConn{back, p}) {
		return
	}
	s.goServe(p.passAnswers)
	p.passRequests()
}

func (s *Server) register(p *proxy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proxies[p] = struct{}{}
	if s.closed {
		p.close()
	}
}

func (s *Server) unregister(p *proxy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.proxies, p)
	s.changed.Broadcast()
}

// passRequests passes frames from the client to the back until either is gone.
func (p *proxy) passRequests() {
	r := bufio.NewReader(p.client)
	preface := make([]byte, len(clientPreface))
	if _, err := io.ReadFull(r, preface); err != nil {
		return
	}
	out := preface
	for {
		if _, err := p.back.Write(out); err != nil {
			return
		}
		block, err := readBlock(r)
		if err != nil {
			return
		}
		out = slices.Concat(p.request(block)...)
	}
}

// request notes what a block from the client does to its stream, and labels
// the block if it opens one.
func (p *proxy) request(block []frame) []frame {
	f := block[0]
	id := f.stream()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case f.kind() == frameRSTStream:
		delete(p.open, id)
		if p.idle {
			p.s.goServe(p.closeIfIdle) // not here: it writes
		}
	case f.kind() == frameHeaders && id > p.last: // not trailers
		if p.last == 0 {
			p.first = id
		}
		p.last = id
		p.open[id] = struct{}{}
		return addField(block, streamField, strconv.FormatUint(uint64(id), 10))
	}
	return block
}

// passAnswers passes frames from the back to the client until the back is
// gone. A client that cannot be written to may still have sent requests, so
// that only its end of file ends passRequests.
func (p *proxy) passAnswers() {
	defer p.close()
	ready := sync.OnceFunc(func() { close(p.ready) })
	defer ready()
	r := bufio.NewReader(p.back)
	for {
		block, err := readBlock(r)
		if err != nil {
			return
		}
		p.answer(block)
		ready()
	}
}

// answer passes one block on, or what a fault has made of it.
func (p *proxy) answer(block []frame) {
	f := block[0]
	id := f.stream()
	p.wmu.Lock()
	defer p.wmu.Unlock()
	ends := f.has(flagEndStream)
	switch f.kind() {
	case frameRSTStream:
		ends = true
		p.mu.Lock()
		if code, ok := p.codes[id]; ok {
			delete(p.codes, id)
			block[0] = rstStreamFrame(id, code)
		}
		if id > p.cut {
			block = nil // GOAWAY has told the client
		}
		p.mu.Unlock()
	case frameData, frameHeaders:
	default:
		ends = false // the flag means something else
	}
	p.write(block...)
	if ends {
		p.mu.Lock()
		delete(p.open, id)
		p.mu.Unlock()
		p.hangUpIfIdle()
	}
}

// lockWrites waits until frames other than the first may be written.
func (p *proxy) lockWrites() *sync.Mutex {
	<-p.ready
	p.wmu.Lock()
	return &p.wmu
}

// write writes to the client unless that has ended. p.wmu is held.
func (p *proxy) write(block ...frame) {
	if p.hungUp || len(block) == 0 {
		return
	}
	if _, err := p.client.Write(slices.Concat(block...)); err != nil {
		p.hungUp = true
	}
}

// writeGoAway writes what cut says now, so that of two frames the later
// never has the higher stream. p.wmu is held.
func (p *proxy) writeGoAway() {
	p.mu.Lock()
	last := p.cut
	p.mu.Unlock()
	p.write(goAwayFrame(last))
}

// lost returns the fault that the connection has already met before the
// stream, if any.
func (p *proxy) lost(id uint32) (Fault, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cutBy, id > p.cut
}

// admit decides whether f can strike the stream as it is, together with
// what it means for later streams, and writes the GOAWAY of one that was
// not processed. From here on a stream that is admitted may run the
// handler, and no GOAWAY will deny it.
func (p *proxy) admit(id uint32, f Fault) Fault {
	p.mu.Lock()
	if id > p.cut {
		defer p.mu.Unlock()
		return p.cutBy
	}
	if f.kind != goAway || f.after {
		defer p.mu.Unlock()
		p.admitted = max(p.admitted, id)
		return f
	}
	if p.admitted < id {
		p.cutAfter(max(id, 2)-2, f)
	} else {
		p.cutAfter(p.admitted, f)
		p.codes[id] = RefusedStream
	}
	p.mu.Unlock()
	defer p.lockWrites().Unlock()
	p.writeGoAway()
	return f
}

// strike plays a fault, as far as it is not net/http's own RST_STREAM
// INTERNAL_ERROR, which the caller goes on to make.
func (p *proxy) strike(id uint32, f Fault) {
	p.mu.Lock()
	switch f.kind {
	case rstStream:
		p.codes[id] = f.code
	case goAway:
		if f.after {
			p.cutAfter(p.admitted, GoAway())
		}
	case dropConn, closeStale:
		p.cutAfter(p.admitted, DropConn())
	}
	p.mu.Unlock()

	defer p.lockWrites().Unlock()
	switch f.kind {
	case goAway:
		if f.after {
			p.writeGoAway()
			p.hangUp()
		}
	case dropConn, closeStale:
		p.hangUp()
	}
}

// cutAfter turns streams above id away, if that is not so yet. p.mu is held.
func (p *proxy) cutAfter(id uint32, f Fault) {
	if id < p.cut {
		p.cut, p.cutBy = id, f
	}
}

// drain announces the end of the connection and goes on serving: unless
// there was a GOAWAY before, the last stream is the highest there can be.
func (p *proxy) drain() {
	defer p.lockWrites().Unlock()
	p.writeGoAway()
}

// closeWhenIdle hangs up now or when the last open stream has ended.
func (p *proxy) closeWhenIdle() {
	p.mu.Lock()
	p.idle = true
	p.mu.Unlock()
	select {
	case <-p.ready:
		p.closeIfIdle()
	default: // no request can have arrived
	}
}

func (p *proxy) closeIfIdle() {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	p.hangUpIfIdle()
}

// hangUpIfIdle ends a connection without open streams, if it is to.
// p.wmu is held.
func (p *proxy) hangUpIfIdle() {
	p.mu.Lock()
	idle := p.idle && len(p.open) == 0
	if idle {
		p.cutAfter(p.last, GoAway())
	}
	p.mu.Unlock()
	if idle {
		p.writeGoAway()
		p.hangUp()
	}
}

// hangUp ends the writing side only: requests that the client has already
// sent are still read, and recorded as lost, until it closes its side.
// p.wmu is held.
func (p *proxy) hangUp() {
	if p.hungUp {
		return
	}
	p.hungUp = true
	p.client.CloseWrite()
	if c, ok := p.client.NetConn().(*net.TCPConn); ok {
		c.CloseWrite()
	} else {
		p.client.NetConn().Close() // a pipe has no half
	}
}

// close ends both connections.
func (p *proxy) close() {
	p.client.NetConn().Close() // not tls.Conn's Close, which may wait for the client
	p.back.Close()
}

// claim takes the label off r, which then looks as if it had come without a
// proxy, and returns its stream and whether that is not the first.
func (p *proxy) claim(r *http.Request) (id uint32, reused bool) {
	n, err := strconv.ParseUint(r.Header.Get(streamField), 10, 32)
	if err != nil {
		panic("faulty: a request without its stream")
	}
	r.Header.Del(streamField)
	r.RemoteAddr, r.TLS = p.client.RemoteAddr().String(), &p.tls
	p.mu.Lock()
	defer p.mu.Unlock()
	return uint32(n), uint32(n) != p.first
}
