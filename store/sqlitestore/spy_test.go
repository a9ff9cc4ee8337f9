package sqlitestore

import (
	"context"

	"database/sql/driver"
	"strings"
	"sync"

	"modernc.org/sqlite"
)

// spy is the SQLite driver, and notes every statement that goes through it.
type spy struct {
	dsn string

	mu   sync.Mutex
	seen []string // guarded by mu
}

func (s *spy) Driver() driver.Driver { return &sqlite.Driver{} }

func (s *spy) Connect(context.Context) (driver.Conn, error) {
	conn, err := s.Driver().Open(s.dsn)
	return spyConn{conn, s}, err
}

func (s *spy) note(query string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, query)
}

// with returns the noted statements that hold the text.
func (s *spy) with(text string) (found []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.seen {
		if strings.Contains(q, text) {
			found = append(found, q)
		}
	}
	return found
}

type spyConn struct {
	driver.Conn
	spy *spy
}

func (c spyConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	c.spy.note(query)
	return c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
}

func (c spyConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.spy.note(query)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

func (c spyConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.spy.note(query)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}
