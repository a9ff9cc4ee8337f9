package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/faulty"
	"github.com/oncehttp/oncehttp/store/sqlitestore"
)

// playLives plays a scene in which the shop is a process that is killed, and
// started again to charge the same order. The provider lives on.
func (s scene) playLives(ctx context.Context, plain, plant bool) run {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // for a shop that hangs
	defer cancel()
	dir, err := os.MkdirTemp("", "checkout-")
	if err != nil {
		return run{broken: err}
	}
	defer os.RemoveAll(dir)

	box := s.newSandbox()
	charged, gone := make(chan struct{}), make(chan struct{})
	if s.dies == beforeAnswer {
		box.hold = sync.OnceFunc(func() {
			close(charged)
			<-gone
		})
	}
	server := faulty.NewServer(box, s.faults)
	first := shop{Scene: s.name, Provider: strings.TrimPrefix(server.URL, "http://"), Plant: plant, StopAt: s.dies}
	if !plain {
		first.Store = filepath.Join(dir, "intents.db")
	}

	r := run{start: time.Now()}
	err = first.killed(ctx, charged)
	close(gone) // the provider answers, and nobody is there
	r.killed = len(server.Requests())
	var last message
	if err == nil && s.later > 0 {
		box.forgetKeys()
		err = first.age(ctx, s.later)
	}
	if err == nil {
		second := first
		second.StopAt = ""
		last, err = second.lives(ctx)
	}
	server.Close()

	r.deliveries, r.ledger, r.broken = server.Requests(), box.charges(), err
	for range r.killed {
		r.saw = append(r.saw, fmt.Sprintf("(killed %s)", s.dies))
	}
	r.saw = append(r.saw, last.Saw...)
	t := told{order: newOrder(1), payment: Payment{Charge: last.Charge, Outcome: last.Outcome, Report: last.Report}}
	if last.Err != "" {
		t.err = errors.New(last.Err)
	}
	r.told = []told{t}
	return r
}

// killed starts the shop and kills it, with SIGKILL, once it waits for that or
// charged is closed. It returns when the process is gone.
func (s shop) killed(ctx context.Context, charged <-chan struct{}) error {
	p, err := s.start(ctx)
	if err != nil {
		return err
	}
	var m message
	heard := make(chan error, 1)
	go func() { heard <- p.out.Decode(&m) }()
	select {
	case err = <-heard:
		if err == nil && m.Stopped != s.StopAt {
			err = fmt.Errorf("the shop went past the moment %q", s.StopAt)
		}
		p.kill()
	case <-charged:
		p.kill()
		<-heard
	}
	return p.explain(err)
}

// lives starts the shop and returns what it says before it ends.
func (s shop) lives(ctx context.Context) (m message, err error) {
	p, err := s.start(ctx)
	if err != nil {
		return m, err
	}
	err = p.out.Decode(&m)
	return m, p.explain(errors.Join(err, p.cmd.Wait()))
}

// process is a shop's.
type process struct {
	cmd    *exec.Cmd
	out    *json.Decoder
	errors bytes.Buffer
}

func (s shop) start(ctx context.Context) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	spec, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.CommandContext(ctx, exe)}
	p.cmd.Env = append(os.Environ(), shopEnv+"="+string(spec))
	p.cmd.Stderr = &p.errors
	if _, err = p.cmd.StdinPipe(); err != nil { // open for as long as we live
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = json.NewDecoder(out)
	return p, p.cmd.Start()
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it says that the process was killed
}

func (p *process) explain(err error) error {
	if err != nil {
		err = fmt.Errorf("the shop's process: %w: %s", err, p.errors.String())
	}
	return err
}

// age sets the intents in the store back, as if so much time had passed.
func (s shop) age(ctx context.Context, by time.Duration) error {
	if s.Store == "" {
		return nil
	}
	store, err := sqlitestore.Open(ctx, s.Store)
	if err != nil {
		return err
	}
	defer store.Close()
	intents, err := store.List(ctx, oncehttp.Query{})
	if err != nil {
		return err
	}
	for _, i := range intents {
		i.FirstSent, i.Updated, i.Lease = i.FirstSent.Add(-by), i.Updated.Add(-by), i.Lease.Add(-by)
		if _, err := store.Update(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// sameKey tells whether the two lives sent one key.
func (r run) sameKey() string {
	for _, d := range r.deliveries {
		if d.Header.Get("Idempotency-Key") != r.deliveries[0].Header.Get("Idempotency-Key") {
			return "wrong"
		}
	}
	return "same"
}
