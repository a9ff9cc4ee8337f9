package storetest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

var epoch = time.Date(2026, 7, 30, 12, 0, 0, 123456000, time.UTC)

func at(d time.Duration) time.Time { return epoch.Add(d) }

var allStates = []oncehttp.State{
	oncehttp.StateReserved, oncehttp.StateSending, oncehttp.StateDone, oncehttp.StateRejected,
	oncehttp.StateNotSent, oncehttp.StateOpen, oncehttp.StateUnknown,
}

func prunable(s oncehttp.State) bool {
	return s != oncehttp.StateSending && s != oncehttp.StateOpen && s != oncehttp.StateUnknown
}

// claim is a record as Transport makes one.
func claim(id, owner string) oncehttp.Record {
	return oncehttp.Record{
		ID: id, Upstream: "pay.example", Intent: "charge:" + id, Key: "key-" + id, State: oncehttp.StateSending, Owner: owner,
		Lease: at(time.Minute), FirstSent: epoch, Updated: epoch, Expires: at(time.Hour), Fingerprint: [32]byte{1, 31: 255},
	}
}

// full is a record with something in every field.
func full(id string) oncehttp.Record {
	r := claim(id, "owner 1-2")
	r.Scope, r.Note, r.Attempts, r.Status = "tenant-7", "seen in the dashboard", 3, 201
	r.Request = &oncehttp.SavedRequest{
		Method: "POST", URL: "https://pay.example/v1/charges?x=%2F&y=1",
		Header: http.Header{"Content-Type": {"application/json"}, "X-Two": {"a", "b"}, "X-Empty": {""}},
		Body:   []byte(`{"amount": 1.10, "text": "<&>` + "\u2028" + `"}`),
	}
	r.Response = &oncehttp.SavedResponse{
		Status: 201,
		Header: http.Header{"Content-Type": {"application/octet-stream"}, "Location": {"/v1/charges/1"}, "X-Order": {"b", "a", "b"}},
		Body:   []byte{0, 1, 0xff, 0xfe, '\n', 0, 0x80},
	}
	return r
}

func mustCreate(t testing.TB, s oncehttp.KeyStore, r oncehttp.Record) oncehttp.Record {
	t.Helper()
	stored, created, err := s.Create(t.Context(), r)
	require.NoError(t, err, "Create")
	require.True(t, created, "Create of a new id says that it was there")
	r.Version = 1
	same(t, r, stored, "Create's answer")
	return stored
}

func mustUpdate(t testing.TB, s oncehttp.KeyStore, r oncehttp.Record) oncehttp.Record {
	t.Helper()
	stored, err := s.Update(t.Context(), r)
	require.NoError(t, err, "Update")
	r.Version++
	same(t, r, stored, "Update's answer")
	return stored
}

func mustGet(t testing.TB, s oncehttp.KeyStore, id string) oncehttp.Record {
	t.Helper()
	r, err := s.Get(t.Context(), id)
	require.NoError(t, err, "Get(%.80q)", id)
	return r
}

func has(t testing.TB, s oncehttp.KeyStore, id string) bool {
	t.Helper()
	_, err := s.Get(t.Context(), id)
	if err != nil {
		require.ErrorIs(t, err, oncehttp.ErrNotFound, "Get(%.80q)", id)
	}
	return err == nil
}

func same(t testing.TB, want, got oncehttp.Record, what string) {
	t.Helper()
	if d := difference(want, got); d != "" {
		t.Fatalf("%s is not what was stored: %s", what, d)
	}
}

// difference names the fields in which two records differ, "" if in none. Nil
// and empty are alike; times must be equal, and in UTC.
func difference(want, got oncehttp.Record) string {
	var b strings.Builder
	compare(&b, "", reflect.ValueOf(want), reflect.ValueOf(got))
	return b.String()
}

func compare(b *strings.Builder, name string, want, got reflect.Value) {
	differs := false
	switch w := want.Interface().(type) {
	case time.Time:
		g := got.Interface().(time.Time)
		differs = !w.Equal(g) || !g.IsZero() && g.Location() != time.UTC
	case []byte:
		if g := got.Bytes(); !bytes.Equal(w, g) {
			fmt.Fprintf(b, "%s has %d bytes %.40q, want %d bytes %.40q; ", name, len(g), g, len(w), w)
		}
		return
	case http.Header:
		differs = !(len(w) == 0 && got.Len() == 0) && !reflect.DeepEqual(w, got.Interface())
	default:
		switch {
		case want.Kind() == reflect.Pointer && !want.IsNil() && !got.IsNil():
			compare(b, name+".", want.Elem(), got.Elem())
			return
		case want.Kind() == reflect.Struct:
			for i := range want.NumField() {
				compare(b, name+want.Type().Field(i).Name, want.Field(i), got.Field(i))
			}
			return
		}
		differs = !reflect.DeepEqual(w, got.Interface())
	}
	if differs {
		fmt.Fprintf(b, "%s is %s, want %s; ", name, shorten(got), shorten(want))
	}
}

func shorten(v reflect.Value) string {
	if v.Kind() == reflect.String {
		return fmt.Sprintf("%.80q", v.String())
	}
	return fmt.Sprintf("%.200v", v.Interface())
}

// noise is n bytes that no encoding is at home with, the same for one seed.
func noise(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// hostile are texts that have broken stores: by their quotes, their patterns,
// their lines, their width or their length.
var hostile = []string{
	"", " ", `'`, `"`, "`", `\`, `\'; DROP TABLE oncehttp_intents; --`, `' OR '1'='1`, "%", "_", "100%_", "*?[a-z]", ";--", "/* */",
	"a\nb\r\nc", "\t", "\x01\x1b[31m", "\x7f", "$1", "?", ":id", "@p1", "{0}", "${x}", "%s%n", "NULL", "null", "0", "1e9", "true", "../../etc/passwd",
	"é", "e\u0301", "ß", "ſ", "İ", "日本語", "👩‍👩‍👧‍👦", "\u202eabc", "\ufeff", "\u2028", "\ufffd", "\U0010ffff", "<a href='x'>&amp;", "{}:;,|#",
}
