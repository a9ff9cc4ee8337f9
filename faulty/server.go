package faulty

import (
	"context"
	"crypto/tls"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp/internal/memnet"
)

// A Server is an HTTP server that fails to order. Its methods may be called
// concurrently.
type Server struct {
	URL string // "http://127.0.0.1:port", https or a name in memory; no slash at the end

	http2    bool
	listener net.Listener
	dial     func(ctx context.Context, network, addr string) (net.Conn, error) // nil: by TCP
	server   *http.Server                                                      // over HTTP/2: behind the proxies, on backend
	backend  *backListener
	journal  journal
	closing  chan struct{} // closed by Close: ends stalls
	once     sync.Once

	mu         sync.Mutex // guards all below
	changed    sync.Cond  // on mu: conns, proxies or active have changed
	script     Script
	asked      int // requests that script was asked about
	handler    http.Handler
	refuse     int // connections still to be refused; negative: all
	transports []*http.Transport
	conns      map[net.Conn]*serverConn
	proxies    map[*proxy]struct{}
	active     int  // goroutines and requests under way
	closed     bool // connections that were accepted at the last moment close at once
}

// NewServer starts an HTTP/1.1 server on a port of 127.0.0.1. A nil handler
// answers 200 with no body, a nil script never faults.
func NewServer(handler http.Handler, script Script) *Server {
	return start(listen(), "http", false, handler, script)
}

// NewTLSServer is NewServer for HTTP/1.1 over TLS.
func NewTLSServer(handler http.Handler, script Script) *Server {
	return start(listen(), "https", false, handler, script)
}

// NewHTTP2Server is NewServer for HTTP/2 over TLS.
func NewHTTP2Server(handler http.Handler, script Script) *Server {
	return start(listen(), "https", true, handler, script)
}

// NewMemoryServer is NewServer without sockets, for a testing/synctest
// bubble, where stalls take no time. Only the clients that Client and
// Transport make can reach it. A reset there is a plain close.
func NewMemoryServer(handler http.Handler, script Script) *Server {
	return start(memnet.Listen(), "http", false, handler, script)
}

// NewMemoryHTTP2Server is NewHTTP2Server without sockets, as NewMemoryServer
// is NewServer without.
func NewMemoryHTTP2Server(handler http.Handler, script Script) *Server {
	return start(memnet.Listen(), "https", true, handler, script)
}

func listen() net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic("faulty: " + err.Error())
	}
	return l
}

func start(l net.Listener, scheme string, h2 bool, handler http.Handler, script Script) *Server {
	host := l.Addr().String()
	memory, inMemory := l.(*memnet.Listener)
	if inMemory {
		host = memoryHost
	}
	s := &Server{
		URL:     scheme + "://" + host,
		http2:   h2,
		closing: make(chan struct{}),
		script:  script,
		handler: handler,
		conns:   make(map[net.Conn]*serverConn),
		proxies: make(map[*proxy]struct{}),
	}
	s.changed.L = &s.mu
	if inMemory {
		s.dial = memory.DialContext
	}
	s.listener = gate{l, s}
	var protocols http.Protocols
	protocols.SetHTTP1(!h2)
	protocols.SetUnencryptedHTTP2(h2)
	s.server = &http.Server{
		Handler:     http.HandlerFunc(s.serve),
		Protocols:   &protocols,
		ConnState:   s.connState,
		ConnContext: s.connContext,
	}
	switch {
	case h2:
		s.backend = newBackListener()
		s.goServe(func() { s.server.Serve(s.backend) })
		s.goServe(s.acceptHTTP2)
	case scheme == "https":
		s.server.TLSConfig = serverTLS("http/1.1")
		s.goServe(func() { s.server.ServeTLS(s.listener, "", "") })
	default:
		s.goServe(func() { s.server.Serve(s.listener) })
	}
	return s
}

func serverTLS(protocol string) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{certificate()}, NextProtos: []string{protocol}}
}

// goServe runs f in a goroutine that Close waits for.
func (s *Server) goServe(f func()) {
	s.begin()
	go func() {
		defer s.end()
		f()
	}()
}

func (s *Server) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active++
}

// closeLater closes c in a goroutine that Close waits for: a TLS connection
// may block. s.mu is held.
func (s *Server) closeLater(c net.Conn) {
	s.active++
	go func() {
		defer s.end()
		c.Close()
	}()
}

func (s *Server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active--
	s.changed.Broadcast()
}

// Client returns a client with a Transport of its own.
func (s *Server) Client() *http.Client { return &http.Client{Transport: s.Transport()} }

// Transport returns a fresh transport that trusts the server's certificate,
// speaks its protocol only and keeps up to 1,000 idle connections. Close
// closes those that are idle.
func (s *Server) Transport() *http.Transport {
	var protocols http.Protocols
	protocols.SetHTTP1(!s.http2)
	protocols.SetHTTP2(s.http2)
	t := &http.Transport{
		Protocols:           &protocols,
		DialContext:         s.dial,
		TLSClientConfig:     &tls.Config{RootCAs: trusted()},
		MaxIdleConnsPerHost: 1000,
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.transports = append(s.transports, t)
	return t
}

// Requests returns the record of every request that arrived, in the order
// of arrival. A request is there before its client can have an answer or an
// error from the server. A client that gives up by itself may be ahead of
// it; after Close the record is complete.
func (s *Server) Requests() []Request { return s.journal.requests() }

// SetScript replaces the script for the requests that arrive from now on.
// The new one counts from 1 again.
func (s *Server) SetScript(script Script) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.script, s.asked = script, 0
}

// SetHandler replaces the handler for the requests that are handled from
// now on.
func (s *Server) SetHandler(h http.Handler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handler = h
}

// Refuse closes the next n connections as soon as they are accepted, with
// nothing read, and no request of theirs is recorded. Over TLS the client's
// handshake fails, which proves that nothing was sent; over plain HTTP it
// may have written already and sees a reset. Zero stops it, a negative n
// refuses all connections until then.
func (s *Server) Refuse(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = n
}

// gate is the server's listener; it turns away what Refuse says.
type gate struct {
	net.Listener
	s *Server
}

func (g gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil || !g.s.takeRefusal() {
			return c, err
		}
		reset(c)
	}
}

func (s *Server) takeRefusal() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse > 0 {
		s.refuse--
		return true
	}
	return s.refuse < 0
}

// grace is how long Close lets requests that have reached this host be read
// and recorded, and handlers see that their client is gone, before it takes
// the connections away.
const grace = 250 * time.Millisecond

// Close stops the server: stalls end, connections close, and Close returns
// when the last handler has. Handlers whose clients are still waiting have
// 250 ms before their context is cancelled. It may be called twice.
func (s *Server) Close() {
	s.once.Do(s.close)
}

func (s *Server) close() {
	close(s.closing)
	s.listener.Close()
	s.mu.Lock()
	transports := s.transports
	s.mu.Unlock()
	for _, t := range transports {
		t.CloseIdleConnections()
	}
	if t, ok := http.DefaultTransport.(*http.Transport); ok {
		t.CloseIdleConnections()
	}

	// Connections close when idle, but none that may hold an unread request.
	expired := false
	timer := time.AfterFunc(grace, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		expired = true
		s.changed.Broadcast()
	})
	defer timer.Stop()
	s.mu.Lock()
	for _, c := range s.conns {
		c.closeIdle = true
	}
	proxies := slices.Collect(maps.Keys(s.proxies))
	s.mu.Unlock()
	for _, p := range proxies {
		p.closeWhenIdle()
	}
	s.mu.Lock()
	for !expired && (len(s.proxies) > 0 || !s.http2 && len(s.conns) > 0) {
		s.changed.Wait()
	}
	proxies = slices.Collect(maps.Keys(s.proxies))
	s.closed = true
	s.mu.Unlock()
	for _, p := range proxies {
		p.close()
	}
	s.server.Close()

	s.mu.Lock()
	defer s.mu.Unlock()
	for s.active > 0 || len(s.conns) > 0 || len(s.proxies) > 0 {
		s.changed.Wait()
	}
}

// nextFault asks the script. A script is the user's: it runs unlocked.
func (s *Server) nextFault(e *Request, r *http.Request) Fault {
	s.mu.Lock()
	script := s.script
	s.asked++
	n := s.asked
	s.journal.add(e) // under the same lock: the records are in the script's order
	s.mu.Unlock()
	if script == nil {
		return Pass()
	}
	return script(n, r)
}

func (s *Server) currentHandler() http.Handler {
	s.mu.Lock()
	defer s.mu.Unlock()
	return orOK(s.handler)
}

type connKey struct{}

func (s *Server) connContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}
