package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAnErrorSaysWhatIsKnownAndWhatToDo(t *testing.T) {
	for want, e := range map[string]*Error{
		"oncehttp: outcome unknown at pay.example after 3 attempts: REASON: connection reset by peer (it may have been done: call again for the same intent)": {
			Report: Report{Upstream: "pay.example", Attempts: 3, Reason: ErrAttempts, Intent: "charge:1"}, Err: errLost},
		"oncehttp: outcome unknown at pay.example: REASON (it may have been done)": {
			Report: Report{Upstream: "pay.example", Attempts: 1, Reason: ErrDeadline}},
		"oncehttp: outcome unknown at pay.example: REASON: connection reset by peer (it may have been done: look it up at the upstream, then tell Transport.Settle)": {
			Report: Report{Upstream: "pay.example", Attempts: 1, Reason: ErrUnsafe, Intent: "charge:1"}, Err: errLost},
		"oncehttp: outcome unknown at pay.example: REASON (it may have been done: look it up at the upstream, then tell Transport.Settle)": {
			Report: Report{Upstream: "pay.example", Reason: ErrKeyExpired, Intent: "charge:1"}},
		"oncehttp: not sent to pay.example: REASON": {
			Report: Report{Upstream: "pay.example", Outcome: NotSent, Reason: ErrOpen}},
		"oncehttp: not sent to pay.example: REASON: disk on fire": {
			Report: Report{Upstream: "pay.example", Outcome: NotSent, Reason: ErrStore}, Err: errDisk},
		"oncehttp: outcome unknown at pay.example: REASON (call again for the same intent later, or set WaitInFlight)": {
			Report: Report{Upstream: "pay.example", Reason: ErrInFlight, Intent: "charge:1"}},
		"oncehttp: done at pay.example: REASON (nothing was sent; look the result up at the upstream)": {
			Report: Report{Upstream: "pay.example", Outcome: Done, Reason: ErrSettled, Intent: "charge:1"}},
		"oncehttp: not sent: REASON: the request has no URL": {
			Report: Report{Outcome: NotSent, Reason: ErrInvalid}, Err: errors.New("the request has no URL")},
		"oncehttp: outcome unknown (it may have been done)": {},
		"oncehttp: rejected by pay.example: context canceled": {
			Report: Report{Upstream: "pay.example", Outcome: Rejected, Reason: context.Canceled}, Err: context.Canceled},
	} {
		if e.Reason != nil {
			want = strings.Replace(want, "REASON", e.Reason.Error(), 1)
		}
		require.Equal(t, want, e.Error())
	}
}

func TestErrorsIsFindsTheReasonAndTheCause(t *testing.T) {
	cause := &url.Error{Op: "Post", URL: payURL, Err: errLost}
	err := fmt.Errorf("charging: %w", &Error{Report: Report{Reason: ErrAttempts}, Err: cause})
	require.ErrorIs(t, err, ErrAttempts)
	require.ErrorIs(t, err, errLost)
	var u *url.Error
	require.ErrorAs(t, err, &u)
	require.Same(t, cause, u)
	require.NotErrorIs(t, err, ErrBudget)

	for _, e := range []*Error{{}, {Err: errLost}, {Report: Report{Reason: ErrOpen}}, {Report: Report{Reason: ErrOpen}, Err: errLost}} {
		for _, inner := range e.Unwrap() {
			require.NotNil(t, inner)
		}
		require.False(t, errors.Is(e, nil))
	}
	require.Empty(t, (&Error{}).Unwrap())
	require.Equal(t, []error{ErrOpen, errLost}, (&Error{Report: Report{Reason: ErrOpen}, Err: errLost}).Unwrap())
}

func TestTimeoutTellsWhetherTimeRanOut(t *testing.T) {
	for _, c := range []struct {
		reason, err error
		want        bool
	}{
		{ErrDeadline, nil, true},
		{ErrDeadline, context.DeadlineExceeded, true},
		{ErrAttempts, errAttemptTimeout, true},
		{ErrAttempts, fmt.Errorf("wrapped: %w", errAttemptTimeout), true},
		{ErrAttempts, context.DeadlineExceeded, true},
		{ErrAttempts, errLost, false},
		{context.Canceled, context.Canceled, false},
		{ErrOpen, nil, false},
		{nil, nil, false},
	} {
		e := &Error{Report: Report{Reason: c.reason}, Err: c.err}
		require.Equal(t, c.want, e.Timeout(), "%v %v", c.reason, c.err)
		// http.Client's error asks ours.
		require.Equal(t, c.want, (&url.Error{Op: "Get", URL: payURL, Err: e}).Timeout(), "%v %v", c.reason, c.err)
	}
}

func TestWhatIsNotOursIsUnknown(t *testing.T) {
	for name, c := range map[string]struct {
		resp *http.Response
		err  error
	}{
		"nothing":                 {nil, nil},
		"a foreign error":         {nil, errLost},
		"a foreign answer":        {answerOf(200, ""), nil},
		"its request, not ours":   {&http.Response{StatusCode: 200, Request: fetch(t, t.Context())}, nil},
		"both":                    {answerOf(200, ""), errLost},
		"a wrapped foreign error": {nil, fmt.Errorf("x: %w", errLost)},
	} {
		require.Equal(t, Unknown, OutcomeOf(c.resp, c.err), name)
		rep, ok := ReportOf(c.resp)
		require.False(t, ok, name)
		require.Equal(t, Report{}, rep, name)
	}
	require.Equal(t, NotSent, OutcomeOf(nil, fmt.Errorf("sdk: %w", &Error{Report: Report{Outcome: NotSent}})))
	for o, s := range map[Outcome]string{Unknown: "unknown", NotSent: "not sent", Rejected: "rejected", Done: "done", 77: "unknown"} {
		require.Equal(t, s, o.String())
	}
}

// cases.md A24: net/url and many RoundTrippers put the whole URL into errors.
func TestErrorTextsShowNoMoreOfAURLThanItsHost(t *testing.T) {
	for _, raw := range []string{
		"https://user:canary@pay.example/charges",
		"https://pay.example/charges?api_key=canary",
		"https://pay.example/charges?api_key=canary#canary",
		"https://pay.example/canary/1",
		"HTTPS://user:canary@PAY.example:8443/x",
		"http://user:ca%zznary@pay.example/canary",
		"https://canary@pay.example",
		"postgres://oncehttp:canary@db.example:5432/keys?sslmode=disable",
		"https://pay.example/charges?$filter=name%20eq%20'canary'",
		"https://pay.example/charges?q=<canary>",
		"https://pay.example/charges?q=a|canary",
		`https://pay.example/charges?q="canary"`,
		"https://pay.example/charges?q=a b&api_key=canary",
	} {
		t.Run(raw, func(t *testing.T) {
			errs := []error{
				&url.Error{Op: "Post", URL: raw, Err: errLost},
				fmt.Errorf("sdk: %w", &url.Error{Op: "Post", URL: raw, Err: &url.Error{Op: "Get", URL: raw, Err: errLost}}),
			}
			if !strings.Contains(raw, " ") { // in a plain text nobody can tell where such a one ends
				errs = append(errs, fmt.Errorf("calling <%s>: failed", raw), fmt.Errorf("redirect from %s to %s failed", raw, raw))
			}
			for _, err := range errs {
				text := (&Error{Err: err}).Error()
				require.NotContains(t, text, "canary")
				require.NotContains(t, text, "nary")
			}
			text := safeText(&url.Error{Op: "Post", URL: raw, Err: errLost})
			require.Contains(t, text, "Post")
			require.Contains(t, text, errLost.Error(), "what happened is still told")
		})
	}
	require.Equal(t, `Get "http://pay.example": EOF`, safeText(&url.Error{Op: "Get", URL: "http://u:p@pay.example/a?b=c", Err: io.EOF}))
	require.Equal(t, "dial tcp 10.0.0.1:443: connection refused", safeText(errors.New("dial tcp 10.0.0.1:443: connection refused")))
}

// brokenAnswer is an answer whose body breaks off, of a type that is not read
// before RoundTrip returns.
func brokenAnswer(after string) *http.Response {
	resp := answerOf(200, "", "Content-Type", "text/event-stream")
	resp.ContentLength = -1
	resp.Body = io.NopCloser(io.MultiReader(strings.NewReader(after), iotest.ErrReader(io.ErrUnexpectedEOF)))
	return resp
}

// cases.md A98, A45: the retry layer never saw a body that failed, because
// reading was deferred.
func TestDoneIsProvisionalUntilTheBodyHasEnded(t *testing.T) {
	store := &flakyStore{}
	tr := &Transport{Store: store, Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
		return brokenAnswer("half"), nil
	})}
	resp, err := contract(t, tr).Do(post(t, t.Context(), "charge:1", payURL, "{}"))
	require.NoError(t, err)
	require.Equal(t, Done, OutcomeOf(resp, nil))
	require.Equal(t, StateSending, only(t, store).State, "not settled before the end")
	b, err := io.ReadAll(resp.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, "half", string(b))
	require.Equal(t, Unknown, OutcomeOf(resp, nil))
	require.Equal(t, StateOpen, only(t, store).State)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, StateOpen, only(t, store).State)
	require.Equal(t, Unknown, OutcomeOf(resp, nil))
}

// The status of a 2xx is known without its body: who closes early has been
// charged, and only the answer is not saved.
func TestAnEarlyCloseOfASuccessSettlesDoneWithoutASavedAnswer(t *testing.T) {
	store, sends := &flakyStore{}, 0
	tr := &Transport{Store: store, Policy: Policy{Keys: KeysHonored}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
		sends++
		return brokenAnswer("half"), nil
	})}
	client := contract(t, tr)
	resp, err := client.Do(post(t, t.Context(), "charge:1", payURL, "{}"))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.NoError(t, resp.Body.Close(), "closing twice settles once")
	require.Equal(t, Done, OutcomeOf(resp, nil))
	require.Equal(t, StateDone, only(t, store).State)
	require.Nil(t, only(t, store).Response)

	r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
	require.ErrorIs(t, r.err, ErrSettled)
	require.Equal(t, Done, r.report.Outcome)
	require.Equal(t, 200, r.report.Status)
	require.Equal(t, 1, sends)
}

func TestAnAnswerLargerThanMaxResponseBytesIsNotSaved(t *testing.T) {
	for name, length := range map[string]int64{"its length is known": 0, "it is not": -1} {
		store := &flakyStore{}
		tr := &Transport{Store: store, Policy: Policy{Keys: KeysHonored, MaxResponseBytes: 10}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
			resp := answerOf(201, `{"id":"12345"}`, "Content-Type", "application/json")
			resp.ContentLength += length * (resp.ContentLength + 1)
			return resp, nil
		})}
		r := do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
		require.NoError(t, r.err, name)
		require.Equal(t, `{"id":"12345"}`, r.body, "the caller gets it whole")
		require.Equal(t, StateDone, only(t, store).State)
		require.Nil(t, only(t, store).Response, name)
	}
}

// cases.md A45: 200 with Content-Length 100, seven bytes, end.
func TestATruncatedAnswerToANamedIntentIsNeverDone(t *testing.T) {
	for _, c := range []struct {
		keys   KeyMode
		sends  int
		reason error
	}{{KeysHonored, 3, ErrAttempts}, {KeysSent, 1, ErrUnsafe}} {
		store, sends := &flakyStore{}, 0
		tr := &Transport{Store: store, Policy: Policy{Keys: c.keys, BaseDelay: 1, MaxDelay: 1}, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
			sends++
			resp := brokenAnswer("{\"id\":1")
			resp.Header.Set("Content-Type", "application/json")
			resp.ContentLength = 100
			return resp, nil
		})}
		r := do(contract(t, tr), post(t, t.Context(), "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, c.reason)
		require.ErrorIs(t, r.err, io.ErrUnexpectedEOF)
		require.Equal(t, Unknown, r.report.Outcome)
		require.Equal(t, StateOpen, only(t, store).State)
		require.Equal(t, c.sends, sends)
	}
}

func TestReportIsFilledWhateverEndsTheCall(t *testing.T) {
	ok := answers(200)
	for name, c := range map[string]struct {
		tr   *Transport
		req  func(ctx context.Context) *http.Request
		want Report
	}{
		"an answer": {&Transport{Base: ok}, func(ctx context.Context) *http.Request { return fetch(t, ctx) },
			Report{Outcome: Done, Attempts: 1, Status: 200, Upstream: "pay.example"}},
		"an error": {&Transport{Base: fail(errLost)}, func(ctx context.Context) *http.Request { return post(t, ctx, "", payURL, "{}") },
			Report{Outcome: Unknown, Reason: ErrUnsafe, Attempts: 1, Upstream: "pay.example"}},
		"settings that cannot work": {&Transport{Base: ok, Policy: Policy{MaxAttempts: -2}}, func(ctx context.Context) *http.Request { return fetch(t, ctx) },
			Report{Outcome: NotSent, Reason: ErrInvalid}},
		"a policy that cannot work": {&Transport{Base: ok}, func(ctx context.Context) *http.Request {
			return fetch(t, WithPolicy(ctx, Policy{MaxInFlight: 1}))
		}, Report{Outcome: NotSent, Reason: ErrInvalid}},
		"a store that fails": {&Transport{Base: ok, Store: &flakyStore{create: fails, get: fails}}, func(ctx context.Context) *http.Request {
			return post(t, ctx, "", payURL, "{}")
		}, Report{Outcome: NotSent, Reason: ErrStore, Upstream: "pay.example"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := Report{Outcome: 9, Attempts: 99, Waited: time.Hour} // of an earlier call
			do(contract(t, c.tr), c.req(WithReport(t.Context(), &got)))
			got.RecordID = ""
			require.Equal(t, c.want, got)
		})
	}
	// A nil Report asks for nothing.
	require.NoError(t, do(contract(t, &Transport{Base: ok}), fetch(t, WithReport(t.Context(), nil))).err)
}
