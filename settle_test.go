package oncehttp

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The caller learnt the truth elsewhere: what that does in each state.
func TestSettleInEachState(t *testing.T) {
	type want struct {
		reason error // nil: it settles
		left   State // 0: as it was
	}
	settles := map[Outcome]want{Done: {left: StateDone}, Rejected: {left: StateRejected}, NotSent: {left: StateNotSent}}
	for name, c := range map[string]struct {
		state State
		lease time.Duration
		want  map[Outcome]want
	}{
		"Reserved":                {state: StateReserved, want: settles},
		"NotSent":                 {state: StateNotSent, want: settles},
		"Open":                    {state: StateOpen, want: settles},
		"Unknown":                 {state: StateUnknown, want: settles},
		"Sending, its lease over": {state: StateSending, lease: -1, want: settles},
		"Sending": {state: StateSending, lease: time.Minute, want: map[Outcome]want{
			Done: {reason: ErrInFlight}, Rejected: {reason: ErrInFlight}, NotSent: {reason: ErrInFlight}}},
		"Done": {state: StateDone, want: map[Outcome]want{
			Done: {}, Rejected: {reason: ErrSettled}, NotSent: {reason: ErrSettled}}},
		"Rejected": {state: StateRejected, want: map[Outcome]want{
			Done: {reason: ErrSettled}, Rejected: {}, NotSent: {reason: ErrSettled}}},
	} {
		for outcome, w := range c.want {
			t.Run(fmt.Sprintf("%s to %v", name, outcome), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					base, store := answers(0, 201), &flakyStore{}
					tr := &Transport{Base: base, Store: store, Policy: oneShot(Policy{Keys: KeysHonored, SaveRequest: true})}
					client := contract(t, tr)
					do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
					change(t, store, func(r *Record) {
						r.State = c.state
						if c.lease != 0 {
							r.Lease = wall(time.Now().Add(c.lease))
						}
					})
					before := only(t, store)
					time.Sleep(time.Second)
					err := tr.Settle(post(t, t.Context(), "charge:1", payURL, ""), outcome, "webhook evt_1")
					after := only(t, store)
					require.Len(t, base.sent(), 1, "nothing is sent")
					if w.reason != nil {
						require.ErrorIs(t, err, w.reason)
						require.Equal(t, before, after)
						require.Equal(t, before.outcome(), OutcomeOf(nil, err))
						return
					}
					require.NoError(t, err)
					if w.left == 0 || w.left == c.state {
						require.Equal(t, c.state, after.State)
						return
					}
					require.Equal(t, w.left, after.State)
					require.Equal(t, "webhook evt_1", after.Note)
					require.Equal(t, before.Key, after.Key)
					require.Nil(t, after.Request)
					require.Zero(t, after.Lease)
					require.Equal(t, wall(time.Now().Add(retention)), after.Expires)
					require.NotEqual(t, before.Owner, after.Owner)

					r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
					if outcome == NotSent {
						require.NoError(t, r.err)
						require.Equal(t, []string{before.Key, before.Key}, base.sent(), "callable again, under the same key")
						return
					}
					require.ErrorIs(t, r.err, ErrSettled)
					require.Equal(t, outcome, r.report.Outcome)
					require.Len(t, base.sent(), 1)
				})
			})
		}
	}
}

func TestSettleRefusesWhatSettlesNothing(t *testing.T) {
	store := &flakyStore{}
	tr := &Transport{Base: answers(0), Store: store}
	about := post(t, t.Context(), "charge:1", payURL, "")
	for _, o := range []Outcome{Unknown, 4, 99} {
		require.ErrorIs(t, tr.Settle(about, o, ""), ErrInvalid)
	}
	require.ErrorIs(t, tr.Settle(nil, Done, ""), ErrInvalid)
	require.ErrorIs(t, tr.Settle(post(t, t.Context(), "", payURL, ""), Done, ""), ErrInvalid)
	require.ErrorIs(t, tr.Settle(&http.Request{}, Done, ""), ErrInvalid)
	require.Zero(t, store.calls())

	err := tr.Settle(about, Done, "")
	require.ErrorIs(t, err, ErrStore)
	require.ErrorIs(t, err, ErrNotFound)
}

func TestSettleFindsAnIntentByTheCallersKey(t *testing.T) {
	store := &MemoryStore{}
	tr := &Transport{Base: answers(0), Store: store, Policy: oneShot(Policy{})}
	req := post(t, t.Context(), "", payURL, "{}")
	req.Header["idempotency-KEY"] = []string{"mine"}
	do(contract(t, tr), req)
	require.Equal(t, StateOpen, only(t, store).State)
	require.NoError(t, tr.Settle(req, Done, ""))
	require.Equal(t, StateDone, only(t, store).State)
}

func TestSettleTriesAgainWhenSomeoneElseWrote(t *testing.T) {
	store := &flakyStore{}
	tr := &Transport{Base: answers(0), Store: store, Policy: oneShot(Policy{})}
	do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
	store.update = once(func(context.Context, func() error) error { return ErrConflict })
	require.NoError(t, tr.Settle(post(t, t.Context(), "charge:1", payURL, ""), Rejected, ""))
	require.Equal(t, StateRejected, only(t, store).State)

	store.update = fails
	require.NoError(t, tr.Settle(post(t, t.Context(), "charge:1", payURL, ""), Rejected, ""), "it is so already: nothing to write")
	store.get = fails
	require.ErrorIs(t, tr.Settle(post(t, t.Context(), "charge:1", payURL, ""), Done, ""), errDisk)
}

// What an answer on the first send leaves behind: judged or turned away
// (design §5, Outcome).
func TestWhatAnAnswerOnTheFirstSendLeaves(t *testing.T) {
	turnedAway := []int{401, 403, 404, 405, 407, 411, 413, 415, 417, 421, 425, 426, 428, 429, 431}
	judged := []int{400, 402, 409, 410, 412, 422, 406, 414, 416, 418, 423, 424, 451}
	for state, statuses := range map[State][]int{
		StateDone:     {200, 201, 202, 204, 299, 303},
		StateNotSent:  turnedAway,
		StateRejected: judged,
		StateOpen:     {408, 500, 501, 502, 503, 504, 505, 599},
	} {
		for _, status := range statuses {
			store := &MemoryStore{}
			tr := &Transport{Base: answers(status), Store: store, Policy: oneShot(Policy{Keys: KeysHonored})}
			client := contract(t, tr)
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
			require.NoError(t, r.err)
			require.Equal(t, state, only(t, store).State, "%d", status)
			want := Rejected
			switch state {
			case StateDone:
				want = Done
			case StateOpen:
				want = Unknown
			}
			require.Equal(t, want, r.report.Outcome, "%d", status)
			require.Equal(t, status, only(t, store).Status)
			require.Equal(t, 1, only(t, store).Attempts)
		}
	}
}

// After an ambiguous attempt these answers may come from in front of the key
// check: calling them "rejected" makes someone pay twice.
func TestAnAnswerAfterADoubtSettlesOnlyWhatItCan(t *testing.T) {
	for status, want := range map[int]State{
		200: StateDone, 201: StateDone, 402: StateRejected,
		400: StateOpen, 401: StateOpen, 403: StateOpen, 404: StateOpen, 405: StateOpen, 407: StateOpen, 413: StateOpen, 422: StateOpen, 429: StateOpen,
	} {
		for _, when := range []string{"in the call", "in the next call", "in another process"} {
			synctest.Test(t, func(t *testing.T) {
				store := &flakyStore{}
				base := answers(0, status)
				p := Policy{Keys: KeysHonored, MaxAttempts: 2}
				if when != "in the call" {
					p = oneShot(p)
				}
				tr := &Transport{Base: base, Store: store, Policy: p}
				r := do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
				if when == "in another process" {
					tr = &Transport{Base: base, Store: store, Policy: p}
				}
				if when != "in the call" {
					r = do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
				}
				require.Equal(t, want, only(t, store).State, "%d %s", status, when)
				require.Equal(t, want == StateOpen, r.report.Outcome == Unknown, "%d %s", status, when)
				require.Equal(t, 2, only(t, store).Attempts, "all runs together")
			})
		}
	}
}

// An answer that is marked as a replay is what became of the first send.
func TestAReplayedRejectionSettlesTheDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, n := &MemoryStore{}, 0
		tr := &Transport{Store: store, Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return nil, errLost
			}
			return answerOf(422, "{}", "Idempotent-Replayed", "true"), nil
		})}
		r := do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
		require.Equal(t, Rejected, r.report.Outcome)
		require.True(t, r.report.Replayed)
		require.Equal(t, StateRejected, only(t, store).State)
	})
}

// A call that panics leaves no one waiting for its lease, and no lie.
func TestAPanicLeavesTheIntentOpenOrNotSent(t *testing.T) {
	for name, c := range map[string]struct {
		base    http.RoundTripper
		prepare func(*http.Request) error
		want    State
	}{
		"in the base: it may have been sent": {roundTripFunc(func(*http.Request) (*http.Response, error) { panic("boom") }), nil, StateOpen},
		"in Prepare: nothing was sent":       {answers(201), func(*http.Request) error { panic("boom") }, StateNotSent},
	} {
		t.Run(name, func(t *testing.T) {
			store := &flakyStore{}
			tr := &Transport{Base: c.base, Store: store, Prepare: c.prepare, Policy: Policy{Keys: KeysHonored}}
			require.PanicsWithValue(t, "boom", func() { do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}")) })
			require.Equal(t, c.want, only(t, store).State)
			require.Zero(t, only(t, store).Lease)
		})
	}
}
