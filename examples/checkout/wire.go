package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"sync"
)

// wire is the way to the sandbox: it notes what each send brought back.
type wire struct {
	base   http.RoundTripper
	plant  bool   // the planted bug: every send gets a key of its own
	before func() // called before each send, if not nil

	mu      sync.Mutex
	results []string // guarded by mu: of the sends, in the order they began
}

func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if w.before != nil {
		w.before()
	}
	if w.plant {
		req = req.Clone(req.Context())
		req.Header.Del("Idempotency-Key")
		delete(req.Header, "idempotency-key") // upstreams that are not declared get it like this
		req.Header.Set("Idempotency-Key", rand.Text())
	}
	n := w.begin()
	resp, err := w.base.RoundTrip(req)
	switch {
	case err == nil && resp.Header.Get("Idempotent-Replayed") != "":
		w.end(n, resp.Status+", replayed")
	case err == nil:
		w.end(n, resp.Status)
	case req.Context().Err() != nil:
		w.end(n, context.Cause(req.Context()).Error())
	default:
		w.end(n, fmt.Sprint(err))
	}
	return resp, err
}

func (w *wire) begin() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.results = append(w.results, "")
	return len(w.results) - 1
}

func (w *wire) end(n int, result string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.results[n] = result
}

// result is what the client saw of send n.
func (w *wire) result(n int) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n >= len(w.results) {
		return "(sent by net/http itself)"
	}
	return w.results[n]
}
