package sqlitestore

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// writes are what one process did: for each id, the versions that its
// acknowledged writes made.
type writes struct {
	Versions map[string][]int64
	Created  map[string]int
	Conflict int
}

const sharedIDs, passes, hands = 200, 3, 4

// claimAndSettleAll walks the ids with 4 goroutines, each from another place:
// claims, or takes over, and settles.
func claimAndSettleAll(ctx context.Context, s oncehttp.KeyStore, owner string) (writes, error) {
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
			for n := range sharedIDs * passes {
				err := one(fmt.Sprintf("%064d", (n+h*7)%sharedIDs), fmt.Sprintf("%s-%d-%d", owner, h, n))
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
	fmt.Println("ready")
	_, err := bufio.NewReader(os.Stdin).ReadString('\n')
	require.NoError(t, err)
	w, err := claimAndSettleAll(t.Context(), s, "child")
	require.NoError(t, err)
	require.NoError(t, json.NewEncoder(os.Stdout).Encode(w))
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
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)

	_, err = io.WriteString(in, "go\n")
	require.NoError(t, err)
	mine, err := claimAndSettleAll(t.Context(), s, "parent")
	require.NoError(t, err)
	var theirs writes
	require.NoError(t, json.NewDecoder(lines).Decode(&theirs))
	_, err = io.Copy(io.Discard, lines)
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())

	total := 0
	for n := range sharedIDs {
		id := fmt.Sprintf("%064d", n)
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
