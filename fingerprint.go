package oncehttp

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"hash"
	"io"
	"slices"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// A fingerprint tells two requests apart that were made under one intent name.
// It is stored with the intent, so it must come out the same in every version:
// what is hashed here cannot change without a migration. The layout:
//
//	for method, scheme, host, target: length (8 bytes, big-endian), bytes
//	tagRaw or tagJSON (1 byte)
//	the body as it is, or its canonical form, to the end
//
// The lengths keep a byte from moving from one field to the next unseen. The
// tag keeps a raw body from passing for a canonical one.
const (
	tagRaw  = 0
	tagJSON = 1
)

// fingerprint hashes a request. scheme and host are the caller's to normalise;
// target is the escaped path, "?" and the raw query.
//
// A caller that builds the same request again, after a crash perhaps, may get
// its JSON members in another order: they are sorted, by their decoded names,
// and white space and the spelling of escapes are ignored. Numbers stay as
// written. RFC 8785 (JCS) would send them through float64, where two different
// amounts can become one; "1" and "1.0" being two requests is the cheap mistake.
// Whatever is not surely canonical is hashed raw, see appendCanonical.
func fingerprint(method, scheme, host, target, contentType string, body []byte) [sha256.Size]byte {
	buf := make([]byte, 0, headLen(method, scheme, host, target)+len(body))
	if isJSON(contentType) {
		if buf, ok := appendCanonical(appendHead(buf, method, scheme, host, target, tagJSON), body); ok {
			return sha256.Sum256(buf)
		}
	}
	return sha256.Sum256(append(appendHead(buf, method, scheme, host, target, tagRaw), body...))
}

// fingerprintStream hashes a request whose body is too large to hold, raw. The
// result is that of fingerprint for a body that is not JSON; for one that is,
// the two differ, so every call for an intent has to choose by the same rule.
func fingerprintStream(method, scheme, host, target string, body io.Reader) ([sha256.Size]byte, error) {
	h := newFingerprint(method, scheme, host, target)
	if body != nil {
		if _, err := io.Copy(h, body); err != nil {
			return [sha256.Size]byte{}, err
		}
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

// newFingerprint returns a hash to which the raw body remains to be written.
func newFingerprint(method, scheme, host, target string) hash.Hash {
	h := sha256.New()
	h.Write(appendHead(make([]byte, 0, headLen(method, scheme, host, target)), method, scheme, host, target, tagRaw))
	return h
}

func headLen(method, scheme, host, target string) int {
	return 4*8 + len(method) + len(scheme) + len(host) + len(target) + 1
}

func appendHead(dst []byte, method, scheme, host, target string, tag byte) []byte {
	for _, field := range [...]string{method, scheme, host, target} {
		dst = binary.BigEndian.AppendUint64(dst, uint64(len(field)))
		dst = append(dst, field...)
	}
	return append(dst, tag)
}

// isJSON reads a Content-Type leniently: a wrong "yes" is harmless, since a body
// that is not JSON is hashed raw all the same.
func isJSON(contentType string) bool {
	mediaType, _, _ := strings.Cut(contentType, ";")
	mediaType = strings.Trim(mediaType, " \t")
	const suffix = "+json" // RFC 6839 §3.1
	return strings.EqualFold(mediaType, "application/json") ||
		strings.EqualFold(mediaType, "text/json") ||
		len(mediaType) > len(suffix) && strings.EqualFold(mediaType[len(mediaType)-len(suffix):], suffix)
}

// maxJSONDepth is how deep a body may nest and still be canonicalised; it
// bounds the recursion.
const maxJSONDepth = 1000

// stringEnd ends a string in the canonical form. UTF-8 never contains it, so a
// string can stand there decoded and needs no escapes, and a plain comparison
// of bytes sorts names as they are, not as they are spelt.
const stringEnd = 0xFF

// appendCanonical appends the canonical form of a JSON body, which is not
// longer than the body:
//
//	object  {  then for each member, by name: string value ,  then }
//	array   [  values separated by ,  ]
//	string  "  its decoded UTF-8  0xFF
//	number, true, false, null: as written
//
// ok is false, and what was appended is to be dropped, for a body that two
// parsers could read as two different values: not exactly one valid JSON text,
// a name twice in an object, invalid UTF-8, a lone surrogate, or U+FFFD, which
// is what decoders make of both. It is false beyond maxJSONDepth too.
func appendCanonical(dst, body []byte) (_ []byte, ok bool) {
	if !utf8.Valid(body) || bytes.Contains(body, []byte("\uFFFD")) || !json.Valid(body) {
		return dst, false
	}
	w := canonicalWalk{in: body, out: dst}
	w.members = w.few[:0]
	if !w.value(0) {
		return dst, false
	}
	return w.out, true
}

// canonicalWalk goes once through a body that json.Valid has accepted, so that
// it looks only for what it has to change.
type canonicalWalk struct {
	in      []byte // what is left
	out     []byte
	members []member // of every object that is open, innermost last
	few     [16]member
	scratch []byte
}

// member is where a member stands in out: its name with the quote and
// stringEnd, then its value with the comma.
type member struct{ start, nameEnd, end int }

func (w *canonicalWalk) name(m member) []byte { return w.out[m.start:m.nameEnd] }

func (w *canonicalWalk) value(depth int) bool {
	switch w.peek() {
	case '{':
		return depth < maxJSONDepth && w.object(depth+1)
	case '[':
		return depth < maxJSONDepth && w.array(depth+1)
	case '"':
		return w.string()
	}
	n := bytes.IndexAny(w.in, ",]} \t\r\n") // a number or a word
	if n < 0 {
		n = len(w.in)
	}
	w.out = append(w.out, w.in[:n]...)
	w.in = w.in[n:]
	return true
}

func (w *canonicalWalk) array(depth int) bool {
	w.copyByte()
	for w.peek() != ']' {
		if w.in[0] == ',' {
			w.copyByte()
		}
		if !w.value(depth) {
			return false
		}
	}
	w.copyByte()
	return true
}

func (w *canonicalWalk) object(depth int) bool {
	w.copyByte()
	first := len(w.members)
	sorted := true
	for w.peek() != '}' {
		if w.in[0] == ',' {
			w.in = w.in[1:]
			w.peek()
		}
		m := member{start: len(w.out)}
		if !w.string() {
			return false
		}
		m.nameEnd = len(w.out)
		if len(w.members) > first {
			sorted = sorted && bytes.Compare(w.name(w.members[len(w.members)-1]), w.name(m)) < 0
		}
		w.peek()
		w.in = w.in[1:] // the colon
		if !w.value(depth) {
			return false
		}
		w.out = append(w.out, ',')
		m.end = len(w.out)
		w.members = append(w.members, m)
	}
	if !sorted && !w.sort(w.members[first:]) {
		return false
	}
	w.members = w.members[:first]
	w.copyByte()
	return true
}

// sort puts the members of the object that out ends with in order. It is false
// if a name is there twice; in an object that came sorted, none is.
func (w *canonicalWalk) sort(members []member) bool {
	start := members[0].start
	slices.SortFunc(members, func(a, b member) int { return bytes.Compare(w.name(a), w.name(b)) })
	for i := range members[1:] {
		if bytes.Equal(w.name(members[i]), w.name(members[i+1])) {
			return false
		}
	}
	w.scratch = append(w.scratch[:0], w.out[start:]...)
	w.out = w.out[:start]
	for _, m := range members {
		w.out = append(w.out, w.scratch[m.start-start:m.end-start]...)
	}
	return true
}

// string appends a string decoded. It is false for a lone surrogate and U+FFFD.
func (w *canonicalWalk) string() bool {
	w.copyByte()
	for {
		n := bytes.IndexAny(w.in, `"\`)
		w.out = append(w.out, w.in[:n]...)
		quote := w.in[n] == '"'
		w.in = w.in[n+1:]
		if quote {
			w.out = append(w.out, stringEnd)
			return true
		}
		c := w.in[0]
		w.in = w.in[1:]
		switch c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r := w.hex4()
			if utf16.IsSurrogate(r) {
				if !bytes.HasPrefix(w.in, []byte(`\u`)) {
					return false
				}
				w.in = w.in[2:]
				r = utf16.DecodeRune(r, w.hex4()) // U+FFFD if they are no pair
			}
			if r == utf8.RuneError {
				return false
			}
			w.out = utf8.AppendRune(w.out, r)
			continue
		}
		w.out = append(w.out, c) // those above, and \" \\ \/
	}
}

// hex4 takes the four digits of a \u escape.
func (w *canonicalWalk) hex4() (r rune) {
	for _, c := range w.in[:4] {
		switch {
		case c <= '9':
			c -= '0'
		case c <= 'F':
			c -= 'A' - 10
		default:
			c -= 'a' - 10
		}
		r = r<<4 | rune(c)
	}
	w.in = w.in[4:]
	return r
}

// peek drops white space and returns the next byte; in valid JSON there is one.
func (w *canonicalWalk) peek() byte {
	for w.in[0] == ' ' || w.in[0] == '\t' || w.in[0] == '\r' || w.in[0] == '\n' {
		w.in = w.in[1:]
	}
	return w.in[0]
}

// copyByte takes over a bracket, comma or quote.
func (w *canonicalWalk) copyByte() {
	w.out = append(w.out, w.in[0])
	w.in = w.in[1:]
}
