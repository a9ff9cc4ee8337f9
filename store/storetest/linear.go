package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

// The size of a history. The checker's time grows with how many calls overlap:
// 33 on one key by 32 clients took 26 s, 108 more than 60 s. Under the race
// detector it is several times slower.
var clientsPerKey, callsPerKey = 16, 40

func init() {
	if raceEnabled {
		clientsPerKey, callsPerKey = 8, 24
	}
}

// checkLimit bounds the checker's time for one key. No answer by then fails.
const checkLimit = 60 * time.Second

type callKind uint8

const (
	callCreate callKind = iota
	callUpdate
	callGet
)

// callInput and callOutput are one call as the checker sees it.
type callInput struct {
	kind callKind
	recordState
}

type callOutput struct {
	created bool
	err     error // nil, ErrNotFound or ErrConflict
	recordState
}

// recordState is what is compared of a record.
type recordState struct {
	version int64
	owner   string
	state   oncehttp.State
}

func stateOf(r oncehttp.Record) recordState { return recordState{r.Version, r.Owner, r.State} }

// keyStore is KeyStore for one id, one call after another.
var keyStore = porcupine.Model{
	Init: func() any { return recordState{} }, // version 0: none
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(recordState), input.(callInput), output.(callOutput)
		exists := s.version > 0
		next := recordState{s.version + 1, in.owner, in.state}
		switch {
		case in.kind == callCreate && !exists:
			return out.err == nil && out.created && out.recordState == next, next
		case in.kind == callCreate:
			return out.err == nil && !out.created && out.recordState == s, s
		case !exists:
			return out.err == oncehttp.ErrNotFound, s
		case in.kind == callGet:
			return out.err == nil && out.recordState == s, s
		case in.version != s.version:
			return out.err == oncehttp.ErrConflict, s
		}
		return out.err == nil && out.recordState == next, next
	},
	DescribeOperation: func(input, output any) string {
		in, out := input.(callInput), output.(callOutput)
		call := [...]string{"Create", "Update", "Get"}[in.kind]
		if in.kind != callGet {
			call += fmt.Sprintf("(%s, %s, version %d)", in.owner, in.state, in.version)
		}
		if out.err != nil {
			return call + ": " + out.err.Error()
		}
		return call + fmt.Sprintf(": version %d, %s, %s, created %t", out.version, out.owner, out.state, out.created)
	},
}

// A history of one key, and how much of what it should hold it holds.
type history struct {
	id        string
	clock     atomic.Int64 // orders the beginnings and ends of calls
	calls     atomic.Int64
	takeovers atomic.Int64
	lost      atomic.Int64

	mu     sync.Mutex
	ops    []porcupine.Operation // guarded by mu
	failed error                 // guarded by mu: an error that nobody planted
}

// record makes the calls of all clients on one key.
func record(t testing.TB, stores [2]oncehttp.KeyStore, id string) *history {
	h := &history{id: id}
	together(t, clientsPerKey, func(c int) {
		w := &worker{t: t, h: h, client: c, store: stores[c%2], rand: rand.New(rand.NewPCG(rand.Uint64(), uint64(c)))}
		w.work()
	})
	return h
}

// worker is a client that claims, takes over, settles and reads as Transport
// does, with what it knows: not the acknowledgements that it lost.
type worker struct {
	t      testing.TB
	h      *history
	client int
	store  oncehttp.KeyStore
	rand   *rand.Rand
	run    int
}

func (w *worker) work() {
	token := w.token()
	var known oncehttp.Record // version 0: nothing is known
	for w.h.calls.Add(1) <= int64(callsPerKey) {
		var err error
		mine := known.Owner == token && known.State == oncehttp.StateSending
		switch {
		case known.Version == 0 && w.rand.IntN(4) > 0:
			known, err = w.call(callCreate, claim(w.h.id, token))
		case known.Version == 0 || !mine && w.rand.IntN(3) == 0:
			known, err = w.call(callGet, oncehttp.Record{ID: w.h.id})
		case mine: // settle
			next := known
			next.State = allStates[2+w.rand.IntN(5)]
			known, err = w.call(callUpdate, next)
			token = w.token()
		default: // claim again, or take over one whose lease is past
			if known.State == oncehttp.StateSending {
				w.h.takeovers.Add(1)
			}
			next := known
			next.State, next.Owner = oncehttp.StateSending, token
			known, err = w.call(callUpdate, next)
		}
		switch {
		case err == nil:
		case is(err, oncehttp.ErrNotFound), is(err, oncehttp.ErrConflict), is(err, errAckLost), is(err, errCallLost):
			known = oncehttp.Record{} // look, and find our token or not
			if w.h.calls.Add(1) > int64(callsPerKey) {
				return
			}
			if r, err := w.call(callGet, oncehttp.Record{ID: w.h.id}); err == nil {
				known = r
			}
		default:
			w.h.mu.Lock()
			w.h.failed = errors.Join(w.h.failed, err)
			w.h.mu.Unlock()
			return
		}
	}
}

func (w *worker) token() string {
	w.run++
	return fmt.Sprintf("c%d-%d", w.client, w.run)
}

// call makes a call and puts it, with what the store truly answered, into the
// history. One in twenty reaches the client as an error: half of them were
// never made.
func (w *worker) call(kind callKind, r oncehttp.Record) (stored oncehttp.Record, err error) {
	fate := w.rand.IntN(40)
	if fate == 0 {
		w.h.lost.Add(1)
		return oncehttp.Record{}, errCallLost
	}
	op := porcupine.Operation{ClientId: w.client, Input: callInput{kind, stateOf(r)}, Call: w.h.clock.Add(1)}
	created := false
	switch kind {
	case callCreate:
		stored, created, err = w.store.Create(w.t.Context(), r)
	case callUpdate:
		stored, err = w.store.Update(w.t.Context(), r)
	case callGet:
		stored, err = w.store.Get(w.t.Context(), r.ID)
	}
	out := callOutput{created: created}
	switch {
	case err == nil:
		out.recordState = stateOf(stored)
	case is(err, oncehttp.ErrNotFound):
		out.err = oncehttp.ErrNotFound
	case is(err, oncehttp.ErrConflict):
		out.err = oncehttp.ErrConflict
	default:
		return stored, err
	}
	op.Output, op.Return = out, w.h.clock.Add(1)
	w.h.mu.Lock()
	w.h.ops = append(w.h.ops, op)
	w.h.mu.Unlock()
	if fate == 1 {
		w.h.lost.Add(1)
		return oncehttp.Record{}, errAckLost
	}
	return stored, err
}

// check says whether the calls can be put into an order, each between its
// beginning and its end, in which a store that does one at a time would have
// answered so.
func (h *history) check() porcupine.CheckResult {
	return porcupine.CheckOperationsTimeout(keyStore, h.ops, checkLimit)
}

func (h *history) String() string {
	var b strings.Builder
	for _, op := range h.ops {
		fmt.Fprintf(&b, "  [%3d, %3d] client %2d: %s\n", op.Call, op.Return, op.ClientId, keyStore.DescribeOperation(op.Input, op.Output))
	}
	return b.String()
}

func linearizable(t *testing.T, s *suite) {
	stores := s.pair(t)
	var calls, takeovers, lost int64
	for k := range *keyCount {
		h := record(t, stores, fmt.Sprint("key ", k))
		require.NoError(t, h.failed, "a call failed that had no reason to")
		if result := h.check(); result != porcupine.Ok {
			t.Fatalf("the history of %s is %s (Unknown: the checker did not end within %s):\n%s", h.id, result, checkLimit, h)
		}
		calls += int64(len(h.ops))
		takeovers += h.takeovers.Load()
		lost += h.lost.Load()
	}
	t.Logf("%d keys, %d clients each, %d calls, %d take-overs tried, %d acknowledgements or calls lost", *keyCount, clientsPerKey, calls, takeovers, lost)
	if *keyCount >= 20 {
		require.Positive(t, takeovers)
		require.Positive(t, lost)
	}
}
