package sqlitestore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/store/storetest"
)

func openAt(t testing.TB, path string) *Store {
	t.Helper()
	s, err := Open(t.Context(), path)
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func openNew(t testing.TB) oncehttp.KeyStore {
	return openAt(t, filepath.Join(t.TempDir(), "intents.db"))
}

func TestTheContractIsKept(t *testing.T) { storetest.Run(t, openNew) }

func TestTheContractIsKeptByTwoHandlesOnOneFile(t *testing.T) {
	storetest.Run(t, openNew, storetest.Options{Reopen: func(t testing.TB, s oncehttp.KeyStore) oncehttp.KeyStore {
		return openAt(t, s.(*Store).path)
	}})
}

// Two processes on one file.

const childFile = "SQLITESTORE_CONTRACT_CHILD"

func (w *writes) add(o writes) {
	if w.Versions == nil {
		w.Versions, w.Created = map[string][]int64{}, map[string]int{}
	}
	maps.Copy(w.Versions, o.Versions) // of another block
	maps.Copy(w.Created, o.Created)
	w.Conflict += o.Conflict
}

func sharedID(n int) string { return fmt.Sprintf("%064d", n) }

// writes are what one process did: for each id, the versions that its
// acknowledged writes made.
type writes struct {
	Versions map[string][]int64
	Created  map[string]int
	Conflict int
}

// The ids are shared block by block, so that the processes meet.
const sharedIDs, blockIDs, hands, turns = 200, 10, 4, 15

// claimAndSettleBlock lets 4 goroutines claim, or take over, and settle ids of a
// block at random.
func claimAndSettleBlock(ctx context.Context, s oncehttp.KeyStore, owner string, block int) (writes, error) {
	w := writes{Versions: map[string][]int64{}, Created: map[string]int{}}
	var mu sync.Mutex
	var all sync.WaitGroup
	var failed error
	wrote := func(id string, version int64) {
		mu.Lock()
		defer mu.Unlock()
		w.Versions[id] = append(w.Versions[id], version)
	}
	one := func(id, owner string) error {
		now := time.Now().UTC().Truncate(time.Microsecond)
		mine := oncehttp.Record{ID: id, Upstream: "pay.example", State: oncehttp.StateSending, Owner: owner, Lease: now, FirstSent: now, Updated: now, Expires: now.Add(time.Hour)}
		held, created, err := s.Create(ctx, mine)
		if err != nil {
			return err
		}
		if created {
			wrote(id, held.Version)
			mu.Lock()
			w.Created[id]++
			mu.Unlock()
		} else {
			held.State, held.Owner, held.Attempts = oncehttp.StateSending, owner, held.Attempts+1
			if held, err = s.Update(ctx, held); err != nil {
				return err
			}
			wrote(id, held.Version)
		}
		held.State, held.Attempts = oncehttp.StateDone, held.Attempts+1
		held.Response = &oncehttp.SavedResponse{Status: 201, Body: []byte(owner)}
		if held, err = s.Update(ctx, held); err != nil {
			return err
		}
		wrote(id, held.Version)
		return nil
	}
	for h := range hands {
		all.Go(func() {
			for n := range blockIDs + turns {
				id := block*blockIDs + n%blockIDs // each of them, and then any
				if n >= blockIDs {
					id = block*blockIDs + rand.N(blockIDs)
				}
				err := one(sharedID(id), fmt.Sprintf("%s-%d-%d", owner, h, n))
				mu.Lock()
				switch {
				case errors.Is(err, oncehttp.ErrConflict):
					w.Conflict++
				case err != nil:
					failed = errors.Join(failed, err)
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return w, failed
}

// TestChildOfTheTwoProcessTest is the other process.
func TestChildOfTheTwoProcessTest(t *testing.T) {
	path := os.Getenv(childFile)
	if path == "" {
		t.Skip("a child process of TestTwoProcessesLoseNoWriteOfEachOther")
	}
	s := openAt(t, path)
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for block := 0; ; {
		if err := in.Decode(&block); errors.Is(err, io.EOF) {
			return
		}
		w, err := claimAndSettleBlock(t.Context(), s, "child", block)
		require.NoError(t, err)
		require.NoError(t, out.Encode(w))
	}
}

func TestTwoProcessesLoseNoWriteOfEachOther(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	s := openAt(t, path)
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestChildOfTheTwoProcessTest$")
	cmd.Env = append(os.Environ(), childFile+"="+path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	tell, hear := json.NewEncoder(in), json.NewDecoder(out)
	var mine, theirs writes
	for block := range sharedIDs / blockIDs {
		require.NoError(t, tell.Encode(block))
		m, err := claimAndSettleBlock(t.Context(), s, "parent", block)
		require.NoError(t, err)
		mine.add(m)
		var c writes
		require.NoError(t, hear.Decode(&c))
		theirs.add(c)
	}
	require.NoError(t, in.Close())
	_, err = io.Copy(io.Discard, out)
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())

	total := 0
	for n := range sharedIDs {
		id := sharedID(n)
		rec, err := s.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 1, mine.Created[id]+theirs.Created[id], "processes that created %s", id)
		versions := append(mine.Versions[id], theirs.Versions[id]...)
		slices.Sort(versions)
		want := make([]int64, rec.Version)
		for i := range want {
			want[i] = int64(i + 1)
		}
		require.Equal(t, want, versions, "versions that acknowledged writes of both processes made of %s: each once", id)
		require.EqualValues(t, rec.Version-1, rec.Attempts, "updates counted in the record")
		total += len(versions)
	}
	count := func(w writes) (n int) {
		for _, v := range w.Versions {
			n += len(v)
		}
		return n
	}
	t.Logf("%d writes, %d of them the child's; %d ids created by the child; %d and %d conflicts", total, count(theirs), len(theirs.Created), mine.Conflict, theirs.Conflict)
	assert.Positive(t, count(mine))
	assert.Positive(t, count(theirs))
}

// TestAWriterIsNotLeftWaitingByThoseWhoLeftAGroup: another process holds the
// lock while the callers of a group leave one after the other. Once a caller
// that had left was handed the lead, and nothing was written ever after.
func TestAWriterIsNotLeftWaitingByThoseWhoLeftAGroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	s, other := openAt(t, path), openAt(t, path)
	lock, err := other.db.Conn(t.Context())
	require.NoError(t, err)
	_, err = lock.ExecContext(t.Context(), "BEGIN IMMEDIATE")
	require.NoError(t, err)

	var leaving sync.WaitGroup
	for n := range 64 {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond+rand.N(400*time.Millisecond))
		defer cancel()
		leaving.Go(func() {
			_, _, err := s.Create(ctx, oncehttp.Record{ID: fmt.Sprint(n), State: oncehttp.StateSending})
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		})
	}
	leaving.Wait()
	_, err = lock.ExecContext(t.Context(), "ROLLBACK")
	require.NoError(t, err)
	require.NoError(t, lock.Close())

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, created, err := s.Create(ctx, oncehttp.Record{ID: "stays", State: oncehttp.StateSending})
	require.NoError(t, err, "the lock is free again")
	require.True(t, created)
}
