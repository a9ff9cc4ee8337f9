package storetest

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

func is(err, target error) bool { return errors.Is(err, target) }

// patience is how long calls that should end may take, on a slow machine,
// before the test says that they hang.
var patience = 60 * time.Second

// together runs f n times at once and fails if they do not all return.
func together(t testing.TB, n int, f func(i int)) {
	t.Helper()
	var ready, ended sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		ready.Add(1)
		ended.Go(func() {
			ready.Done()
			<-start
			f(i)
		})
	}
	ready.Wait()
	close(start)
	all := make(chan struct{})
	go func() {
		ended.Wait()
		close(all)
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-all:
	case <-timer.C:
		stacks := make([]byte, 64<<10)
		t.Fatalf("calls hang: they have not returned within %s\n%s", patience, stacks[:runtime.Stack(stacks, true)])
	}
}

func oneCreateWins(t *testing.T, s *suite) {
	stores := s.pair(t)
	const clients, rounds = 16, 40
	for round := range rounds {
		id := fmt.Sprint("intent ", round)
		var wins atomic.Int64
		answers := make([]oncehttp.Record, clients)
		together(t, clients, func(c int) {
			stored, created, err := stores[c%2].Create(t.Context(), claim(id, fmt.Sprint("client ", c)))
			assert.NoError(t, err, "that a record exists is not an error")
			if created {
				wins.Add(1)
				assert.Equal(t, fmt.Sprint("client ", c), stored.Owner)
			}
			answers[c] = stored
		})
		require.False(t, t.Failed())
		require.EqualValues(t, 1, wins.Load(), "of %d simultaneous Creates, this many created the record", clients)
		stored := mustGet(t, stores[0], id)
		for _, r := range answers {
			same(t, stored, r, "the answer of one of the Creates")
		}
	}
}

func oneUpdateWins(t *testing.T, s *suite) {
	stores := s.pair(t)
	const clients, rounds = 16, 40
	current := mustCreate(t, stores[0], claim("1", "nobody"))
	for round := range rounds {
		var wins atomic.Int64
		var winner atomic.Value
		together(t, clients, func(c int) {
			r := current
			r.Owner = fmt.Sprint("client ", c)
			stored, err := stores[c%2].Update(t.Context(), r)
			if err == nil {
				wins.Add(1)
				winner.Store(stored)
			} else {
				assert.ErrorIs(t, err, oncehttp.ErrConflict)
			}
		})
		require.False(t, t.Failed())
		require.EqualValues(t, 1, wins.Load(), "of %d simultaneous Updates of version %d, this many were made", clients, current.Version)
		require.EqualValues(t, round+2, mustGet(t, stores[0], "1").Version)
		same(t, winner.Load().(oncehttp.Record), mustGet(t, stores[1], "1"), "the record")
		current = mustGet(t, stores[1], "1")
	}
}

// noUpdateIsLost counts in a record as in a counter: read, add one, compare
// and swap, again if it has changed.
func noUpdateIsLost(t *testing.T, s *suite) {
	stores := s.pair(t)
	mustCreate(t, stores[0], claim("1", "a"))
	const clients, each = 8, 12
	var conflicts atomic.Int64
	together(t, clients, func(c int) {
		for done := 0; done < each; {
			r, err := stores[c%2].Get(t.Context(), "1")
			if err != nil {
				t.Errorf("Get: %v", err)
				return
			}
			r.Attempts++
			switch _, err = stores[c%2].Update(t.Context(), r); {
			case err == nil:
				done++
			case is(err, oncehttp.ErrConflict):
				// One update spoils at most one attempt of each other client.
				if conflicts.Add(1) > (clients-1)*clients*each {
					t.Error("there are more conflicts than updates could have caused: reads are stale")
					return
				}
			default:
				t.Errorf("Update: %v", err)
				return
			}
		}
	})
	r := mustGet(t, stores[0], "1")
	require.Equal(t, clients*each, r.Attempts, "updates counted in the record")
	require.EqualValues(t, 1+clients*each, r.Version)
	t.Logf("%d conflicts beside %d updates", conflicts.Load(), clients*each)
}

func handlesAgree(t *testing.T, s *suite) {
	if s.reopen == nil {
		t.Skip("Options.Reopen is nil: there is no other handle")
	}
	stores := s.pair(t)
	for i := range 50 {
		a, b := stores[i%2], stores[1-i%2]
		r := mustCreate(t, a, full(fmt.Sprint(i)))
		same(t, r, mustGet(t, b, r.ID), "Get's answer by the other handle")
		r.Note = "changed by the other"
		r = mustUpdate(t, b, r)
		same(t, r, mustGet(t, a, r.ID), "Get's answer by the first handle")
		late := r
		late.Version--
		_, err := a.Update(t.Context(), late)
		require.ErrorIs(t, err, oncehttp.ErrConflict)
		if i%2 == 0 {
			page, err := b.List(t.Context(), oncehttp.Query{Limit: 1000})
			require.NoError(t, err)
			require.Len(t, page, i+1)
		}
	}
}
