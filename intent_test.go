package oncehttp

import (
	"bytes"
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

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// cases.md A05: turning retries on replaced the caller's own key.
func TestACallersKeyIsKeptWhateverItsLetterCase(t *testing.T) {
	for _, name := range []string{"Idempotency-Key", "idempotency-key", "IDEMPOTENCY-KEY", "iDeMpOtEnCy-KeY"} {
		for _, intent := range []string{"", "charge:1"} {
			for _, keys := range []KeyMode{KeysHonored, KeysSent} {
				synctest.Test(t, func(t *testing.T) {
					base, store := answers(429, 429, 201), &flakyStore{}
					tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: keys}}
					req := post(t, t.Context(), intent, payURL, "{}")
					req.Header[name] = []string{"mine-1"}
					r := do(contract(t, tr), req)
					require.NoError(t, r.err)
					require.Equal(t, []string{"mine-1", "mine-1", "mine-1"}, base.sent(), "one key header, the caller's")
					require.Equal(t, "mine-1", only(t, store).Key)
				})
			}
		}
	}
}

func TestTwoKeyHeadersAreRefused(t *testing.T) {
	for name, h := range map[string]http.Header{
		"two values":       {"Idempotency-Key": {"a", "b"}},
		"two letter cases": {"Idempotency-Key": {"a"}, "idempotency-key": {"b"}},
		"the same twice":   {"Idempotency-Key": {"a", "a"}},
	} {
		base, store := answers(201), &flakyStore{}
		req := post(t, t.Context(), "charge:1", payURL, "{}")
		req.Header = h
		r := do(contract(t, &Transport{Base: base, Store: store}), req)
		require.ErrorIs(t, r.err, ErrInvalid, name)
		require.ErrorContains(t, r.err, "more than one idempotency key")
		require.Equal(t, NotSent, r.report.Outcome)
		require.Empty(t, base.sent())
		require.Zero(t, store.calls())
	}
}

// cases.md A93: bad keys are refused before they are sent or stored, and never
// repaired. The error does not show them.
func TestABadKeyIsRefusedBeforeTheStore(t *testing.T) {
	for name, c := range map[string]struct {
		key    string
		policy Policy
	}{
		"empty":              {"", Policy{}},
		"a line feed":        {"canary\nX-Evil: 1", Policy{}},
		"a carriage return":  {"canary\r", Policy{}},
		"a space":            {"canary key", Policy{}},
		"a space at the end": {"canary ", Policy{}},
		"a tab":              {"canary\t", Policy{}},
		"NUL":                {"canary\x00", Policy{}},
		"DEL":                {"canary\x7f", Policy{}},
		"UTF-8":              {"canary-é", Policy{}},
		"256 bytes":          {"canary" + strings.Repeat("k", 250), Policy{}},
		"longer than 36":     {"canary" + strings.Repeat("k", 31), Policy{KeyMaxLen: 36}},
		"longer than 45":     {"canary" + strings.Repeat("k", 40), Policy{KeyMaxLen: 45}},
		"longer than 64":     {"canary" + strings.Repeat("k", 59), Policy{KeyMaxLen: 64}},
	} {
		for _, from := range []string{"the caller", "NewKey"} {
			t.Run(name+" from "+from, func(t *testing.T) {
				base, store := answers(201), &flakyStore{}
				c.policy.NewKey = nil
				req := post(t, t.Context(), "charge:1", payURL, "{}")
				if from == "the caller" {
					req.Header["Idempotency-Key"] = []string{c.key}
				} else {
					c.policy.NewKey = func(context.Context, Intent) (string, error) { return c.key, nil }
				}
				tr := &Transport{Base: base, Store: store, Policy: c.policy}
				// http.Client would refuse some of them itself.
				_, err := strict{t, tr}.RoundTrip(req)
				require.ErrorIs(t, err, ErrInvalid)
				require.Equal(t, NotSent, OutcomeOf(nil, err))
				require.NotContains(t, err.Error(), "canary")
				require.Empty(t, base.sent())
				require.Zero(t, store.calls())

				_, err = tr.Key(req)
				require.ErrorIs(t, err, ErrInvalid)
				require.Zero(t, store.calls())
			})
		}
	}
}

func TestAKeyOfAllVisibleCharactersAndTheFullLengthIsSentRaw(t *testing.T) {
	var visible []byte
	for b := byte(0x21); b <= 0x7e; b++ {
		visible = append(visible, b)
	}
	for _, key := range []string{string(visible), strings.Repeat("k", 255), `"quoted"`, ","} {
		base := answers(201)
		req := post(t, t.Context(), "", payURL, "{}")
		req.Header.Set("Idempotency-Key", key)
		require.NoError(t, do(contract(t, &Transport{Base: base}), req).err)
		require.Equal(t, []string{key}, base.sent())
	}
}

// cases.md A93: the intent's name.
func TestAnIntentNameThatCannotBeIsRefused(t *testing.T) {
	for name, intent := range map[string]string{
		"empty":         "",
		"10 KiB":        strings.Repeat("n", 10<<10),
		"1,025 bytes":   strings.Repeat("n", 1025),
		"NUL":           "charge\x00:1",
		"invalid UTF-8": "charge\xff",
	} {
		t.Run(name, func(t *testing.T) {
			base, store := answers(201), &flakyStore{}
			tr := &Transport{Base: base, Store: store}
			req := post(t, WithIntent(t.Context(), intent), "", payURL, "{}")
			r := do(contract(t, tr), req)
			require.ErrorIs(t, r.err, ErrInvalid)
			require.ErrorContains(t, r.err, "WithIntent")
			require.Less(t, len(r.err.Error()), 300, "it does not repeat the name")
			require.Equal(t, NotSent, r.report.Outcome)
			_, err := tr.Key(req)
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorIs(t, tr.Settle(req, Done, ""), ErrInvalid)
			require.Empty(t, base.sent())
			require.Zero(t, store.calls())

			// A GET ignores it.
			require.NoError(t, do(contract(t, tr), fetch(t, WithIntent(t.Context(), intent))).err)
		})
	}
}

func TestAnyOtherNameGivesABoundedStableKey(t *testing.T) {
	for _, intent := range []string{"x", strings.Repeat("n", 1024), "charge order 1042\r\n", "ütf-8 ✓", " ", "a\tb"} {
		var sent []string
		for range 2 { // two processes without a shared store
			base := answers(201)
			tr := &Transport{Base: base, Policy: Policy{NewKey: DerivedKey, KeyMaxLen: 36}}
			require.NoError(t, do(contract(t, tr), post(t, t.Context(), intent, payURL, "{}")).err)
			sent = append(sent, base.sent()...)
		}
		require.Len(t, keysIn(sent), 1)
		require.NoError(t, checkKey(sent[0], 36))
	}
}

// cases.md A04: the key was derived from a clock, or from the amount.
func TestTheKeyDependsOnTheIntentsIdentityOnly(t *testing.T) {
	for name, newKey := range map[string]func(context.Context, Intent) (string, error){"random": nil, "derived": DerivedKey} {
		for _, durable := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, durable %v", name, durable), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					base := answers(0)
					tr := &Transport{Base: base, Policy: oneShot(Policy{Keys: KeysHonored, NewKey: newKey})}
					if durable {
						tr.Store = &flakyStore{}
					}
					client := contract(t, tr)
					time.Sleep(900 * time.Millisecond)
					for range 3 {
						do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
						time.Sleep(200 * time.Millisecond)
					}
					require.Len(t, base.sent(), 3)
					require.Len(t, keysIn(base.sent()), 1, "one intent, whatever the time")

					base.keys = nil
					do(client, post(t, t.Context(), "charge:2", payURL, "{}"))
					do(client, post(t, t.Context(), "charge:3", payURL, "{}"))
					do(client, post(t, t.Context(), "", payURL, "{}"))
					do(client, post(t, t.Context(), "", payURL, "{}"))
					require.Len(t, base.sent(), 4)
					require.Len(t, keysIn(base.sent()), 4, "two intents of one amount in one instant, and two anonymous ones")
				})
			})
		}
	}
}

// cases.md A67 (two hosts) and design §5: an intent is a name, an upstream and
// a scope.
func TestAnotherScopeOrUpstreamIsAnotherKey(t *testing.T) {
	for name, newKey := range map[string]func(context.Context, Intent) (string, error){"random": nil, "derived": DerivedKey} {
		t.Run(name, func(t *testing.T) {
			base, store := answers(201), &flakyStore{}
			tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored, NewKey: newKey},
				Scope: func(r *http.Request) string { return r.Header.Get("X-Merchant") }}
			client := contract(t, tr)
			for _, target := range []string{"http://a.example/c", "http://b.example/c"} {
				for _, merchant := range []string{"m1", "m2"} {
					for range 2 {
						req := post(t, t.Context(), "charge:1", target, "{}")
						req.Header.Set("X-Merchant", merchant)
						require.NoError(t, do(client, req).err)
					}
				}
			}
			require.Len(t, base.sent(), 4)
			require.Len(t, keysIn(base.sent()), 4)
			require.Len(t, all(t, store), 4)
		})
	}
}

func TestNoTwoIntentsHaveOneRecordID(t *testing.T) {
	seen := map[string]string{}
	for _, kind := range []byte{kindName, kindKey, kindAnon} {
		for _, parts := range [][3]string{
			{"a", "b", "c"}, {"ab", "", "c"}, {"a", "", "bc"}, {"", "ab", "c"}, {"", "", "abc"}, {"a", "bc", ""}, {"abc", "", ""},
			{"a", "b", "c\x00"}, {"a", "b\x00", "c"}, {"\x00\x00\x00\x00\x00\x00\x00\x01a", "", ""}, {strings.Repeat("x", 300), "", ""},
		} {
			id := recordID(kind, parts[0], parts[1], parts[2])
			require.Len(t, id, 64)
			require.Empty(t, seen[id])
			seen[id] = string(kind) + fmt.Sprint(parts)
			require.Equal(t, id, recordID(kind, parts[0], parts[1], parts[2]))
		}
	}
}

// cases.md A30: the key of a create call stuck and went out with the next one.
func TestAKeyNeverLeaksIntoTheNextRequest(t *testing.T) {
	for _, own := range []bool{true, false} {
		base := answers(201)
		client := contract(t, &Transport{Base: base, Policy: Policy{Keys: KeysHonored}})
		ctx := t.Context()
		first := post(t, ctx, "", "http://pay.example/invoices", "{}")
		if own {
			first.Header.Set("Idempotency-Key", "K")
		}
		require.NoError(t, do(client, first).err)
		require.NoError(t, do(client, post(t, ctx, "", "http://pay.example/invoices/1/pay", "{}")).err)
		require.Len(t, keysIn(base.sent()), 2)
		require.NotContains(t, base.sent()[1:], "K")
	}
}

func TestTheCallersKeyIsAnIntentOfItsOwn(t *testing.T) {
	store, base := &MemoryStore{}, answers(201)
	tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored}}
	client := contract(t, tr)
	with := func(body string) result {
		req := post(t, t.Context(), "", payURL, body)
		req.Header.Set("idempotency-key", "K")
		return do(client, req)
	}
	require.NoError(t, with("{}").err)
	again := with("{}")
	require.NoError(t, again.err)
	require.True(t, again.report.Replayed)
	require.ErrorIs(t, with(`{"amount":2}`).err, ErrIntentMismatch)
	require.Len(t, base.sent(), 1)
}

func TestWhichRequestsCarryAKey(t *testing.T) {
	for _, c := range []struct {
		method           string
		anonymous, named bool // carry one
	}{
		{"POST", true, true}, {"PATCH", true, true}, {"PURGE", true, true},
		{"PUT", false, true}, {"DELETE", false, true},
		{"GET", false, false}, {"HEAD", false, false}, {"OPTIONS", false, false}, {"TRACE", false, false},
	} {
		for _, keys := range []KeyMode{KeysSent, KeysHonored, KeysOff} {
			base, store := answers(200), &MemoryStore{}
			client := contract(t, &Transport{Base: base, Store: store, Policy: Policy{Keys: keys}})
			for _, intent := range []string{"", "x"} {
				req := post(t, t.Context(), intent, payURL, "{}")
				req.Method = c.method
				require.NoError(t, do(client, req).err)
			}
			sent := base.sent()
			require.Equal(t, c.anonymous && keys != KeysOff, sent[0] != "", "%s, anonymous, %d", c.method, keys)
			require.Equal(t, c.named && keys != KeysOff, sent[1] != "", "%s, named, %d", c.method, keys)
			require.Equal(t, c.named, len(all(t, store)) == 1, "an intent has a record even without a key")
		}
	}
}

func TestAProvidersOwnHeaderCarriesTheKey(t *testing.T) {
	var got http.Header
	tr := &Transport{Policy: Policy{KeyHeader: "paypal-request-id", Keys: KeysHonored}, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		got = r.Header.Clone()
		return answerOf(201, ""), nil
	})}
	req := post(t, t.Context(), "", payURL, "{}")
	req.Header["PAYPAL-REQUEST-ID"] = []string{"mine"}
	require.NoError(t, do(contract(t, tr), req).err)
	require.Equal(t, http.Header{"Paypal-Request-Id": {"mine"}}, got)
}

func TestNewKeyIsAskedOnceForAnIntent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked []Intent
		base := answers(503, 503, 503, 201)
		tr := &Transport{Base: base, Store: &flakyStore{}, Scope: func(*http.Request) string { return "m1" },
			Policy: Policy{Keys: KeysHonored, NewKey: func(_ context.Context, in Intent) (string, error) {
				asked = append(asked, in)
				return fmt.Sprint("key-", len(asked)), nil
			}}}
		client := contract(t, tr)
		r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		require.NoError(t, do(client, post(t, t.Context(), "charge:1", payURL, "{}")).err)
		require.Equal(t, []string{"key-1", "key-1", "key-1", "key-1"}, base.sent())
		require.Equal(t, Intent{Name: "charge:1", Upstream: "pay.example", Scope: "m1", RecordID: r.report.RecordID}, asked[0])
	})
}

func TestANewKeyThatFailsSendsNothing(t *testing.T) {
	base, store := answers(201), &flakyStore{}
	r := do(contract(t, &Transport{Base: base, Store: store, Policy: Policy{
		NewKey: func(context.Context, Intent) (string, error) { return "", errDisk },
	}}), post(t, t.Context(), "charge:1", payURL, "{}"))
	require.ErrorIs(t, r.err, ErrInvalid)
	require.ErrorIs(t, r.err, errDisk)
	require.Equal(t, NotSent, r.report.Outcome)
	require.Empty(t, base.sent())
	require.Zero(t, store.calls())
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// cases.md A09: the error of the random reader was ignored, so that half of the
// key was constant.
func TestBrokenRandomnessSendsAndStoresNothing(t *testing.T) {
	for name, source := range map[string]io.Reader{
		"an error": readFunc(func([]byte) (int, error) { return 0, errDisk }),
		"eight bytes, then an error": readFunc(func(p []byte) (int, error) {
			if len(p) == 16 {
				return 8, nil
			}
			return 0, errDisk
		}),
		"only zeros": readFunc(func(p []byte) (int, error) { clear(p); return len(p), nil }),
		"nothing":    bytes.NewReader(nil),
	} {
		for _, intent := range []string{"charge:1", ""} {
			for _, durable := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s, intent %q, durable %v", name, intent, durable), func(t *testing.T) {
					base, mem, flaky := answers(201), &MemoryStore{}, &flakyStore{}
					tr := &Transport{Base: base, Store: mem}
					if durable {
						tr.Store = flaky
					}
					client := contract(t, tr)
					uuid.SetRand(source)
					defer uuid.SetRand(nil)
					var r result
					require.NotPanics(t, func() { r = do(client, post(t, t.Context(), intent, payURL, "{}")) })
					require.ErrorIs(t, r.err, ErrInvalid)
					require.Equal(t, NotSent, r.report.Outcome)
					require.Empty(t, base.sent())
					require.Empty(t, all(t, mem))
					require.Zero(t, flaky.calls())
					if intent != "" {
						_, err := tr.Key(post(t, t.Context(), intent, payURL, "{}"))
						require.ErrorIs(t, err, ErrInvalid)
						require.Empty(t, all(t, mem))
						require.Zero(t, flaky.calls())
					}
				})
			}
		}
	}
}

// A short read without an error is no failure: the rest is read.
func TestAShortReadOfRandomnessIsReadOn(t *testing.T) {
	uuid.SetRand(readFunc(func(p []byte) (int, error) {
		n := min(len(p), 5)
		for i := range n {
			p[i] = byte(i + len(p))
		}
		return n, nil
	}))
	defer uuid.SetRand(nil)
	base := answers(201)
	require.NoError(t, do(contract(t, &Transport{Base: base}), post(t, t.Context(), "", payURL, "{}")).err)
	require.Len(t, base.sent()[0], 36)
}

func TestTwoThousandGoroutinesHaveTwoThousandKeys(t *testing.T) {
	base := answers(201)
	client := contract(t, &Transport{Base: base, Policy: Policy{Keys: KeysHonored}})
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			for range 40 {
				assert.NoError(t, do(client, post(t, t.Context(), "", payURL, "{}")).err)
			}
		})
	}
	all.Wait()
	require.Len(t, keysIn(base.sent()), 2000)
}

func TestKeyGivesThePersistedKeyThatTheCallThenSends(t *testing.T) {
	for _, durable := range []bool{true, false} {
		base, body := answers(201), ""
		base.answers[0] = func(r *http.Request) (*http.Response, error) {
			b, err := io.ReadAll(r.Body)
			body = string(b)
			return answerOf(201, "{}"), err
		}
		var store KeyStore = &MemoryStore{}
		if durable {
			store = &flakyStore{}
		}
		tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored}}
		client := contract(t, tr)
		about := post(t, t.Context(), "charge:1", payURL, "")
		key, err := tr.Key(about)
		require.NoError(t, err)
		rec := only(t, store)
		require.Equal(t, StateReserved, rec.State)
		require.Equal(t, key, rec.Key)
		require.Zero(t, rec.FirstSent)
		require.Empty(t, base.sent())
		again, err := tr.Key(about)
		require.NoError(t, err)
		require.Equal(t, key, again)

		r := do(client, post(t, t.Context(), "charge:1", payURL, `{"reference":"`+key+`"}`))
		require.NoError(t, r.err)
		require.Equal(t, []string{key}, base.sent())
		require.Contains(t, body, key)
		require.Equal(t, StateDone, only(t, store).State)

		// The body with the key in it is the intent's request from now on.
		after, err := tr.Key(about)
		require.NoError(t, err)
		require.Equal(t, key, after)
		require.ErrorIs(t, do(client, post(t, t.Context(), "charge:1", payURL, `{}`)).err, ErrIntentMismatch)
	}
}

func TestKeyNeedsAnIntentAndAStoreThatConfirms(t *testing.T) {
	store := &flakyStore{}
	tr := &Transport{Base: answers(201), Store: store}
	_, err := tr.Key(nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = tr.Key(post(t, t.Context(), "", payURL, ""))
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "WithIntent")
	require.Zero(t, store.calls())

	store.create = fails
	_, err = tr.Key(post(t, t.Context(), "charge:1", payURL, ""))
	require.ErrorIs(t, err, ErrStore)
	require.ErrorIs(t, err, errDisk)
	require.Equal(t, NotSent, OutcomeOf(nil, err))
	store.create = nil

	// A caller's key is the key; another one for the same intent is refused.
	req := post(t, t.Context(), "charge:1", payURL, "")
	req.Header.Set("idempotency-key", "mine")
	key, err := tr.Key(req)
	require.NoError(t, err)
	require.Equal(t, "mine", key)
	req.Header.Set("idempotency-key", "another")
	_, err = tr.Key(req)
	require.ErrorIs(t, err, ErrIntentMismatch)
}

// An SDK uses one context for a GET, a token and the charge.
func TestAnSDKThatUsesOneContextForEverything(t *testing.T) {
	sdk := func(client *http.Client, ctx context.Context, tokens string) (looked, token, charged result) {
		looked = do(client, fetch(t, ctx))
		token = do(client, post(t, ctx, "", tokens, "grant_type=client_credentials"))
		charged = do(client, post(t, ctx, "", payURL, "{}"))
		return looked, token, charged
	}
	t.Run("tokens from another host work", func(t *testing.T) {
		base, store := answers(200), &MemoryStore{}
		tr := &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored}}
		looked, token, charged := sdk(contract(t, tr), WithIntent(t.Context(), "charge:1"), "http://auth.example/token")
		require.NoError(t, errors.Join(looked.err, token.err, charged.err))
		require.Empty(t, base.sent()[0])
		require.Len(t, keysIn(base.sent()), 3)
		require.Len(t, all(t, store), 2)
	})
	t.Run("from the same host they are told apart loudly", func(t *testing.T) {
		base := answers(200)
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored}}
		looked, token, charged := sdk(contract(t, tr), WithIntent(t.Context(), "charge:1"), "http://pay.example/token")
		require.NoError(t, errors.Join(looked.err, token.err))
		require.ErrorIs(t, charged.err, ErrIntentMismatch)
		require.Equal(t, NotSent, charged.report.Outcome)
		require.Len(t, base.sent(), 2, "the charge was not sent under the token's key")
	})
	t.Run("and UpstreamOf gives the token endpoint a name of its own", func(t *testing.T) {
		base := answers(200)
		tr := &Transport{Base: base, Policy: Policy{Keys: KeysHonored}, UpstreamOf: func(r *http.Request) string {
			if r.URL.Path == "/token" {
				return "pay.example/token"
			}
			return upstreamOfHost(r)
		}}
		looked, token, charged := sdk(contract(t, tr), WithIntent(t.Context(), "charge:1"), "http://pay.example/token")
		require.NoError(t, errors.Join(looked.err, token.err, charged.err))
		require.Len(t, keysIn(base.sent()), 3)
	})
}

// A token request inside an attempt is not the charge.
func TestTheContextOfAnAttemptCarriesNoIntent(t *testing.T) {
	base, store := answers(200), &flakyStore{}
	var tr *Transport
	tr = &Transport{Base: base, Store: store, Policy: Policy{Keys: KeysHonored}, Prepare: func(r *http.Request) error {
		require.Nil(t, r.Context().Value(intentKey{}))
		require.Nil(t, r.Context().Value(policyKey{}))
		require.Nil(t, r.Context().Value(reportKey{}))
		if r.URL.Path == "/token" {
			return nil
		}
		return do(tr.Client(), post(t, r.Context(), "", "http://pay.example/token", "grant")).err
	}}
	var rep Report
	r := do(contract(t, tr), post(t, WithReport(t.Context(), &rep), "charge:1", payURL, "{}"))
	require.NoError(t, r.err)
	require.Len(t, base.sent(), 2)
	require.Equal(t, "charge:1", only(t, store).Intent)
	require.Equal(t, only(t, store).Key, base.sent()[1])
	require.NotEqual(t, base.sent()[0], base.sent()[1])
	require.Equal(t, "charge:1", rep.Intent)
}
