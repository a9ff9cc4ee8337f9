package sqlstore

import (
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/oncehttp/oncehttp"
)

// columns are in the order of values and scan.
const columns = "id, upstream, scope, intent, key, state, owner, version, lease, first_sent, updated, expires, " +
	"attempts, status, fingerprint, note, request, response"

const columnCount = 18

// A CorruptError says that a row is not what a store of this package writes:
// edited by hand, written by a newer version, or damaged. Other rows are still
// served.
type CorruptError struct {
	ID     string
	Column string
	Err    error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("sqlstore: record %s: column %s: %v", e.ID, e.Column, e.Err)
}

func (e *CorruptError) Unwrap() error { return e.Err }

// timeLayout sorts as text, has the microseconds that a Record has, and can be
// read by people.
const timeLayout = "2006-01-02T15:04:05.000000Z"

func timeText(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UTC().Format(timeLayout)
}

// states are stored by name.
var states = func() map[string]oncehttp.State {
	m := map[string]oncehttp.State{}
	for s := oncehttp.StateReserved; s <= oncehttp.StateUnknown; s++ {
		m[s.String()] = s
	}
	return m
}()

// payload is how a saved request or answer stands in its column: JSON, and the
// body as text where it is text.
type payload struct {
	Method string              `json:"method,omitempty"`
	URL    string              `json:"url,omitempty"`
	Status int                 `json:"status,omitempty"`
	Header http.Header         `json:"header,omitempty"`
	Raw    map[string][][]byte `json:"header_base64,omitempty"` // values that are not UTF-8: JSON would change them
	Text   string              `json:"text,omitempty"`
	Base64 []byte              `json:"base64,omitempty"`
	Length int                 `json:"length"` // of the body: a cut value shows itself
}

func (p *payload) setBody(b []byte) {
	p.Length = len(b)
	if utf8.Valid(b) {
		p.Text = string(b)
	} else {
		p.Base64 = b
	}
}

func (p *payload) body() ([]byte, error) {
	b := p.Base64
	if b == nil {
		b = []byte(p.Text)
	}
	if len(b) != p.Length {
		return nil, fmt.Errorf("the body has %d bytes, not %d", len(b), p.Length)
	}
	return b, nil
}

func encode(p payload) (any, error) {
	text := make(http.Header, len(p.Header))
	for name, values := range p.Header {
		if utf8.ValidString(strings.Join(values, ",")) {
			text[name] = values
			continue
		}
		if p.Raw == nil {
			p.Raw = map[string][][]byte{}
		}
		for _, v := range values {
			p.Raw[name] = append(p.Raw[name], []byte(v))
		}
	}
	p.Header = text
	b, err := json.Marshal(p)
	return string(b), err
}

// values are the record's columns.
func values(r *oncehttp.Record) ([]any, error) {
	var request, response any
	var err error
	if q := r.Request; q != nil {
		p := payload{Method: q.Method, URL: q.URL, Header: q.Header}
		p.setBody(q.Body)
		if request, err = encode(p); err != nil {
			return nil, err
		}
	}
	if a := r.Response; a != nil {
		p := payload{Status: a.Status, Header: a.Header}
		p.setBody(a.Body)
		if response, err = encode(p); err != nil {
			return nil, err
		}
	}
	if states[r.State.String()] != r.State {
		return nil, fmt.Errorf("sqlstore: the record's state %d is not known", r.State)
	}
	return []any{
		r.ID, r.Upstream, r.Scope, r.Intent, r.Key, r.State.String(), r.Owner, r.Version,
		timeText(r.Lease), timeText(r.FirstSent), timeText(r.Updated), timeText(r.Expires),
		r.Attempts, r.Status, hex.EncodeToString(r.Fingerprint[:]), r.Note, request, response,
	}, nil
}

// scan reads a row.
func scan(row interface{ Scan(...any) error }) (oncehttp.Record, error) {
	var r oncehttp.Record
	var state, fingerprint string
	var lease, firstSent, updated, expires, request, response sql.NullString
	err := row.Scan(&r.ID, &r.Upstream, &r.Scope, &r.Intent, &r.Key, &state, &r.Owner, &r.Version,
		&lease, &firstSent, &updated, &expires, &r.Attempts, &r.Status, &fingerprint, &r.Note, &request, &response)
	if err != nil {
		if r.ID != "" { // the row is there, and does not fit
			return r, &CorruptError{ID: r.ID, Column: "?", Err: err}
		}
		return r, err
	}
	corrupt := func(column string, err error) (oncehttp.Record, error) {
		return r, &CorruptError{ID: r.ID, Column: column, Err: err}
	}
	var ok bool
	if r.State, ok = states[state]; !ok {
		return corrupt("state", fmt.Errorf("%q is not a state that this version knows", state))
	}
	n, err := hex.Decode(r.Fingerprint[:], []byte(fingerprint[:min(len(fingerprint), 64)]))
	if err != nil || n != len(r.Fingerprint) || len(fingerprint) != 64 {
		return corrupt("fingerprint", errors.New("not 64 hex digits"))
	}
	for _, c := range []struct {
		name string
		text sql.NullString
		time *time.Time
	}{{"lease", lease, &r.Lease}, {"first_sent", firstSent, &r.FirstSent}, {"updated", updated, &r.Updated}, {"expires", expires, &r.Expires}} {
		if c.text.Valid {
			if *c.time, err = time.Parse(timeLayout, c.text.String); err != nil {
				return corrupt(c.name, errors.New("not a time"))
			}
		}
	}
	if request.Valid {
		p, body, err := decode(request.String)
		if err != nil {
			return corrupt("request", err)
		}
		r.Request = &oncehttp.SavedRequest{Method: p.Method, URL: p.URL, Header: p.Header, Body: body}
	}
	if response.Valid {
		p, body, err := decode(response.String)
		if err == nil && (p.Status < 100 || p.Status > 999) {
			err = errors.New("no status")
		}
		if err != nil {
			return corrupt("response", err)
		}
		r.Response = &oncehttp.SavedResponse{Status: p.Status, Header: p.Header, Body: body}
	}
	return r, nil
}

func decode(text string) (payload, []byte, error) {
	var p payload
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return p, nil, errors.New("not the JSON of a saved message")
	}
	for name, values := range p.Raw {
		for _, v := range values {
			if p.Header == nil {
				p.Header = http.Header{}
			}
			p.Header[name] = append(p.Header[name], string(v))
		}
	}
	body, err := p.body()
	return p, body, err
}
