package storetest

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/oncehttp/oncehttp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemoryStoreKeepsTheContract(t *testing.T) {
	Run(t, func(testing.TB) oncehttp.KeyStore { return &oncehttp.MemoryStore{} })
}

func TestASimpleStoreKeepsTheContractFromTwoHandles(t *testing.T) {
	Run(t, func(testing.TB) oncehttp.KeyStore { return &simpleStore{} },
		Options{Reopen: func(_ testing.TB, s oncehttp.KeyStore) oncehttp.KeyStore { return handle{s} }})
}

// handle is the same store as another value, without its Close.
type handle struct{ oncehttp.KeyStore }

// bugs are planted in simpleStore one at a time, each with a promise that must
// then be found broken, among others.
var bugs = []struct{ name, promise string }{
	{"Create checks, then acts", "One of many simultaneous Creates wins"},
	{"Create replaces what is there", "Create inserts"},
	{"Create fails if the record exists", "Create inserts"},
	{"Create keeps the caller's version", "Create inserts"},
	{"Update checks, then acts", "One of many simultaneous Updates of a version wins"},
	{"Update ignores the version", "Update replaces the version it names"},
	{"Update takes an older version", "Update replaces the version it names"},
	{"Update inserts", "A record that does not exist"},
	{"Update says ErrNotFound for a conflict", "Update replaces the version it names"},
	{"Update keeps what the new record leaves empty", "Update replaces the version it names"},
	{"Update returns the old version", "Update replaces the version it names"},
	{"Get is stale", "Claims, settles and reads are linearizable"},
	{"Get of nothing is an empty record", "A record that does not exist"},
	{"List is unordered", "List returns the least recently updated first"},
	{"List orders by time only", "List returns the least recently updated first"},
	{"List includes Before", "List returns the states, upstream and times"},
	{"List ignores Upstream", "List returns the states, upstream and times"},
	{"List looks at the first state only", "List returns the states, upstream and times"},
	{"List has no limit by default", "List returns 100 records"},
	{"List filters after the limit", "List returns the states, upstream and times"},
	{"List looks at one state after the other", "List has every record once"},
	{"the cursor is of the time only", "Paging by Cursor"},
	{"the cursor is included", "Paging by Cursor"},
	{"Prune deletes Open", "Prune deletes what has ended"},
	{"Prune deletes Unknown", "Prune deletes what has ended"},
	{"Prune deletes Sending", "Prune deletes what has ended"},
	{"Prune spares Reserved", "Prune deletes what has ended"},
	{"Prune deletes what expires at that time", "Prune deletes what has ended"},
	{"Prune ignores the limit", "Prune deletes at most limit"},
	{"Prune takes a negative limit for none", "Prune deletes at most limit"},
	{"Prune miscounts", "Prune deletes what has ended"},
	{"Prune checks, then acts", "Prune never deletes a record that was just claimed"},
	{"reads share memory", "What a read returned is the caller's"},
	{"times are rounded to seconds", "A time comes back"},
	{"times come back in local time", "Every field comes back"},
	{"the response's header is dropped", "Every field comes back"},
	{"a second value of a header is dropped", "Every field comes back"},
	{"headers are taken for UTF-8", "A header with bytes beyond ASCII"},
	{"an answer is cut at 64 KiB", "An answer of 256 KiB"},
	{"bodies are taken for text", "Every field comes back"},
	{"a nil Response comes back empty", "Every field comes back"},
	{"ids are compared without case", "Ids that look alike"},
	{"ids are trimmed", "Ids that look alike"},
	{"texts are trimmed", "Text that is SQL"},
	{"the note is dropped", "Every field comes back"},
	{"ctx is ignored", "An ended context does nothing"},
	{"an ended ctx writes first", "An ended context does nothing"},
	{"an ended ctx is told in words", "An ended context does nothing"},
	{"the lock is kept by those who leave", "Callers that leave"},
	{"Close leaves a goroutine", "Close leaves no goroutine"},
}

const bugVariable = "STORETEST_PLANTED_BUG"

// TestPlanted is the child process: Run fails it.
func TestPlanted(t *testing.T) {
	bug := os.Getenv(bugVariable)
	if bug == "" {
		t.Skip("a child process of TestEveryPlantedBugIsFound")
	}
	patience = 5 * time.Second
	Run(t, func(testing.TB) oncehttp.KeyStore { return &simpleStore{bug: bug} })
}

var failedLine = regexp.MustCompile(`(?m)^    --- FAIL: TestPlanted/(\S+)`)

// TestEveryPlantedBugIsFound is the contract's negative control.
func TestEveryPlantedBugIsFound(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	var mu sync.Mutex
	found, table := 0, ""
	t.Run("bugs", func(t *testing.T) {
		for _, bug := range bugs {
			t.Run(bug.name, func(t *testing.T) {
				t.Parallel()
				cmd := exec.Command(exe, "-test.run=^TestPlanted$", "-test.v", "-rapid.checks=20", "-rapid.nofailfile", "-rapid.shrinktime=100ms", "-storetest.keys=20")
				cmd.Env = append(os.Environ(), bugVariable+"="+bug.name)
				cmd.Dir = t.TempDir()
				out, err := cmd.CombinedOutput()
				var failed []string
				for _, m := range failedLine.FindAllStringSubmatch(string(out), -1) {
					failed = append(failed, strings.ReplaceAll(m[1], "_", " "))
				}
				assert.Error(t, err)
				hit := false
				for _, name := range failed {
					hit = hit || strings.HasPrefix(name, bug.promise)
				}
				if !hit {
					t.Fatalf("%q is not found broken, only %q:\n%s", bug.promise, failed, out[max(0, len(out)-4000):])
				}
				mu.Lock()
				defer mu.Unlock()
				found++
				table += fmt.Sprintf("%-50s %d promises broken\n", bug.name, len(failed))
			})
		}
	})
	t.Logf("%d of %d planted bugs found\n%s", found, len(bugs), table)
	require.Equal(t, len(bugs), found)
}

// TestACheckThenActStoreIsIllegal shows that the checker can say no: a store
// whose Update compares under one lock and swaps under another.
func TestACheckThenActStoreIsIllegal(t *testing.T) {
	for _, bug := range []string{"Update checks, then acts", "Create checks, then acts", "Get is stale"} {
		results := map[porcupine.CheckResult]int{}
		for k := range 100 {
			s := &simpleStore{bug: bug}
			results[record(t, [2]oncehttp.KeyStore{s, s}, fmt.Sprint(k)).check()]++
		}
		t.Logf("%s: %v", bug, results)
		require.Positive(t, results[porcupine.Illegal], bug)
		require.Zero(t, results[porcupine.Unknown], bug)
	}
	results := map[porcupine.CheckResult]int{}
	for k := range 100 {
		s := &simpleStore{}
		results[record(t, [2]oncehttp.KeyStore{s, s}, fmt.Sprint(k)).check()]++
	}
	require.Equal(t, map[porcupine.CheckResult]int{porcupine.Ok: 100}, results, "of a store without a bug")
}
