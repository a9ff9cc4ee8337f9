// Package storetest is the contract of oncehttp.KeyStore as a test suite, for
// anyone's store:
//
//	func TestMyStoreKeepsTheContract(t *testing.T) {
//		storetest.Run(t, func(t testing.TB) oncehttp.KeyStore {
//			s, err := mystore.Open(filepath.Join(t.TempDir(), "intents"))
//			if err != nil {
//				t.Fatal(err)
//			}
//			t.Cleanup(func() { s.Close() })
//			return s
//		})
//	}
//
// Run it with -race too; a store that the race detector makes slow, with
// -rapid.checks=20. Each subtest is one promise. What the suite takes for
// granted is what Transport does: ids of 1 to 512 bytes, texts that are UTF-8
// without NUL, times after 1970, Updated and Expires always set, answers of at
// most 256 KiB that have a status.
//
// It does not show durability: no power is cut here and no process killed.
package storetest

import (
	"flag"
	"testing"

	"github.com/oncehttp/oncehttp"
)

// Options of Run. The zero value tests one handle.
type Options struct {
	// Reopen opens a second handle on the data of store, as another process
	// would, to be closed by t.Cleanup. The concurrent checks then divide
	// their clients among both. Nil where a store cannot be shared.
	Reopen func(t testing.TB, store oncehttp.KeyStore) oncehttp.KeyStore
}

var keyCount = flag.Int("storetest.keys", 100, "storetest: how many keys have their history checked for linearizability")

// Run tests the store that open makes: an empty one each time, closed by a
// t.Cleanup in open. It opens one for each subtest, and 100 (-rapid.checks) for
// the model-based one, which prints how to repeat a failure. Let nothing else
// run beside it in the process: it looks for goroutines left behind.
func Run(t *testing.T, open func(t testing.TB) oncehttp.KeyStore, opts ...Options) {
	s := &suite{open: open}
	for _, o := range opts {
		if o.Reopen != nil {
			s.reopen = o.Reopen
		}
	}
	for _, c := range checks {
		t.Run(c.promise, func(t *testing.T) { c.run(t, s) })
	}
}

type suite struct {
	open   func(testing.TB) oncehttp.KeyStore
	reopen func(testing.TB, oncehttp.KeyStore) oncehttp.KeyStore
}

// pair opens a store and another handle on it, the same one if it has none.
func (s *suite) pair(t testing.TB) [2]oncehttp.KeyStore {
	first := s.open(t)
	if s.reopen == nil {
		return [2]oncehttp.KeyStore{first, first}
	}
	return [2]oncehttp.KeyStore{first, s.reopen(t, first)}
}

// checks are the contract, the plain promises first.
var checks = []struct {
	promise string
	run     func(*testing.T, *suite)
}{
	{"Create inserts a record at version 1 and returns what is there if there is one", createInserts},
	{"Update replaces the version it names and no other", updateReplaces},
	{"A record that does not exist is ErrNotFound", missingIsNotFound},
	{"Every field comes back as it was stored", fieldsComeBack},
	{"A time comes back as the same instant to the microsecond", timesComeBack},
	{"An answer of 256 KiB comes back byte for byte", bigAnswersComeBack},
	{"A header with bytes beyond ASCII comes back as it was", latin1HeadersComeBack},
	{"Ids that look alike are different records", alikeIDsDiffer},
	{"Text that is SQL or a pattern is only text", hostileTextIsText},
	{"Whatever is done a store answers as a map would", answersAsAMap},

	{"List returns the least recently updated first and then by id", listIsOrdered},
	{"List returns the states, upstream and times that are asked for", listFilters},
	{"List returns 100 records if Limit is zero", listLimits},
	{"Paging by Cursor has no gaps or repeats while others write", pagingIsStable},
	{"List has every record once while records change state", listIsOneMoment},

	{"Prune deletes what has ended and expired and nothing else", pruneDeletes},
	{"Prune deletes at most limit", pruneLimits},
	{"Prune never deletes a record that was just claimed", pruneSparesClaims},

	{"What a read returned is the caller's to write to", readsAreCopies},
	{"One of many simultaneous Creates wins", oneCreateWins},
	{"One of many simultaneous Updates of a version wins", oneUpdateWins},
	{"No update is lost", noUpdateIsLost},
	{"Claims, settles and reads are linearizable with take-overs and lost acknowledgements", linearizable},
	{"A write whose acknowledgement was lost is recognised by its owner", ownerTells},
	{"Another handle sees what was acknowledged", handlesAgree},

	{"An ended context does nothing and is told as such", endedContextDoesNothing},
	{"Callers that leave while 64 write harm no one", leavingHarmsNoOne},
	{"Close leaves no goroutine behind", closeLeavesNothing},
}
