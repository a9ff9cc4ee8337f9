// Package memnet is a network in memory: a net.Listener whose connections
// are net.Pipe pairs. It exists for testing/synctest, in whose bubbles a
// goroutine blocked on a socket stops the clock and one blocked on a pipe
// does not.
package memnet

import (
	"context"
	"net"
	"strconv"
	"sync"
	"syscall"
)

// A Listener is both ends of the network: a server accepts from it, and
// clients dial it with DialContext, whatever address they ask for.
//
// Its connections are unbuffered: a Write returns when the other end has
// read. Deadlines work. All methods may be called concurrently.
type Listener struct {
	pending chan net.Conn
	closed  chan struct{}
	close   sync.Once

	mu     sync.Mutex
	dialed int // guarded by mu; numbers the connections
}

// Listen returns an open Listener. It cannot fail: there is no port to be
// taken.
func Listen() *Listener {
	return &Listener{pending: make(chan net.Conn), closed: make(chan struct{})}
}

// DialContext connects to the listener and is meant for
// http.Transport.DialContext. It returns when Accept has taken the
// connection. Once ctx is over or the listener is closed it returns a
// *net.OpError with Op "dial", which wraps ctx.Err or ECONNREFUSED.
func (l *Listener) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	l.mu.Lock()
	l.dialed++
	name := addr("client-" + strconv.Itoa(l.dialed))
	l.mu.Unlock()

	client, server := net.Pipe()
	err := ctx.Err()
	if err == nil {
		select {
		case l.pending <- conn{server, l.Addr(), name}:
			return conn{client, name, l.Addr()}, nil
		case <-l.closed:
			err = syscall.ECONNREFUSED
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	client.Close()
	server.Close()
	return nil, &net.OpError{Op: "dial", Net: network, Addr: addr(address), Err: err}
}

// Accept waits for the next connection. After Close it returns a
// *net.OpError that wraps net.ErrClosed.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.pending:
		return c, nil
	case <-l.closed:
		return nil, &net.OpError{Op: "accept", Net: "memnet", Addr: l.Addr(), Err: net.ErrClosed}
	}
}

// Close fails the pending and all later calls of Accept and DialContext.
// Accepted connections stay open. It always returns nil.
func (l *Listener) Close() error {
	l.close.Do(func() { close(l.closed) })
	return nil
}

// Addr returns the listener's address, "listener" on network "memnet".
func (l *Listener) Addr() net.Addr { return addr("listener") }

type addr string

func (addr) Network() string  { return "memnet" }
func (a addr) String() string { return string(a) }

// conn gives a pipe addresses, so that a server can tell its clients apart.
type conn struct {
	net.Conn
	local, remote net.Addr
}

func (c conn) LocalAddr() net.Addr  { return c.local }
func (c conn) RemoteAddr() net.Addr { return c.remote }
