package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// sandbox is the provider: it takes POST /charges and writes each charge into
// its ledger. Idempotency-Key works as the IETF draft says
// (draft-ietf-httpapi-idempotency-key-header-07), unless ignoresKeys is set.
type sandbox struct {
	ignoresKeys  bool          // every POST is a charge
	requiresKeys bool          // a POST without a key is refused
	bank         time.Duration // how long a charge takes
	hold         func()        // called between a charge and its answer, if not nil

	mu     sync.Mutex
	ledger []Order          // guarded by mu: what was charged, in order
	byKey  map[string]*work // guarded by mu
}

// work is what the sandbox did under a key.
type work struct {
	payload []byte
	answer  []byte // nil while it is in progress
}

func (s *sandbox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	payload, err := io.ReadAll(r.Body)
	var order Order
	if err != nil || json.Unmarshal(payload, &order) != nil || order.Amount <= 0 {
		problem(w, http.StatusBadRequest, "not an order")
		return
	}
	key := r.Header.Get("Idempotency-Key")
	if s.ignoresKeys {
		key = ""
	}
	if key == "" {
		if s.requiresKeys {
			problem(w, http.StatusBadRequest, "Idempotency-Key is missing")
			return
		}
		answer := s.charge(order)
		s.holdBack()
		created(w, answer)
		return
	}

	known, mine := s.claim(key, payload)
	switch {
	case mine:
		answer := s.charge(order)
		s.finish(known, answer)
		s.holdBack()
		created(w, answer)
	case !bytes.Equal(known.payload, payload):
		problem(w, http.StatusUnprocessableEntity, "Idempotency-Key was used for another request")
	case known.answer == nil:
		problem(w, http.StatusConflict, "a request with this Idempotency-Key is in progress")
	default:
		w.Header().Set("Idempotent-Replayed", "true")
		created(w, known.answer)
	}
}

// claim returns the work under key as it stands, and whether it was started by
// this call.
func (s *sandbox) claim(key string, payload []byte) (known *work, mine bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known, ok := s.byKey[key]; ok {
		copied := *known
		return &copied, false
	}
	if s.byKey == nil {
		s.byKey = make(map[string]*work)
	}
	s.byKey[key] = &work{payload: payload}
	return s.byKey[key], true
}

func (s *sandbox) finish(done *work, answer []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	done.answer = answer
}

// charge goes on to its end whether or not the client is still there, as
// charges do.
func (s *sandbox) charge(order Order) (answer []byte) {
	time.Sleep(s.bank)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledger = append(s.ledger, order)
	return fmt.Appendf(nil, `{"charge":"ch_%03d","order":%q,"amount":%d}`, len(s.ledger), order.ID, order.Amount)
}

func (s *sandbox) holdBack() {
	if s.hold != nil {
		s.hold()
	}
}

// forgetKeys is what providers do with keys that are too old.
func (s *sandbox) forgetKeys() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byKey = nil
}

// charges returns what is in the ledger.
func (s *sandbox) charges() []Order {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Order(nil), s.ledger...)
}

func created(w http.ResponseWriter, answer []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	w.Write(answer)
}

// problem answers as RFC 9457 says.
func problem(w http.ResponseWriter, status int, title string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"title":%q,"status":%d}`, title, status)
}
