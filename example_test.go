package oncehttp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/oncehttp/oncehttp"
)

// api is an upstream without a network: a Transport.Base made of a function.
// In your code Base is nil, or the *http.Transport that you have.
type api func(*http.Request) (*http.Response, error)

func (f api) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	return f(r)
}

// answer makes a response; header holds name, value pairs.
func answer(status int, body string, header ...string) (*http.Response, error) {
	w := httptest.NewRecorder()
	w.Header().Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		w.Header().Set(header[i], header[i+1])
	}
	w.WriteHeader(status)
	io.WriteString(w, body)
	return w.Result(), nil
}

// lostOnce is a payments API that honours keys. It loses its first answer.
func lostOnce() api {
	charged := make(map[string]bool)
	return func(r *http.Request) (*http.Response, error) {
		key := r.Header.Get("Idempotency-Key")
		if charged[key] {
			return answer(201, `{"charge":"ch_1"}`, "Idempotent-Replayed", "true")
		}
		charged[key] = true
		fmt.Println("charged")
		return nil, io.ErrUnexpectedEOF
	}
}

// The upstream charges and its answer is lost: the second attempt carries the
// same key and gets the answer, not a second charge.
func Example() {
	client := (&oncehttp.Transport{
		Base: lostOnce(),
		Upstreams: map[string]oncehttp.Policy{
			"api.pay.example": {Keys: oncehttp.KeysHonored, KeyWindow: 24 * time.Hour},
		},
	}).Client()

	ctx := oncehttp.WithIntent(context.Background(), "charge:order-1042")
	req, err := http.NewRequestWithContext(ctx, "POST", "https://api.pay.example/charges", strings.NewReader(`{"amount":4990}`))
	if err != nil {
		panic(err)
	}
	resp, err := client.Do(req)
	if err == nil {
		defer resp.Body.Close()
	}
	switch oncehttp.OutcomeOf(resp, err) {
	case oncehttp.Done:
		body, _ := io.ReadAll(resp.Body)
		fmt.Printf("paid: %s\n", body)
	case oncehttp.Rejected:
		fmt.Println("refused: tell the customer")
	case oncehttp.NotSent:
		fmt.Println("nothing happened: try again, or pay otherwise")
	case oncehttp.Unknown:
		fmt.Println("keep it pending: call again for the same intent, or look it up")
	}
	// Output:
	// charged
	// paid: {"charge":"ch_1"}
}

// Each upstream has a policy of its own; what it leaves zero comes from
// Transport.Policy, and what that leaves zero from the defaults.
func ExampleTransport_upstreams() {
	t := &oncehttp.Transport{
		Base:   api(func(*http.Request) (*http.Response, error) { return answer(503, "{}") }),
		Policy: oncehttp.Policy{AttemptTimeout: 5 * time.Second, BaseDelay: time.Millisecond},
		Upstreams: map[string]oncehttp.Policy{
			"api.pay.example":   {Keys: oncehttp.KeysHonored, KeyWindow: 24 * time.Hour},
			"rates.fx.example":  {MaxAttempts: 2, Budget: oncehttp.Budget{Burst: 3}},
			"send.mail.example": {RateLimit: 10, RateBurst: 5, MaxInFlight: 2},
		},
	}
	if err := t.Validate(); err != nil {
		panic(err)
	}
	for _, call := range []struct{ method, host string }{
		{"POST", "api.pay.example"}, {"GET", "rates.fx.example"}, {"POST", "send.mail.example"},
	} {
		req, err := http.NewRequest(call.method, "https://"+call.host+"/", nil)
		if err != nil {
			panic(err)
		}
		resp, err := t.Client().Do(req)
		if err != nil {
			panic(err)
		}
		resp.Body.Close()
		report, _ := oncehttp.ReportOf(resp)
		state := t.Upstream(call.host)
		fmt.Printf("%s: sent %d×, %v; %.0f tokens left\n", call.host, report.Attempts, report.Reason, state.Tokens)
	}
	// Output:
	// api.pay.example: sent 3×, no attempt left; 8 tokens left
	// rates.fx.example: sent 2×, no attempt left; 2 tokens left
	// send.mail.example: sent 1×, not safe to send again; 10 tokens left
}

// The second call for an intent gets the answer of the first.
func ExampleWithIntent() {
	sends := 0
	client := (&oncehttp.Transport{
		Base: api(func(*http.Request) (*http.Response, error) {
			sends++
			return answer(201, fmt.Sprintf(`{"charge":"ch_%d"}`, sends))
		}),
	}).Client()

	ctx := oncehttp.WithIntent(context.Background(), "charge:order-1042")
	for range 2 {
		req, err := http.NewRequestWithContext(ctx, "POST", "https://api.pay.example/charges", strings.NewReader(`{"amount":4990}`))
		if err != nil {
			panic(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			panic(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		report, _ := oncehttp.ReportOf(resp)
		fmt.Printf("%s attempts: %d, replayed: %v\n", body, report.Attempts, report.Replayed)
	}

	// Another amount under the same name is not the same intent.
	req, err := http.NewRequestWithContext(ctx, "POST", "https://api.pay.example/charges", strings.NewReader(`{"amount":5990}`))
	if err != nil {
		panic(err)
	}
	_, err = client.Do(req)
	fmt.Println("mismatch:", errors.Is(err, oncehttp.ErrIntentMismatch))
	fmt.Println("sends:", sends)
	// Output:
	// {"charge":"ch_1"} attempts: 1, replayed: false
	// {"charge":"ch_1"} attempts: 0, replayed: true
	// mismatch: true
	// sends: 1
}

// Where the upstream is not declared to honour keys, a lost answer to a POST
// is Unknown. NotSent needs proof.
func ExampleOutcomeOf() {
	t := &oncehttp.Transport{
		Base: api(func(r *http.Request) (*http.Response, error) {
			switch r.URL.Path {
			case "/lost":
				return nil, io.ErrUnexpectedEOF
			case "/declined":
				return answer(402, `{"reason":"card declined"}`)
			}
			return answer(201, `{"charge":"ch_1"}`)
		}),
	}
	post := func(path string) oncehttp.Outcome {
		resp, err := t.Client().Post("https://api.pay.example"+path, "application/json", strings.NewReader(`{"amount":4990}`))
		if err == nil {
			defer resp.Body.Close()
			_, err = io.ReadAll(resp.Body) // until its end the outcome is provisional
		}
		return oncehttp.OutcomeOf(resp, err)
	}
	fmt.Println(post("/charges"))
	fmt.Println(post("/declined"))
	fmt.Println(post("/lost"))

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", "https://api.pay.example/charges", nil)
	if err != nil {
		panic(err)
	}
	fmt.Println(oncehttp.OutcomeOf(t.Client().Do(req)))
	// Output:
	// done
	// rejected
	// unknown
	// not sent
}

// A response is returned as it is, also if retrying did not help. The report
// tells why it stopped.
func ExampleReportOf() {
	client := (&oncehttp.Transport{
		Base: api(func(*http.Request) (*http.Response, error) {
			return answer(503, `{"title":"maintenance"}`, "Retry-After", "3600")
		}),
	}).Client()
	resp, err := client.Get("https://api.pay.example/charges/ch_1")
	if err != nil {
		panic(err)
	}
	defer resp.Body.Close()
	report, _ := oncehttp.ReportOf(resp)
	fmt.Println(resp.Status)
	fmt.Println("attempts:", report.Attempts)
	fmt.Println("stopped:", report.Reason)
	fmt.Println("waited:", report.Waited)
	fmt.Println("again in an hour:", time.Until(report.RetryAt).Round(time.Minute) == time.Hour)
	// Output:
	// 503 Service Unavailable
	// attempts: 1
	// stopped: no time for another attempt (deadline, MaxElapsed or MaxRetryAfter)
	// waited: 0s
	// again in an hour: true
}

// Some APIs want the key in the body.
func ExampleTransport_Key() {
	t := &oncehttp.Transport{
		Base: api(func(r *http.Request) (*http.Response, error) {
			var body struct {
				Key string `json:"idempotency_key"`
			}
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				return nil, err
			}
			fmt.Println("one key:", body.Key != "" && body.Key == r.Header.Get("Idempotency-Key"))
			return answer(201, "{}")
		}),
		Upstreams: map[string]oncehttp.Policy{"api.pay.example": {Keys: oncehttp.KeysHonored}},
	}

	ctx := oncehttp.WithIntent(context.Background(), "charge:order-1042")
	req, err := http.NewRequestWithContext(ctx, "POST", "https://api.pay.example/charges", nil)
	if err != nil {
		panic(err)
	}
	key, err := t.Key(req) // the same one whenever this intent is called
	if err != nil {
		panic(err)
	}
	body, err := json.Marshal(map[string]any{"amount": 4990, "idempotency_key": key})
	if err != nil {
		panic(err)
	}
	req, err = http.NewRequestWithContext(ctx, "POST", "https://api.pay.example/charges", bytes.NewReader(body))
	if err != nil {
		panic(err)
	}
	resp, err := t.Client().Do(req)
	if err != nil {
		panic(err)
	}
	defer resp.Body.Close()
	fmt.Println(oncehttp.OutcomeOf(resp, err))
	// Output:
	// one key: true
	// done
}

// A charge ends Unknown, and then a webhook says that it went through.
func ExampleTransport_Settle() {
	t := &oncehttp.Transport{
		Base: api(func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF }),
	}
	charge := func() *http.Request {
		ctx := oncehttp.WithIntent(context.Background(), "charge:order-1042")
		req, err := http.NewRequestWithContext(ctx, "POST", "https://api.pay.example/charges", strings.NewReader(`{"amount":4990}`))
		if err != nil {
			panic(err)
		}
		return req
	}
	fmt.Println(oncehttp.OutcomeOf(t.Client().Do(charge())))

	// In the webhook's handler:
	if err := t.Settle(charge(), oncehttp.Done, "webhook: charge.succeeded ch_1"); err != nil {
		panic(err)
	}

	_, err := t.Client().Do(charge()) // nothing is sent
	fmt.Println(oncehttp.OutcomeOf(nil, err), errors.Is(err, oncehttp.ErrSettled))
	// Output:
	// unknown
	// done true
}

// What happens goes to the log, without keys, URLs, headers or bodies.
func ExampleLogTrace() {
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		Level: slog.LevelDebug,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			switch a.Key {
			case slog.TimeKey, "elapsed", "delay", "record": // differ from run to run
				return slog.Attr{}
			}
			return a
		},
	}))
	sends := 0
	client := (&oncehttp.Transport{
		Base: api(func(*http.Request) (*http.Response, error) {
			if sends++; sends == 1 {
				return answer(503, "{}")
			}
			return answer(200, "{}")
		}),
		Policy: oncehttp.Policy{BaseDelay: time.Millisecond},
		Trace:  oncehttp.LogTrace(logger),
	}).Client()
	resp, err := client.Get("https://api.pay.example/charges?token=secret")
	if err != nil {
		panic(err)
	}
	resp.Body.Close()
	// Output:
	// level=DEBUG msg="oncehttp: attempt" upstream=api.pay.example method=GET attempt=1 status=503
	// level=DEBUG msg="oncehttp: wait" upstream=api.pay.example before=2 asked=false
	// level=DEBUG msg="oncehttp: attempt" upstream=api.pay.example method=GET attempt=2 status=200
	// level=DEBUG msg="oncehttp: call" upstream=api.pay.example outcome=done attempts=2 status=200 replayed=false
}

// An upstream that answers 200 and says in the body that it was too busy.
func ExamplePolicy_classify() {
	sends := 0
	client := (&oncehttp.Transport{
		Base: api(func(*http.Request) (*http.Response, error) {
			if sends++; sends == 1 {
				return answer(200, `{"error":"busy"}`)
			}
			return answer(200, `{"charge":"ch_1"}`)
		}),
		Upstreams: map[string]oncehttp.Policy{
			"api.pay.example": {
				Classify: func(a oncehttp.Attempt) oncehttp.Verdict {
					if a.Response != nil && a.Response.StatusCode == http.StatusOK {
						if body, _ := a.Peek(64); bytes.Contains(body, []byte(`"busy"`)) {
							return oncehttp.Verdict{Kind: oncehttp.VerdictNotProcessed, Wait: time.Millisecond}
						}
					}
					return oncehttp.Verdict{} // the built-in rules
				},
			},
		},
	}).Client()
	resp, err := client.Post("https://api.pay.example/charges", "application/json", strings.NewReader(`{"amount":4990}`))
	if err != nil {
		panic(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Printf("%s after %d sends: %v\n", body, sends, oncehttp.OutcomeOf(resp, nil))
	// Output:
	// {"charge":"ch_1"} after 2 sends: done
}
