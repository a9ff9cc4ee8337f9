package storetest

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

func createInserts(t *testing.T, s *suite) {
	store := s.open(t)
	first := full("1")
	first.Version = 77 // not the caller's to choose
	first = mustCreate(t, store, first)

	other := claim("1", "someone else")
	stored, created, err := store.Create(t.Context(), other)
	require.NoError(t, err, "that a record exists is not an error")
	require.False(t, created)
	same(t, first, stored, "the answer of a Create that came second")
	same(t, first, mustGet(t, store, "1"), "Get's answer")
}

func updateReplaces(t *testing.T, s *suite) {
	store := s.open(t)
	v1 := mustCreate(t, store, full("1"))
	bystander := mustCreate(t, store, full("2"))

	v2 := claim("1", "owner b")
	v2.Version, v2.State, v2.Updated, v2.Lease = 1, oncehttp.StateOpen, at(time.Second), time.Time{}
	v2 = mustUpdate(t, store, v2) // what it does not have is gone: request, response, note
	same(t, v2, mustGet(t, store, "1"), "Get's answer")

	for _, version := range []int64{v1.Version, 3, 0, -1} {
		late := v1
		late.Version, late.Owner = version, "late"
		_, err := store.Update(t.Context(), late)
		require.ErrorIs(t, err, oncehttp.ErrConflict, "Update of version %d where 2 is stored", version)
		same(t, v2, mustGet(t, store, "1"), "the record after a conflict")
	}
	for v := int64(2); v < 20; v++ {
		v2.Attempts++
		v2 = mustUpdate(t, store, v2)
	}
	require.EqualValues(t, 20, mustGet(t, store, "1").Version)
	same(t, bystander, mustGet(t, store, "2"), "another record")
}

func missingIsNotFound(t *testing.T, s *suite) {
	store := s.open(t)
	for _, id := range []string{"1", "", "%", "'"} {
		_, err := store.Get(t.Context(), id)
		require.ErrorIs(t, err, oncehttp.ErrNotFound)
		for _, version := range []int64{0, 1} {
			r := claim(id, "a")
			r.Version = version
			_, err = store.Update(t.Context(), r)
			require.ErrorIs(t, err, oncehttp.ErrNotFound)
		}
		require.False(t, has(t, store, id), "Update does not insert")
	}
	page, err := store.List(t.Context(), oncehttp.Query{})
	require.NoError(t, err, "that there is nothing to list is not an error")
	require.Empty(t, page)
	n, err := store.Prune(t.Context(), at(time.Hour), 10)
	require.NoError(t, err)
	require.Zero(t, n)
}

func fieldsComeBack(t *testing.T, s *suite) {
	store := s.open(t)
	for i, change := range []func(*oncehttp.Record){
		func(*oncehttp.Record) {},
		func(r *oncehttp.Record) { r.Request, r.Response = nil, nil },
		func(r *oncehttp.Record) { r.Request.Header, r.Response.Header = nil, nil },
		func(r *oncehttp.Record) { r.Request.Header, r.Response.Header = http.Header{}, http.Header{} },
		func(r *oncehttp.Record) { r.Request.Body, r.Response.Body = nil, nil },
		func(r *oncehttp.Record) { r.Request.Body, r.Response.Body = []byte{}, []byte{} },
		func(r *oncehttp.Record) { r.Request.Body, r.Response.Body = []byte("null"), []byte("\ufffd") },
		func(r *oncehttp.Record) { r.Scope, r.Intent, r.Key, r.Owner, r.Note = "", "", "", "", "" },
		func(r *oncehttp.Record) { r.Lease, r.FirstSent, r.Fingerprint = time.Time{}, time.Time{}, [32]byte{} },
		func(r *oncehttp.Record) { r.Attempts, r.Status = 0, 0 },
		func(r *oncehttp.Record) { r.Attempts = 1 << 30 },
	} {
		for _, state := range allStates {
			r := full(fmt.Sprint(i, state))
			r.State = state
			change(&r)
			created := mustCreate(t, store, r)
			same(t, created, mustGet(t, store, r.ID), "Get's answer")
			updated := mustUpdate(t, store, created)
			same(t, updated, mustGet(t, store, r.ID), "Get's answer")
			page, err := store.List(t.Context(), oncehttp.Query{States: []oncehttp.State{state}, Limit: 1000})
			require.NoError(t, err)
			found := false
			for _, listed := range page {
				if listed.ID == r.ID {
					found = true
					same(t, updated, listed, "List's answer")
				}
			}
			require.True(t, found, "List has no record of state %s that was stored", state)
			_, created2, err := store.Create(t.Context(), r)
			require.NoError(t, err)
			require.False(t, created2)
		}
	}
}

// timesComeBack is for times that are not as Transport makes them: in another
// zone, with nanoseconds or a monotonic reading, before now or long after.
func timesComeBack(t *testing.T, s *suite) {
	store := s.open(t)
	for i, want := range []time.Time{
		epoch, epoch.In(time.FixedZone("far", -11*3600-1800)), epoch.Add(789), time.Now(), time.Unix(1, 0).UTC(),
		epoch.Truncate(time.Second), epoch.Truncate(time.Second).Add(time.Microsecond), epoch.Truncate(time.Second).Add(time.Second - time.Microsecond),
		time.Date(2038, 1, 19, 3, 14, 8, 1000, time.UTC), time.Date(2600, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2028, 2, 29, 23, 59, 59, 999999000, time.UTC),
	} {
		r := claim(fmt.Sprint(i), "a")
		r.Lease, r.FirstSent, r.Updated, r.Expires = want, want, want, want
		_, created, err := store.Create(t.Context(), r)
		require.NoError(t, err)
		require.True(t, created)
		got := mustGet(t, store, r.ID)
		for name, back := range map[string]time.Time{"Lease": got.Lease, "FirstSent": got.FirstSent, "Updated": got.Updated, "Expires": got.Expires} {
			require.Less(t, back.Sub(want).Abs(), time.Microsecond, "%s was %v and came back as %v", name, want, back)
		}
	}
}

func bigAnswersComeBack(t *testing.T, s *suite) {
	store := s.open(t)
	for i, body := range [][]byte{
		noise(1, 256<<10), bytes.Repeat([]byte("é<\"\\\n"), 256<<10/6), make([]byte, 256<<10), bytes.Repeat([]byte{0xff}, 256<<10),
	} {
		r := full(fmt.Sprint("big", i))
		r.Request.Body = body[:64<<10]
		r = mustCreate(t, store, r)
		r.Response.Body = body
		r.Response.Header = http.Header{"X-Long": {strings.Repeat("v", 32<<10)}}
		r = mustUpdate(t, store, r)
		same(t, r, mustGet(t, store, r.ID), "Get's answer")
	}
	page, err := store.List(t.Context(), oncehttp.Query{})
	require.NoError(t, err)
	require.Len(t, page, 4)
}

// latin1HeadersComeBack: RFC 9110 §5.5 lets a field value hold any byte from
// 0x80, and net/http hands them on. A store that takes them for UTF-8 gives
// later callers another answer than the first one got.
func latin1HeadersComeBack(t *testing.T, s *suite) {
	store := s.open(t)
	r := full("1")
	r.Response.Header = http.Header{"Content-Disposition": {"attachment; filename=\"caf\xe9.pdf\""}, "X-All": {"\x80\x9f\xa0\xff", "é"}, "X-Cut": {"\xc3", "\xa9"}}
	r.Request.Header = http.Header{"X-Name": {"Jos\xe9"}}
	r = mustCreate(t, store, r)
	same(t, r, mustGet(t, store, "1"), "Get's answer")
}

func alikeIDsDiffer(t *testing.T, s *suite) {
	store := s.open(t)
	ids := []string{
		"abc", "ABC", "Abc", "abc ", " abc", "abc\n", "äbc", "a\u0308bc", "ａbc", "abc\u200b", "ab%", "ab_", "ab*", "0", "00", "0.0", "-0", "0x0",
		"1", "01", "1.0", "1e0", "true", "NULL", "ss", "ß", strings.Repeat("x", 511), strings.Repeat("x", 512), strings.Repeat("x", 511) + "y",
	}
	for i, id := range ids {
		r := claim(id, fmt.Sprint("owner ", i))
		mustCreate(t, store, r)
	}
	for i, id := range ids {
		require.Equal(t, fmt.Sprint("owner ", i), mustGet(t, store, id).Owner, "the record of %.20q", id)
	}
}

func hostileTextIsText(t *testing.T, s *suite) {
	store := s.open(t)
	texts := append(hostile[:len(hostile):len(hostile)], strings.Repeat("長い", 170), strings.Repeat(`'"\`, 340))
	for i, text := range texts {
		r := full(text + "#")
		r.ID = r.ID[max(0, len(r.ID)-512):]
		if i >= len(hostile) {
			r.ID = fmt.Sprint("long ", i)
		}
		r.Scope, r.Intent, r.Key, r.Owner, r.Note = text, text, text, text, text
		r.Upstream = "u" + text
		r.Request.URL, r.Request.Body, r.Response.Body = "https://pay.example/"+text, []byte(text), []byte(text)
		r = mustCreate(t, store, r)
		same(t, r, mustGet(t, store, r.ID), "Get's answer")
		r.Note += text
		r = mustUpdate(t, store, r)
		page, err := store.List(t.Context(), oncehttp.Query{Upstream: r.Upstream})
		require.NoError(t, err)
		require.Len(t, page, 1, "records of the upstream %.40q", r.Upstream)
		same(t, r, page[0], "List's answer")
	}
	page, err := store.List(t.Context(), oncehttp.Query{Limit: 1000})
	require.NoError(t, err)
	require.Len(t, page, len(texts))
}

func readsAreCopies(t *testing.T, s *suite) {
	store := s.open(t)
	want := mustCreate(t, store, full("1"))
	reads := map[string]func() oncehttp.Record{
		"Get": func() oncehttp.Record { return mustGet(t, store, "1") },
		"List": func() oncehttp.Record {
			page, err := store.List(t.Context(), oncehttp.Query{})
			require.NoError(t, err)
			require.Len(t, page, 1)
			return page[0]
		},
		"Create of what is there": func() oncehttp.Record {
			r, created, err := store.Create(t.Context(), claim("1", "b"))
			require.NoError(t, err)
			require.False(t, created)
			return r
		},
	}
	want = full("1") // memory of our own
	want.Version = 1
	for name, read := range reads {
		other := read()
		scribble(read())
		same(t, want, other, "what "+name+" returned earlier, after another answer was written to,")
		same(t, want, read(), name+"'s answer, after an earlier one was written to,")
	}
	together(t, 8, func(i int) {
		for range 20 {
			r, err := store.Get(t.Context(), "1")
			if err != nil {
				t.Errorf("Get: %v", err)
				return
			}
			scribble(r) // the race detector sees memory that is shared
		}
	})
	same(t, want, mustGet(t, store, "1"), "Get's answer")
}

// scribble writes to all memory that a record holds.
func scribble(r oncehttp.Record) {
	for _, h := range []http.Header{r.Request.Header, r.Response.Header} {
		for _, values := range h {
			for i := range values {
				values[i] = "scribbled"
			}
		}
		h.Set("Scribbled", "1")
	}
	for _, b := range [][]byte{r.Request.Body, r.Response.Body} {
		for i := range b {
			b[i] = '!'
		}
	}
	*r.Request, *r.Response = oncehttp.SavedRequest{}, oncehttp.SavedResponse{}
}
