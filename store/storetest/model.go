package storetest

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/oncehttp/oncehttp"
)

// answersAsAMap makes up histories of calls, and compares every answer with a
// map's. Ids, upstreams and times are few, so that calls meet.
func answersAsAMap(t *testing.T, s *suite) {
	calls := 0
	rapid.Check(t, func(rt *rapid.T) {
		tb := &scope{TB: t}
		defer tb.end()
		m := &model{store: s.open(tb), t: t, records: map[string]oncehttp.Record{}}
		rt.Repeat(map[string]func(*rapid.T){
			"create": m.create, "update": m.update, "get": m.get, "list": m.list, "prune": m.prune,
		})
		for _, id := range modelIDs {
			m.agree(rt, id)
		}
		calls += m.calls
	})
	t.Logf("%d calls", calls)
}

// scope is a testing.TB whose cleanups run when the history ends.
type scope struct {
	testing.TB
	cleanups []func()
}

func (s *scope) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }

func (s *scope) end() {
	for _, f := range slices.Backward(s.cleanups) {
		f()
	}
}

type model struct {
	store   oncehttp.KeyStore
	t       *testing.T
	records map[string]oncehttp.Record
	calls   int
}

var (
	modelIDs       = []string{"a", "A", "b'", "b'; --", "c%", "\U0001f600", "line\nbreak", strings.Repeat("long", 64)}
	modelUpstreams = []string{"pay.example", "mail.example:8443", "it's"}
	genID          = rapid.SampledFrom(modelIDs)
	genText        = rapid.OneOf(rapid.SampledFrom(hostile), rapid.Map(rapid.StringN(0, 40, 200), func(s string) string { return strings.ReplaceAll(s, "\x00", "") }))
	genSoon        = rapid.Map(rapid.IntRange(0, 6), func(n int) time.Time { return at(time.Duration(n) * time.Microsecond) })
	genTime        = rapid.Map(rapid.Int64Range(1, 4e15), func(n int64) time.Time { return time.UnixMicro(n).UTC() })
	genMaybeTime   = rapid.OneOf(rapid.Just(time.Time{}), genTime)
	genState       = rapid.SampledFrom(allStates)
	genHeader      = rapid.MapOfN(rapid.SampledFrom([]string{"Content-Type", "Location", "X-A", "x-lower"}), rapid.SliceOfN(genText, 1, 3), 0, 3)
	genBody        = rapid.OneOf(rapid.SliceOfN(rapid.Byte(), 0, 60), rapid.Map(genText, func(s string) []byte { return []byte(s) }),
		rapid.Map(rapid.Uint64Range(0, 1<<20), func(n uint64) []byte { return noise(n, int(n%(32<<10))) }))
)

func genRecord(rt *rapid.T, id string) oncehttp.Record {
	r := oncehttp.Record{
		ID: id, Upstream: rapid.SampledFrom(modelUpstreams).Draw(rt, "upstream"), Scope: genText.Draw(rt, "scope"), Intent: genText.Draw(rt, "intent"),
		Key: genText.Draw(rt, "key"), State: genState.Draw(rt, "state"), Owner: genText.Draw(rt, "owner"), Note: genText.Draw(rt, "note"),
		Lease: genMaybeTime.Draw(rt, "lease"), FirstSent: genMaybeTime.Draw(rt, "first sent"), Updated: genSoon.Draw(rt, "updated"), Expires: genSoon.Draw(rt, "expires"),
		Attempts: rapid.IntRange(0, 1000).Draw(rt, "attempts"), Status: rapid.IntRange(0, 999).Draw(rt, "status"),
	}
	copy(r.Fingerprint[:], rapid.SliceOfN(rapid.Byte(), 0, 32).Draw(rt, "fingerprint"))
	if rapid.Bool().Draw(rt, "has request") {
		r.Request = &oncehttp.SavedRequest{Method: "POST", URL: "https://pay.example/" + genText.Draw(rt, "url"), Header: http.Header(genHeader.Draw(rt, "request header")), Body: genBody.Draw(rt, "request body")}
	}
	if rapid.Bool().Draw(rt, "has response") {
		r.Response = &oncehttp.SavedResponse{Status: rapid.IntRange(100, 599).Draw(rt, "answer"), Header: http.Header(genHeader.Draw(rt, "response header")), Body: genBody.Draw(rt, "response body")}
	}
	return r
}

func (m *model) create(rt *rapid.T) {
	r := genRecord(rt, genID.Draw(rt, "id"))
	r.Version = rapid.Int64Range(0, 9).Draw(rt, "version")
	m.calls++
	stored, created, err := m.store.Create(m.t.Context(), r)
	was, exists := m.records[r.ID]
	switch {
	case err != nil:
		rt.Fatalf("Create: %v", err)
	case created == exists:
		rt.Fatalf("Create says created=%t, and that the record existed is %t", created, exists)
	case !exists:
		r.Version = 1
		m.records[r.ID] = r
		was = r
	}
	if d := difference(was, stored); d != "" {
		rt.Fatalf("Create's answer: %s", d)
	}
	m.agree(rt, r.ID)
}

func (m *model) update(rt *rapid.T) {
	r := genRecord(rt, genID.Draw(rt, "id"))
	was, exists := m.records[r.ID]
	r.Version = was.Version + rapid.SampledFrom([]int64{0, 0, 0, -1, 1, 5}).Draw(rt, "version off by")
	m.calls++
	stored, err := m.store.Update(m.t.Context(), r)
	switch {
	case !exists:
		if !is(err, oncehttp.ErrNotFound) {
			rt.Fatalf("Update of a record that does not exist: %v, want ErrNotFound", err)
		}
	case r.Version != was.Version:
		if !is(err, oncehttp.ErrConflict) {
			rt.Fatalf("Update of version %d where %d is stored: %v, want ErrConflict", r.Version, was.Version, err)
		}
	case err != nil:
		rt.Fatalf("Update: %v", err)
	default:
		r.Version++
		m.records[r.ID] = r
		if d := difference(r, stored); d != "" {
			rt.Fatalf("Update's answer: %s", d)
		}
	}
	m.agree(rt, r.ID)
}

func (m *model) get(rt *rapid.T) { m.agree(rt, genID.Draw(rt, "id")) }

func (m *model) agree(rt *rapid.T, id string) {
	m.calls++
	got, err := m.store.Get(m.t.Context(), id)
	want, exists := m.records[id]
	if !exists {
		if !is(err, oncehttp.ErrNotFound) {
			rt.Fatalf("Get(%.40q): %v, want ErrNotFound", id, err)
		}
		return
	}
	if err != nil {
		rt.Fatalf("Get(%.40q): %v", id, err)
	}
	if d := difference(want, got); d != "" {
		rt.Fatalf("Get(%.40q): %s", id, d)
	}
}

// list walks all pages of a query.
func (m *model) list(rt *rapid.T) {
	q := oncehttp.Query{States: rapid.SliceOfN(genState, 0, 3).Draw(rt, "states"), Limit: rapid.IntRange(0, 4).Draw(rt, "limit")}
	if rapid.Bool().Draw(rt, "one upstream") {
		q.Upstream = rapid.SampledFrom(modelUpstreams).Draw(rt, "upstream")
	}
	if rapid.Bool().Draw(rt, "before") {
		q.Before = genSoon.Draw(rt, "before")
	}
	if rapid.Bool().Draw(rt, "after") {
		q.After = oncehttp.Cursor{Updated: genSoon.Draw(rt, "after"), ID: genID.Draw(rt, "after id")}
	}
	want := selected(m.records, q)
	limit := q.Limit
	if limit == 0 {
		limit = 100
	}
	for {
		m.calls++
		page, err := m.store.List(m.t.Context(), q)
		if err != nil {
			rt.Fatalf("List: %v", err)
		}
		n := min(limit, len(want))
		if len(page) != n {
			rt.Fatalf("List returned %d records %v, want %d of %v", len(page), ids(page), n, ids(want))
		}
		for i, r := range page {
			if r.ID != want[i].ID {
				rt.Fatalf("List returned %v, want %v", ids(page), ids(want[:n]))
			}
			if d := difference(want[i], r); d != "" {
				rt.Fatalf("List, record %d: %s", i, d)
			}
		}
		if want = want[n:]; n == 0 {
			return
		}
		q.After = oncehttp.Cursor{Updated: page[n-1].Updated, ID: page[n-1].ID}
	}
}

// selected is List of a map.
func selected(records map[string]oncehttp.Record, q oncehttp.Query) []oncehttp.Record {
	var found []oncehttp.Record
	for _, r := range records {
		if (len(q.States) == 0 || slices.Contains(q.States, r.State)) &&
			(q.Upstream == "" || q.Upstream == r.Upstream) &&
			(q.Before.IsZero() || r.Updated.Before(q.Before)) &&
			(q.After == oncehttp.Cursor{} || inOrder(q.After.Updated, q.After.ID, r.Updated, r.ID) < 0) {
			found = append(found, r)
		}
	}
	slices.SortFunc(found, func(a, b oncehttp.Record) int { return inOrder(a.Updated, a.ID, b.Updated, b.ID) })
	return found
}

// inOrder is the order of List: by Updated, then by the bytes of ID.
func inOrder(t time.Time, id string, u time.Time, jd string) int {
	if d := t.Compare(u); d != 0 {
		return d
	}
	return strings.Compare(id, jd)
}

func ids(records []oncehttp.Record) []string {
	var s []string
	for _, r := range records {
		s = append(s, fmt.Sprintf("%.20q", r.ID))
	}
	return s
}

func (m *model) prune(rt *rapid.T) {
	before, limit := genSoon.Draw(rt, "before"), rapid.IntRange(0, 5).Draw(rt, "limit")
	may := 0
	for _, r := range m.records {
		if prunable(r.State) && r.Expires.Before(before) {
			may++
		}
	}
	m.calls++
	n, err := m.store.Prune(m.t.Context(), before, limit)
	if err != nil {
		rt.Fatalf("Prune: %v", err)
	}
	if n != min(may, limit) {
		rt.Fatalf("Prune says that it deleted %d; %d may go and the limit is %d", n, may, limit)
	}
	gone := 0
	for id, r := range m.records {
		_, err := m.store.Get(m.t.Context(), id)
		if err == nil {
			continue
		}
		if !is(err, oncehttp.ErrNotFound) {
			rt.Fatalf("Get: %v", err)
		}
		if !prunable(r.State) || !r.Expires.Before(before) {
			rt.Fatalf("Prune before %v deleted a record that is %s and expires %v", before, r.State, r.Expires)
		}
		gone++
		delete(m.records, id)
	}
	if gone != n {
		rt.Fatalf("Prune says that it deleted %d, and %d are gone", n, gone)
	}
}
