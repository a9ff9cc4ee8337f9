package storetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/oncehttp/oncehttp"
)

func endedContextDoesNothing(t *testing.T, s *suite) {
	store := s.open(t)
	there := claim("there", "a")
	there.State = oncehttp.StateDone
	there = mustCreate(t, store, there)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	for _, ctx := range []context.Context{canceled, late} {
		_, created, err := store.Create(ctx, claim("new", "a"))
		require.ErrorIs(t, err, ctx.Err(), "Create")
		require.False(t, created)
		require.False(t, has(t, store, "new"), "Create under an ended context created")

		_, created, err = store.Create(ctx, claim("there", "b"))
		require.ErrorIs(t, err, ctx.Err(), "Create of what is there")
		require.False(t, created)

		changed := there
		changed.Owner = "b"
		_, err = store.Update(ctx, changed)
		require.ErrorIs(t, err, ctx.Err(), "Update")
		_, err = store.Get(ctx, "there")
		require.ErrorIs(t, err, ctx.Err(), "Get")
		_, err = store.Get(ctx, "missing")
		require.ErrorIs(t, err, ctx.Err(), "Get of what is not there")
		require.NotErrorIs(t, err, oncehttp.ErrNotFound, "it was not looked for")
		_, err = store.List(ctx, oncehttp.Query{})
		require.ErrorIs(t, err, ctx.Err(), "List")
		n, err := store.Prune(ctx, at(24*time.Hour), 10)
		require.ErrorIs(t, err, ctx.Err(), "Prune")
		require.Zero(t, n)
		same(t, there, mustGet(t, store, "there"), "the record after calls under an ended context")
	}
	works(t, store)
}

// works makes one call of each kind.
func works(t testing.TB, store oncehttp.KeyStore) {
	t.Helper()
	r := claim("it still works", "z")
	r.Expires = time.Unix(1, 0).UTC()
	r = mustCreate(t, store, r)
	r.State = oncehttp.StateDone
	r = mustUpdate(t, store, r)
	same(t, r, mustGet(t, store, r.ID), "Get's answer")
	_, err := store.List(t.Context(), oncehttp.Query{})
	require.NoError(t, err)
	n, err := store.Prune(t.Context(), time.Unix(2, 0), 10)
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// leavingHarmsNoOne lets 64 writers share a few records under contexts that
// end at any moment. What was acknowledged must be there, what was not may be,
// and no one who stays may be kept waiting by those who left.
func leavingHarmsNoOne(t *testing.T, s *suite) {
	stores := s.pair(t)
	const writers, calls = 64, 12
	var acked, unclear [8]atomic.Int64
	var left atomic.Int64
	for i := range acked {
		mustCreate(t, stores[0], claim(fmt.Sprint(i), "nobody"))
	}
	together(t, writers, func(c int) {
		store := stores[c%2]
		for n := range calls {
			ctx, cancel := context.WithCancel(t.Context())
			if c%4 != 0 { // they stay
				stop := context.AfterFunc(deadlineIn(ctx, rand.N(3*time.Millisecond)), cancel)
				defer stop()
			}
			id := (c + n) % len(acked)
			wrote, err := leave(ctx, store, id, c, n)
			ended := ctx.Err()
			cancel()
			switch {
			case err == nil:
				acked[id].Add(wrote)
			case is(err, oncehttp.ErrConflict):
			case ended == nil:
				t.Errorf("a call under a context that had not ended: %v", err)
			case !is(err, ended):
				t.Errorf("a call under a context that ended with %q: %v", ended, err)
			default:
				left.Add(1)
				unclear[id].Add(wrote)
			}
		}
	})
	together(t, 1, func(int) { works(t, stores[0]); works(t, stores[1]) })
	for i := range acked {
		r := mustGet(t, stores[0], fmt.Sprint(i))
		writes := r.Version - 1
		require.GreaterOrEqual(t, writes, acked[i].Load(), "writes that are there, against those acknowledged")
		require.LessOrEqual(t, writes, acked[i].Load()+unclear[i].Load(), "writes that are there, against those acknowledged or unclear")
		require.EqualValues(t, writes, r.Attempts, "a write is there in part: Attempts counts with Version")
	}
	t.Logf("%d of %d calls were left", left.Load(), writers*calls)
}

// deadlineIn returns a context that ends after d. It has a parent's end too, so
// that its timer goes with it.
func deadlineIn(ctx context.Context, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(ctx, d)
	context.AfterFunc(ctx, cancel)
	return ctx
}

// leave makes the n-th call of a writer, and says how many updates it holds.
func leave(ctx context.Context, store oncehttp.KeyStore, id, c, n int) (wrote int64, err error) {
	switch n % 4 {
	case 0:
		_, _, err = store.Create(ctx, claim(fmt.Sprintf("%d-%d", c, n), "a"))
		return 0, err
	case 1:
		_, err = store.List(ctx, oncehttp.Query{Limit: 5})
		return 0, err
	}
	r, err := store.Get(ctx, fmt.Sprint(id))
	if err != nil {
		return 0, err
	}
	r.Owner, r.Attempts = fmt.Sprint("writer ", c), int(r.Version)
	_, err = store.Update(ctx, r)
	return 1, err
}

func closeLeavesNothing(t *testing.T, s *suite) {
	before := goleak.IgnoreCurrent()
	store := s.open(t)
	closer, ok := store.(interface{ Close() error })
	if !ok {
		t.Skip("the store has no Close() error")
	}
	together(t, 8, func(c int) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+c)*time.Millisecond)
		defer cancel()
		for n := range 20 {
			if _, _, err := store.Create(ctx, claim(fmt.Sprintf("%d-%d", c, n), "a")); err != nil && !is(err, ctx.Err()) {
				t.Errorf("Create: %v", err)
			}
		}
	})
	require.NoError(t, closer.Close())
	if err := goleak.Find(before); err != nil {
		t.Fatalf("goroutines that Close left behind: %v", err)
	}
}
