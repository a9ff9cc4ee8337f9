package oncehttp

import (
	"fmt"
	"math"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// fetchFrom makes a GET to a host.
func fetchFrom(t testing.TB, target string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, target, nil)
	require.NoError(t, err)
	return req
}

// cases.md A83: state per remote host was written and never expired.
func TestAHundredThousandFailingHostsKeepABoundedState(t *testing.T) {
	tr := sendOnce(fail(errLost))
	tr.Policy.Breaker.OpenFor = time.Hour
	reg := tr.settings().upstreams
	trip(reg.get("first.example"))
	req := fetchFrom(t, "http://x.example/")
	for n := range 100_000 {
		if n%10 != 0 { // what a call does to the state, without the call
			done, ok := reg.get(fmt.Sprint(n, ".example")).breaker.allow()
			require.True(t, ok)
			done(errBreakerFailure)
			continue
		}
		req.URL.Host = fmt.Sprint(n, ".EXAMPLE.:80")
		_, err := tr.RoundTrip(req)
		require.ErrorIs(t, err, errLost)
	}
	require.Equal(t, maxUpstreams, reg.lru.Len())
	require.Len(t, reg.byName, maxUpstreams)
	require.Equal(t, "open", tr.Upstream("first.example").Breaker, "one that is open is not forgotten")
	require.False(t, tr.Upstream("0.example").Known)
	require.True(t, tr.Upstream("99990.example").Known)
	require.Nil(t, reg.shared)
}

func TestOnlyABreakerWhoseTimerHasEndedMayBeForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := newRegistry(3, func(string) Policy { return Policy{} })
		for _, name := range []string{"a", "b", "c"} {
			trip(reg.get(name))
		}
		shared := reg.get("d")
		require.Same(t, shared.budget, reg.get("e").budget, "all are open: new names share one entry")
		for _, name := range []string{"a", "b", "c"} {
			require.NotNil(t, reg.peek(name))
		}
		require.Len(t, reg.byName, 3)

		time.Sleep(6001 * time.Millisecond)
		require.NotSame(t, shared.budget, reg.get("f").budget)
		require.Nil(t, reg.peek("a"), "the least recently used one goes")
		require.NotNil(t, reg.peek("b"))
		require.Len(t, reg.byName, 3)
	})
}

func TestTheLeastRecentlyUsedUpstreamGoes(t *testing.T) {
	reg := newRegistry(3, func(string) Policy { return Policy{} })
	for _, name := range []string{"a", "b", "c", "a", "d"} {
		reg.get(name)
	}
	require.NotNil(t, reg.peek("a"))
	require.Nil(t, reg.peek("b"))
	require.NotNil(t, reg.peek("c"))
	require.NotNil(t, reg.peek("d"))
}

// When all are open, what is shared is the health and not the identity: an
// intent keeps its record and its key, and an upstream its policy.
func TestSharingAnEntryChangesNoIntentsKeyAndNoPolicy(t *testing.T) {
	store, base := &MemoryStore{}, answers(0, 201)
	tr := &Transport{Base: base, Store: store, Upstreams: map[string]Policy{
		"pay.example": oneShot(Policy{Keys: KeysHonored}),
	}}
	client := contract(t, tr)
	do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
	id := only(t, store).ID

	// pay.example is forgotten, and the only place is taken by one that is open.
	reg := tr.settings().upstreams
	reg.max = 1
	trip(reg.get("down.example"))
	require.Nil(t, reg.peek("pay.example"))

	r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
	require.NoError(t, r.err)
	require.Equal(t, id, r.report.RecordID, "another record, and so another key, for one intent")
	require.Len(t, keysIn(base.sent()), 1)
	require.Equal(t, "pay.example", r.report.Upstream)

	// And two upstreams do not share an intent because they share an entry.
	other := do(client, post(t, t.Context(), "charge:1", "http://other.example/charges", "{}"))
	require.NotErrorIs(t, other.err, ErrIntentMismatch)
	require.NotEqual(t, id, other.report.RecordID)
}

func TestUpstreamNamesAreNormalised(t *testing.T) {
	for target, want := range map[string]string{
		"http://pay.example/":        "pay.example",
		"http://PAY.Example/":        "pay.example",
		"http://pay.example./":       "pay.example",
		"http://pay.example:80/":     "pay.example",
		"http://Pay.Example.:80/":    "pay.example",
		"http://pay.example:/":       "pay.example",
		"https://pay.example:443/":   "pay.example",
		"https://pay.example:80/":    "pay.example:80",
		"http://pay.example:443/":    "pay.example:443",
		"http://pay.example:8080/":   "pay.example:8080",
		"http://pay.example.:8080/":  "pay.example:8080",
		"http://u:p@pay.example/":    "pay.example",
		"http://[::1]/":              "[::1]",
		"http://[::1]:80/":           "[::1]",
		"http://[::80]/":             "[::80]",
		"https://[2001:DB8::1]:443/": "[2001:db8::1]",
		"http://[2001:db8::1]:8080/": "[2001:db8::1]:8080",
		"http://127.0.0.1:80/":       "127.0.0.1",
	} {
		require.Equal(t, want, upstreamOfHost(fetchFrom(t, target)), target)
	}
}

func TestAPolicyIsFoundUnderAnySpellingOfItsHost(t *testing.T) {
	for _, written := range []string{"api.pay.example", "API.Pay.Example", "api.pay.example."} {
		tr := &Transport{Base: answers(0, 201), Upstreams: map[string]Policy{written: {Keys: KeysHonored}}}
		client := contract(t, tr)
		for _, target := range []string{"http://api.pay.example/c", "http://API.PAY.EXAMPLE.:80/c"} {
			require.Equal(t, 2, do(client, post(t, t.Context(), "", target, "{}")).report.Attempts, "%s %s", written, target)
			tr.Base.(*upstreamStub).keys = nil
		}
		require.True(t, tr.Upstream("API.pay.example.").Known)
		require.Len(t, tr.settings().upstreams.byName, 1)
	}
}

func TestUpstreamIsASnapshotAndCreatesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{Base: roundTripFunc(hung)}
		require.Equal(t, UpstreamState{}, tr.Upstream("pay.example"))
		require.Empty(t, tr.settings().upstreams.byName)

		client := contract(t, tr)
		ctx := t.Context()
		done := make(chan result)
		go func() { done <- do(client, fetch(t, ctx)) }()
		synctest.Wait()
		require.Equal(t, UpstreamState{Known: true, Tokens: 10, Breaker: "closed", InFlight: 1}, tr.Upstream("pay.example"))
		<-done
		require.Equal(t, 0, tr.Upstream("pay.example").InFlight)
	})
	off := &Transport{Base: status(200), Policy: unguarded(Policy{})}
	do(contract(t, off), fetch(t, t.Context()))
	require.Equal(t, UpstreamState{Known: true, Tokens: math.Inf(1), Breaker: "off"}, off.Upstream("pay.example"))
}

func TestUpstreamOfNamesEndpointsThatMustNotShare(t *testing.T) {
	tr := &Transport{Base: status(503), Policy: Policy{MaxAttempts: Off}, UpstreamOf: func(r *http.Request) string {
		if r.URL.Path == "/token" {
			return "Pay.Example/Token"
		}
		return upstreamOfHost(r)
	}}
	client := contract(t, tr)
	do(client, fetchFrom(t, "http://pay.example/token"))
	require.True(t, tr.Upstream("pay.example/token").Known)
	require.False(t, tr.Upstream("pay.example").Known)

	empty := &Transport{Base: status(200), UpstreamOf: func(*http.Request) string { return "" }}
	r := do(contract(t, empty), fetch(t, t.Context()))
	require.ErrorIs(t, r.err, ErrInvalid)
	require.ErrorContains(t, r.err, "UpstreamOf")
}
