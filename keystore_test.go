package oncehttp

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The state machine's whole judgement, over every combination of what it looks
// at. The expected value is written as the design tells it, not as the code is.
func TestDecideOverEveryStateFingerprintLeaseOwnerWindowAndKeyMode(t *testing.T) {
	now := time.Date(2026, 7, 30, 12, 0, 0, 0, time.UTC)
	mine, theirs := [32]byte{1}, [32]byte{2}
	states := []State{0, StateReserved, StateSending, StateDone, StateRejected, StateNotSent, StateOpen, StateUnknown, 8, 255}
	prints := map[string][32]byte{"none": {}, "mine": mine, "other": theirs}
	leases := map[string]time.Time{"live": now.Add(1), "just over": now, "long over": now.Add(-time.Hour), "none": {}}
	owners := map[string]string{"this life": "pod-1 a-1", "earlier life": "pod-1 b-9", "another": "pod-2 b-1", "nobody": "", "unnamed": " b-1"}
	ages := map[string]struct {
		first, updated time.Duration // ago
		window         time.Duration
		inside         bool
	}{
		"fresh":                 {time.Minute, time.Minute, 0, true},
		"at the window's end":   {15 * time.Minute, time.Minute, 0, false},
		"just before":           {15*time.Minute - 1, time.Minute, 0, true},
		"long past":             {30 * time.Hour, time.Hour, 0, false},
		"long past, window Off": {9999 * time.Hour, time.Hour, Off, true},
		"inside 24 h":           {24*time.Hour - time.Minute, time.Hour, 24 * time.Hour, true},
		"first sent in future":  {-time.Second, time.Minute, 0, false},
		"updated in future":     {time.Minute, -time.Second, 0, false},
		"this very instant":     {0, 0, 0, true},
	}
	cases := 0
	for _, state := range states {
		for printName, print := range prints {
			for leaseName, lease := range leases {
				for ownerName, owner := range owners {
					for ageName, age := range ages {
						for _, keys := range []KeyMode{KeysSent, KeysHonored, KeysOff} {
							pol := Policy{Keys: keys, KeyWindow: age.window}.resolve()
							rec := Record{State: state, Key: "key-1", Fingerprint: print, Lease: lease, Owner: owner,
								FirstSent: now.Add(-age.first), Updated: now.Add(-age.updated)}
							claim := Record{Fingerprint: mine, Owner: "pod-1 a-7"}
							before := rec
							got := rec.decide(&claim, &pol, now)

							want := nextUnsafe // in doubt
							switch {
							case keys == KeysHonored && age.inside && state != StateUnknown:
								want = nextResend
							case keys == KeysHonored:
								want = nextExpired
							}
							switch {
							case printName == "other":
								want = nextMismatch
							case state == StateReserved || state == StateNotSent:
								want = nextSend
							case state == StateDone || state == StateRejected:
								want = nextAnswer
							case state == 0 || state > StateUnknown:
								want = nextCorrupt
							case state == StateSending && leaseName == "live" && ownerName != "earlier life":
								want = nextInFlight
							}
							require.Equal(t, want, got, "%v, fingerprint %s, lease %s, owner %s, %s, keys %d",
								state, printName, leaseName, ownerName, ageName, keys)
							require.Equal(t, before, rec, "it is pure")
							cases++
						}
					}
				}
			}
		}
	}
	require.Equal(t, 10*3*4*5*9*3, cases)
}

func TestOnlyAnEarlierLifeOfTheSameOwnerIsKnownToBeOver(t *testing.T) {
	for _, c := range []struct {
		theirs, mine string
		want         bool
	}{
		{"pod-1 b-1", "pod-1 a-1", true},
		{"pod-1 a-1", "pod-1 a-2", false},
		{"pod-2 b-1", "pod-1 a-1", false},
		{"pod b-1", "pod-1 a-1", false},
		{"pod-1 b-1", "pod a-1", false},
		{" b-1", " a-1", false}, // no owner: every process is new
		{"b-1", "a-1", false},   // not a token
		{"", "pod-1 a-1", false},
		{"pod-1 b-1", "", false},
		{"a pod 1 b-1", "a pod 1 a-1", true}, // an owner's name may have spaces
		{"a pod 1 b-1", "a pod 2 a-1", false},
		{"pod-1 ab-1", "pod-1 a-1", true},
	} {
		require.Equal(t, c.want, earlierLife(c.theirs, c.mine), "%q, %q", c.theirs, c.mine)
	}
}

// cases.md A64: an owner's name that is used again proves nothing.
func TestEveryRunHasAnOwnerTokenOfItsOwn(t *testing.T) {
	seen := map[string]bool{}
	for range 10_000 {
		token := ownerToken("pod-1", processLife())
		require.False(t, seen[token])
		seen[token] = true
		require.False(t, earlierLife(token, ownerToken("pod-1", processLife())))
	}
	require.Len(t, processLife(), 16)
}

func TestTheStateThatAnEndedRunLeaves(t *testing.T) {
	for _, c := range []struct {
		outcome    Outcome
		turnedAway bool
		want       State
	}{
		{Done, false, StateDone},
		{Done, true, StateDone},
		{Rejected, false, StateRejected},
		{Rejected, true, StateNotSent},
		{NotSent, false, StateNotSent},
		{NotSent, true, StateNotSent},
		{Unknown, false, StateOpen},
		{Unknown, true, StateOpen},
		{99, false, StateOpen},
	} {
		require.Equal(t, c.want, settledState(c.outcome, c.turnedAway), "%v %v", c.outcome, c.turnedAway)
	}
}

func TestWhatARecordSaysAboutTheEffect(t *testing.T) {
	for state, want := range map[State]Outcome{
		0: Unknown, StateReserved: NotSent, StateSending: Unknown, StateDone: Done, StateRejected: Rejected,
		StateNotSent: NotSent, StateOpen: Unknown, StateUnknown: Unknown, 99: Unknown,
	} {
		rec := Record{State: state}
		require.Equal(t, want, rec.outcome(), "%v", state)
	}
}

// The numbers are stored: changing one rewrites what databases say.
func TestStatesHaveTheirNumbersAndNames(t *testing.T) {
	for n, name := range []string{"invalid", "reserved", "sending", "done", "rejected", "notsent", "open", "unknown", "invalid"} {
		require.Equal(t, name, State(n).String())
	}
	require.Equal(t, "reserved 1 unknown 7", fmt.Sprint(StateReserved, " ", uint8(StateReserved), " ", StateUnknown, " ", uint8(StateUnknown)))
}

func TestACloneSharesNoMemory(t *testing.T) {
	rec := Record{
		Request:  &SavedRequest{Header: map[string][]string{"A": {"b"}}, Body: []byte("body")},
		Response: &SavedResponse{Header: map[string][]string{"A": {"b"}}, Body: []byte("body")},
	}
	c := rec.clone()
	require.Equal(t, rec, c)
	c.Request.Header["A"][0], c.Response.Header["A"][0] = "x", "x"
	c.Request.Body[0], c.Response.Body[0] = 'x', 'x'
	require.Equal(t, "b", rec.Request.Header.Get("A")+rec.Response.Header.Get("A")[1:])
	require.Equal(t, "bodybody", string(rec.Request.Body)+string(rec.Response.Body))
	require.Equal(t, Record{ID: "x"}, Record{ID: "x"}.clone())
}
