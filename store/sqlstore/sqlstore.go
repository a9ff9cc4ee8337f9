// Package sqlstore is a oncehttp.KeyStore on database/sql: one table, readable
// with any SQL tool. The driver is the caller's. Package sqlitestore puts it on
// an embedded SQLite file; Open puts it on a database you have.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// Options of Open. The zero value is the safe one.
type Options struct {
	// AllowWeakDurability accepts settings under which an acknowledged claim
	// can be lost with the power: a second charge, then. For tests.
	AllowWeakDurability bool

	// BeforeWrite is asked before a transaction; its error fails the writes. An
	// embedded store looks here whether its file is still in its place.
	BeforeWrite func() error
}

// Store is a oncehttp.KeyStore. It is safe for concurrent use, by goroutines
// and by processes. Concurrent writes share transactions (group commit).
type Store struct {
	db      *sql.DB
	dialect Dialect
	opts    Options
	group   group

	mu     sync.Mutex // held by the group's leader, and by Close
	writer *writer    // guarded by mu; nil: to be opened
	closed bool       // guarded by mu

	// corrupt is why nothing is written any more: in a damaged database a
	// claim may not see the one that it repeats. Guarded by mu.
	corrupt error
}

var _ oncehttp.KeyStore = (*Store)(nil)

// ErrClosed is returned by a Store after Close.
var ErrClosed = errors.New("sqlstore: the store is closed")

// Open creates the table if there is none, checks its version, and reads back
// the settings that durability hangs on: weak ones are an error. It keeps one
// connection of db for writing; db stays the caller's to close, after Close.
func Open(ctx context.Context, db *sql.DB, d Dialect, opts Options) (*Store, error) {
	s := &Store{db: db, dialect: d, opts: opts}
	s.group.commit = s.commit
	if err := s.retry(ctx, func() error {
		w, err := s.open(ctx)
		if err == nil {
			s.writer = w
		}
		return err
	}); err != nil {
		return nil, fmt.Errorf("sqlstore: %w", err)
	}
	return s, nil
}

// Close gives the writing connection back. It waits for writes under way.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.writer == nil {
		return nil
	}
	err := s.writer.close()
	s.writer = nil
	return err
}

// writer is the connection that writes, with its statements.
type writer struct {
	conn                    *sql.Conn
	begin, commit, rollback *sql.Stmt
	insert, update, get     *sql.Stmt
	version, prune          *sql.Stmt
	lazy                    bool // it commits lazily now
}

func (s *Store) open(ctx context.Context) (_ *writer, err error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	w := &writer{conn: conn}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if err := s.dialect.ready(ctx, conn, s.opts.AllowWeakDurability); err != nil {
		return nil, err
	}
	for _, stmt := range s.dialect.schema {
		if _, err := conn.ExecContext(ctx, stmt); err != nil {
			return nil, err
		}
	}
	for _, p := range []struct {
		stmt **sql.Stmt
		text string
	}{
		{&w.insert, "INSERT INTO oncehttp_intents (" + columns + ") VALUES (" + strings.TrimSuffix(strings.Repeat("?, ", columnCount), ", ") + ") ON CONFLICT (id) DO NOTHING"},
		{&w.update, "UPDATE oncehttp_intents SET " + strings.ReplaceAll(columns, ", ", " = ?, ") + " = ? WHERE id = ? AND version = ?"},
		{&w.get, "SELECT " + columns + " FROM oncehttp_intents WHERE id = ?"},
		{&w.version, "SELECT version FROM oncehttp_intents WHERE id = ?"},
		{&w.prune, pruneSQL},
		{&w.begin, s.dialect.begin},
		{&w.commit, "COMMIT"},
		{&w.rollback, "ROLLBACK"},
	} {
		if *p.stmt, err = conn.PrepareContext(ctx, p.text); err != nil {
			return nil, err
		}
	}
	w.lazy = true // as far as we know
	if err := w.setLazy(s.dialect, false); err != nil {
		return nil, err
	}
	if !s.opts.AllowWeakDurability {
		if err := s.dialect.safe(ctx, conn); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (w *writer) close() error {
	for _, stmt := range []*sql.Stmt{w.insert, w.update, w.get, w.version, w.prune, w.begin, w.commit, w.rollback} {
		if stmt != nil {
			stmt.Close()
		}
	}
	return w.conn.Close()
}

// Create implements oncehttp.KeyStore.
func (s *Store) Create(ctx context.Context, rec oncehttp.Record) (oncehttp.Record, bool, error) {
	rec.Version = 1
	args, err := values(&rec)
	if err != nil {
		return oncehttp.Record{}, false, err
	}
	// Not results with names: a caller that leaves writes to those while the
	// leader still works.
	var stored oncehttp.Record
	var created bool
	o := &op{claim: true, apply: func(ctx context.Context, w *writer) (err error) {
		stored, created = oncehttp.Record{}, false
		n, err := affected(w.insert.ExecContext(ctx, args...))
		switch {
		case err != nil:
			return err
		case n == 1:
			stored, created = rec, true
			return nil
		}
		stored, err = scan(w.get.QueryRowContext(ctx, rec.ID))
		return result(err)
	}}
	if err := s.group.do(ctx, o); err != nil {
		return oncehttp.Record{}, false, err
	}
	return stored, created, nil
}

// Update implements oncehttp.KeyStore.
func (s *Store) Update(ctx context.Context, rec oncehttp.Record) (stored oncehttp.Record, err error) {
	was := rec.Version
	rec.Version++
	args, err := values(&rec)
	if err != nil {
		return oncehttp.Record{}, err
	}
	args = append(args, rec.ID, was)
	o := &op{claim: rec.State == oncehttp.StateSending, apply: func(ctx context.Context, w *writer) error {
		n, err := affected(w.update.ExecContext(ctx, args...))
		if err != nil || n == 1 {
			return err
		}
		var version int64
		switch err := w.version.QueryRowContext(ctx, rec.ID).Scan(&version); {
		case errors.Is(err, sql.ErrNoRows):
			return result(oncehttp.ErrNotFound)
		case err != nil:
			return err
		}
		return result(oncehttp.ErrConflict)
	}}
	if err := s.group.do(ctx, o); err != nil {
		return oncehttp.Record{}, err
	}
	return rec, nil
}

// Get implements oncehttp.KeyStore.
func (s *Store) Get(ctx context.Context, id string) (rec oncehttp.Record, err error) {
	err = s.retry(ctx, func() error {
		rec, err = scan(s.db.QueryRowContext(ctx, "SELECT "+columns+" FROM oncehttp_intents WHERE id = ?", id))
		return err
	})
	if errors.Is(err, sql.ErrNoRows) {
		err = oncehttp.ErrNotFound
	}
	if err != nil {
		return oncehttp.Record{}, err
	}
	return rec, nil
}

// List implements oncehttp.KeyStore. Rows that cannot be read are left out,
// and told by a *CorruptError beside the records that can.
func (s *Store) List(ctx context.Context, q oncehttp.Query) (recs []oncehttp.Record, err error) {
	limit := q.Limit
	if limit <= 0 {
		limit = 100
	}
	wanted := q.States
	if len(wanted) == 0 {
		for st := oncehttp.StateReserved; st <= oncehttp.StateUnknown; st++ {
			wanted = append(wanted, st)
		}
	}
	// One part for each state: each walks its own part of an index in order
	// and stops at the limit, so no row is read that could not be returned. One
	// statement, so that a record that changes state is there once.
	var corrupt []error
	var parts []string
	var args []any
	for _, state := range slices.Compact(slices.Sorted(slices.Values(wanted))) {
		part, a := listSQL(state, q, limit)
		parts, args = append(parts, "SELECT * FROM ("+part+")"), append(args, a...)
	}
	if err := s.retry(ctx, func() error {
		recs, corrupt = nil, nil
		rows, err := s.db.QueryContext(ctx, strings.Join(parts, " UNION ALL "), args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			rec, err := scan(rows)
			switch {
			case errors.As(err, new(*CorruptError)):
				corrupt = append(corrupt, err)
			case err != nil:
				return err
			default:
				recs = append(recs, rec)
			}
		}
		return rows.Err()
	}); err != nil {
		return nil, err
	}
	slices.SortFunc(recs, func(a, b oncehttp.Record) int {
		if d := a.Updated.Compare(b.Updated); d != 0 {
			return d
		}
		return strings.Compare(a.ID, b.ID)
	})
	return recs[:min(limit, len(recs))], errors.Join(corrupt...)
}

func listSQL(state oncehttp.State, q oncehttp.Query, limit int) (string, []any) {
	query := "SELECT " + columns + " FROM oncehttp_intents WHERE state = ?"
	args := []any{state.String()}
	switch state {
	case oncehttp.StateReserved, oncehttp.StateSending, oncehttp.StateOpen, oncehttp.StateUnknown:
		query += " AND " + unsettled
	}
	if q.Upstream != "" {
		query += " AND upstream = ?"
		args = append(args, q.Upstream)
	}
	if !q.Before.IsZero() {
		query += " AND updated < ?"
		args = append(args, timeText(q.Before))
	}
	if q.After != (oncehttp.Cursor{}) {
		query += " AND (updated, id) > (?, ?)"
		args = append(args, timeText(q.After.Updated), q.After.ID)
	}
	return query + " ORDER BY updated, id LIMIT ?", append(args, limit)
}

const pruneSQL = "DELETE FROM oncehttp_intents WHERE id IN (SELECT id FROM oncehttp_intents WHERE " + prunable +
	" AND expires < ? ORDER BY expires LIMIT ?)"

// Prune implements oncehttp.KeyStore.
func (s *Store) Prune(ctx context.Context, before time.Time, limit int) (int, error) {
	if limit <= 0 {
		return 0, ctx.Err()
	}
	var n int64
	o := &op{apply: func(ctx context.Context, w *writer) (err error) {
		n, err = affected(w.prune.ExecContext(ctx, timeText(before), limit))
		return err
	}}
	if err := s.group.do(ctx, o); err != nil {
		return 0, err
	}
	return int(n), nil
}

func affected(r sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

// resultError is an op's own outcome: it does not spoil the transaction.
type resultError struct{ error }

func (e resultError) Unwrap() error { return e.error }

func result(err error) error {
	if err == nil {
		return nil
	}
	return resultError{err}
}

// commit is the group's: one transaction for the batch. If one write cannot be
// made, the others get a transaction each.
func (s *Store) commit(ctx context.Context, batch []*op) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(batch) == 1 {
		return s.transact(ctx, batch)
	}
	err := s.transact(ctx, batch)
	if err == nil || errors.Is(err, errNotBegun) || !errors.As(err, new(spoiltError)) {
		return err
	}
	for _, o := range batch {
		// The rest must be answered whatever becomes of the leader.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), aloneTimeout)
		if err := s.transact(ctx, []*op{o}); errors.Is(err, errNotBegun) {
			o.err = err
		}
		cancel()
	}
	return nil
}

const aloneTimeout = 2 * time.Second

// spoiltError: a write of the batch failed, and all were rolled back.
type spoiltError struct{ error }

// transact runs the batch in one transaction and sets every op's err. It is
// called with mu held.
func (s *Store) transact(ctx context.Context, batch []*op) (err error) {
	fail := func(err error) error {
		if s.dialect.damaged(err) {
			s.corrupt = err
		}
		for _, o := range batch {
			o.err = err
		}
		return err
	}
	claim := slices.ContainsFunc(batch, func(o *op) bool { return o.claim })
	if s.closed {
		return fail(ErrClosed)
	}
	if s.corrupt != nil {
		return fail(fmt.Errorf("sqlstore: the database was found damaged; nothing more is written to it: %w", s.corrupt))
	}
	if s.opts.BeforeWrite != nil {
		if err := s.opts.BeforeWrite(); err != nil {
			return fail(err)
		}
	}
	err = s.retry(ctx, func() error {
		if s.writer == nil {
			w, err := s.open(ctx)
			if err != nil {
				return err
			}
			s.writer = w
		}
		if err := s.writer.setLazy(s.dialect, !claim); err != nil {
			return err
		}
		// Not with ctx: the driver waits for a lock no longer than its own
		// busy timeout, which is short, and a context costs it a goroutine.
		_, err := s.writer.begin.Exec()
		return err
	})
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("%w: %w", errNotBegun, err)
		}
		s.drop()
		return fail(err)
	}
	// From here on it runs to its end: what the leader's time is does not
	// concern the others, and nothing waits for another process.
	ctx = context.WithoutCancel(ctx)
	for _, o := range batch {
		o.err = o.apply(ctx, s.writer)
		var own resultError
		if errors.As(o.err, &own) {
			o.err = own.error
		} else if o.err != nil {
			if _, rerr := s.writer.rollback.Exec(); rerr != nil {
				s.drop()
			}
			return spoiltError{fail(o.err)}
		}
	}
	if _, err := s.writer.commit.Exec(); err != nil {
		s.writer.rollback.Exec()
		s.drop()
		return fail(err)
	}
	return nil
}

// drop gives a connection up whose state is not known.
func (s *Store) drop() {
	if s.writer != nil {
		s.writer.close()
		s.writer = nil
	}
}

// setLazy switches between commits that wait for the disk and commits that
// need not: losing a settle means a send under the same key, or a doubt.
func (w *writer) setLazy(d Dialect, lazy bool) error {
	if w.lazy == lazy {
		return nil
	}
	stmt := d.durable
	if lazy {
		stmt = d.lazy
	}
	if _, err := w.conn.ExecContext(context.Background(), stmt); err != nil {
		return err
	}
	w.lazy = lazy
	return nil
}

// retry repeats what another process's lock kept from happening, with jitter,
// until ctx ends.
func (s *Store) retry(ctx context.Context, f func() error) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		err := f()
		if err == nil || !s.dialect.busy(err) {
			return err
		}
		timer := time.NewTimer(rand.N(wait) + 1)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("the database is locked by another connection: %w: %w", ctx.Err(), err)
		}
	}
}
