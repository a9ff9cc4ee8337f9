//go:build unix

package sqlitestore

import (
	"flag"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

var (
	meetingsFlag = flag.Int("meetings", 1000, "how many intents two processes call at the same instant (200 with -short)")
	pauseFlag    = flag.Bool("pause", false, "let a stopped process's lease of 11 s pass three times, instead of setting it back")
)

// meet lets two processes, on the files at a and b, call n intents at the same
// instant each, and returns in what the promises were broken.
func meet(t *testing.T, n int, a, b string) violations {
	l := newLedger(t, 0.1)
	l.before = func(*http.Request, delivery) { <-time.After(time.Millisecond) } // so that they overlap
	var pods [2]*child
	for i, path := range []string{a, b} {
		pods[i] = start(t, orders{Role: "call", Path: path, URL: l.URL, Owner: fmt.Sprintf("pod-%d", i), Wait: true, Attempts: 10})
	}
	pods[0].ready() // both made the file, or one found the other's
	pods[1].ready()
	v := violations{}
	begin := time.Now()
	met, replayed := 0, 0
	var senders [2]int
	for i := range n {
		next := appointment{intentName(i), time.Now().Add(300 * time.Microsecond).UnixNano()}
		require.NoError(t, pods[0].in.Encode(next))
		require.NoError(t, pods[1].in.Encode(next))
		got := [2]called{pods[0].called(), pods[1].called()}
		for p, r := range got {
			if r.Outcome != "done" || r.Err != "" {
				v.add("not done", "%+v", r)
			}
			if r.Attempts > 0 {
				senders[p]++
			} else if r.Replayed {
				replayed++
			}
		}
		if got[0].Attempts > 0 && got[1].Attempts > 0 {
			v.add("sent by both", "%+v", got)
		}
		if got[0].Start < got[1].End && got[1].Start < got[0].End {
			met++
		}
	}
	took := time.Since(begin)
	s := mustOpen(t, a)
	l.mu.Lock()
	defer l.mu.Unlock()
	keys := map[string]map[string]bool{}
	for _, d := range l.came {
		if keys[d.Intent] == nil {
			keys[d.Intent] = map[string]bool{}
		}
		keys[d.Intent][d.Key] = true
	}
	for i := range n {
		intent := intentName(i)
		rec := recordOf(t, s, intent)
		switch {
		case len(keys[intent]) != 1:
			v.add("two keys", "%s: %d", intent, len(keys[intent]))
		case rec.State != oncehttp.StateDone || !keys[intent][rec.Key]:
			v.add("record wrong", "%s: %s", intent, rec.State)
		}
		if l.effects[intent] != 1 {
			v.add("effects", "%s: %d", intent, l.effects[intent])
		}
	}
	if l.most > 1 {
		v.add("deliveries under way at a time", "%d", l.most)
	}
	assert.Greater(t, met, n*8/10, "the calls did not meet: nothing was tested")
	t.Logf("%d intents in %v: %d met; %d and %d sent by each, %d answered from the store; %d deliveries, %d answers lost, at most %d under way at a time; violations: %v",
		n, took.Round(time.Millisecond), met, senders[0], senders[1], replayed, len(l.came), l.lost, l.most, v)
	return v
}

func TestTwoProcessesWithOneIntentSendItOneAtATimeUnderOneKey(t *testing.T) {
	n := *meetingsFlag
	if testing.Short() {
		n = min(n, 200)
	}
	path := filepath.Join(t.TempDir(), "intents.db")
	assert.Empty(t, meet(t, n, path, path))
}

// The negative control: they share no file.
func TestTwoProcessesBetrayAStoreThatTheyDoNotShare(t *testing.T) {
	dir := t.TempDir()
	v := meet(t, 30, filepath.Join(dir, "a.db"), filepath.Join(dir, "b.db"))
	for _, kind := range []string{"sent by both", "two keys", "effects", "deliveries under way at a time"} {
		assert.NotEmpty(t, v[kind], kind)
	}
}

func mustOpen(t *testing.T, path string) *Store {
	t.Helper()
	s, err := Open(t.Context(), path)
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func recordOf(t *testing.T, s *Store, intent string) oncehttp.Record {
	t.Helper()
	var id string
	require.NoError(t, s.db.QueryRow("SELECT id FROM oncehttp_intents WHERE intent = ?", intent).Scan(&id))
	rec, err := s.Get(t.Context(), id)
	require.NoError(t, err)
	return rec
}

// hold makes the ledger keep the first delivery of each intent: it tells of it,
// and goes on when the sender is gone or the channel of that intent is closed.
func (l *ledger) hold(intents ...string) (arrived chan delivery, release map[string]chan func()) {
	arrived, release = make(chan delivery, len(intents)), map[string]chan func(){}
	held := map[string]bool{}
	for _, i := range intents {
		release[i] = make(chan func(), 1)
	}
	l.before = func(r *http.Request, d delivery) {
		l.mu.Lock()
		first := !held[d.Intent] && release[d.Intent] != nil
		held[d.Intent] = true
		l.mu.Unlock()
		if !first {
			return
		}
		arrived <- d
		select {
		case then := <-release[d.Intent]:
			then()
		case <-r.Context().Done():
		}
	}
	return arrived, release
}

func arrival(t *testing.T, arrived <-chan delivery) delivery {
	t.Helper()
	select {
	case d := <-arrived:
		return d
	case <-time.After(20 * time.Second):
		t.Fatal("the child sent nothing")
		return delivery{}
	}
}

func (l *ledger) sent(intent string) (keys []string, effects int, last delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.came {
		if d.Intent == intent {
			keys, last = append(keys, d.Key), d
		}
	}
	return keys, l.effects[intent], last
}

// killedWhileSending leaves an intent that a process of pod-1 was sending when
// it was killed.
func killedWhileSending(t *testing.T, l *ledger, path, intent string) oncehttp.Record {
	t.Helper()
	arrived, _ := l.hold(intent)
	c := start(t, orders{Role: "call", Path: path, URL: l.URL, Owner: "pod-1"})
	c.ready()
	require.NoError(t, c.in.Encode(appointment{Intent: intent}))
	d := arrival(t, arrived)
	c.kill()
	rec := recordOf(t, mustOpen(t, path), intent)
	require.Equal(t, oncehttp.StateSending, rec.State)
	require.Equal(t, d.Key, rec.Key)
	require.True(t, strings.HasPrefix(rec.Owner, "pod-1 "), rec.Owner)
	require.Greater(t, time.Until(rec.Lease), time.Minute, "the lease of the one that was killed")
	return rec
}

func TestARestartedProcessTakesItsOwnIntentsOverAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	l := newLedger(t, 0)
	rec := killedWhileSending(t, l, path, "charge:order-1")
	begin := time.Now()
	c := start(t, orders{Role: "call", Path: path, URL: l.URL, Owner: "pod-1"})
	c.ready()
	require.NoError(t, c.in.Encode(appointment{Intent: "charge:order-1"}))
	got := c.called()
	took := time.Since(begin)
	require.Equal(t, "done", got.Outcome, "%+v", got)
	require.Equal(t, 1, got.Attempts)
	require.True(t, time.Now().Before(rec.Lease))
	keys, effects, _ := l.sent("charge:order-1")
	require.Equal(t, []string{rec.Key, rec.Key}, keys)
	require.Equal(t, 1, effects)
	t.Logf("taken over and done %v after the start, %v before the lease ended", took.Round(time.Millisecond), time.Until(rec.Lease).Round(time.Second))
}

func TestAnotherProcessWaitsForTheLeaseOfAKilledOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	l := newLedger(t, 0)
	rec := killedWhileSending(t, l, path, "charge:order-1")
	s := mustOpen(t, path)
	other := newCaller(s, orders{URL: l.URL, Owner: "pod-2"})
	defer other.t.CloseIdleConnections()
	got := other.call(t.Context(), "charge:order-1")
	require.Equal(t, "unknown", got.Outcome)
	require.Equal(t, oncehttp.ErrInFlight.Error(), got.Reason)
	require.True(t, got.RetryAt.Equal(rec.Lease), "RetryAt %v, lease %v", got.RetryAt, rec.Lease)
	keys, _, _ := l.sent("charge:order-1")
	require.Len(t, keys, 1, "another owner sent within the lease")

	// A lease lasts over ten seconds: set it to end sooner, by hand.
	lease := time.Now().Add(400 * time.Millisecond).UTC().Truncate(time.Microsecond)
	setLease(t, s, rec.ID, lease)
	waits := newCaller(s, orders{URL: l.URL, Owner: "pod-2", Wait: true})
	defer waits.t.CloseIdleConnections()
	got = waits.call(t.Context(), "charge:order-1")
	require.Equal(t, "done", got.Outcome, "%+v", got)
	keys, effects, last := l.sent("charge:order-1")
	require.Equal(t, []string{rec.Key, rec.Key}, keys)
	require.Equal(t, 1, effects)
	after := time.Duration(last.At - lease.UnixNano())
	require.GreaterOrEqual(t, after, time.Duration(0), "sent before the lease ended")
	t.Logf("refused until the lease ends; sent %v after its end", after.Round(time.Millisecond))
}

func setLease(t *testing.T, s *Store, id string, lease time.Time) {
	t.Helper()
	res, err := s.db.Exec("UPDATE oncehttp_intents SET lease = ? WHERE id = ? AND state = 'sending'", lease.Format("2006-01-02T15:04:05.000000Z"), id)
	require.NoError(t, err)
	n, err := res.RowsAffected()
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
}

// stopped lets a process stop while its request is at the upstream, lets
// another take the intent over and end it, and wakes the first up, which then
// gets the late answer. It returns the record as the taker left it and as it
// is afterwards, and what the first reported.
func stopped(t *testing.T, late func(), deadline time.Duration, planted bool) (taken, after oncehttp.Record, reported called) {
	const intent = "charge:order-1"
	path := filepath.Join(t.TempDir(), "intents.db")
	s := mustOpen(t, path)
	l := newLedger(t, 0)
	arrived, release := l.hold(intent)
	c := start(t, orders{Role: "call", Path: path, URL: l.URL, Owner: "pod-1", Attempts: 1, MaxElapsed: deadline, Unfenced: planted})
	c.ready()
	require.NoError(t, c.in.Encode(appointment{Intent: intent}))
	d := arrival(t, arrived)
	require.NoError(t, c.cmd.Process.Signal(syscall.SIGSTOP))
	before := recordOf(t, s, intent)
	require.Equal(t, oncehttp.StateSending, before.State)

	taker := newCaller(s, orders{URL: l.URL, Owner: "pod-2"})
	defer taker.t.CloseIdleConnections()
	got := taker.call(t.Context(), intent)
	require.Equal(t, oncehttp.ErrInFlight.Error(), got.Reason, "a stopped holder still has its lease")
	switch {
	case *pauseFlag:
		t.Logf("three leases: %v", 3*time.Until(before.Lease))
		<-time.After(3 * time.Until(before.Lease))
	default:
		setLease(t, s, before.ID, time.Now().Add(-time.Second).UTC())
		if deadline > 0 {
			<-time.After(deadline) // it wakes up with its time over
		}
	}
	got = taker.call(t.Context(), intent)
	require.Equal(t, "done", got.Outcome, "%+v", got)
	taken = recordOf(t, s, intent)
	require.Equal(t, oncehttp.StateDone, taken.State)

	require.NoError(t, c.cmd.Process.Signal(syscall.SIGCONT))
	release[intent] <- late
	reported = c.called()
	keys, effects, _ := l.sent(intent)
	require.Equal(t, []string{d.Key, d.Key}, keys)
	require.Equal(t, 1, effects)
	after = recordOf(t, s, intent)
	t.Logf("taken over and done at version %d, at %d after the holder's settle; it reported outcome %q, reason %q, error %q",
		taken.Version, after.Version, reported.Outcome, reported.Reason, reported.Err)
	return taken, after, reported
}

func loseAnswer() { panic(http.ErrAbortHandler) }
func answer()     {}

func TestAHolderThatWasStoppedPastItsLeaseReportsWhatIsStored(t *testing.T) {
	for _, c := range []struct {
		name     string
		late     func()
		deadline time.Duration // zero: it still waits for its answer when it wakes up
	}{
		{"its answer is lost", loseAnswer, 0},
		{"its answer comes late", answer, 0},
		{"its time is over", answer, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			if *pauseFlag && c.deadline == 0 {
				t.Skip("its lease of 130 s is not waited for")
			}
			taken, after, reported := stopped(t, c.late, c.deadline, false)
			assert.Equal(t, "done", reported.Outcome, "what the holder reports")
			assert.Equal(t, taken, after, "the holder's late settle was refused")
		})
	}
}

// The negative control: a store that does not compare versions.
func TestAStoppedHolderBetraysAStoreWithoutAFence(t *testing.T) {
	if *pauseFlag {
		t.Skip("its lease of 130 s is not waited for")
	}
	taken, after, reported := stopped(t, loseAnswer, 0, true)
	assert.Equal(t, oncehttp.StateOpen, after.State, "the late settle was to win")
	assert.Greater(t, after.Version, taken.Version)
	assert.Equal(t, "unknown", reported.Outcome)
}
