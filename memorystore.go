package oncehttp

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// What a MemoryStore keeps at most.
const (
	maxMemoryRecords = 100_000
	maxMemoryAnswers = 64 << 20 // bytes of saved requests and answers
)

// MemoryStore is a KeyStore that lives as long as the process. Its zero value
// is ready. It keeps at most 100,000 records and 64 MiB of saved answers: at
// either bound, the records that ended longest ago go, and with them the
// knowledge that their intents were ended. One that is full of intents that
// have not ended refuses new ones (ErrStore).
type MemoryStore struct {
	mu      sync.Mutex
	entries map[string]*memoryEntry // guarded by mu
	ended   memoryEntry             // guarded by mu: head of the ring of prunable entries, the longest ended next
	bytes   int64                   // guarded by mu: of saved requests and answers
	max     int                     // 0: maxMemoryRecords; for tests
}

type memoryEntry struct {
	rec        Record
	prev, next *memoryEntry // in the ring; nil: not prunable
}

// prunable reports whether losing the record costs no more than the memory of
// an intent that has ended.
func (s State) prunable() bool {
	return s == StateDone || s == StateRejected || s == StateNotSent
}

func (r *Record) bytes() int64 {
	var n int
	if r.Request != nil {
		n += len(r.Request.Body)
	}
	if r.Response != nil {
		n += len(r.Response.Body)
	}
	return int64(n)
}

// Create implements KeyStore.
func (m *MemoryStore) Create(ctx context.Context, rec Record) (Record, bool, error) {
	if err := ctx.Err(); err != nil {
		return Record{}, false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e, ok := m.entries[rec.ID]; ok {
		return e.rec.clone(), false, nil
	}
	limit := m.max
	if limit == 0 {
		limit = maxMemoryRecords
	}
	for len(m.entries) >= limit || m.bytes+rec.bytes() > maxMemoryAnswers {
		if !m.dropOldest() {
			return Record{}, false, fmt.Errorf("the memory store is full of %d intents that have not ended", len(m.entries))
		}
	}
	if m.entries == nil {
		m.entries = make(map[string]*memoryEntry)
	}
	rec.Version = 1
	e := &memoryEntry{rec: rec}
	m.entries[rec.ID] = e
	m.account(e, 0)
	return rec, true, nil
}

// Get implements KeyStore.
func (m *MemoryStore) Get(ctx context.Context, id string) (Record, error) {
	if err := ctx.Err(); err != nil {
		return Record{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[id]
	if !ok {
		return Record{}, ErrNotFound
	}
	return e.rec.clone(), nil
}

// Update implements KeyStore.
func (m *MemoryStore) Update(ctx context.Context, rec Record) (Record, error) {
	if err := ctx.Err(); err != nil {
		return Record{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[rec.ID]
	switch {
	case !ok:
		return Record{}, ErrNotFound
	case e.rec.Version != rec.Version:
		return Record{}, ErrConflict
	}
	was := e.rec.bytes()
	rec.Version++
	e.rec = rec
	m.account(e, was)
	for m.bytes > maxMemoryAnswers && m.dropOldest() {
	}
	return rec, nil
}

// List implements KeyStore.
func (m *MemoryStore) List(ctx context.Context, q Query) ([]Record, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var found []*Record
	for _, e := range m.entries {
		r := &e.rec
		switch {
		case len(q.States) > 0 && !slices.Contains(q.States, r.State),
			q.Upstream != "" && r.Upstream != q.Upstream,
			!q.Before.IsZero() && !r.Updated.Before(q.Before),
			q.After != (Cursor{}) && compareCursor(r, q.After) <= 0:
			continue
		}
		found = append(found, r)
	}
	slices.SortFunc(found, func(a, b *Record) int {
		return compareCursor(a, Cursor{Updated: b.Updated, ID: b.ID})
	})
	limit := q.Limit
	if limit <= 0 {
		limit = 100
	}
	page := make([]Record, 0, min(limit, len(found)))
	for _, r := range found[:min(limit, len(found))] {
		page = append(page, r.clone())
	}
	return page, nil
}

func compareCursor(r *Record, c Cursor) int {
	if d := r.Updated.Compare(c.Updated); d != 0 {
		return d
	}
	switch {
	case r.ID < c.ID:
		return -1
	case r.ID > c.ID:
		return 1
	}
	return 0
}

// Prune implements KeyStore.
func (m *MemoryStore) Prune(ctx context.Context, before time.Time, limit int) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, e := range m.entries {
		if n >= limit || ctx.Err() != nil {
			break
		}
		if (e.rec.State.prunable() || e.rec.State == StateReserved) && e.rec.Expires.Before(before) {
			m.drop(e)
			n++
		}
	}
	return n, ctx.Err()
}

// account keeps ended and bytes true after e.rec was written; was is what it
// held before. Called with mu held.
func (m *MemoryStore) account(e *memoryEntry, was int64) {
	m.bytes += e.rec.bytes() - was
	e.unlink()
	if e.rec.State.prunable() {
		if m.ended.next == nil {
			m.ended.prev, m.ended.next = &m.ended, &m.ended
		}
		e.prev, e.next = m.ended.prev, &m.ended
		e.prev.next, m.ended.prev = e, e
	}
}

func (e *memoryEntry) unlink() {
	if e.next != nil {
		e.prev.next, e.next.prev = e.next, e.prev
		e.prev, e.next = nil, nil
	}
}

// dropOldest is called with mu held.
func (m *MemoryStore) dropOldest() bool {
	oldest := m.ended.next
	if oldest == nil || oldest == &m.ended {
		return false
	}
	m.drop(oldest)
	return true
}

// drop is called with mu held.
func (m *MemoryStore) drop(e *memoryEntry) {
	e.unlink()
	m.bytes -= e.rec.bytes()
	delete(m.entries, e.rec.ID)
}
