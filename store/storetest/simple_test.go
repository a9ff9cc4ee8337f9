package storetest

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// simpleStore is a map under a lock, with at most one bug.
type simpleStore struct {
	bug string

	mu      sync.Mutex
	records map[string]oncehttp.Record // guarded by mu
	stale   map[string]oncehttp.Record // guarded by mu: before the last write
	closed  chan struct{}
}

func (s *simpleStore) has(bug string) bool { return s.bug == bug }

var errGone = errors.New("the caller has gone")

// enter takes the lock, for a caller who is still there.
func (s *simpleStore) enter(ctx context.Context) error {
	if !s.has("ctx is ignored") && !s.has("an ended ctx writes first") && ctx.Err() != nil {
		if s.has("an ended ctx is told in words") {
			return errGone
		}
		return ctx.Err()
	}
	s.mu.Lock()
	if s.records == nil {
		s.records, s.stale = map[string]oncehttp.Record{}, map[string]oncehttp.Record{}
	}
	if s.has("the lock is kept by those who leave") {
		s.mu.Unlock()
		runtime.Gosched()
		s.mu.Lock()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// leave gives the lock back.
func (s *simpleStore) leave(ctx context.Context) error {
	s.mu.Unlock()
	if s.has("an ended ctx writes first") {
		return ctx.Err()
	}
	return nil
}

// gap lets others in between a check and an act.
func (s *simpleStore) gap(bug string) {
	if s.has(bug) {
		s.mu.Unlock()
		for range 3 {
			runtime.Gosched()
		}
		s.mu.Lock()
	}
}

func (s *simpleStore) id(id string) string {
	if s.has("ids are compared without case") {
		id = strings.ToLower(id)
	}
	if s.has("ids are trimmed") {
		id = strings.TrimSpace(id)
	}
	return id
}

func (s *simpleStore) put(r oncehttp.Record) {
	r = s.copy(r)
	for _, t := range []*time.Time{&r.Lease, &r.FirstSent, &r.Updated, &r.Expires} {
		if s.has("times are rounded to seconds") {
			*t = t.Truncate(time.Second)
		}
		if s.has("times come back in local time") && !t.IsZero() {
			*t = t.In(time.FixedZone("here", 3600))
		}
	}
	if s.has("the note is dropped") {
		r.Note = ""
	}
	if s.has("texts are trimmed") {
		r.Scope = strings.TrimRight(r.Scope, " ")
	}
	if a := r.Response; a != nil {
		for name, values := range a.Header {
			if s.has("headers are taken for UTF-8") {
				a.Header[name] = strings.Split(strings.ToValidUTF8(strings.Join(values, "\n"), "\ufffd"), "\n")
			}
			if s.has("a second value of a header is dropped") {
				a.Header[name] = values[:1]
			}
		}
		switch {
		case s.has("the response's header is dropped"):
			a.Header = nil
		case s.has("an answer is cut at 64 KiB"):
			a.Body = a.Body[:min(len(a.Body), 64<<10)]
		case s.has("bodies are taken for text"):
			a.Body = []byte(strings.ToValidUTF8(string(a.Body), "\ufffd"))
		}
	} else if s.has("a nil Response comes back empty") {
		r.Response = &oncehttp.SavedResponse{}
	}
	if old, ok := s.records[s.id(r.ID)]; ok {
		s.stale[s.id(r.ID)] = old
	}
	s.records[s.id(r.ID)] = r
}

func (s *simpleStore) copy(r oncehttp.Record) oncehttp.Record {
	if s.has("reads share memory") {
		return r
	}
	if q := r.Request; q != nil {
		r.Request = &oncehttp.SavedRequest{Method: q.Method, URL: q.URL, Header: q.Header.Clone(), Body: slices.Clone(q.Body)}
	}
	if a := r.Response; a != nil {
		r.Response = &oncehttp.SavedResponse{Status: a.Status, Header: a.Header.Clone(), Body: slices.Clone(a.Body)}
	}
	return r
}

func (s *simpleStore) Create(ctx context.Context, r oncehttp.Record) (_ oncehttp.Record, created bool, err error) {
	if err := s.enter(ctx); err != nil {
		return oncehttp.Record{}, false, err
	}
	defer func() { err = cmp.Or(err, s.leave(ctx)) }()
	old, ok := s.records[s.id(r.ID)]
	s.gap("Create checks, then acts")
	if ok && !s.has("Create replaces what is there") {
		if s.has("Create fails if the record exists") {
			return oncehttp.Record{}, false, oncehttp.ErrConflict
		}
		return s.copy(old), false, nil
	}
	if !s.has("Create keeps the caller's version") {
		r.Version = 1
	}
	s.put(r)
	return s.copy(r), true, nil
}

func (s *simpleStore) Get(ctx context.Context, id string) (_ oncehttp.Record, err error) {
	if err := s.enter(ctx); err != nil {
		return oncehttp.Record{}, err
	}
	defer func() { err = cmp.Or(err, s.leave(ctx)) }()
	r, ok := s.records[s.id(id)]
	if old, was := s.stale[s.id(id)]; was && s.has("Get is stale") {
		r = old
	}
	if !ok && !s.has("Get of nothing is an empty record") {
		return oncehttp.Record{}, oncehttp.ErrNotFound
	}
	return s.copy(r), nil
}

func (s *simpleStore) Update(ctx context.Context, r oncehttp.Record) (_ oncehttp.Record, err error) {
	if err := s.enter(ctx); err != nil {
		return oncehttp.Record{}, err
	}
	defer func() { err = cmp.Or(err, s.leave(ctx)) }()
	old, ok := s.records[s.id(r.ID)]
	s.gap("Update checks, then acts")
	switch {
	case !ok && !s.has("Update inserts"):
		return oncehttp.Record{}, oncehttp.ErrNotFound
	case s.has("Update ignores the version"), s.has("Update takes an older version") && r.Version < old.Version:
	case old.Version != r.Version && s.has("Update says ErrNotFound for a conflict"):
		return oncehttp.Record{}, oncehttp.ErrNotFound
	case old.Version != r.Version:
		return oncehttp.Record{}, oncehttp.ErrConflict
	}
	if s.has("Update keeps what the new record leaves empty") {
		r.Response, r.Note = cmp.Or(r.Response, old.Response), cmp.Or(r.Note, old.Note)
	}
	r.Version++
	s.put(r)
	if s.has("Update returns the old version") {
		r.Version--
	}
	return s.copy(r), nil
}

func (s *simpleStore) List(ctx context.Context, q oncehttp.Query) (_ []oncehttp.Record, err error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer func() { err = cmp.Or(err, s.leave(ctx)) }()
	if s.has("List ignores Upstream") {
		q.Upstream = ""
	}
	if s.has("List looks at the first state only") {
		q.States = q.States[:min(1, len(q.States))]
	}
	if s.has("List includes Before") && !q.Before.IsZero() {
		q.Before = q.Before.Add(1)
	}
	if s.has("List has no limit by default") && q.Limit == 0 {
		q.Limit = 1 << 30
	}
	limit := cmp.Or(q.Limit, 100)
	after, records := q.After, s.records
	if s.has("the cursor is of the time only") && after.ID != "" {
		after.ID = "\xff" // after every id
	}
	if s.has("the cursor is included") && after.ID != "" {
		after.ID = after.ID[:len(after.ID)-1]
	}
	q.After = after
	if s.has("List filters after the limit") {
		first := selected(records, oncehttp.Query{After: after})
		records = map[string]oncehttp.Record{}
		for _, r := range first[:min(len(first), limit/4+1)] {
			records[r.ID] = r
		}
	}
	found := selected(records, q)
	if s.has("List looks at one state after the other") {
		found = nil
		for _, state := range allStates {
			if len(q.States) == 0 || slices.Contains(q.States, state) {
				one := q
				one.States = []oncehttp.State{state}
				found = append(found, selected(records, one)...)
				s.gap("List looks at one state after the other")
			}
		}
		slices.SortFunc(found, func(a, b oncehttp.Record) int { return inOrder(a.Updated, a.ID, b.Updated, b.ID) })
	}
	if s.has("List is unordered") {
		slices.Reverse(found)
	}
	if s.has("List orders by time only") {
		slices.SortStableFunc(found, func(a, b oncehttp.Record) int {
			return cmp.Or(a.Updated.Compare(b.Updated), strings.Compare(b.ID, a.ID))
		})
	}
	found = found[:min(len(found), limit)]
	for i := range found {
		found[i] = s.copy(found[i])
	}
	return found, nil
}

func (s *simpleStore) Prune(ctx context.Context, before time.Time, limit int) (n int, err error) {
	if err := s.enter(ctx); err != nil {
		return 0, err
	}
	defer func() { err = cmp.Or(err, s.leave(ctx)) }()
	if s.has("Prune ignores the limit") || limit < 0 && s.has("Prune takes a negative limit for none") {
		limit = 1 << 30
	}
	if s.has("Prune deletes what expires at that time") {
		before = before.Add(1)
	}
	for id, r := range s.records {
		may := prunable(r.State) && !(r.State == oncehttp.StateReserved && s.has("Prune spares Reserved")) ||
			s.has("Prune deletes "+http.CanonicalHeaderKey(r.State.String()))
		if n < limit && may && r.Expires.Before(before) {
			s.gap("Prune checks, then acts")
			if _, ok := s.records[id]; ok {
				delete(s.records, id)
				n++
			}
			if s.bug == "Prune checks, then acts" {
				break // the map may have changed
			}
		}
	}
	if s.has("Prune miscounts") {
		return n + 1, nil
	}
	return n, nil
}

func (s *simpleStore) Close() error {
	if s.has("Close leaves a goroutine") {
		go func() { <-s.closed }()
	}
	return nil
}
