package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/faulty"
	"github.com/oncehttp/oncehttp/store/sqlitestore"
)

// A crash is where a shop's process is killed with SIGKILL. It is started again
// then, and pays for the same order.
type crash string

const (
	never          crash = ""
	beforeSending  crash = "the key is stored, nothing is sent"
	beforeAnswer   crash = "the provider has charged and not answered"
	afterItSettled crash = "the answer is stored, nobody has seen it"
)

// life is what a shop's process is told to do: pay for one order.
type life struct {
	URL    string // of the sandbox
	File   string // of the key store; "": the plain loop
	Order  Order
	Window time.Duration // Policy.KeyWindow
	Crash  crash         // block here, to be killed
}

// lived is what the process tells at its end.
type lived struct {
	Charge  string
	Outcome oncehttp.Outcome
	Report  oncehttp.Report
	Reason  string
	Err     string
}

const lifeVariable = "CHECKOUT_LIFE"

// liveIfToldTo makes this process a shop's, if playCrash started it as one.
func liveIfToldTo() {
	text, ok := os.LookupEnv(lifeVariable)
	if !ok {
		return
	}
	var l life
	err := json.Unmarshal([]byte(text), &l)
	if err == nil {
		err = l.live(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// live is the shop. With a store in a file, and a name of its own in Owner, the
// next life knows what this one began.
func (l life) live(ctx context.Context) error {
	network := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", strings.TrimPrefix(l.URL, "http://"))
	}}
	base := roundTripper(func(req *http.Request) (*http.Response, error) {
		l.blockAt(beforeSending)
		return network.RoundTrip(req)
	})
	if l.File == "" {
		p, err := payPlain(ctx, &http.Client{Transport: base}, l.Order)
		l.blockAt(afterItSettled)
		return l.tell(p, err)
	}

	store, err := sqlitestore.Open(ctx, l.File)
	if err != nil {
		return err
	}
	defer store.Close()
	t := &oncehttp.Transport{
		Base:  base,
		Store: store,
		Owner: "shop-1",
		Upstreams: map[string]oncehttp.Policy{
			provider: {Keys: oncehttp.KeysHonored, KeyWindow: l.Window},
		},
	}
	p, err := pay(ctx, t.Client(), l.Order)
	l.blockAt(afterItSettled)
	return l.tell(p, err)
}

// blockAt says that the process is there, and waits to be killed.
func (l life) blockAt(c crash) {
	if l.Crash == c {
		fmt.Println("here")
		select {}
	}
}

func (l life) tell(p Payment, err error) error {
	out := lived{Charge: p.Charge, Outcome: p.Outcome, Report: p.Report}
	if err != nil {
		out.Err = err.Error()
	}
	if out.Report.Reason != nil {
		out.Reason, out.Report.Reason = out.Report.Reason.Error(), nil
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// playCrash plays a scene with a crash: one life is killed where it says, the
// next one runs to its end. plain has no store.
func (s scene) playCrash(ctx context.Context, plain bool) (r run, err error) {
	box := &sandbox{charged: make(chan struct{}, 8)}
	faults := faulty.InOrder()
	if s.crash == beforeAnswer {
		faults = faulty.InOrder(faulty.Stall(0).AfterHandler()) // until the client is gone
	}
	server := faulty.NewServer(box, faults)
	defer server.Close()
	dir, err := os.MkdirTemp("", "checkout")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)

	first := life{URL: server.URL, File: filepath.Join(dir, "intents.db"), Order: newOrder(1), Window: s.policy.KeyWindow, Crash: s.crash}
	if plain {
		first.File = ""
	}
	r.start = time.Now()
	if err := first.kill(ctx, box); err != nil {
		return r, err
	}
	second := first
	second.Crash = never
	last, err := second.finish(ctx)
	if err != nil {
		return r, err
	}
	server.Close()
	r.deliveries, r.ledger, r.told = server.Requests(), box.charges(), []told{last}
	r.saw = make([]string, len(r.deliveries))
	return r, nil
}

// start makes a process of it.
func (l life) start(ctx context.Context) (*exec.Cmd, *bufio.Reader, error) {
	text, err := json.Marshal(l)
	if err != nil {
		return nil, nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), lifeVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	return cmd, bufio.NewReader(out), cmd.Start()
}

// kill runs the process up to its crash.
func (l life) kill(ctx context.Context, box *sandbox) error {
	cmd, out, err := l.start(ctx)
	if err != nil {
		return err
	}
	if l.Crash == beforeAnswer {
		<-box.charged
	} else if _, err := out.ReadString('\n'); err != nil {
		return fmt.Errorf("the shop's process ended before its crash: %w", errors.Join(err, cmd.Wait()))
	}
	err = cmd.Process.Kill()
	cmd.Wait() // "signal: killed"
	return err
}

// finish runs the process to its end and returns what it told.
func (l life) finish(ctx context.Context) (told, error) {
	cmd, out, err := l.start(ctx)
	if err != nil {
		return told{}, err
	}
	text, err := io.ReadAll(out)
	var end lived
	if err := errors.Join(err, cmd.Wait(), json.Unmarshal(text, &end)); err != nil {
		return told{}, fmt.Errorf("the shop's process: %w", err)
	}
	t := told{order: l.Order, payment: Payment{Charge: end.Charge, Outcome: end.Outcome, Report: end.Report}}
	if end.Err != "" {
		t.err = errors.New(end.Err)
	}
	return t, nil
}
