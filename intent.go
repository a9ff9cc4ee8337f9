package oncehttp

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"
)

// WithIntent returns a context whose keyed calls carry out the intent called
// name: one thing the caller means to happen once, such as
// "charge:order-1042". Calls for the same name, upstream and scope share one
// idempotency key, over goroutines and, with a durable store, over processes
// and crashes. Name it after what it pays for, not after the time or the
// amount. 1 to 1,024 bytes of UTF-8 without NUL; anything else makes the call
// fail before it is sent.
//
// One name is one request. GET, HEAD, OPTIONS and TRACE ignore it.
func WithIntent(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, intentKey{}, name)
}

type intentKey struct{}

const maxIntentName = 1024

func checkIntentName(name string) error {
	switch {
	case name == "":
		return errors.New("WithIntent: the name is empty; name the intent after what it pays for")
	case len(name) > maxIntentName:
		return fmt.Errorf("WithIntent: the name has %d bytes, more than %d; hash what makes it long", len(name), maxIntentName)
	case !utf8.ValidString(name) || strings.IndexByte(name, 0) >= 0:
		return errors.New("WithIntent: the name is not UTF-8 without NUL")
	}
	return nil
}

// An Intent is what Policy.NewKey may make a key from.
type Intent struct {
	Name     string // "" if anonymous
	Upstream string // its name
	Scope    string // what Transport.Scope returned
	RecordID string // SHA-256 in hex of upstream, scope and name; random if anonymous
}

// DerivedKey is a Policy.NewKey: the UUIDv5 of the record id, so that every
// process makes the same key for one intent even without a shared store. Without
// one, a process does not know what another has sent: where that could be, a
// 409 leaves the outcome Unknown, but a 400 or 401 is still told as Rejected.
// Anonymous intents get a random one.
func DerivedKey(_ context.Context, in Intent) (string, error) {
	return uuid.NewSHA1(uuid.NameSpaceURL, []byte(in.RecordID)).String(), nil
}

// randomKey is the default Policy.NewKey. UUIDv4 fits most providers' limits,
// and one of them takes nothing else (facts: Coinbase).
func randomKey() (string, error) {
	u, err := uuid.NewRandom()
	if err != nil {
		return "", err
	}
	if u == (uuid.UUID{6: 0x40, 8: 0x80}) {
		// All the random bits are zero: the source is broken.
		return "", errors.New("the random source returns only zeros")
	}
	return u.String(), nil
}

// newKey makes and checks the key of a new intent.
func (p *Policy) newKey(ctx context.Context, in Intent) (string, error) {
	var key string
	var err error
	if p.NewKey != nil {
		key, err = p.NewKey(ctx, in)
	} else {
		key, err = randomKey()
	}
	if err != nil {
		return "", fmt.Errorf("making an idempotency key: %w", err)
	}
	if err := checkKey(key, p.KeyMaxLen); err != nil {
		return "", fmt.Errorf("NewKey: %w", err)
	}
	return key, nil
}

// checkKey allows [\x21-\x7e]{1,maxLen}. net/http would also send UTF-8 and
// tabs, and trim spaces at the ends, so that two keys could become one: a bad
// key is refused, never repaired. The error does not show the key.
func checkKey(key string, maxLen int) error {
	if key == "" {
		return errors.New("the idempotency key is empty")
	}
	if len(key) > maxLen {
		return fmt.Errorf("the idempotency key has %d bytes, the upstream takes %d", len(key), maxLen)
	}
	for i := range len(key) {
		if key[i] < 0x21 || key[i] > 0x7e {
			return fmt.Errorf("the idempotency key holds the byte %#02x at %d; only visible ASCII is allowed", key[i], i)
		}
	}
	return nil
}

// callersKey returns the key that is already in the request, whatever the
// header's letter case.
func callersKey(h http.Header, name string) (key string, ok bool, err error) {
	for k, values := range h {
		if !strings.EqualFold(k, name) || len(values) == 0 {
			continue
		}
		if ok || len(values) > 1 {
			return "", false, errors.New("the request has more than one idempotency key")
		}
		key, ok = values[0], true
	}
	return key, ok, nil
}

// deleteHeader removes a header whatever its letter case.
func deleteHeader(h http.Header, name string) {
	for k := range h {
		if strings.EqualFold(k, name) {
			delete(h, k)
		}
	}
}

// recordID identifies an intent in a store. The parts are length-prefixed, so
// that no two triples give one id; kind keeps names and callers' keys apart.
func recordID(kind byte, upstream, scope, name string) string {
	b := make([]byte, 0, 256) // enough for most: then it stays on the stack
	b = append(b, kind)
	for _, part := range [...]string{upstream, scope, name} {
		b = binary.BigEndian.AppendUint64(b, uint64(len(part)))
		b = append(b, part...)
	}
	sum := sha256.Sum256(b)
	return string(hex.AppendEncode(make([]byte, 0, 2*sha256.Size), sum[:]))
}

const (
	kindName = 'n' // the intent is identified by its name
	kindKey  = 'k' // by the key that the caller put into the request
	kindAnon = 'a' // by nothing: one call
)
