package faulty

import (
	"crypto/tls"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
)

// serverConn is what is known of a connection of the net/http server. Its
// fields are guarded by Server.mu.
type serverConn struct {
	state     http.ConnState
	served    int  // requests that arrived on it
	busy      bool // one of them is being handled
	closeIdle bool // close it as soon as it is idle
}

// connState is called by net/http at every change, with StateNew before the
// first request and StateClosed or StateHijacked after the last.
func (s *Server) connState(c net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sc := s.conns[c]
	switch state {
	case http.StateNew:
		sc = new(serverConn)
		s.conns[c] = sc
		if s.closed {
			s.closeLater(c)
		}
	case http.StateClosed, http.StateHijacked:
		delete(s.conns, c)
	case http.StateIdle:
		if sc != nil && sc.closeIdle && !s.http2 {
			s.closeLater(c)
		}
	}
	if sc != nil {
		sc.state = state
	}
	s.changed.Broadcast()
}

// enter notes the arrival of a request on c and whether it is not the first.
func (s *Server) enter(c net.Conn) (reused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sc := s.conns[c]
	if sc == nil {
		return false
	}
	sc.served++
	sc.busy = true
	return sc.served > 1
}

// leave notes that the handling of a request on c has ended.
func (s *Server) leave(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sc := s.conns[c]; sc != nil {
		sc.busy = false
	}
	s.changed.Broadcast()
}

// CloseIdle closes the keep-alive connections that are idle, as a server's
// idle timeout does, over HTTP/2 with a GOAWAY, and returns when it has.
// Connections that serve a request are closed when they have answered.
func (s *Server) CloseIdle() {
	s.mu.Lock()
	if s.http2 {
		proxies := slices.Collect(maps.Keys(s.proxies))
		s.mu.Unlock()
		for _, p := range proxies {
			p.closeWhenIdle()
		}
		return
	}
	defer s.mu.Unlock()
	for c, sc := range s.conns {
		sc.closeIdle = true
		if sc.state == http.StateIdle || sc.state == http.StateNew {
			s.closeLater(c)
		}
	}
	// The client may have an answer before net/http calls the connection
	// idle: wait for those that are about to be.
	for s.settling() {
		s.changed.Wait()
	}
}

// settling reports whether a connection is between an answered request and
// idleness, or idle and about to close.
func (s *Server) settling() bool {
	for _, sc := range s.conns {
		if sc.closeIdle && !sc.busy && (sc.served > 0 || sc.state == http.StateNew || sc.state == http.StateIdle) {
			return true
		}
	}
	return false
}

// reset closes c with a TCP RST where there is TCP.
func reset(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if t, ok := c.(*net.TCPConn); ok {
		t.SetLinger(0)
	}
	c.Close()
}

// backListener is how the proxies reach the net/http server.
type backListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// backConn is the server's end of a proxy's connection.
type backConn struct {
	net.Conn
	proxy *proxy
}

func newBackListener() *backListener {
	return &backListener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// serve hands c to the server and reports whether that is still there.
func (l *backListener) serve(c net.Conn) bool {
	select {
	case l.conns <- c:
		return true
	case <-l.closed:
		c.Close()
		return false
	}
}

func (l *backListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *backListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *backListener) Addr() net.Addr { return hostAddr("backend") }
