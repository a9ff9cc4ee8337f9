package sqlitestore

import (
	"context"

	"database/sql/driver"
	"fmt"
	"strings"
	"sync"

	"modernc.org/sqlite"
)

// spy is the SQLite driver, and notes every statement that goes through it.
type spy struct {
	dsn string

	mu   sync.Mutex
	seen []string // guarded by mu

	// levels counts commits by what was written and PRAGMA synchronous as it
	// was then; nil: not looked at. Guarded by mu.
	levels map[string]int
	writes string // guarded by mu: what the transaction holds
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
	stmt, err := c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
	return spyStmt{stmt, query, c}, err
}

// spyStmt looks at synchronous when a transaction is committed.
type spyStmt struct {
	driver.Stmt
	query string
	conn  spyConn
}

func (s spyStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	spy := s.conn.spy
	spy.mu.Lock()
	if spy.levels != nil {
		switch {
		case strings.HasPrefix(s.query, "INSERT"), strings.HasPrefix(s.query, "UPDATE") && args[5].Value == "sending":
			spy.writes = "claim"
		case strings.HasPrefix(s.query, "UPDATE"):
			spy.writes = "settle"
		case s.query == "COMMIT":
			spy.levels[fmt.Sprint(spy.writes, " at ", s.conn.synchronous(ctx))]++
		}
	}
	spy.mu.Unlock()
	return s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

func (s spyStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

func (c spyConn) synchronous(ctx context.Context) any {
	rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, "PRAGMA synchronous", nil)
	if err != nil {
		return err
	}
	defer rows.Close()
	level := make([]driver.Value, 1)
	if err := rows.Next(level); err != nil {
		return err
	}
	return level[0]
}

func (c spyConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.spy.note(query)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

func (c spyConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.spy.note(query)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}
