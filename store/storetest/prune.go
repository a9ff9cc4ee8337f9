package storetest

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

func pruneDeletes(t *testing.T, s *suite) {
	store := s.open(t)
	before := at(time.Minute)
	stays := map[string]bool{}
	for _, state := range allStates {
		for name, expires := range map[string]time.Time{
			"long ago": time.Unix(1, 0).UTC(), "just before": before.Add(-time.Microsecond), "at that time": before, "later": before.Add(time.Microsecond),
		} {
			r := claim(state.String()+" "+name, "a")
			r.State, r.Expires = state, expires
			mustCreate(t, store, r)
			stays[r.ID] = !prunable(state) || !expires.Before(before)
		}
	}
	for _, state := range []oncehttp.State{oncehttp.StateSending, oncehttp.StateOpen, oncehttp.StateUnknown} {
		r := claim(state.String()+" never expires", "a") // and was another state before
		r.State, r.Expires = oncehttp.StateNotSent, before
		r = mustCreate(t, store, r)
		r.State, r.Expires = state, time.Time{}
		mustUpdate(t, store, r)
		stays[r.ID] = true
	}
	n, err := store.Prune(t.Context(), before, 1000)
	require.NoError(t, err)
	for id, want := range stays {
		require.Equal(t, want, has(t, store, id), "whether the record %q is still there", id)
	}
	require.Equal(t, 8, n, "records that Prune says it deleted")

	again, created, err := store.Create(t.Context(), claim("done long ago", "b"))
	require.NoError(t, err)
	require.True(t, created, "the id of a deleted record is free")
	require.EqualValues(t, 1, again.Version)
}

func pruneLimits(t *testing.T, s *suite) {
	store := s.open(t)
	for i := range 25 {
		r := claim(fmt.Sprint(i), "a")
		r.State = oncehttp.StateDone
		mustCreate(t, store, r)
	}
	for i, limit := range []int{0, -1, 10, 10, 10, 10} {
		n, err := store.Prune(t.Context(), at(24*time.Hour), limit)
		require.NoError(t, err)
		require.Equal(t, []int{0, 0, 10, 10, 5, 0}[i], n, "Prune %d, with limit %d", i, limit)
	}
	page, err := store.List(t.Context(), oncehttp.Query{})
	require.NoError(t, err)
	require.Empty(t, page)
}

// pruneSparesClaims lets an old intent that may be called again be claimed and
// pruned at one moment. Deleting it after the claim would lose a key on the wire.
func pruneSparesClaims(t *testing.T, s *suite) {
	stores := s.pair(t)
	const n = 100
	records := make([]oncehttp.Record, n)
	for i := range records {
		r := claim(fmt.Sprint(i), "a")
		r.State, r.Expires = oncehttp.StateNotSent, epoch
		records[i] = mustCreate(t, stores[0], r)
	}
	var claimed, pruned atomic.Int64
	got := make([]error, n)
	together(t, 8, func(c int) {
		if c%2 == 0 {
			for range n / 8 {
				deleted, err := stores[0].Prune(t.Context(), at(time.Second), 1)
				pruned.Add(int64(deleted))
				if err != nil {
					t.Errorf("Prune: %v", err)
				}
			}
			return
		}
		for i := c / 2; i < n; i += 4 {
			r := records[n-1-i]
			r.State, r.Owner = oncehttp.StateSending, "b"
			if _, got[n-1-i] = stores[1].Update(t.Context(), r); got[n-1-i] == nil {
				claimed.Add(1)
			}
		}
	})
	for i, err := range got {
		if err != nil {
			require.ErrorIs(t, err, oncehttp.ErrNotFound, "Update beside Prune")
		}
		require.Equal(t, err == nil, has(t, stores[0], fmt.Sprint(i)), "a record is there if and only if its claim was acknowledged")
	}
	require.EqualValues(t, n, claimed.Load()+pruned.Load(), "claimed %d, pruned %d", claimed.Load(), pruned.Load())
	t.Logf("%d claimed, %d pruned", claimed.Load(), pruned.Load())
}
