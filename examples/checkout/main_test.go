package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

// TestMain lets the test binary also be the shop's process.
func TestMain(m *testing.M) {
	if status, ok := asShop(context.Background()); ok {
		os.Exit(status)
	}
	os.Exit(m.Run())
}

func TestEveryOrderIsChargedAtMostOnceAndTheOutcomeIsTrue(t *testing.T) {
	const many = -1 // depends on how goroutines are scheduled
	want := []struct {
		name                      string
		plainSends, plainCharges  int
		onceSends, charges, extra int
		tells                     string
	}{
		{"response lost after the charge", 2, 2, 2, 1, 1, "done"},
		{"503 + Retry-After: 1 by a gateway", 2, 2, 2, 1, 1, "done"},
		{"timeout while the charge runs", many, many, many, 1, many, "done"},
		{"201 with half its body", 2, 2, 2, 1, 1, "done"},
		{"keep-alive connection closed", 3, 3, 3, 2, 1, "2 done"},
		{"the same order twice at once", 2, 2, 1, 1, 1, "2 done"},
		{"the same order, another amount", 2, 2, 1, 1, 1, "done, not sent"},
		{"response lost, keys not honoured", 2, 2, 1, 1, 1, "unknown"},
		{"full outage, 200 orders", 800, 0, many, 0, 0, "200 unknown"},
		{"Retry-After: 30, deadline in 5 s", 4, 0, 1, 0, 0, "unknown"},
		{"killed between charge and answer", 2, 2, 2, 1, 1, "done"},
		{"killed before sending", 1, 1, 1, 1, 0, "done"},
		{"killed after the answer was saved", 2, 2, 1, 1, 1, "done"},
		{"killed as in 11, back after 25 h", 2, 2, 1, 1, 1, "unknown"},
	}
	rows := playAll(t.Context(), io.Discard, false)
	require.Len(t, rows, len(want))
	for i, w := range want {
		r := rows[i]
		t.Run(w.name, func(t *testing.T) {
			require.Equal(t, w.name, r.name)
			if w.plainSends != many {
				require.Equal(t, w.plainSends, r.plain.sends(), "sends of the plain loop")
				require.Len(t, r.plain.ledger, w.plainCharges, "charges of the plain loop")
				require.Equal(t, w.extra, r.plain.tooMany(), "charges too many of the plain loop")
			}
			if w.onceSends != many {
				require.Equal(t, w.onceSends, r.once.sends(), "sends")
			}
			require.Len(t, r.once.ledger, w.charges, "charges")
			require.Equal(t, w.tells, r.once.tells(outcomeWord))
			require.Empty(t, r.wrong)
			require.Empty(t, r.once.audit())

			attempts := r.once.killed // of which nobody can report
			for _, told := range r.once.told {
				attempts += told.payment.Report.Attempts
			}
			require.Equal(t, r.once.sends(), attempts, "a send that no report counts was net/http's own")
		})
	}

	gateway := rows[1].once.told[0].payment.Report
	require.GreaterOrEqual(t, gateway.Waited, time.Second, "never earlier than Retry-After asks")

	slow := rows[2]
	require.Greater(t, len(slow.plain.ledger), 1, "the plain loop charges again while the first charge runs")
	require.GreaterOrEqual(t, slow.once.sends(), 2)

	refused := rows[6].once.told[1]
	require.ErrorIs(t, refused.err, oncehttp.ErrIntentMismatch)
	require.Zero(t, refused.payment.Report.Attempts)

	unsafe := rows[7].once.told[0]
	require.ErrorIs(t, unsafe.err, oncehttp.ErrUnsafe)

	// 200 first tries, ten tokens, and a tenth of a token for each second.
	outage := rows[8]
	require.GreaterOrEqual(t, outage.once.sends(), 210)
	require.LessOrEqual(t, outage.once.sends(), 213)

	late := rows[9].once.told[0].payment.Report
	require.Zero(t, late.Waited)
	require.Equal(t, http.StatusServiceUnavailable, late.Status)
	require.Equal(t, oncehttp.ErrDeadline, late.Reason)

	// A shop that was killed and started again.
	keys := func(r run) (keys []string) {
		for _, d := range r.deliveries {
			keys = append(keys, d.Header.Get("Idempotency-Key"))
		}
		return keys
	}
	for i, c := range []struct {
		killed, attempts int
		replayed         bool
		charge           string
	}{
		{1, 1, true, "ch_001"},
		{0, 1, false, "ch_001"},
		{1, 0, true, "ch_001"},
		{1, 0, false, ""},
	} {
		r, again := rows[10+i].once, rows[10+i].once.told[0].payment
		require.Equal(t, c.killed, r.killed, "sends before it was killed")
		require.Equal(t, c.attempts, again.Report.Attempts, "sends of the second life")
		require.Equal(t, c.replayed, again.Report.Replayed)
		require.Equal(t, c.charge, again.Charge, "the answer is delivered")
		require.NotEmpty(t, keys(r)[0])
		require.Len(t, slices.Compact(keys(r)), 1, "one intent, one key, over both lives")
	}
	require.ErrorContains(t, rows[13].once.told[0].err, oncehttp.ErrKeyExpired.Error())
}

func TestBudgetAndBreakerAreWhatKeepsAnOutageSmall(t *testing.T) {
	outage := scenes()[8]
	sends := map[string]int{}
	for _, other := range outage.others {
		r := outage.playOnce(t.Context(), other.policy, false)
		require.Empty(t, r.audit())
		sends[other.name] = r.sends()
	}
	require.Equal(t, 800, sends["the same without the budget"])
	require.Less(t, sends["the same with the breaker too, as by default"], 100)
}

// The negative control: with a bug planted the audit must see double charges.
func TestFreshKeyForEveryAttemptFailsTheAudit(t *testing.T) {
	var out bytes.Buffer
	require.Equal(t, 1, checkout(t.Context(), &out, []string{"-plant"}))
	for _, scene := range []string{"scene 1 ", "scene 2 ", "scene 4 ", "scene 5 ", "scene 11 "} {
		require.Contains(t, out.String(), "WRONG: "+scene)
	}
	require.NotContains(t, out.String(), "agrees with everything")
}

func TestAuditFindsOutcomesThatAreNotTrue(t *testing.T) {
	order := newOrder(1)
	tell := func(o oncehttp.Outcome) []told { return []told{{order: order, payment: Payment{Outcome: o}}} }
	dearer := order
	dearer.Amount++
	for name, r := range map[string]run{
		"done without a charge":      {told: tell(oncehttp.Done)},
		"done for another amount":    {told: tell(oncehttp.Done), ledger: []Order{dearer}},
		"not sent with a charge":     {told: tell(oncehttp.NotSent), ledger: []Order{order}},
		"rejected with a charge":     {told: tell(oncehttp.Rejected), ledger: []Order{order}},
		"charged twice":              {told: tell(oncehttp.Done), ledger: []Order{order, order}},
		"not played to its end":      {broken: errors.New("no shop")},
		"charged twice, two amounts": {told: tell(oncehttp.Done), ledger: []Order{order, dearer}},
	} {
		require.Len(t, r.audit(), 1, name)
	}
	for name, r := range map[string]run{
		"done":                    {told: tell(oncehttp.Done), ledger: []Order{order}},
		"unknown, charged":        {told: tell(oncehttp.Unknown), ledger: []Order{order}},
		"unknown, not charged":    {told: tell(oncehttp.Unknown)},
		"not sent":                {told: tell(oncehttp.NotSent)},
		"another amount not sent": {told: tell(oncehttp.NotSent), ledger: []Order{dearer}},
	} {
		require.Empty(t, r.audit(), name)
	}
}

func TestSandboxAnswersAsTheDraftSays(t *testing.T) {
	box := &sandbox{requiresKeys: true}
	post := func(key, body string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodPost, "/charges", strings.NewReader(body))
		if key != "" {
			r.Header.Set("Idempotency-Key", key)
		}
		w := httptest.NewRecorder()
		box.ServeHTTP(w, r)
		return w
	}
	const order, other = `{"order":"1","amount":1}`, `{"order":"1","amount":2}`

	require.Equal(t, http.StatusBadRequest, post("", order).Code, "required and missing")
	first := post("a", order)
	require.Equal(t, http.StatusCreated, first.Code)
	require.Empty(t, first.Header().Get("Idempotent-Replayed"))
	again := post("a", order)
	require.Equal(t, http.StatusCreated, again.Code)
	require.Equal(t, "true", again.Header().Get("Idempotent-Replayed"))
	require.Equal(t, first.Body.String(), again.Body.String())
	require.Equal(t, http.StatusUnprocessableEntity, post("a", other).Code, "another payload")
	box.claim("b", []byte(order))
	require.Equal(t, http.StatusConflict, post("b", order).Code, "in progress")
	require.Len(t, box.charges(), 1)
}
