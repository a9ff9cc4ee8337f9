package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/store/sqlitestore"
)

// A shop is a process of its own, which charges one order: this program again,
// started with what a shop has to know in its environment.
type shop struct {
	Scene    string // whose policy it has
	Provider string // the address of the sandbox
	Store    string // the path of its key store; "" for the plain loop, which has none
	Plant    bool
	StopAt   moment // it waits there to be killed; "": nowhere
}

const shopEnv = "CHECKOUT_SHOP"

// A moment is when a shop is killed.
type moment string

const (
	beforeSending moment = "before sending"    // the intent is claimed
	beforeAnswer  moment = "before the answer" // the provider has charged
	afterPaying   moment = "after paying"      // the answer is saved, and nobody has it yet
)

// message is what a shop says, once in its life: that it waits to be killed, or
// what became of the order.
type message struct {
	Stopped moment          `json:",omitempty"`
	Charge  string          // as in Payment
	Report  oncehttp.Report // without its Reason, of which Err has the text
	Outcome oncehttp.Outcome
	Err     string
	Saw     []string // what each send brought back
}

// asShop is the program as a shop's process; ok tells whether it is one.
func asShop(ctx context.Context) (status int, ok bool) {
	spec := os.Getenv(shopEnv)
	if spec == "" {
		return 0, false
	}
	var s shop
	err := json.Unmarshal([]byte(spec), &s)
	if err == nil {
		err = s.open(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1, true
	}
	return 0, true
}

// open charges the order. It knows nothing of the shop's earlier life but what
// the key store has kept.
func (s shop) open(ctx context.Context) error {
	sc, err := sceneNamed(s.Scene)
	if err != nil {
		return err
	}
	w := &wire{base: &http.Transport{DialContext: dialer(s.Provider)}, plant: s.Plant}
	if s.StopAt == beforeSending {
		w.before = func() { stop(beforeSending) }
	}
	charge := func(ctx context.Context, o Order) (Payment, error) {
		return payPlain(ctx, &http.Client{Transport: w}, o)
	}
	if s.Store != "" {
		store, err := sqlitestore.Open(ctx, s.Store)
		if err != nil {
			return err
		}
		defer store.Close()
		t := &oncehttp.Transport{
			Base:      w,
			Store:     store,
			Owner:     "shop", // one runs at a time: what its earlier life left is taken over at once
			Upstreams: map[string]oncehttp.Policy{provider: sc.policy},
		}
		charge = func(ctx context.Context, o Order) (Payment, error) { return pay(ctx, t.Client(), o) }
	}

	p, err := charge(ctx, newOrder(1))
	if s.StopAt == afterPaying {
		stop(afterPaying)
	}
	m := message{Charge: p.Charge, Report: p.Report, Outcome: p.Outcome, Saw: w.results}
	m.Report.Reason = nil
	if err != nil {
		m.Err = err.Error()
	}
	return json.NewEncoder(os.Stdout).Encode(m)
}

// stop says where the shop is and waits to be killed.
func stop(at moment) {
	_ = json.NewEncoder(os.Stdout).Encode(message{Stopped: at})
	_, _ = io.Copy(io.Discard, os.Stdin) // it ends if the parent does, and then so does the shop
	os.Exit(2)
}

// dialer leads every name to one address.
func dialer(address string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", address)
	}
}
