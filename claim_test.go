package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// flakyStore is a store that counts as durable, being no *MemoryStore, and
// fails to order.
type flakyStore struct {
	MemoryStore
	create, get, update fault // nil: works. Changed by a test only while no call is under way.

	lock sync.Mutex
	log  []string // guarded by lock: "create sending" when it has returned, and so on
}

// A fault decides what becomes of one store call; do carries it out.
type fault func(ctx context.Context, do func() error) error

var errDisk = errors.New("disk on fire")

// fails does nothing and says so.
func fails(context.Context, func() error) error { return errDisk }

// loses carries the call out and loses the acknowledgement.
func loses(_ context.Context, do func() error) error { do(); return errDisk }

// hangs does nothing and returns when the context ends, as a store must.
func hangs(ctx context.Context, _ func() error) error { <-ctx.Done(); return ctx.Err() }

// hangsAfter carries the call out and then returns only when the context ends.
func hangsAfter(ctx context.Context, do func() error) error { do(); <-ctx.Done(); return ctx.Err() }

// once is f for the first call; later ones work.
func once(f fault) fault {
	var n int
	return func(ctx context.Context, do func() error) error {
		if n++; n == 1 {
			return f(ctx, do)
		}
		return do()
	}
}

func (f fault) run(ctx context.Context, do func() error) error {
	if f == nil {
		return do()
	}
	return f(ctx, do)
}

func (s *flakyStore) note(op string) {
	s.lock.Lock()
	defer s.lock.Unlock()
	s.log = append(s.log, op)
}

func (s *flakyStore) notes() []string {
	s.lock.Lock()
	defer s.lock.Unlock()
	return append([]string(nil), s.log...)
}

func (s *flakyStore) calls() int { return len(s.notes()) }

func (s *flakyStore) Create(ctx context.Context, rec Record) (stored Record, created bool, err error) {
	err = s.create.run(ctx, func() (err error) {
		stored, created, err = s.MemoryStore.Create(context.WithoutCancel(ctx), rec)
		return err
	})
	s.note("create " + rec.State.String())
	if err != nil {
		return Record{}, false, err
	}
	return stored, created, nil
}

func (s *flakyStore) Get(ctx context.Context, id string) (rec Record, err error) {
	err = s.get.run(ctx, func() (err error) {
		rec, err = s.MemoryStore.Get(context.WithoutCancel(ctx), id)
		return err
	})
	s.note("get")
	if err != nil {
		return Record{}, err
	}
	return rec, nil
}

func (s *flakyStore) Update(ctx context.Context, rec Record) (stored Record, err error) {
	err = s.update.run(ctx, func() (err error) {
		stored, err = s.MemoryStore.Update(context.WithoutCancel(ctx), rec)
		return err
	})
	s.note("update " + rec.State.String())
	if err != nil {
		return Record{}, err
	}
	return stored, nil
}

// all returns every record of a store.
func all(t testing.TB, s KeyStore) []Record {
	t.Helper()
	recs, err := s.List(context.Background(), Query{Limit: 1 << 20})
	require.NoError(t, err)
	return recs
}

// only returns the one record that a store has.
func only(t testing.TB, s KeyStore) Record {
	t.Helper()
	recs := all(t, s)
	require.Len(t, recs, 1)
	return recs[0]
}

// change edits the one record of a store behind everyone's back.
func change(t testing.TB, s KeyStore, edit func(*Record)) {
	t.Helper()
	rec := only(t, s)
	edit(&rec)
	_, err := s.Update(context.Background(), rec)
	require.NoError(t, err)
}

// upstreamOf is a base that answers from a list, the last one for ever, and
// remembers what was sent.
type upstreamStub struct {
	answers []func(*http.Request) (*http.Response, error)

	mu   sync.Mutex
	keys []string // guarded by mu: of each send
}

// answers makes a stub; 0 stands for a lost response.
func answers(statuses ...int) *upstreamStub {
	s := &upstreamStub{}
	for _, status := range statuses {
		s.answers = append(s.answers, func(*http.Request) (*http.Response, error) {
			if status == 0 {
				return nil, errLost
			}
			return answerOf(status, fmt.Sprintf(`{"status":%d}`, status), "Content-Type", "application/json", "Set-Cookie", "session=1"), nil
		})
	}
	return s
}

var errLost = errors.New("connection reset by peer")

func (s *upstreamStub) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	var key string
	for name, v := range r.Header {
		if strings.EqualFold(name, "Idempotency-Key") {
			key += strings.Join(v, ",")
		}
	}
	s.mu.Lock()
	s.keys = append(s.keys, key)
	answer := s.answers[min(len(s.keys), len(s.answers))-1]
	s.mu.Unlock()
	return answer(r)
}

func (s *upstreamStub) sent() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.keys...)
}

// oneShot is a policy whose calls send once, so that a test sees each run's end.
func oneShot(p Policy) Policy {
	p.MaxAttempts = Off
	return p
}

// The second call for an intent, by the state that the first one left.
func TestASecondCallDoesWhatTheRecordAllows(t *testing.T) {
	honored := Policy{Keys: KeysHonored}
	for name, c := range map[string]struct {
		policy   Policy
		first    int // the first call's answer; 0: lost
		left     State
		later    time.Duration
		sends    int // of both calls
		outcome  Outcome
		reason   error
		replayed bool
	}{
		"Done gives the saved answer":                    {honored, 201, StateDone, time.Hour * 999, 1, Done, nil, true},
		"Rejected gives the saved answer":                {honored, 422, StateRejected, time.Hour, 1, Rejected, nil, true},
		"Done, nothing saved":                            {Policy{MaxResponseBytes: Off}, 201, StateDone, time.Hour, 1, Done, ErrSettled, false},
		"Rejected, nothing saved":                        {Policy{MaxResponseBytes: Off}, 400, StateRejected, time.Hour, 1, Rejected, ErrSettled, false},
		"turned away: called again":                      {honored, 401, StateNotSent, time.Hour * 999, 2, Done, nil, false},
		"in doubt, honoured, inside the window: re-sent": {honored, 0, StateOpen, 14 * time.Minute, 2, Done, nil, false},
		"in doubt, honoured, past the window":            {honored, 0, StateOpen, 15 * time.Minute, 1, Unknown, ErrKeyExpired, false},
		"in doubt, window Off: re-sent for ever":         {Policy{Keys: KeysHonored, KeyWindow: Off}, 0, StateOpen, 9999 * time.Hour, 2, Done, nil, false},
		"in doubt, keys only sent":                       {Policy{}, 0, StateOpen, time.Second, 1, Unknown, ErrUnsafe, false},
		"in doubt, no keys":                              {Policy{Keys: KeysOff}, 0, StateOpen, time.Second, 1, Unknown, ErrUnsafe, false},
		"503 is a doubt, too":                            {honored, 503, StateOpen, time.Second, 2, Done, nil, false},
		// cases.md A32: retention 24 h.
		"A32 at 23 h 59 m": {Policy{Keys: KeysHonored, KeyWindow: 24 * time.Hour}, 0, StateOpen, 24*time.Hour - time.Minute, 2, Done, nil, false},
		"A32 at 24 h":      {Policy{Keys: KeysHonored, KeyWindow: 24 * time.Hour}, 0, StateOpen, 24 * time.Hour, 1, Unknown, ErrKeyExpired, false},
		"A32 at 30 h":      {Policy{Keys: KeysHonored, KeyWindow: 24 * time.Hour}, 0, StateOpen, 30 * time.Hour, 1, Unknown, ErrKeyExpired, false},
	} {
		for _, durable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, durable %v", name, durable), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var store KeyStore = &MemoryStore{}
					if durable {
						store = &flakyStore{}
					}
					base := answers(c.first, 201)
					tr := &Transport{Base: base, Store: store, Policy: oneShot(c.policy)}
					client := contract(t, tr)
					first := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
					rec := only(t, store)
					require.Equal(t, c.left, rec.State)
					require.Len(t, base.sent(), 1)
					require.Equal(t, rec.ID, first.report.RecordID)

					time.Sleep(c.later)
					second := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
					require.Len(t, base.sent(), c.sends)
					require.Equal(t, c.outcome, second.report.Outcome)
					require.Equal(t, c.reason, second.report.Reason)
					require.Equal(t, c.replayed, second.report.Replayed)
					require.Len(t, keysIn(base.sent()), 1, "one intent, one key")
					if c.replayed {
						require.Equal(t, first.status, second.status)
						require.Equal(t, first.body, second.body)
						require.Zero(t, second.report.Attempts)
						require.Equal(t, c.first, second.report.Status)
					}
					if c.reason != nil {
						require.ErrorIs(t, second.err, c.reason)
						require.Equal(t, c.outcome, OutcomeOf(nil, second.err))
						require.Equal(t, c.left, only(t, store).State, "the record stays as it was")
					}
					if c.left == StateNotSent {
						require.True(t, only(t, store).FirstSent.After(rec.FirstSent), "nothing was processed: the window starts again")
					} else {
						require.Equal(t, rec.FirstSent, only(t, store).FirstSent, "the window counts from the first send")
					}
				})
			})
		}
	}
}

func keysIn(sent []string) map[string]bool {
	keys := map[string]bool{}
	for _, k := range sent {
		keys[k] = true
	}
	return keys
}

// Unknown is only ended by Settle, whatever the keys and the window.
func TestARecordThatIsUnknownIsNeverSentAgain(t *testing.T) {
	for keys, reason := range map[KeyMode]error{KeysHonored: ErrKeyExpired, KeysSent: ErrUnsafe} {
		synctest.Test(t, func(t *testing.T) {
			store, base := &flakyStore{}, answers(0, 201)
			tr := &Transport{Base: base, Store: store, Policy: oneShot(Policy{Keys: keys, KeyWindow: Off})}
			client := contract(t, tr)
			do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
			change(t, store, func(r *Record) { r.State = StateUnknown })
			r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
			require.ErrorIs(t, r.err, reason)
			require.Equal(t, Unknown, r.report.Outcome)
			require.Len(t, base.sent(), 1)
		})
	}
}

func TestARecordInAStateFromTheFutureIsAnErrorAndNotSent(t *testing.T) {
	store, base := &flakyStore{}, answers(0, 201)
	tr := &Transport{Base: base, Store: store, Policy: oneShot(Policy{Keys: KeysHonored})}
	client := contract(t, tr)
	do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
	change(t, store, func(r *Record) { r.State = 99 })
	r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
	require.ErrorIs(t, r.err, ErrStore)
	require.Equal(t, Unknown, r.report.Outcome)
	require.ErrorContains(t, r.err, "99")
	require.Len(t, base.sent(), 1)
}

// A wall clock that reads earlier than the record proves nothing about the
// key's age (design §5, leases; cases.md A90).
func TestAClockEarlierThanTheRecordSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, base := &flakyStore{}, answers(0, 201)
		tr := &Transport{Base: base, Store: store, Policy: oneShot(Policy{Keys: KeysHonored})}
		client := contract(t, tr)
		do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		ahead := time.Now().Add(time.Hour)
		change(t, store, func(r *Record) { r.FirstSent, r.Updated = wall(ahead), wall(ahead) })
		r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, ErrKeyExpired)
		require.ErrorContains(t, r.err, "clock")
		require.Len(t, base.sent(), 1)
		require.Equal(t, ahead.UTC(), r.report.RetryAt.UTC())

		time.Sleep(time.Hour + time.Minute)
		require.NoError(t, do(client, post(t, t.Context(), "charge:1", payURL, "{}")).err)
	})
}

// cases.md A31: the same key with a changed amount.
func TestAnotherRequestUnderTheSameNameIsRefusedBeforeItIsSent(t *testing.T) {
	for name, other := range map[string]func(t *testing.T, ctx context.Context) *http.Request{
		"another amount": func(t *testing.T, ctx context.Context) *http.Request {
			return post(t, ctx, "charge:1", payURL, `{"amount":120}`)
		},
		// cases.md A67: one intent id for two endpoints.
		"another path": func(t *testing.T, ctx context.Context) *http.Request {
			return post(t, ctx, "charge:1", "http://pay.example/refunds", `{"amount":100}`)
		},
		"another query": func(t *testing.T, ctx context.Context) *http.Request {
			return post(t, ctx, "charge:1", payURL+"?dry=1", `{"amount":100}`)
		},
		"another method": func(t *testing.T, ctx context.Context) *http.Request {
			req := post(t, ctx, "charge:1", payURL, `{"amount":100}`)
			req.Method = http.MethodPatch
			return req
		},
		"another key": func(t *testing.T, ctx context.Context) *http.Request {
			req := post(t, ctx, "charge:1", payURL, `{"amount":100}`)
			req.Header.Set("Idempotency-Key", "mine")
			return req
		},
	} {
		for _, first := range []int{503, 201, 401} {
			t.Run(fmt.Sprint(name, " after ", first), func(t *testing.T) {
				store, base := &flakyStore{}, answers(first, 201)
				tr := &Transport{Base: base, Store: store, Policy: oneShot(Policy{Keys: KeysHonored})}
				client := contract(t, tr)
				do(client, post(t, t.Context(), "charge:1", payURL, `{"amount":100}`))
				before := only(t, store)
				r := do(client, other(t, t.Context()))
				require.ErrorIs(t, r.err, ErrIntentMismatch)
				require.ErrorContains(t, r.err, mismatchAdvice[before.outcome()], "what to do depends on what became of the first")
				require.Equal(t, NotSent, r.report.Outcome)
				require.Len(t, base.sent(), 1)
				require.Equal(t, before, only(t, store))
			})
		}
	}
}

func TestACallForAnIntentUnderWayIsToldSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := answers(201)
		base.answers[0] = func(r *http.Request) (*http.Response, error) {
			nap(r, 20*time.Second)
			return answerOf(201, "{}"), nil
		}
		tr := &Transport{Base: base, Store: &flakyStore{}, Policy: Policy{Keys: KeysHonored}}
		client := contract(t, tr)
		var first sync.WaitGroup
		first.Go(func() { do(client, post(t, t.Context(), "charge:1", payURL, "{}")) })
		synctest.Wait()
		start := time.Now()
		r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, ErrInFlight)
		require.Equal(t, Unknown, r.report.Outcome)
		require.Zero(t, time.Since(start))
		// The lease: MaxElapsed and ten seconds.
		require.Equal(t, start.Add(130*time.Second).UTC(), r.report.RetryAt.UTC())
		require.Len(t, base.sent(), 1)
		first.Wait()
	})
}

// cases.md A92: two goroutines start one intent at the same instant.
func TestOneSendInFlightHoweverManyGoroutinesStartTheIntent(t *testing.T) {
	for _, processes := range []int{1, 2} {
		t.Run(fmt.Sprint(processes, " processes"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ledger := newLedger(true)
				ledger.delay = func(int) { time.Sleep(3 * time.Second) }
				base := overMemnet(t, ledger.ServeHTTP)
				store := &flakyStore{}
				clients := make([]*http.Client, processes)
				for n := range clients {
					tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored, WaitInFlight: true}}
					tr.settings().life = fmt.Sprint("life", n)
					clients[n] = contract(t, tr)
				}
				var all sync.WaitGroup
				var mu sync.Mutex
				fresh := 0
				for n := range 40 {
					all.Go(func() {
						r := do(clients[n%processes], post(t, t.Context(), "charge:1", payURL, "{}"))
						assert.NoError(t, r.err)
						assert.Equal(t, Done, r.report.Outcome)
						assert.Equal(t, `{"charge":1}`, r.body)
						mu.Lock()
						defer mu.Unlock()
						if !r.report.Replayed {
							fresh++
						}
					})
				}
				all.Wait()
				require.Len(t, ledger.deliveries(), 1)
				require.Equal(t, 1, fresh)
				require.Equal(t, 1, ledger.effects("{}"))
			})
		})
	}
}

func TestWaitInFlightEndsByTheDeadlineAndByCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{Base: roundTripFunc(hung), Store: &flakyStore{}, Policy: Policy{Keys: KeysHonored, WaitInFlight: true}}
		client := contract(t, tr)
		ctx, stop := context.WithCancel(t.Context())
		var first sync.WaitGroup
		first.Go(func() { do(client, post(t, ctx, "charge:1", payURL, "{}")) })
		synctest.Wait()

		start := time.Now()
		short, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		r := do(client, post(t, short, "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, ErrDeadline)
		require.ErrorIs(t, r.err, ErrInFlight)
		require.LessOrEqual(t, time.Since(start), 1500*time.Millisecond)
		require.Equal(t, Unknown, r.report.Outcome)

		start = time.Now()
		gone, cancel := context.WithCancel(t.Context())
		time.AfterFunc(700*time.Millisecond, cancel)
		r = do(client, post(t, gone, "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, context.Canceled)
		require.Equal(t, 700*time.Millisecond, time.Since(start))
		stop()
		first.Wait()
	})
}

// Promise 1. The order is what proves it; the negative control is to move
// claim() behind loop() in call.do, and then the first line of the log is "send".
func TestTheClaimIsDurableBeforeTheFirstByte(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &flakyStore{}
		slow := func(ctx context.Context, do func() error) error {
			defer time.Sleep(300 * time.Millisecond) // the fsync
			return do()
		}
		store.create, store.update = slow, slow
		base := answers(0)
		base.answers[0] = func(r *http.Request) (*http.Response, error) {
			store.note("send " + r.Header.Get("Idempotency-Key"))
			return nil, errLost
		}
		tr := &Transport{Base: base, Store: store, Policy: oneShot(Policy{Keys: KeysHonored})}
		client := contract(t, tr)
		do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		send := "send " + only(t, store).Key
		require.Equal(t, []string{
			"create sending", send, "update open",
			"create sending", "update sending", send, "update open",
		}, store.notes())

		store.log = nil
		do(client, post(t, t.Context(), "", payURL, "{}"))
		require.Equal(t, "create sending", store.notes()[0], "an anonymous one, too")
	})
}

// cases.md A25, A26, A65: a store that does not confirm the claim means that
// nothing is sent. What was not confirmed and yet written is recognised by the
// owner's token.
func TestAStoreThatDoesNotConfirmTheClaimSendsNothing(t *testing.T) {
	for name, c := range map[string]struct {
		create, get fault
		sends       int
		took        time.Duration
		left        int // records
	}{
		"A25 read-only":             {create: fails, left: 0},
		"A26 down":                  {create: fails, get: fails, left: 0},
		"committed, not readable":   {create: loses, get: fails, left: 1},
		"committed, ack lost":       {create: loses, sends: 1, left: 1},
		"hangs":                     {create: hangs, get: hangs, took: 30 * time.Second, left: 0},
		"hangs once committed":      {create: hangsAfter, get: hangs, took: 30 * time.Second, left: 1},
		"fails, then reading hangs": {create: fails, get: hangs, took: 30 * time.Second, left: 0},
	} {
		for _, intent := range []string{"charge:1", ""} {
			for _, limit := range []string{"deadline", "MaxElapsed"} {
				t.Run(fmt.Sprintf("%s, intent %q, %s", name, intent, limit), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						base, store := answers(201), &flakyStore{create: c.create, get: c.get}
						var told []string
						tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored, AttemptTimeout: time.Second},
							Trace: &Trace{StoreError: func(_ context.Context, id, op string, err error) { told = append(told, op) }}}
						ctx := t.Context()
						if limit == "deadline" {
							var cancel context.CancelFunc
							ctx, cancel = context.WithTimeout(ctx, 30*time.Second)
							defer cancel()
						} else {
							tr.Policy.MaxElapsed = 30 * time.Second
						}
						start := time.Now()
						r := do(contract(t, tr), post(t, ctx, intent, payURL, "{}"))
						require.Equal(t, c.took, time.Since(start))
						require.Len(t, base.sent(), c.sends)
						require.Equal(t, "claim", told[0])
						store.create, store.get = nil, nil
						require.Len(t, all(t, store), c.left)
						if c.sends == 0 {
							require.ErrorIs(t, r.err, ErrStore)
							require.Zero(t, r.report.Attempts)
							want := NotSent
							if intent != "" && c.get != nil {
								want = Unknown // who knows what an earlier run of it did
							}
							require.Equal(t, want, r.report.Outcome)
							return
						}
						require.NoError(t, r.err)
						require.Equal(t, Done, r.report.Outcome)
						require.Equal(t, base.sent()[0], only(t, store).Key)
					})
				})
			}
		}
	}
}

// An intent that may have been charged stays in doubt while the store cannot be
// read: told "not sent", a shop would let the customer pay another way.
func TestAStoreThatIsDownDoesNotTurnADoubtIntoNotSent(t *testing.T) {
	for name, get := range map[string]fault{"and cannot be read": fails, "but can be read": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base, store := answers(201), &flakyStore{}
				base.answers[0] = func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF }
				tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored, MaxAttempts: Off}}
				client := contract(t, tr)
				require.Equal(t, Unknown, do(client, post(t, t.Context(), "charge:1", payURL, "{}")).report.Outcome)
				store.create, store.get = fails, get
				r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
				require.ErrorIs(t, r.err, ErrStore)
				require.Equal(t, Unknown, r.report.Outcome)
				require.Len(t, base.sent(), 1)
			})
		})
	}
}

// The same for the second run of an intent in doubt. There it is not NotSent:
// the first run may have had its effect.
func TestAStoreThatDoesNotConfirmATakeoverSendsNothing(t *testing.T) {
	for name, c := range map[string]struct {
		update, get fault
		sends       int
	}{
		"fails before the commit":           {fails, nil, 1},
		"fails after the commit, no answer": {loses, fails, 1},
		"ack lost":                          {loses, nil, 2},
		"hangs":                             {hangs, hangs, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base, store := answers(0, 201), &flakyStore{}
				tr := &Transport{Base: base, Store: store, Policy: oneShot(Policy{Keys: KeysHonored})}
				client := contract(t, tr)
				do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
				store.update, store.get = once(c.update), c.get
				r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
				require.Len(t, base.sent(), c.sends)
				if c.sends == 1 {
					require.ErrorIs(t, r.err, ErrStore)
					require.Equal(t, Unknown, r.report.Outcome, "the first run is in doubt")
					return
				}
				require.NoError(t, r.err)
				require.Len(t, keysIn(base.sent()), 1)
			})
		})
	}
}

// cases.md A26: the lock's time is not the result's.
func TestALeaseIsMuchShorterThanTheRecordsLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &flakyStore{}
		tr := &Transport{Store: store, Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(hung)}
		client := contract(t, tr)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		var call sync.WaitGroup
		start := time.Now()
		call.Go(func() { do(client, post(t, ctx, "charge:1", payURL, "{}")) })
		synctest.Wait()
		rec := only(t, store)
		require.Equal(t, StateSending, rec.State)
		require.Equal(t, start.Add(13*time.Second).UTC(), rec.Lease, "the caller's deadline and ten seconds")
		require.Equal(t, start.Add(30*24*time.Hour).UTC(), rec.Expires)
		call.Wait()
		require.Zero(t, only(t, store).Lease)
	})
}

// cases.md A65: the record outlives every failure after the first byte.
func TestAFailedSettleLeavesTheRecordSendingAndTheAnswerWithTheCaller(t *testing.T) {
	for name, c := range map[string]struct {
		update fault
		took   time.Duration
		left   State
		told   bool
	}{
		"fails":    {fails, 0, StateSending, true},
		"hangs":    {hangs, 2 * time.Second, StateSending, true},
		"ack lost": {loses, 0, StateDone, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base, store := answers(201), &flakyStore{update: c.update}
				var told []error
				tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored}, Trace: &Trace{
					StoreError: func(_ context.Context, id, op string, err error) {
						require.Equal(t, "settle", op)
						require.NotEmpty(t, id)
						told = append(told, err)
					},
				}}
				client := contract(t, tr)
				start := time.Now()
				r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
				require.Equal(t, c.took, time.Since(start))
				require.NoError(t, r.err)
				require.Equal(t, `{"status":201}`, r.body)
				require.Equal(t, Done, r.report.Outcome)
				require.Equal(t, c.told, len(told) == 1)
				store.update = nil
				require.Equal(t, c.left, only(t, store).State)

				// The lease is over in time, and the same key goes out again.
				time.Sleep(3 * time.Minute)
				r = do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
				require.NoError(t, r.err)
				require.Len(t, keysIn(base.sent()), 1)
				require.Equal(t, StateDone, only(t, store).State)
			})
		})
	}
}

// The settling write is the one thing that may go on after the caller's end.
func TestTheSettlingWriteOutlivesTheCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &flakyStore{}
		tr := &Transport{Store: store, Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(hung)}
		store.update = func(ctx context.Context, do func() error) error {
			require.NoError(t, ctx.Err())
			return do()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := do(contract(t, tr), post(t, ctx, "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, context.DeadlineExceeded)
		require.Equal(t, StateOpen, only(t, store).State)
	})
}

// cases.md A64: a stalled worker passed its own ownership checks after it had
// been taken over.
func TestALateSettleOfAnOvertakenRunIsRefusedAndReportsWhatIsStored(t *testing.T) {
	for name, end := range map[string]func() (*http.Response, error){
		"it gets an answer in doubt": func() (*http.Response, error) { return answerOf(503, ""), nil },
		"it gets an error":           func() (*http.Response, error) { return nil, errLost },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &flakyStore{}
				stalled := roundTripFunc(func(*http.Request) (*http.Response, error) {
					time.Sleep(time.Hour) // beyond every lease, deaf to its context
					return end()
				})
				one := &Transport{Base: stalled, Store: store, Owner: "pod-1", Policy: oneShot(Policy{Keys: KeysHonored})}
				two := &Transport{Base: answers(201), Store: store, Owner: "pod-1", Policy: oneShot(Policy{Keys: KeysHonored})}
				var late result
				var first sync.WaitGroup
				first.Go(func() { late = do(contract(t, one), post(t, t.Context(), "charge:1", payURL, "{}")) })
				synctest.Wait()
				token := only(t, store).Owner

				time.Sleep(3 * time.Minute)
				r := do(contract(t, two), post(t, t.Context(), "charge:1", payURL, "{}"))
				require.NoError(t, r.err)
				won := only(t, store)
				require.Equal(t, StateDone, won.State)
				require.NotEqual(t, token, won.Owner, "every run has a token of its own")

				first.Wait()
				require.Equal(t, won, only(t, store), "the winner's record stands")
				require.Equal(t, Done, late.report.Outcome, "the loser tells what is stored")
			})
		})
	}
}

// cases.md A91: renewal failed with an error and the worker ran on.
func TestARunThatCannotRenewItsLeaseSendsNoMore(t *testing.T) {
	for name, c := range map[string]fault{"fails": fails, "conflicts": func(context.Context, func() error) error { return ErrConflict }} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &flakyStore{update: once(c)}
				base := answers(503)
				base.answers[0] = func(*http.Request) (*http.Response, error) {
					return answerOf(503, "", "Retry-After", "59"), nil
				}
				var told []string
				tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored, MaxElapsed: Off}, Trace: &Trace{
					StoreError: func(_ context.Context, _, op string, _ error) { told = append(told, op) },
				}}
				start := time.Now()
				r := do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
				require.Zero(t, time.Since(start), "it does not wait with a lease that it cannot hold")
				require.Equal(t, ErrStore, r.report.Reason)
				require.Equal(t, Unknown, r.report.Outcome)
				require.Len(t, base.sent(), 1)
				require.Equal(t, "renew", told[0])
				require.Contains(t, []State{StateOpen, StateSending}, only(t, store).State, "left for recovery")
				require.Equal(t, base.sent()[0], only(t, store).Key)
			})
		})
	}
}

// Promise 4: an answer that was obtained is returned, whatever stopped the retries.
func TestAFailedRenewalReturnsTheAnswerThatWasObtained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{Store: &flakyStore{update: once(fails)}, Policy: Policy{Keys: KeysHonored, MaxElapsed: Off},
			Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
				return answerOf(503, "busy", "Retry-After", "59"), nil
			})}
		r := do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
		require.NoError(t, r.err)
		require.Equal(t, "busy", r.body)
		require.Equal(t, ErrStore, r.report.Reason)
	})
}

func TestARunWithoutAnyDeadlineKeepsItsLeaseOverLongWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &flakyStore{}
		sends := 0
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			rec := only(t, store)
			require.True(t, time.Now().Add(29*time.Second).Before(rec.Lease), "a send with a lease about to end")
			if sends++; sends == 1 {
				return answerOf(503, "", "Retry-After", "600"), nil
			}
			return answerOf(201, ""), nil
		})
		tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored, MaxElapsed: Off, MaxRetryAfter: time.Hour}}
		other := &Transport{Base: roundTripFunc(hung), Store: store, Policy: Policy{Keys: KeysHonored}}
		var first sync.WaitGroup
		first.Go(func() {
			require.NoError(t, do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}")).err)
		})
		for range 9 {
			time.Sleep(time.Minute)
			r := do(contract(t, other), post(t, t.Context(), "charge:1", payURL, "{}"))
			require.ErrorIs(t, r.err, ErrInFlight)
		}
		first.Wait()
		require.Equal(t, 2, sends)
	})
}

// cases.md A29: a container died in mid-request, and its library could only
// invent another key. What an earlier life of the same owner left is taken over
// at once, under its key: it cannot
// be at work any more. Anyone else's lease is waited for.
func TestAnEarlierLifeIsTakenOverAtOnceAndAnotherOwnerIsNot(t *testing.T) {
	for name, c := range map[string]struct {
		owner, life string // of the second
		keys        KeyMode
		reason      error
	}{
		"the same pod after a restart":       {"pod-1", "life2", KeysHonored, nil},
		"the same life":                      {"pod-1", "life1", KeysHonored, ErrInFlight},
		"another pod":                        {"pod-2", "life2", KeysHonored, ErrInFlight},
		"no owner":                           {"", "life2", KeysHonored, ErrInFlight},
		"a pod whose name is the beginning":  {"pod", "life2", KeysHonored, ErrInFlight},
		"after a restart, keys not honoured": {"pod-1", "life2", KeysSent, ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &flakyStore{}
				crashed := &Transport{Base: roundTripFunc(hung), Store: store, Owner: "pod-1", Policy: Policy{Keys: c.keys}}
				crashed.settings().life = "life1"
				ctx, kill := context.WithCancel(t.Context())
				store.update = fails // it dies before it settles
				var first sync.WaitGroup
				first.Go(func() { do(contract(t, crashed), post(t, ctx, "charge:1", payURL, "{}")) })
				synctest.Wait()
				kill()
				first.Wait()
				store.update = nil
				require.Equal(t, StateSending, only(t, store).State)
				key := only(t, store).Key

				base := answers(201)
				next := &Transport{Base: base, Store: store, Owner: c.owner, Policy: Policy{Keys: c.keys}}
				next.settings().life = c.life
				client := contract(t, next)
				r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
				if c.reason == nil {
					require.NoError(t, r.err)
					require.Equal(t, []string{key}, base.sent())
					return
				}
				require.ErrorIs(t, r.err, c.reason)
				require.Equal(t, Unknown, r.report.Outcome)
				require.Empty(t, base.sent())
				if c.reason == ErrInFlight {
					time.Sleep(time.Until(r.report.RetryAt))
					require.NoError(t, do(client, post(t, t.Context(), "charge:1", payURL, "{}")).err)
					require.Equal(t, []string{key}, base.sent())
				}
			})
		})
	}
}

// cases.md A25, second half: the store silently lost what it had confirmed.
func TestAStoreThatForgotGivesNoSecondKeyToAnIntentUnderWayHere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &flakyStore{}
		base := answers(201)
		base.answers[0] = func(r *http.Request) (*http.Response, error) {
			nap(r, 20*time.Second)
			return answerOf(201, "{}"), nil
		}
		tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored}}
		client := contract(t, tr)
		var first sync.WaitGroup
		first.Go(func() { do(client, post(t, t.Context(), "charge:1", payURL, "{}")) })
		synctest.Wait()
		store.MemoryStore.mu.Lock()
		store.entries = nil // an empty replica was promoted
		store.MemoryStore.mu.Unlock()

		do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		first.Wait()
		require.Len(t, keysIn(base.sent()), 1, "a second key for an intent that is in flight in this process")
	})
}

// The window ends while the loop waits: nothing is sent past it, neither by a
// long Retry-After, nor by waiting for admission, nor where there is no record.
func TestNothingIsSentPastTheWindowWithinACall(t *testing.T) {
	for name, c := range map[string]struct {
		intent string
		policy Policy
		asked  string
	}{
		"Retry-After outlasts it":               {"charge:1", Policy{}, "45"},
		"Retry-After outlasts it, anonymous":    {"", Policy{}, "45"},
		"the rate limit outlasts it":            {"charge:1", Policy{RateLimit: 1.0 / 45}, ""},
		"the rate limit outlasts it, anonymous": {"", Policy{RateLimit: 1.0 / 45}, ""},
	} {
		for _, durable := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", durable ", durable), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					sends := 0
					c.policy.Keys, c.policy.KeyWindow = KeysHonored, 30*time.Second
					tr := &Transport{Policy: c.policy, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
						sends++
						return answerOf(503, "busy", "Retry-After", c.asked), nil
					})}
					if durable {
						tr.Store = &flakyStore{}
					}
					r := do(contract(t, tr), post(t, t.Context(), c.intent, payURL, "{}"))
					require.Equal(t, 1, sends, "sent past the key's window")
					require.Equal(t, Unknown, r.report.Outcome)
					require.Equal(t, ErrKeyExpired, r.report.Reason)
					require.Equal(t, "busy", r.body)
				})
			})
		}
	}
}

// Nor by waiting until another call leaves its place (Policy.MaxInFlight).
func TestAWaitForASlotThatOutlastsTheWindowSendsNothing(t *testing.T) {
	for _, intent := range []string{"charge:1", ""} {
		synctest.Test(t, func(t *testing.T) {
			sends := 0
			tr := &Transport{
				Policy: Policy{Keys: KeysHonored, KeyWindow: 30 * time.Second, MaxInFlight: 1, AttemptTimeout: 90 * time.Second},
				Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
					if r.Method == http.MethodGet {
						return answerOf(200, ""), nap(r, time.Minute)
					}
					sends++
					return answerOf(503, "busy", "Retry-After", "2"), nil
				}),
			}
			client := contract(t, tr)
			var slow sync.WaitGroup
			slow.Go(func() {
				time.Sleep(time.Second) // while the charge waits to be sent again
				do(client, fetch(t, t.Context()))
			})
			r := do(client, post(t, t.Context(), intent, payURL, "{}"))
			slow.Wait()
			require.Equal(t, 1, sends, "sent past the key's window")
			require.Equal(t, ErrKeyExpired, r.report.Reason)
			require.Equal(t, Unknown, r.report.Outcome)
			require.Equal(t, "busy", r.body)
		})
	}
}

func TestSaveRequestKeepsTheBytesAndNothingSecret(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &flakyStore{}
		tr := &Transport{Base: answers(0, 201), Store: store, Policy: oneShot(Policy{Keys: KeysHonored, SaveRequest: true})}
		client := contract(t, tr)
		make := func() *http.Request {
			req := post(t, t.Context(), "charge:1", "http://user:canary@pay.example/charges?a=1&b=2", `{ "amount" : 1.00 }`)
			for _, name := range []string{"Authorization", "Cookie", "X-Api-Key", "Proxy-Authorization", "Idempotency-Key"} {
				req.Header.Set(name, "canary")
			}
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Accept", "application/json")
			req.Header.Set("Stripe-Version", "2025-01-01")
			return req
		}
		do(client, make())
		saved := only(t, store).Request
		require.NotNil(t, saved)
		require.Equal(t, &SavedRequest{
			Method: http.MethodPost, URL: "http://pay.example/charges?a=1&b=2", Body: []byte(`{ "amount" : 1.00 }`),
			Header: http.Header{"Content-Type": {"application/json"}, "Accept": {"application/json"}, "Stripe-Version": {"2025-01-01"}},
		}, saved)

		require.NoError(t, do(client, make()).err)
		require.Nil(t, only(t, store).Request, "once the intent has ended the bytes are of no use")
	})
}

func TestWithoutSaveRequestNoBytesAreKept(t *testing.T) {
	store := &flakyStore{}
	tr := &Transport{Base: answers(0), Store: store, Policy: oneShot(Policy{Keys: KeysHonored})}
	do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
	require.Nil(t, only(t, store).Request)
}

func TestASavedAnswerHasOnlyHeadersOfTheAllowList(t *testing.T) {
	for location, kept := range map[string]string{"/charges/1": "/charges/1", "http://u:canary@pay.example/1": ""} {
		store := &flakyStore{}
		tr := &Transport{Store: store, Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
			return answerOf(201, `{"id":1}`, "Content-Type", "application/json", "Set-Cookie", "canary", "Authorization", "canary",
				"X-Token", "canary", "Location", location, "Etag", `"1"`, "Request-Id", "req_1",
				"Link", "<http://u:canary@pay.example/2>; rel=next"), nil
		})}
		client := contract(t, tr)
		r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		require.NoError(t, r.err)
		saved := only(t, store).Response
		require.Equal(t, 201, saved.Status)
		require.Equal(t, `{"id":1}`, string(saved.Body))
		require.Equal(t, kept, saved.Header.Get("Location"))
		require.Equal(t, "req_1", saved.Header.Get("Request-Id"))
		require.NotContains(t, fmt.Sprint(saved.Header), "canary")

		resp, err := client.Do(post(t, t.Context(), "charge:1", payURL, "{}"))
		require.NoError(t, err)
		require.Equal(t, saved.Header, resp.Header)
		require.Equal(t, int64(8), resp.ContentLength)
		require.Equal(t, "201 Created", resp.Status)
		require.NoError(t, resp.Body.Close())
	}
}

// What a caller does with a saved answer reaches neither the store nor the
// next caller.
func TestASavedAnswerIsTheCallersOwn(t *testing.T) {
	tr := &Transport{Base: answers(201), Policy: Policy{Keys: KeysHonored}}
	client := contract(t, tr)
	for range 3 {
		resp, err := client.Do(post(t, t.Context(), "charge:1", payURL, "{}"))
		require.NoError(t, err)
		require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
		resp.Header.Set("Content-Type", "spoilt")
		buf := make([]byte, 14)
		n, _ := resp.Body.Read(buf)
		require.Equal(t, `{"status":201}`, string(buf[:n]))
		copy(buf, "spoilt")
		require.NoError(t, resp.Body.Close())
	}
}
