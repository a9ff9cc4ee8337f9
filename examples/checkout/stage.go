package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/faulty"
)

// provider is the upstream's name. Only the stage knows that it is a port of
// 127.0.0.1.
const provider = "api.pay.example"

// A run is one scene played to one client.
type run struct {
	deliveries []faulty.Request // as they arrived at the server
	saw        []string         // what the client saw of each
	start      time.Time
	ledger     []Order // what was charged
	told       []told
	killed     int   // deliveries of a process that was killed
	broken     error // the scene could not be played to its end
}

// playPlain plays the scene to the plain loop.
func (s scene) playPlain(ctx context.Context) run {
	if s.dies != "" {
		return s.playLives(ctx, true, false)
	}
	return s.play(ctx, func(w *wire) payer {
		client := &http.Client{Transport: w, Timeout: s.policy.AttemptTimeout}
		return func(ctx context.Context, o Order) (Payment, error) { return payPlain(ctx, client, o) }
	})
}

// playOnce plays it to oncehttp.
func (s scene) playOnce(ctx context.Context, policy oncehttp.Policy, plant bool) run {
	if s.dies != "" {
		return s.playLives(ctx, false, plant)
	}
	return s.play(ctx, func(w *wire) payer {
		w.plant = plant
		t := &oncehttp.Transport{
			Base:      w,
			Upstreams: map[string]oncehttp.Policy{provider: policy},
		}
		client := t.Client()
		return func(ctx context.Context, o Order) (Payment, error) { return pay(ctx, client, o) }
	})
}

func (s scene) newSandbox() *sandbox {
	return &sandbox{ignoresKeys: s.sandbox.ignoresKeys, bank: s.sandbox.bank}
}

// play sets up a sandbox, a server that fails as the scene says, and a way to
// it, all of the run's own: no budget, breaker or connection is shared.
func (s scene) play(ctx context.Context, client func(*wire) payer) run {
	box := s.newSandbox()
	server := faulty.NewServer(box, s.faults)
	network := server.Transport()
	network.DialContext = dialer(strings.TrimPrefix(server.URL, "http://"))
	w := &wire{base: network}
	pay := client(w)

	start := time.Now()
	all := s.act(ctx, pay)
	server.Close() // returns when charges that nobody waits for any more have ended

	r := run{deliveries: server.Requests(), start: start, ledger: box.charges(), told: all}
	for i := range r.deliveries {
		r.saw = append(r.saw, w.result(i))
	}
	return r
}

// sends is how many requests arrived.
func (r run) sends() int { return len(r.deliveries) }

// secondSend is when the second request arrived, after the start.
func (r run) secondSend() time.Duration {
	if r.sends() < 2 {
		return 0
	}
	return r.deliveries[1].Time.Sub(r.start)
}

// printLog writes every delivery, or the first of many, and the errors told.
func (r run) printLog(out io.Writer, title string) {
	const most = 8
	fmt.Fprintln(out, "  "+title)
	attempts := make(map[string]int)
	for i, d := range r.deliveries[:min(most, r.sends())] {
		var order Order
		_ = json.Unmarshal(d.Body, &order)
		attempts[order.ID]++
		key := cmp.Or(d.Header.Get("Idempotency-Key"), "-")
		line := fmt.Sprintf("    %6.3f s  order %s attempt %d  key %-8.8s  %-25s %s",
			d.Time.Sub(r.start).Seconds(), order.ID, attempts[order.ID], key, r.saw[i], fault(d.Fault))
		fmt.Fprintln(out, strings.TrimRight(line, " "))
	}
	if r.sends() > most {
		fmt.Fprintf(out, "    … and %d more\n", r.sends()-most)
	}
	for _, t := range r.told[:min(2, len(r.told))] {
		if t.err != nil {
			fmt.Fprintf(out, "    error: %v\n", t.err)
		}
	}
}

func fault(f faulty.Fault) string {
	if f == faulty.Pass() {
		return ""
	}
	return "(" + f.String() + ")"
}
