package oncehttp

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// site is an upstream of two hosts and two schemes in memory: http://a, https://a,
// http://b. /charges redirects, once for each key, and everything else answers.
type site struct {
	status int
	to     string

	mu   sync.Mutex
	hops []hop // guarded by mu
}

type hop struct{ method, url, body, key string }

func (s *site) RoundTrip(r *http.Request) (*http.Response, error) {
	body := ""
	if r.Body != nil {
		b, _ := io.ReadAll(r.Body)
		r.Body.Close()
		body = string(b)
	}
	key := ""
	for k, v := range r.Header {
		if strings.EqualFold(k, "Idempotency-Key") {
			key += strings.Join(v, ",")
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hops = append(s.hops, hop{r.Method, r.URL.String(), body, key})
	if r.URL.Path == "/charges" {
		resp := answerOf(s.status, "moved", "Location", s.to)
		resp.Request = r
		return resp, nil
	}
	return answerOf(200, `{"id":1}`, "Content-Type", "application/json"), nil
}

// DESIGN.md §5, Redirects: every status, target, key and kind of body.
func TestRedirectsAreFollowedUnderTheSameKeyOrNotAtAll(t *testing.T) {
	targets := map[string]string{"same host": "/moved", "other host": "https://b.example/moved", "https to http": "http://a.example/moved"}
	for _, status := range []int{301, 302, 303, 307, 308} {
		for where, to := range targets {
			for _, keys := range []KeyMode{KeysSent, KeysHonored, KeysOff} {
				for _, intent := range []string{"", "charge"} {
					for _, getBody := range []bool{true, false} {
						for _, elsewhere := range []bool{false, true} {
							t.Run(fmt.Sprint(status, "/", where, "/keys ", keys, "/", intent, "/GetBody ", getBody, "/elsewhere ", elsewhere), func(t *testing.T) {
								s := &site{status: status, to: to}
								pol := quick(keys)
								pol.FollowElsewhere = elsewhere
								store := &MemoryStore{}
								client := contract(t, &Transport{Base: s, Policy: pol, Store: store})
								ctx := t.Context()
								if intent != "" {
									ctx = WithIntent(ctx, intent)
								}
								var body io.Reader = strings.NewReader("amount=100")
								if !getBody {
									body = opaque("amount=100")
								}
								req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://a.example/charges", body)
								require.NoError(t, err)
								r := do(client, req)
								records, _ := store.List(t.Context(), Query{})

								require.NotEmpty(t, s.hops)
								first := s.hops[0]
								assert.Equal(t, hop{"POST", "https://a.example/charges", "amount=100", first.key}, first)
								assert.Equal(t, keys != KeysOff, first.key != "")
								keyed := first.key != "" || intent != ""
								switch {
								case status >= 307 && !getBody:
									// http.Client cannot follow: never a POST with an empty body.
									assert.Equal(t, status, r.status)
									assert.Equal(t, "moved", r.body)
									assert.Len(t, s.hops, 1)
									assert.Equal(t, Rejected, r.report.Outcome)
								case status >= 307 && keyed && where != "same host" && !elsewhere:
									assert.ErrorIs(t, r.err, ErrRedirect)
									assert.Len(t, s.hops, 1)
									assert.Equal(t, Rejected, r.report.Outcome, "the upstream said where to go, and did nothing")
									assert.Equal(t, 1, r.report.Attempts)
								case status >= 307:
									require.NoError(t, r.err)
									require.Len(t, s.hops, 2)
									assert.Equal(t, hop{"POST", s.hops[1].url, "amount=100", first.key}, s.hops[1])
									assert.Equal(t, Done, r.report.Outcome)
									assert.Equal(t, 2, r.report.Attempts, "hops add up")
								default:
									require.NoError(t, r.err)
									require.Len(t, s.hops, 2)
									assert.Equal(t, hop{"GET", s.hops[1].url, "", ""}, s.hops[1], "no body and no key")
									assert.Equal(t, 2, r.report.Attempts)
									want := Unknown // 301 and 302 after a POST can mean both
									if status == 303 {
										want = Done
									}
									assert.Equal(t, want, r.report.Outcome)
									assert.Equal(t, 200, r.status)
								}
								if intent == "" {
									assert.Empty(t, records)
									return
								}
								require.Len(t, records, 1, "one record")
								assert.Equal(t, settledState(r.report.Outcome, true), records[0].State)
								if status >= 307 {
									assert.Equal(t, r.report.RecordID, records[0].ID)
									assert.Equal(t, intent, r.report.Intent)
								}
								if keys != KeysOff {
									assert.Equal(t, first.key, records[0].Key)
								}
							})
						}
					}
				}
			}
		}
	}
}

// A POST that commits and then answers 302, as web frameworks do, must not be
// told rejected: calling again would charge again.
func TestAPostThatCommitsAndAnswers302IsNotToldRejected(t *testing.T) {
	for _, status := range []int{301, 302, 303} {
		for _, keys := range []KeyMode{KeysSent, KeysOff, KeysHonored} {
			charges := 0
			base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
				if r.Method == http.MethodPost {
					charges++
					return answerOf(status, "", "Location", "/receipt"), nil
				}
				return answerOf(404, "no receipt yet"), nil
			})
			store := &MemoryStore{}
			client := contract(t, &Transport{Base: base, Policy: quick(keys), Store: store})
			r := do(client, post(t, t.Context(), "charge", "http://up.example/charges", "100"))
			assert.NotEqual(t, Rejected, r.report.Outcome, "%d", status)
			assert.NotEqual(t, NotSent, r.report.Outcome, "%d", status)
			records, _ := store.List(t.Context(), Query{})
			require.Len(t, records, 1)
			assert.NotContains(t, []State{StateNotSent, StateRejected}, records[0].State)
			if keys != KeysHonored {
				do(client, post(t, t.Context(), "charge", "http://up.example/charges", "100"))
				assert.Equal(t, 1, charges, "asked again, not charged again")
			}
		}
	}
}

// A38, on a socket: the redirect is one intent, with the whole body.
func TestA307IsOneIntentWithTheWholeBody(t *testing.T) {
	for _, start := range []func(http.Handler, faulty.Script) *faulty.Server{faulty.NewServer, faulty.NewHTTP2Server} {
		for _, status := range []int{307, 308} {
			l := newLedger(true)
			s := start(l, faulty.InOrder(faulty.Status(status, "Location", "/b"), faulty.LoseResponse()))
			store := &MemoryStore{}
			client := contract(t, &Transport{Base: s.Transport(), Policy: quick(KeysHonored), Store: store})
			r := do(client, post(t, t.Context(), "charge", s.URL+"/a", "amount=100"))
			require.NoError(t, r.err)
			assert.Equal(t, Done, r.report.Outcome)
			assert.True(t, r.report.Replayed)
			assert.Equal(t, 3, r.report.Attempts)
			assert.Equal(t, 1, l.effects("amount=100"))
			sent := s.Requests()
			require.Len(t, sent, 3)
			for _, d := range sent {
				assert.Equal(t, sent[0].Header["Idempotency-Key"], d.Header["Idempotency-Key"])
				assert.Equal(t, "amount=100", string(d.Body))
			}
			records, _ := store.List(t.Context(), Query{})
			require.Len(t, records, 1)
			assert.Equal(t, StateDone, records[0].State)

			again := do(client, post(t, t.Context(), "charge", s.URL+"/a", "amount=100"))
			assert.Equal(t, 201, again.status, "the answer of the last hop is saved")
			assert.Len(t, s.Requests(), 3)
			s.Close()
		}
	}
}

// The outcome that the last hop reports is the POST's, so its names are too:
// the caller has to find the record that it speaks of.
func TestTheReportAfterA303NamesThePostsIntent(t *testing.T) {
	s := &site{status: 303, to: "/moved"}
	store := &MemoryStore{}
	r := do(contract(t, &Transport{Base: s, Policy: quick(KeysHonored), Store: store}), post(t, t.Context(), "charge", "https://a.example/charges", "100"))
	require.NoError(t, r.err)
	assert.Equal(t, Done, r.report.Outcome)
	records, _ := store.List(t.Context(), Query{})
	require.Len(t, records, 1)
	assert.Equal(t, "charge", r.report.Intent)
	assert.Equal(t, records[0].ID, r.report.RecordID)
}

// A69: a hop back to the first host carries the first key, one to a foreign
// host none unless allowed.
func TestAHopToAForeignHostCarriesNoKey(t *testing.T) {
	for _, elsewhere := range []bool{false, true} {
		var hops []hop
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			hops = append(hops, hop{method: r.Method, url: r.URL.String(), key: r.Header.Get("Idempotency-Key")})
			switch len(hops) {
			case 1:
				return answerOf(307, "", "Location", "http://b.example/"), nil
			case 2:
				return answerOf(307, "", "Location", "http://a.example/end"), nil
			}
			return answerOf(200, ""), nil
		})
		pol := quick(KeysHonored)
		pol.FollowElsewhere = elsewhere
		r := do(contract(t, &Transport{Base: base, Policy: pol}), post(t, t.Context(), "charge", "http://a.example/", "100"))
		if !elsewhere {
			assert.ErrorIs(t, r.err, ErrRedirect)
			assert.Len(t, hops, 1)
			continue
		}
		require.NoError(t, r.err)
		require.Len(t, hops, 3)
		assert.Equal(t, hops[0].key, hops[1].key)
		assert.Equal(t, hops[0].key, hops[2].key)
		assert.Equal(t, 3, r.report.Attempts)
	}
}

// A94: a redirect that became a GET stays one.
func TestAfterA303A307IsAGetWithoutBodyOrKey(t *testing.T) {
	var seen []*http.Request
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		seen = append(seen, r)
		switch len(seen) {
		case 1:
			return answerOf(303, "", "Location", "/x"), nil
		case 2:
			return answerOf(307, "", "Location", "/y"), nil
		}
		return answerOf(404, "not there"), nil
	})
	for _, ownKey := range []string{"", "the-callers-own"} {
		seen = nil
		req := post(t, t.Context(), "", "http://up.example/", "100")
		if ownKey != "" {
			req.Header.Set("Idempotency-Key", ownKey)
		}
		r := do(contract(t, &Transport{Base: base, Policy: quick(KeysHonored)}), req)
		require.NoError(t, r.err)
		require.Len(t, seen, 3)
		for _, hop := range seen[1:] {
			assert.Equal(t, http.MethodGet, hop.Method)
			assert.Nil(t, hop.Body)
			assert.Zero(t, hop.ContentLength)
			for k := range hop.Header {
				assert.False(t, strings.EqualFold(k, "Idempotency-Key"), "%v", hop.Header)
			}
		}
		assert.Equal(t, Done, r.report.Outcome, "what a 303 leads to tells nothing about the POST")
		assert.Equal(t, 3, r.report.Attempts)
	}
}

// The record is held until the last hop ends: a second call meanwhile is told
// that the first is under way, or gets its answer, never a send of its own.
func TestARedirectHoldsTheIntentUntilItsLastHop(t *testing.T) {
	second := make(chan result, 1)
	var client *http.Client
	sends := 0
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		if sends++; r.URL.Path == "/charges" {
			return answerOf(307, "", "Location", "/b"), nil
		}
		second <- do(client, post(t, t.Context(), "charge", "http://up.example/charges", "100"))
		return answerOf(201, "charged"), nil
	})
	client = contract(t, &Transport{Base: base, Policy: quick(KeysHonored)})
	r := do(client, post(t, t.Context(), "charge", "http://up.example/charges", "100"))
	require.NoError(t, r.err)
	assert.Equal(t, Done, r.report.Outcome)
	assert.ErrorIs(t, (<-second).err, ErrInFlight)
	assert.Equal(t, 2, sends)
}

// A redirect that the caller's CheckRedirect stops leaves what the 307 said.
func TestARedirectThatTheCallerStopsIsTheAnswer(t *testing.T) {
	base := roundTripFunc(func(*http.Request) (*http.Response, error) { return answerOf(307, "moved", "Location", "/b"), nil })
	store := &MemoryStore{}
	client := contract(t, &Transport{Base: base, Policy: quick(KeysHonored), Store: store})
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	r := do(client, post(t, t.Context(), "charge", "http://up.example/", "100"))
	require.NoError(t, r.err)
	assert.Equal(t, 307, r.status)
	assert.Equal(t, "moved", r.body)
	assert.Equal(t, Rejected, r.report.Outcome)
	records, _ := store.List(t.Context(), Query{})
	require.Len(t, records, 1)
	assert.Equal(t, StateNotSent, records[0].State)
}

// A redirect loop ends by http.Client's own limit, under one key.
func TestARedirectLoopHasOneKey(t *testing.T) {
	keys := map[string]bool{}
	base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		keys[r.Header.Get("Idempotency-Key")] = true
		return answerOf(308, "", "Location", "/"), nil
	})
	var report Report
	store := &MemoryStore{}
	client := contract(t, &Transport{Base: base, Policy: quick(KeysHonored), Store: store})
	r := do(client, post(t, WithReport(context.Background(), &report), "charge", "http://up.example/", "100"))
	assert.ErrorContains(t, r.err, "stopped after 10 redirects")
	assert.Len(t, keys, 1)
	assert.Equal(t, 10, report.Attempts)
	records, _ := store.List(t.Context(), Query{})
	assert.Len(t, records, 1)
}
