package oncehttp

import (
	"context"
	"errors"
	"net/http"
	"time"
)

// A KeyStore keeps the records of intents. Transport runs the state machine;
// a store only inserts, compares and swaps. Its methods may be called
// concurrently, by several processes if they share it, and return when ctx
// ends. An error means "not known to have happened": the write may have been
// made all the same, and Transport finds that out by the record's Owner.
//
// A store may keep the memory of what it is given, which is not written to
// afterwards, and may return that. What it returns of what it kept is the
// caller's: another copy each time. Times are in UTC, to the microsecond.
type KeyStore interface {
	// Create inserts rec if no record has its id, and returns what is now
	// stored; created tells whether that is rec. That a record exists is not
	// an error. It must be atomic, and durable when it returns.
	Create(ctx context.Context, rec Record) (stored Record, created bool, err error)

	// Get returns the record, or ErrNotFound.
	Get(ctx context.Context, id string) (Record, error)

	// Update replaces the record of rec.ID if its version is rec.Version, and
	// returns it with the version incremented; otherwise ErrConflict, or
	// ErrNotFound. It must be atomic. A write whose State is Sending must be
	// durable when it returns; others may become so a little later.
	Update(ctx context.Context, rec Record) (stored Record, err error)

	// List returns a page of the records that q asks for, as they are at one
	// moment, the least recently updated first. Records that cannot be read
	// are told by an error beside those that can.
	List(ctx context.Context, q Query) ([]Record, error)

	// Prune deletes at most limit records that are Done, Rejected, NotSent or
	// Reserved and whose Expires is earlier than before, and returns how many
	// it deleted; none if limit is zero or less. It never deletes Sending,
	// Open or Unknown.
	Prune(ctx context.Context, before time.Time, limit int) (int, error)
}

// Errors that a KeyStore returns as such or wrapped.
var (
	ErrNotFound = errors.New("no such record")
	ErrConflict = errors.New("the record has changed")
)

// A Query selects records. Its zero value selects all.
type Query struct {
	States   []State   // any of them; none means every state
	Upstream string    // "" means every upstream
	Before   time.Time // updated before; zero means any time
	After    Cursor    // the page before ended here
	Limit    int       // at most so many; zero means 100
}

// A Cursor is a place in the order of List: of the last record of a page.
type Cursor struct {
	Updated time.Time
	ID      string
}

// State is where an intent stands.
type State uint8

// Reserved → Sending → Done, Rejected, NotSent, Open or Unknown. From NotSent
// and Open the next call goes on to Sending. The numbers are stored.
const (
	// StateReserved: the key is made and nothing was sent.
	StateReserved State = iota + 1
	// StateSending: a run holds it until Lease; it may be on the wire.
	StateSending
	// StateDone and StateRejected are final.
	StateDone
	StateRejected
	// StateNotSent: nothing happened; it may be called again, same key.
	StateNotSent
	// StateOpen: ended in doubt. The next call sends it again under the same
	// key if keys are honoured and the window allows.
	StateOpen
	// StateUnknown: in doubt, and not to be sent again. Only Settle ends it.
	StateUnknown
)

var stateNames = [...]string{"invalid", "reserved", "sending", "done", "rejected", "notsent", "open", "unknown"}

// String returns "reserved", "sending" and so on.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return stateNames[0]
}

// A Record is the durable entry of one intent.
type Record struct {
	ID          string // SHA-256 in hex of upstream, scope and name; random if anonymous
	Upstream    string
	Scope       string
	Intent      string // its name; "" if anonymous or named by the caller's key
	Key         string // the idempotency key; "" where the upstream gets none
	State       State
	Owner       string    // who holds it or held it last; another for each run
	Version     int64     // 1 when created
	Lease       time.Time // while Sending: until when Owner may be at work
	FirstSent   time.Time // from here the key's window counts; zero while Reserved
	Updated     time.Time // of the last write
	Expires     time.Time // from then on Prune may delete it
	Attempts    int       // sends, all runs together
	Status      int       // of the last answer; 0 if none
	Fingerprint [32]byte  // of the request; zero while Reserved
	Note        string    // what Settle was told
	Request     *SavedRequest
	Response    *SavedResponse
}

// A SavedRequest is what Recover can send again. No credentials are in it:
// no userinfo, and no header outside an allow-list.
type SavedRequest struct {
	Method string
	URL    string
	Header http.Header
	Body   []byte
}

// A SavedResponse is the answer that later calls get.
type SavedResponse struct {
	Status int
	Header http.Header // an allow-list: never Set-Cookie
	Body   []byte
}

// clone returns a deep copy: what a store keeps shares nothing with callers.
func (r Record) clone() Record {
	if q := r.Request; q != nil {
		r.Request = &SavedRequest{Method: q.Method, URL: q.URL, Header: q.Header.Clone(), Body: append([]byte(nil), q.Body...)}
	}
	if a := r.Response; a != nil {
		r.Response = &SavedResponse{Status: a.Status, Header: a.Header.Clone(), Body: append([]byte(nil), a.Body...)}
	}
	return r
}

// retention is how long an ended intent keeps its record, so that calling it
// again finds what happened and not a new key.
const retention = 30 * 24 * time.Hour

// next says what a call may do with the record it found.
type next uint8

const (
	nextSend     next = iota // claim it: nothing was ever sent, or provably not
	nextResend               // claim it: what was sent before is in doubt
	nextAnswer               // it has ended: give the stored answer
	nextInFlight             // another run holds it
	nextExpired              // in doubt, and the key may be forgotten
	nextUnsafe               // in doubt, and keys are not honoured
	nextMismatch             // it belongs to another request
	nextCorrupt              // not a state we know
)

// decide is the state machine's whole judgement of a record. It is pure.
// claim is the record the caller would create.
func (r *Record) decide(claim *Record, p *Policy, now time.Time) next {
	if r.Fingerprint != ([32]byte{}) && r.Fingerprint != claim.Fingerprint {
		return nextMismatch
	}
	switch r.State {
	case StateReserved, StateNotSent:
		return nextSend
	case StateDone, StateRejected:
		return nextAnswer
	case StateSending:
		if now.Before(r.Lease) && !earlierLife(r.Owner, claim.Owner) {
			return nextInFlight
		}
	case StateOpen, StateUnknown:
	default:
		return nextCorrupt
	}
	switch {
	case p.Keys != KeysHonored, r.Key == "":
		return nextUnsafe
	case r.State == StateUnknown, !r.insideWindow(p, now):
		return nextExpired
	}
	return nextResend
}

// insideWindow reports whether the upstream surely still knows the key. A
// clock that reads earlier than a time in the record proves nothing.
func (r *Record) insideWindow(p *Policy, now time.Time) bool {
	if p.KeyWindow == Off {
		return true
	}
	return !now.Before(r.FirstSent) && !now.Before(r.Updated) && now.Before(r.FirstSent.Add(p.KeyWindow))
}

// settled returns the state that an ended run leaves.
func settledState(o Outcome, turnedAway bool) State {
	switch {
	case o == Done:
		return StateDone
	case o == NotSent, o == Rejected && turnedAway:
		return StateNotSent
	case o == Rejected:
		return StateRejected
	}
	return StateOpen
}

// outcome is what a record says about the effect.
func (r *Record) outcome() Outcome {
	switch r.State {
	case StateDone:
		return Done
	case StateRejected:
		return Rejected
	case StateNotSent, StateReserved:
		return NotSent
	}
	return Unknown
}
