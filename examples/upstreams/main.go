// Command upstreams calls three APIs through one Transport while one of them
// is down: each has its own retry budget, breaker and rate limit, so that the
// other two do not notice.
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/faulty"
)

const (
	cards = "api.cards.example"
	fx    = "rates.fx.example"
	mail  = "send.mail.example"
)

// newTransport is what a service sets up once and shares.
func newTransport(base http.RoundTripper) *oncehttp.Transport {
	return &oncehttp.Transport{
		Base: base,
		// What holds for all of them.
		Policy: oncehttp.Policy{
			BaseDelay:      50 * time.Millisecond,
			AttemptTimeout: 2 * time.Second,
		},
		Upstreams: map[string]oncehttp.Policy{
			// Charges: retried, as the provider documents its keys.
			cards: {Keys: oncehttp.KeysHonored, KeyWindow: 24 * time.Hour},
			// Exchange rates: a few retries, then leave it alone.
			fx: {
				Budget:  oncehttp.Budget{Burst: 5},
				Breaker: oncehttp.Breaker{MinCalls: 10, Window: 2 * time.Second, OpenFor: 500 * time.Millisecond},
			},
			// Mail: the contract allows ten a second, two at once. More wait.
			mail: {RateLimit: 10, RateBurst: 2},
		},
	}
}

func main() {
	apis := &apis{sends: make(map[string]int)}
	watch(context.Background(), os.Stdout, apis, newTransport(faulty.Handler(apis)))
}

const (
	ticks    = 16
	tick     = 250 * time.Millisecond
	fxFails  = 3 // the tick in which fx goes down
	fxMended = 9
	mails    = 30
)

// A line is what happened in one tick, by upstream.
type line struct {
	fxDown bool
	by     map[string]standing
}

type standing struct {
	ok, failed int // calls
	sends      int // requests that arrived at the API
	oncehttp.UpstreamState
}

func (s standing) String() string {
	return fmt.Sprintf("%2d %6d %5d %6.1f %s", s.ok, s.failed, s.sends, s.Tokens, s.Breaker)
}

// watch calls all three and prints how they stand, tick after tick.
func watch(ctx context.Context, out io.Writer, apis *apis, t *oncehttp.Transport) []line {
	head := fmt.Sprintf("%-35s", "ok failed sends tokens breaker")
	fmt.Fprintf(out, "%15s%-35s%-35s%s\n", "", cards, fx, mail)
	fmt.Fprintln(out, strings.TrimRight(fmt.Sprintf("%-7s %-6s %s%s%s", "time", "fx is", head, head, head), " "))

	calls := &calls{client: t.Client(), by: make(map[string]standing)}
	var newsletter sync.WaitGroup
	newsletter.Go(func() { // all at once, as far as this code is concerned
		for range mails {
			calls.do(ctx, http.MethodPost, mail)
		}
	})
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	var lines []line
	for i := range ticks {
		l := line{fxDown: i >= fxFails && i < fxMended}
		apis.set(fx, l.fxDown)
		for range 3 {
			calls.do(ctx, http.MethodPost, cards)
		}
		for range 6 {
			calls.do(ctx, http.MethodGet, fx)
		}
		<-ticker.C

		l.by = calls.take()
		for _, name := range []string{cards, fx, mail} {
			s := l.by[name]
			s.sends, s.UpstreamState = apis.take(name), t.Upstream(name)
			l.by[name] = s
		}
		lines = append(lines, l)
		word := map[bool]string{false: "up", true: "DOWN"}[l.fxDown]
		at := fmt.Sprintf("%.2f s", (time.Duration(i+1) * tick).Seconds())
		text := fmt.Sprintf("%-7s %-6s %-35v%-35v%v", at, word, l.by[cards], l.by[fx], l.by[mail])
		fmt.Fprintln(out, strings.TrimRight(text, " "))
	}
	newsletter.Wait()
	return lines
}

// calls makes calls and counts how they end.
type calls struct {
	client *http.Client

	mu sync.Mutex
	by map[string]standing // guarded by mu
}

func (c *calls) do(ctx context.Context, method, upstream string) {
	good := call(ctx, c.client, method, "https://"+upstream+"/")
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.by[upstream]
	if good {
		s.ok++
	} else {
		s.failed++
	}
	c.by[upstream] = s
}

// take returns the counts since it was last asked.
func (c *calls) take() map[string]standing {
	c.mu.Lock()
	defer c.mu.Unlock()
	by := c.by
	c.by = make(map[string]standing)
	return by
}

func call(ctx context.Context, client *http.Client, method, url string) (good bool) {
	req, err := http.NewRequestWithContext(ctx, method, url, http.NoBody)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false // for instance oncehttp.ErrOpen: nothing was sent
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err == nil && oncehttp.OutcomeOf(resp, nil) == oncehttp.Done
}

// apis are the three, in memory. They count what reaches each.
type apis struct {
	mu    sync.Mutex
	down  string         // guarded by mu: which of them answers 503
	sends map[string]int // guarded by mu
}

func (a *apis) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sends[r.Host]++
	if a.down == r.Host {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}

func (a *apis) set(name string, down bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.down = ""
	if down {
		a.down = name
	}
}

// take returns how many requests came since it was last asked.
func (a *apis) take(name string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.sends[name]
	a.sends[name] = 0
	return n
}
