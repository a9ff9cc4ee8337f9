package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var epoch = time.Date(2026, 7, 30, 12, 0, 0, 0, time.UTC)

// recordIn creates a record in a state.
func recordIn(t testing.TB, m *MemoryStore, id string, state State) Record {
	t.Helper()
	rec, created, err := m.Create(t.Context(), Record{ID: id, State: StateSending, Updated: epoch, Expires: epoch})
	require.NoError(t, err)
	require.True(t, created)
	if state != StateSending {
		rec.State = state
		rec, err = m.Update(t.Context(), rec)
		require.NoError(t, err)
	}
	return rec
}

func has(t testing.TB, m *MemoryStore, id string) bool {
	t.Helper()
	_, err := m.Get(t.Context(), id)
	if err != nil {
		require.ErrorIs(t, err, ErrNotFound)
	}
	return err == nil
}

func TestMemoryStoreInsertsComparesAndSwaps(t *testing.T) {
	ctx, m := t.Context(), &MemoryStore{}
	_, err := m.Get(ctx, "1")
	require.ErrorIs(t, err, ErrNotFound)
	_, err = m.Update(ctx, Record{ID: "1"})
	require.ErrorIs(t, err, ErrNotFound)

	first, created, err := m.Create(ctx, Record{ID: "1", Key: "k1", Owner: "a", Version: 77})
	require.NoError(t, err)
	require.True(t, created)
	require.EqualValues(t, 1, first.Version)

	again, created, err := m.Create(ctx, Record{ID: "1", Key: "k2", Owner: "b"})
	require.NoError(t, err, "that a record exists is not an error")
	require.False(t, created)
	require.Equal(t, first, again)

	next := first
	next.State, next.Note = StateDone, "n"
	next, err = m.Update(ctx, next)
	require.NoError(t, err)
	require.EqualValues(t, 2, next.Version)
	_, err = m.Update(ctx, first)
	require.ErrorIs(t, err, ErrConflict, "a late write of an overtaken owner")
	future := next
	future.Version = 3
	_, err = m.Update(ctx, future)
	require.ErrorIs(t, err, ErrConflict)
	got, err := m.Get(ctx, "1")
	require.NoError(t, err)
	require.Equal(t, next, got)
}

func TestMemoryStoreDoesNothingForACallerWhoHasGone(t *testing.T) {
	m := &MemoryStore{}
	recordIn(t, m, "1", StateDone)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := m.Create(ctx, Record{ID: "2"})
	require.ErrorIs(t, err, context.Canceled)
	_, err = m.Get(ctx, "1")
	require.ErrorIs(t, err, context.Canceled)
	_, err = m.Update(ctx, Record{ID: "1", Version: 2})
	require.ErrorIs(t, err, context.Canceled)
	_, err = m.List(ctx, Query{})
	require.ErrorIs(t, err, context.Canceled)
	n, err := m.Prune(ctx, epoch.Add(time.Hour), 10)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, n)
	require.Len(t, m.entries, 1)
}

func TestWhatAMemoryStoreReturnsSharesNoMemory(t *testing.T) {
	ctx, m := t.Context(), &MemoryStore{}
	fresh := func() Record {
		return Record{ID: "1", State: StateSending, Updated: epoch,
			Request:  &SavedRequest{Method: "POST", Header: http.Header{"A": {"b"}}, Body: []byte("body")},
			Response: &SavedResponse{Status: 200, Header: http.Header{"A": {"b"}}, Body: []byte("body")}}
	}
	_, _, err := m.Create(ctx, fresh())
	require.NoError(t, err)
	spoil := func(r Record) {
		r.Request.Body[0], r.Response.Body[0] = 'X', 'X'
		r.Request.Header.Set("A", "X")
		r.Response.Header.Set("A", "X")
	}
	whole := fresh()
	whole.Version = 1
	for range 2 {
		got, err := m.Get(ctx, "1")
		require.NoError(t, err)
		require.Equal(t, whole, got)
		spoil(got)
		page, err := m.List(ctx, Query{})
		require.NoError(t, err)
		require.Equal(t, []Record{whole}, page)
		spoil(page[0])
		again, _, err := m.Create(ctx, fresh())
		require.NoError(t, err)
		require.Equal(t, whole, again)
		spoil(again)
	}
}

func TestAtTheBoundTheRecordsThatEndedLongestAgoGo(t *testing.T) {
	m := &MemoryStore{max: 5}
	recordIn(t, m, "open", StateOpen)
	b := recordIn(t, m, "b", StateSending)
	recordIn(t, m, "a", StateDone)
	c := recordIn(t, m, "c", StateRejected)
	b.State = StateNotSent // it ended after a, though it was created before
	_, err := m.Update(t.Context(), b)
	require.NoError(t, err)
	_, err = m.Update(t.Context(), c) // touched: now it is the last that ended
	require.NoError(t, err)
	recordIn(t, m, "d", StateUnknown)

	var gone []string
	for n := range 3 {
		recordIn(t, m, fmt.Sprint("new", n), StateSending)
		for _, id := range []string{"a", "b", "c"} {
			if !has(t, m, id) && !slices.Contains(gone, id) {
				gone = append(gone, id)
			}
		}
		require.Len(t, m.entries, 5)
	}
	require.Equal(t, []string{"a", "b", "c"}, gone)
	require.True(t, has(t, m, "open") && has(t, m, "d"), "what has not ended stays")

	_, _, err = m.Create(t.Context(), Record{ID: "one more"})
	require.ErrorContains(t, err, "full of 5 intents")
	require.False(t, has(t, m, "one more"))
	require.True(t, has(t, m, "new2"))
}

// A record that is claimed again is no longer ended, and so not to be dropped.
func TestARecordThatIsClaimedAgainIsNotDropped(t *testing.T) {
	m := &MemoryStore{max: 2}
	a := recordIn(t, m, "a", StateNotSent)
	a.State = StateSending
	_, err := m.Update(t.Context(), a)
	require.NoError(t, err)
	recordIn(t, m, "b", StateDone)
	recordIn(t, m, "c", StateSending)
	require.True(t, has(t, m, "a"))
	require.False(t, has(t, m, "b"))
}

func TestAMemoryStoreFullOfOpenIntentsRefusesTheNextOne(t *testing.T) {
	base := answers(0, 201)
	base.answers[1] = base.answers[0]
	tr := &Transport{Base: base, Store: &MemoryStore{max: 3}, Policy: oneShot(Policy{Keys: KeysHonored})}
	client := contract(t, tr)
	for n := range 3 {
		do(client, post(t, t.Context(), fmt.Sprint("charge:", n), payURL, "{}"))
	}
	r := do(client, post(t, t.Context(), "charge:3", payURL, "{}"))
	require.ErrorIs(t, r.err, ErrStore)
	require.Equal(t, NotSent, r.report.Outcome)
	require.Len(t, base.sent(), 3)
	// Those it has can still be called.
	do(client, post(t, t.Context(), "charge:0", payURL, "{}"))
	require.Len(t, base.sent(), 4)
}

func TestSavedBytesAreBoundedTogether(t *testing.T) {
	m := &MemoryStore{}
	big := make([]byte, 1<<20)
	for n := range 100 {
		rec := recordIn(t, m, fmt.Sprint(n), StateSending)
		rec.State, rec.Response = StateDone, &SavedResponse{Body: big}
		_, err := m.Update(t.Context(), rec)
		require.NoError(t, err)
		require.LessOrEqual(t, m.bytes, int64(maxMemoryAnswers))
	}
	require.Len(t, m.entries, 64)
	require.False(t, has(t, m, "35"))
	require.True(t, has(t, m, "36"))

	// Saved requests count as well, and those of intents that have not ended
	// cannot be dropped.
	m = &MemoryStore{}
	var err error
	n := 0
	for ; n < 100 && err == nil; n++ {
		_, _, err = m.Create(t.Context(), Record{ID: fmt.Sprint(n), State: StateSending, Request: &SavedRequest{Body: big}})
	}
	require.Error(t, err)
	require.Equal(t, 65, n)
	require.Equal(t, int64(maxMemoryAnswers), m.bytes)
}

func TestTheByteCountStaysTrueOverRandomOperations(t *testing.T) {
	ctx, m := t.Context(), &MemoryStore{max: 50}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		id := fmt.Sprint(rnd.IntN(80))
		switch rnd.IntN(4) {
		case 0:
			m.Create(ctx, Record{ID: id, State: StateSending, Request: &SavedRequest{Body: make([]byte, rnd.IntN(100))}})
		case 1, 2:
			if rec, err := m.Get(ctx, id); err == nil {
				rec.State = State(1 + rnd.IntN(7))
				rec.Response = &SavedResponse{Body: make([]byte, rnd.IntN(100))}
				rec.Expires = epoch.Add(time.Duration(rnd.IntN(100)) * time.Hour)
				m.Update(ctx, rec)
			}
		case 3:
			m.Prune(ctx, epoch.Add(time.Duration(rnd.IntN(20))*time.Hour), rnd.IntN(3))
		}
	}
	var bytes int64
	prunable := 0
	for id, e := range m.entries {
		require.Equal(t, id, e.rec.ID)
		bytes += e.rec.bytes()
		require.Equal(t, e.rec.State.prunable(), e.next != nil)
		if e.next != nil {
			prunable++
		}
	}
	require.Equal(t, bytes, m.bytes)
	require.LessOrEqual(t, len(m.entries), 50)
	inRing := 0
	for e := m.ended.next; e != nil && e != &m.ended; e = e.next {
		require.Same(t, e, m.entries[e.rec.ID])
		require.Same(t, e, e.next.prev)
		inRing++
	}
	require.Equal(t, prunable, inRing)
}

func TestListPagesInTheOrderOfTheLastWrite(t *testing.T) {
	ctx, m := t.Context(), &MemoryStore{}
	var want []string
	for n := range 250 {
		// Several records have one time: then the id decides.
		rec := Record{ID: fmt.Sprintf("%03d", n), Upstream: []string{"a", "b"}[n%2], State: State(1 + n%7), Updated: epoch.Add(time.Duration(n/10) * time.Second)}
		_, _, err := m.Create(ctx, rec)
		require.NoError(t, err)
		want = append(want, rec.ID)
	}
	page, err := m.List(ctx, Query{})
	require.NoError(t, err)
	require.Len(t, page, 100, "the default limit")

	var got []string
	q := Query{Limit: 7}
	for {
		page, err := m.List(ctx, q)
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		for _, rec := range page {
			got = append(got, rec.ID)
		}
		last := page[len(page)-1]
		q.After = Cursor{Updated: last.Updated, ID: last.ID}
	}
	require.Equal(t, want, got, "each record once")

	page, err = m.List(ctx, Query{States: []State{StateOpen, StateSending}, Upstream: "b", Before: epoch.Add(10 * time.Second), Limit: 1000})
	require.NoError(t, err)
	n := 0
	for _, rec := range page {
		require.Contains(t, []State{StateOpen, StateSending}, rec.State)
		require.Equal(t, "b", rec.Upstream)
		require.True(t, rec.Updated.Before(epoch.Add(10*time.Second)))
	}
	for k := range 100 { // written before the tenth second
		if k%2 == 1 && (1+k%7 == int(StateOpen) || 1+k%7 == int(StateSending)) {
			n++
		}
	}
	require.Len(t, page, n)
}

func TestPruneDeletesOnlyWhatHasEndedAndExpired(t *testing.T) {
	ctx, m := t.Context(), &MemoryStore{}
	for _, state := range []State{StateReserved, StateSending, StateDone, StateRejected, StateNotSent, StateOpen, StateUnknown} {
		recordIn(t, m, state.String(), state)
	}
	n, err := m.Prune(ctx, epoch, 100)
	require.NoError(t, err)
	require.Zero(t, n, "not earlier than Expires")
	n, err = m.Prune(ctx, epoch.Add(1), 2)
	require.NoError(t, err)
	require.Equal(t, 2, n, "the limit")
	n, err = m.Prune(ctx, epoch.Add(1), 100)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	for state, stays := range map[State]bool{
		StateReserved: false, StateSending: true, StateDone: false, StateRejected: false, StateNotSent: false, StateOpen: true, StateUnknown: true,
	} {
		require.Equal(t, stays, has(t, m, state.String()), "%v", state)
	}
	n, err = m.Prune(ctx, epoch.Add(time.Hour), 0)
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestOneOfManyConcurrentClaimsWins(t *testing.T) {
	ctx, m := t.Context(), &MemoryStore{max: 64}
	var created, updated atomic.Int32
	var all sync.WaitGroup
	for n := range 50 {
		all.Go(func() {
			for k := range 40 {
				rec, won, err := m.Create(ctx, Record{ID: fmt.Sprint(k), Owner: fmt.Sprint(n), State: StateOpen})
				assert.NoError(t, err)
				if won {
					created.Add(1)
				}
				if rec.Version == 1 {
					rec.Owner = fmt.Sprint("second ", n)
					if _, err := m.Update(ctx, rec); err == nil {
						updated.Add(1)
					} else {
						assert.True(t, errors.Is(err, ErrConflict))
					}
				}
				m.List(ctx, Query{Limit: 3})
				m.Prune(ctx, epoch, 1)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 40, created.Load())
	require.EqualValues(t, 40, updated.Load())
}
