package sqlitestore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

// TestMain lets the test binary also be the process that a test kills.
func TestMain(m *testing.M) {
	if spec := os.Getenv(childSpec); spec != "" {
		var c orders
		err := json.Unmarshal([]byte(spec), &c)
		if err == nil {
			err = children[c.Role](context.Background(), c)
		}
		if err != nil {
			tell(message{Failed: err.Error()})
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

const childSpec = "SQLITESTORE_CHILD"

// children are what a child process can be told to do. It hears on stdin and
// tells on stdout.
var children = map[string]func(context.Context, orders) error{
	"calls": manyCalls,
	"call":  oneCallEach,
}

// orders are what a child is started with.
type orders struct {
	Role  string
	Path  string // of the store
	URL   string // of the ledger
	Owner string

	First, Span int           // of "calls": the intents it chooses from
	Settle      bool          // of "claims": settle them, too
	Attempts    int           // Policy.MaxAttempts; zero: the default
	Wait        bool          // Policy.WaitInFlight
	MaxElapsed  time.Duration // Policy.MaxElapsed; zero: the default

	// Planted bugs.
	Deferred bool   // Create is acknowledged 20 ms before it is made
	Unfenced bool   // Update overwrites whatever there is
	Weak     string // of "claims": the synchronous mode for all commits
}

// message is a line of a child's stdout.
type message struct {
	Ready   time.Duration `json:",omitempty"` // the store is open, after so long
	Failed  string        `json:",omitempty"` // the child cannot go on
	Written *written      `json:",omitempty"` // the store acknowledged a write
	Called  *called       `json:",omitempty"` // a call has returned
}

type written struct {
	ID, Intent, Key, State string
	Version                int64
	At                     int64 // ns, by the clock that the test compares it with
}

type called struct {
	Intent      string
	Outcome     string
	Reason, Err string
	Attempts    int
	Replayed    bool
	RetryAt     time.Time
	Start, End  int64 // wall clock, ns
}

var toldMu sync.Mutex

// tell writes a line in one piece: what is told was told before whatever the
// child does next, also if it is killed then.
func tell(m message) {
	line, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	toldMu.Lock()
	defer toldMu.Unlock()
	os.Stdout.Write(append(line, '\n'))
}

// child is a process that a test has started.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder

	mayFail bool // that it could not go on is not the test's failure
}

func start(t testing.TB, o orders) *child {
	t.Helper()
	spec, err := json.Marshal(o)
	require.NoError(t, err)
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childSpec+"="+string(spec), "GORACE=halt_on_error=1") // a race ends the child, which the test notices
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	c := &child{t: t, cmd: cmd, in: json.NewEncoder(in), out: json.NewDecoder(out)}
	t.Cleanup(c.kill)
	return c
}

// hear returns what the child tells next, and false when it has ended.
func (c *child) hear() (message, bool) {
	var m message
	err := c.out.Decode(&m)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, os.ErrClosed):
		return m, false
	case err != nil:
		c.t.Errorf("a child told something else: %v", err)
		return m, false
	case m.Failed != "" && !c.mayFail:
		c.t.Errorf("a child failed: %s", m.Failed)
	}
	return m, true
}

// ready waits for the store to be open.
func (c *child) ready() {
	c.t.Helper()
	m, ok := c.hear()
	require.True(c.t, ok && m.Ready > 0, "the child did not open the store: %+v", m)
}

// called waits for the end of a call.
func (c *child) called() called {
	c.t.Helper()
	for {
		m, ok := c.hear()
		require.True(c.t, ok && m.Failed == "", "the child ended in a call")
		if m.Called != nil {
			return *m.Called
		}
	}
}

// kill is SIGKILL; it returns when the process is gone. To hear the child's
// last words, hear them before.
func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// caller makes calls through a Transport on the store, as a service does.
type caller struct {
	t   *oncehttp.Transport
	url string
}

func newCaller(s oncehttp.KeyStore, o orders) *caller {
	p := oncehttp.Policy{
		Keys: oncehttp.KeysHonored, MaxAttempts: o.Attempts, MaxElapsed: o.MaxElapsed, BaseDelay: time.Millisecond,
		Budget: oncehttp.Budget{Ratio: oncehttp.Off}, WaitInFlight: o.Wait,
	}
	return &caller{url: o.URL, t: &oncehttp.Transport{
		Base: &http.Transport{MaxIdleConnsPerHost: 16}, Store: s, Owner: o.Owner, Policy: p,
	}}
}

func (c *caller) call(ctx context.Context, intent string) called {
	var rep oncehttp.Report
	ctx = oncehttp.WithReport(oncehttp.WithIntent(ctx, intent), &rep)
	got := called{Intent: intent, Start: time.Now().UnixNano()}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/charges", strings.NewReader(fmt.Sprintf(`{"intent":%q,"amount":100}`, intent)))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.t.Client().Do(req)
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	got.End = time.Now().UnixNano()
	got.Outcome, got.Attempts, got.Replayed, got.RetryAt = rep.Outcome.String(), rep.Attempts, rep.Replayed, rep.RetryAt
	if rep.Reason != nil {
		got.Reason = rep.Reason.Error()
	}
	if err != nil {
		got.Err = err.Error()
	}
	return got
}

// telling is a store that tells each write that was acknowledged, before the
// Transport hears of it and so before anything is sent.
type telling struct {
	oncehttp.KeyStore
	tell func(message)
}

func (s telling) Create(ctx context.Context, rec oncehttp.Record) (oncehttp.Record, bool, error) {
	stored, created, err := s.KeyStore.Create(ctx, rec)
	if err == nil && created {
		s.wrote(stored)
	}
	return stored, created, err
}

func (s telling) Update(ctx context.Context, rec oncehttp.Record) (oncehttp.Record, error) {
	stored, err := s.KeyStore.Update(ctx, rec)
	if err == nil {
		s.wrote(stored)
	}
	return stored, err
}

func (s telling) wrote(r oncehttp.Record) {
	s.tell(message{Written: &written{ID: r.ID, Intent: r.Intent, Key: r.Key, State: r.State.String(), Version: r.Version, At: time.Now().UnixNano()}})
}

// deferred is the planted bug: it acknowledges claims before they are made.
type deferred struct{ oncehttp.KeyStore }

func (s deferred) Create(ctx context.Context, rec oncehttp.Record) (oncehttp.Record, bool, error) {
	if old, err := s.KeyStore.Get(ctx, rec.ID); err == nil {
		return old, false, nil
	}
	time.AfterFunc(20*time.Millisecond, func() { s.KeyStore.Create(context.Background(), rec) })
	stored := rec
	stored.Version = 1
	return stored, true, nil
}

// unfenced is the planted bug: it writes although the record has changed.
type unfenced struct{ oncehttp.KeyStore }

func (s unfenced) Update(ctx context.Context, rec oncehttp.Record) (oncehttp.Record, error) {
	for {
		stored, err := s.KeyStore.Update(ctx, rec)
		if !errors.Is(err, oncehttp.ErrConflict) {
			return stored, err
		}
		if stored, err = s.KeyStore.Get(ctx, rec.ID); err != nil {
			return stored, err
		}
		rec.Version = stored.Version
	}
}

// opened opens the store of a child and says so.
func opened(ctx context.Context, o orders) (*Store, *caller, error) {
	begin := time.Now()
	s, err := Open(ctx, o.Path)
	if err != nil {
		return nil, nil, err
	}
	var seen oncehttp.KeyStore = s
	if o.Deferred {
		seen = deferred{s}
	}
	if o.Unfenced {
		seen = unfenced{s}
	}
	tell(message{Ready: time.Since(begin)})
	return s, newCaller(telling{seen, tell}, o), nil
}

// manyCalls calls intents of a range at random, from 8 goroutines, until it is
// killed.
func manyCalls(ctx context.Context, o orders) error {
	_, c, err := opened(ctx, o)
	if err != nil {
		return err
	}
	for range 8 {
		go func() {
			for {
				got := c.call(ctx, intentName(o.First+rand.N(o.Span)))
				tell(message{Called: &got})
			}
		}()
	}
	select {}
}

// oneCallEach calls each intent that it hears of, at the instant it is told.
func oneCallEach(ctx context.Context, o orders) error {
	_, c, err := opened(ctx, o)
	if err != nil {
		return err
	}
	for in := json.NewDecoder(os.Stdin); ; {
		var next appointment
		if err := in.Decode(&next); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		for time.Now().UnixNano() < next.At { // a timer would be late
		}
		got := c.call(ctx, next.Intent)
		tell(message{Called: &got})
	}
}

type appointment struct {
	Intent string
	At     int64 // wall clock, ns
}

func intentName(n int) string { return fmt.Sprintf("charge:order-%d", n) }

// ledger is the upstream, in the test's process: it honours keys, charges, and
// keeps books of its own.
type ledger struct {
	*httptest.Server
	lose    float64                       // the share of answers that are lost after the charge
	before  func(*http.Request, delivery) // called before the charge, if not nil; may hang, answer by panic
	look    func(delivery) error          // asked at each delivery, if not nil
	mu      sync.Mutex                    // guards all below, and the fields above
	done    map[string]string             // intent by key
	effects map[string]int                // by intent
	came    []delivery
	lost    int
	now     map[string]int // deliveries being served, by intent
	most    int            // the largest of them
	wrong   []string       // what look said
}

type delivery struct {
	Intent, Key string
	At          int64 // wall clock, ns
}

func newLedger(t testing.TB, lose float64) *ledger {
	l := &ledger{lose: lose, done: map[string]string{}, effects: map[string]int{}, now: map[string]int{}}
	l.Server = httptest.NewServer(http.HandlerFunc(l.serve))
	l.Config.ErrorLog = nil
	t.Cleanup(func() {
		l.CloseClientConnections()
		l.Close()
	})
	return l
}

func (l *ledger) set(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

func (l *ledger) serve(w http.ResponseWriter, r *http.Request) {
	d := delivery{Key: r.Header.Get("Idempotency-Key"), At: time.Now().UnixNano()}
	var body struct{ Intent string }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		return // the sender was killed while it wrote: not a request
	}
	d.Intent = body.Intent
	l.mu.Lock()
	l.came = append(l.came, d)
	l.now[d.Intent]++
	l.most = max(l.most, l.now[d.Intent])
	look, before := l.look, l.before
	l.mu.Unlock()
	defer l.set(func() { l.now[d.Intent]-- })
	if look != nil {
		if err := look(d); err != nil {
			l.set(func() { l.wrong = append(l.wrong, err.Error()) })
		}
	}
	if before != nil {
		before(r, d)
	}
	l.mu.Lock()
	_, known := l.done[d.Key]
	if !known {
		l.done[d.Key] = d.Intent
		l.effects[d.Intent]++
	}
	lost := rand.Float64() < l.lose
	if lost {
		l.lost++
	}
	l.mu.Unlock()
	if lost {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	if known {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, `{"id":"ch_%s","amount":100}`, d.Key)
}
