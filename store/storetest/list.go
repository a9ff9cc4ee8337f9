package storetest

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

func listIsOrdered(t *testing.T, s *suite) {
	store := s.open(t)
	want := map[string]oncehttp.Record{}
	for i := range 60 {
		id := fmt.Sprintf("%c%d", "aBZ_é~"[i%6], i*37%60) // insertion order is not the order, nor is a collation's
		r := claim(id, "a")
		r.State = allStates[i%len(allStates)]
		r.Updated = at(time.Duration(i*17%5) * time.Microsecond)
		want[r.ID] = mustCreate(t, store, r)
	}
	moved := want["a0"]
	moved.Updated = at(time.Minute)
	want["a0"] = mustUpdate(t, store, moved)
	page, err := store.List(t.Context(), oncehttp.Query{})
	require.NoError(t, err)
	require.Equal(t, ids(selected(want, oncehttp.Query{})), ids(page))
	require.Equal(t, "a0", page[len(page)-1].ID, "an updated record goes to the end")
}

func listFilters(t *testing.T, s *suite) {
	store := s.open(t)
	all := map[string]oncehttp.Record{}
	for i := range 84 {
		r := claim(fmt.Sprintf("%02d", i), "a")
		r.State, r.Upstream = allStates[i%7], modelUpstreams[i/7%3]
		r.Updated = at(time.Duration(i/21) * time.Microsecond)
		all[r.ID] = mustCreate(t, store, r)
	}
	n := 0
	for _, states := range [][]oncehttp.State{
		nil, {}, {oncehttp.StateOpen}, {oncehttp.StateDone}, {oncehttp.StateUnknown, oncehttp.StateReserved},
		{oncehttp.StateSending, oncehttp.StateSending}, allStates,
	} {
		for _, upstream := range []string{"", modelUpstreams[0], modelUpstreams[2], "pay.exampl_"} {
			for _, before := range []time.Time{{}, epoch, at(2 * time.Microsecond), at(time.Hour)} {
				for _, after := range []oncehttp.Cursor{{}, {Updated: at(time.Microsecond), ID: "30"}, {Updated: at(time.Hour)}} {
					q := oncehttp.Query{States: states, Upstream: upstream, Before: before, After: after}
					page, err := store.List(t.Context(), q)
					require.NoError(t, err)
					require.Equal(t, ids(selected(all, q)), ids(page), "%+v", q)
					n++
				}
			}
		}
	}
	t.Logf("%d queries", n)
}

func listLimits(t *testing.T, s *suite) {
	store := s.open(t)
	for i := range 130 {
		r := claim(fmt.Sprintf("%03d", i), "a")
		r.State = allStates[i%len(allStates)]
		mustCreate(t, store, r)
	}
	for limit, want := range map[int]int{0: 100, 1: 1, 99: 99, 101: 101, 130: 130, 1000: 130} {
		page, err := store.List(t.Context(), oncehttp.Query{Limit: limit})
		require.NoError(t, err)
		require.Len(t, page, want, "Limit %d of 130 records", limit)
		require.Equal(t, "000", page[0].ID)
		require.Equal(t, fmt.Sprintf("%03d", want-1), page[want-1].ID)
	}
}

// pagingIsStable pages through records that nobody writes, while others are
// created, updated and pruned all around them.
func pagingIsStable(t *testing.T, s *suite) {
	stores := s.pair(t)
	const still = 150
	var want []string
	for i := range still {
		r := claim(fmt.Sprintf("still %03d", i*7%still), "a")
		r.Updated = at(time.Duration(i*7%still/4) * time.Millisecond)
		mustCreate(t, stores[0], r)
		want = append(want, fmt.Sprintf("still %03d", i))
	}
	stop, ended, writes := make(chan struct{}), make(chan error, 1), 0
	go func() {
		ended <- func() error {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return nil
				default:
				}
				r := claim(fmt.Sprintf("moving %d", i), "b")
				r.Updated = at(time.Duration(i*13%40) * time.Millisecond)
				r, _, err := stores[1].Create(t.Context(), r)
				if err != nil {
					return err
				}
				r.State, r.Updated, r.Expires = oncehttp.StateDone, at(time.Duration(i*29%40)*time.Millisecond), epoch
				if _, err := stores[1].Update(t.Context(), r); err != nil {
					return err
				}
				if _, err := stores[1].Prune(t.Context(), at(time.Minute), 3); err != nil {
					return err
				}
				writes += 3
			}
		}()
	}()
	var failure string
	for round := 0; round < 6 && failure == ""; round++ {
		var got []string
		q := oncehttp.Query{Limit: 7, States: [][]oncehttp.State{nil, {oncehttp.StateSending}}[round%2]}
		for {
			page, err := stores[0].List(t.Context(), q)
			if err != nil {
				failure = fmt.Sprintf("List: %v", err)
				break
			}
			if len(page) == 0 {
				break
			}
			for _, r := range page {
				if inOrder(q.After.Updated, q.After.ID, r.Updated, r.ID) >= 0 {
					failure = fmt.Sprintf("%q at %v comes after %+v", r.ID, r.Updated, q.After)
				}
				q.After = oncehttp.Cursor{Updated: r.Updated, ID: r.ID}
				if r.Owner == "a" {
					got = append(got, r.ID)
				}
			}
		}
		if failure == "" && !slices.Equal(want, got) {
			failure = fmt.Sprintf("paging returned %v, want %v", got, want)
		}
	}
	close(stop)
	require.NoError(t, <-ended)
	require.Empty(t, failure)
	t.Logf("6 walks of %d records beside %d writes", still, writes)
}

// listIsOneMoment lists all records while some go from state to state. A List
// that looks at one state after the other meets a record twice, or never.
func listIsOneMoment(t *testing.T, s *suite) {
	stores := s.pair(t)
	const records, moving, lists = 20, 4, 60
	for i := range records {
		mustCreate(t, stores[0], claim(fmt.Sprint(i), "a"))
	}
	stop := make(chan struct{})
	var movers sync.WaitGroup
	for i := range moving {
		movers.Go(func() {
			r, err := stores[1].Get(t.Context(), fmt.Sprint(i))
			for n := 1; err == nil; n++ {
				select {
				case <-stop:
					return
				default:
				}
				r.State, r.Updated = allStates[(n*5+i)%len(allStates)], at(time.Duration(n)*time.Microsecond)
				r, err = stores[1].Update(t.Context(), r)
			}
			t.Errorf("Update: %v", err)
		})
	}
	var failure string
	for range lists {
		page, err := stores[0].List(t.Context(), oncehttp.Query{})
		if err != nil {
			failure = fmt.Sprintf("List: %v", err)
		}
		seen := map[string]int{}
		for _, r := range page {
			seen[r.ID]++
		}
		for i := range records {
			if n := seen[fmt.Sprint(i)]; n != 1 && failure == "" {
				failure = fmt.Sprintf("List has the record %d %d times", i, n)
			}
		}
	}
	close(stop)
	movers.Wait()
	require.Empty(t, failure)
}
