package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/store/sqlstore"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func raw(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := connect(path)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func claimed(id string) oncehttp.Record {
	now := time.Now().UTC().Truncate(time.Microsecond)
	return oncehttp.Record{ID: id, Upstream: "pay.example", Intent: "charge:" + id, Key: "key-" + id, State: oncehttp.StateSending,
		Owner: "pod-1 life-1", Lease: now.Add(time.Minute), FirstSent: now, Updated: now, Expires: now.Add(time.Hour)}
}

func TestBadFilesAreRefusedByWhatIsWrongWithThem(t *testing.T) {
	dir := t.TempDir()
	good := filepath.Join(dir, "good.db")
	require.NoError(t, openAt(t, good).Close())
	whole, err := os.ReadFile(good)
	require.NoError(t, err)
	foreign := filepath.Join(dir, "foreign.db")
	db := raw(t, foreign)
	_, err = db.Exec("CREATE TABLE customers (id INTEGER); PRAGMA application_id=7")
	require.NoError(t, err)
	newer := filepath.Join(dir, "newer.db")
	require.NoError(t, os.WriteFile(newer, whole, 0o600))
	_, err = raw(t, newer).Exec("PRAGMA user_version=2")
	require.NoError(t, err)
	write := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		return path
	}
	for _, c := range []struct{ path, says string }{
		{write("empty.db", nil), "the file is empty"},
		{write("short.db", whole[:50]), "cut short"},
		{write("cut.db", whole[:len(whole)-100]), "not whole pages"},
		{write("page.db", whole[:4096]), ""}, // the schema's page is there, its tables are not
		{write("text.db", []byte(strings.Repeat("not a database ", 20))), "not SQLite"},
		{foreign, "another application's"},
		{newer, "written by a newer one"},
		{filepath.Join(dir, "no", "such", "folder", "x.db"), "no such file or directory"},
		{dir, "it is a directory"},
		{"", "a path to a file is needed"},
		{":memory:", "a path to a file is needed"},
		{"file::memory:?cache=shared", "a path to a file is needed"},
		{"file:x.db?mode=memory", "a path to a file is needed"},
	} {
		var before []byte
		info, err := os.Stat(c.path)
		regular := err == nil && info.Mode().IsRegular()
		if regular {
			before, _ = os.ReadFile(c.path)
		}
		_, err = Open(t.Context(), c.path)
		require.Error(t, err, c.path)
		require.ErrorContains(t, err, c.says)
		if regular && c.path != newer {
			after, err := os.ReadFile(c.path)
			require.NoError(t, err)
			require.Equal(t, before, after, "what is refused is left as it is: %s", c.path)
		}
	}
	leftovers, err := filepath.Glob(filepath.Join(dir, "*.new-*"))
	require.NoError(t, err)
	require.Empty(t, leftovers)
}

func TestAPathMayHoldAnyCharacter(t *testing.T) {
	for _, name := range []string{"a b.db", "what?.db", "100%20.db", "#1.db", "k&v=;.db", "ü.db"} {
		path := filepath.Join(t.TempDir(), name)
		s := openAt(t, path)
		_, created, err := s.Create(t.Context(), claimed("a"))
		require.NoError(t, err)
		require.True(t, created)
		require.NoError(t, s.Close())
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, fs.FileMode(0o600), info.Mode().Perm())
		rec, err := openAt(t, path).Get(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, "key-a", rec.Key)
	}
}

func TestTheFileIsInWALModeAndClaimsAreSynchronous(t *testing.T) {
	s := openAt(t, filepath.Join(t.TempDir(), "x.db"))
	conn, err := s.db.Conn(t.Context())
	require.NoError(t, err)
	defer conn.Close()
	var mode string
	require.NoError(t, conn.QueryRowContext(t.Context(), "PRAGMA journal_mode").Scan(&mode))
	require.Equal(t, "wal", mode)
}

// A prepared PRAGMA once left the connection at NORMAL: half of all power cuts
// lost acknowledged claims. What is in force is read at each claim's commit.
func TestEveryClaimIsCommittedWithSynchronousFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	require.NoError(t, openAt(t, path).Close())
	watched := &spy{dsn: "file:" + path, levels: map[string]int{}}
	db := sql.OpenDB(watched)
	defer db.Close()
	s, err := sqlstore.Open(t.Context(), db, sqlstore.SQLite, sqlstore.Options{})
	require.NoError(t, err)
	defer s.Close()
	for i := range 20 {
		rec, _, err := s.Create(t.Context(), claimed(fmt.Sprint(i)))
		require.NoError(t, err)
		if i%3 != 0 { // claims in a row, and claims after lazy settles
			rec.State = oncehttp.StateDone
			rec, err = s.Update(t.Context(), rec)
			require.NoError(t, err)
		}
		if i%5 == 0 {
			rec.State = oncehttp.StateSending
			_, err = s.Update(t.Context(), rec)
			require.NoError(t, err)
		}
	}
	t.Log(watched.levels)
	require.Equal(t, 24, watched.levels["claim at 2"])
	require.Equal(t, 13, watched.levels["settle at 1"])
	require.Len(t, watched.levels, 2)
}

func TestASQLiteDatabaseOfTheCallersOwnIsTaken(t *testing.T) {
	db := raw(t, filepath.Join(t.TempDir(), "shop.db"))
	_, err := db.Exec("PRAGMA journal_mode=WAL; CREATE TABLE orders (id INTEGER); PRAGMA application_id=7; PRAGMA user_version=42")
	require.NoError(t, err)
	s, err := sqlstore.Open(t.Context(), db, sqlstore.SQLite, sqlstore.Options{})
	require.NoError(t, err)
	defer s.Close()
	_, created, err := s.Create(t.Context(), claimed("a"))
	require.NoError(t, err)
	require.True(t, created)
	var version int
	require.NoError(t, db.QueryRow("PRAGMA user_version").Scan(&version))
	require.Equal(t, 42, version, "its marks stay")
}

func TestWeakJournalModesAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	require.NoError(t, openAt(t, path).Close())
	db := raw(t, path)
	_, err := db.Exec("PRAGMA journal_mode=DELETE")
	require.NoError(t, err)
	_, err = sqlstore.Open(t.Context(), db, sqlstore.SQLite, sqlstore.Options{})
	require.ErrorContains(t, err, "not WAL")
	s, err := sqlstore.Open(t.Context(), db, sqlstore.SQLite, sqlstore.Options{AllowWeakDurability: true})
	require.NoError(t, err)
	require.NoError(t, s.Close())
}

// cases.md A62: one hung process made every later one hang. The operator's "three
// in the morning": a lock held by a tool, for long.
func TestALockedFileIsWaitedForUntilTheDeadlineAndSaysByWhat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	s := openAt(t, path)
	conn, err := raw(t, path).Conn(t.Context())
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.ExecContext(t.Context(), "BEGIN IMMEDIATE")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, _, err = s.Create(ctx, claimed("a"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "locked by another connection")
	_, err = s.Get(t.Context(), "a")
	require.ErrorIs(t, err, oncehttp.ErrNotFound, "reading goes on, and nothing was stored")

	// Behind the lock a second caller, with time, gets its turn.
	done := make(chan error, 1)
	go func() {
		_, _, err := s.Create(t.Context(), claimed("b"))
		done <- err
	}()
	_, err = conn.ExecContext(t.Context(), "ROLLBACK")
	require.NoError(t, err)
	require.NoError(t, <-done)
}

func TestRowsThatAreNotOursFailAloneAndLoudly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	s := openAt(t, path)
	db := raw(t, path)
	edits := map[string]string{
		"state":       "state = 'paid'",
		"fingerprint": "fingerprint = 'abc'",
		"lease":       "lease = 'tomorrow'",
		"updated":     "updated = '2026-12-01 00:00:00'",
		"request":     "request = '{'",
		"response":    `response = '{"status":201,"text":"{\"id\":","length":64}'`, // cut
		"response2":   `response = '{"length":0}'`,
		"version":     "version = 'one'",
	}
	for id, edit := range edits {
		_, _, err := s.Create(t.Context(), claimed(id))
		require.NoError(t, err)
		_, err = db.Exec("UPDATE oncehttp_intents SET "+edit+" WHERE id = ?", id)
		require.NoError(t, err)
	}
	_, _, err := s.Create(t.Context(), claimed("healthy"))
	require.NoError(t, err)
	for id := range edits {
		_, err := s.Get(t.Context(), id)
		var corrupt *sqlstore.CorruptError
		require.ErrorAs(t, err, &corrupt, id)
		require.Equal(t, id, corrupt.ID)
		_, created, err := s.Create(t.Context(), claimed(id))
		require.ErrorAs(t, err, &corrupt, "a claim of it fails closed")
		require.False(t, created)
	}
	rec, err := s.Get(t.Context(), "healthy")
	require.NoError(t, err)
	require.Equal(t, oncehttp.StateSending, rec.State)
	recs, err := s.List(t.Context(), oncehttp.Query{})
	require.Error(t, err)
	require.Len(t, recs, 1, "the others are listed, and the error tells of these")
}

func TestADeletedOrReplacedFileTakesNoMoreClaims(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	s := openAt(t, path)
	_, _, err := s.Create(t.Context(), claimed("a"))
	require.NoError(t, err)
	require.NoError(t, os.Rename(path, path+".away"))
	_, _, err = s.Create(t.Context(), claimed("b"))
	require.ErrorContains(t, err, "the file is gone")
	_, err = Open(t.Context(), path)
	require.ErrorContains(t, err, "its log, -wal, is there", "the old log would be played into a new file")
	for _, suffix := range []string{"-wal", "-shm"} {
		require.NoError(t, os.Rename(path+suffix, path+".away"+suffix))
	}
	other := openAt(t, path) // a new process starts a new file
	_, _, err = s.Create(t.Context(), claimed("b"))
	require.ErrorContains(t, err, "was replaced")
	_, created, err := other.Create(t.Context(), claimed("b"))
	require.NoError(t, err)
	require.True(t, created)
}

func TestAReadOnlyFileIsRefusedWhenItIsWritten(t *testing.T) {
	if os.Getuid() == 0 {
		// Root writes to any file: an immutable one stands for it.
		dir := mountTmpfs(t, "1m")
		path := filepath.Join(dir, "x.db")
		require.NoError(t, openAt(t, path).Close())
		require.NoError(t, exec.Command("mount", "-o", "remount,ro", dir).Run())
		_, err := Open(t.Context(), path)
		require.Error(t, err)
		require.NoError(t, exec.Command("mount", "-o", "remount,rw", dir).Run())
		openAt(t, path)
		return
	}
	path := filepath.Join(t.TempDir(), "x.db")
	require.NoError(t, openAt(t, path).Close())
	require.NoError(t, os.Chmod(path, 0o400))
	_, err := Open(t.Context(), path)
	require.Error(t, err)
}

func mountTmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size="+size, "tmpfs", dir).CombinedOutput(); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("mount: %v: %s", err, out)
		}
		t.Skipf("mount: %v: %s", err, out)
	}
	t.Cleanup(func() { exec.Command("umount", "-l", dir).Run() })
	return dir
}

func TestAFullDiskRefusesClaimsAndServesWhatItHas(t *testing.T) {
	dir := mountTmpfs(t, "2m")
	s := openAt(t, filepath.Join(dir, "x.db"))
	var acknowledged []string
	var err error
	for n := 0; err == nil && n < 10_000; n++ {
		rec := claimed(fmt.Sprint("id-", n))
		rec.Request = &oncehttp.SavedRequest{Method: "POST", URL: "https://pay.example/", Body: []byte(strings.Repeat("x", 4096))}
		var created bool
		if _, created, err = s.Create(t.Context(), rec); err == nil && created {
			acknowledged = append(acknowledged, rec.ID)
		}
	}
	require.Error(t, err)
	require.NotEmpty(t, acknowledged)
	t.Logf("%d claims until: %v", len(acknowledged), err)
	for _, id := range acknowledged {
		_, err := s.Get(t.Context(), id)
		require.NoError(t, err, id)
	}
	n := len(acknowledged)
	_, err = s.Get(t.Context(), fmt.Sprint("id-", n))
	require.ErrorIs(t, err, oncehttp.ErrNotFound, "the refused one is not half there")
	require.NoError(t, exec.Command("mount", "-o", "remount,size=8m", dir).Run())
	_, created, err := s.Create(t.Context(), claimed("after"))
	require.NoError(t, err, "with space again it goes on")
	require.True(t, created)
}

func TestTwoOpensAtOnceMakeOneFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	const n = 8
	errs := make(chan error, n)
	for i := range n {
		go func() {
			s, err := Open(context.Background(), path)
			if err == nil {
				_, _, err = s.Create(context.Background(), claimed(fmt.Sprint(i)))
				err = errors.Join(err, s.Close())
			}
			errs <- err
		}()
	}
	for range n {
		require.NoError(t, <-errs)
	}
	recs, err := openAt(t, path).List(t.Context(), oncehttp.Query{})
	require.NoError(t, err)
	require.Len(t, recs, n)
}

var unsettled = []oncehttp.State{oncehttp.StateReserved, oncehttp.StateSending, oncehttp.StateOpen, oncehttp.StateUnknown}

// cases.md A63: a transaction that read first and wrote then failed at once as
// "database is locked", past the busy timeout.
func TestNoLockReachesTheCallersOfOneFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	handles := []*Store{openAt(t, path), openAt(t, path)} // as two processes would
	var all sync.WaitGroup
	var won atomic.Int32
	for g := range 50 {
		all.Go(func() {
			s := handles[g%2]
			for i := range 20 {
				rec, created, err := s.Create(t.Context(), claimed(fmt.Sprint(g, "-", i)))
				if assert.NoError(t, err) && assert.True(t, created) {
					rec.State = oncehttp.StateDone
					_, err = s.Update(t.Context(), rec)
					assert.NoError(t, err)
				}
			}
			_, created, err := s.Create(t.Context(), claimed("the same"))
			assert.NoError(t, err)
			if created {
				won.Add(1)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 1, won.Load(), "the same key has one winner")
}

// List and Prune must not read what they do not return: with years of settled
// records in the file, recovery would take for ever.
func TestListAndPruneWalkTheirIndexes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	require.NoError(t, openAt(t, path).Close())
	watched := &spy{dsn: "file:" + path}
	db := sql.OpenDB(watched)
	t.Cleanup(func() { db.Close() })
	s, err := sqlstore.Open(t.Context(), db, sqlstore.SQLite, sqlstore.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	_, err = db.Exec(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)
		INSERT INTO oncehttp_intents SELECT printf('%064d', i), 'u', '', '', 'k', CASE WHEN i % 1000 = 0 THEN 'open' ELSE 'done' END, 'o 1', 1,
		NULL, NULL, printf('2026-01-01T00:00:00.%06dZ', i), printf('2026-02-01T00:00:00.%06dZ', i), 1, 200,
		'0000000000000000000000000000000000000000000000000000000000000000', '', NULL, NULL FROM n`)
	require.NoError(t, err)
	for _, q := range []oncehttp.Query{
		{States: unsettled},
		{States: unsettled, Upstream: "u", Before: time.Now()},
		{States: unsettled, After: oncehttp.Cursor{Updated: time.Now(), ID: "x"}},
	} {
		_, err := s.List(t.Context(), q)
		require.NoError(t, err)
	}
	statements := append(watched.with("ORDER BY updated, id LIMIT"), watched.with("DELETE")...)
	require.GreaterOrEqual(t, len(statements), 4)
	for _, statement := range statements {
		args := make([]any, strings.Count(statement, "?"))
		rows, err := db.Query("EXPLAIN QUERY PLAN "+statement, args...)
		require.NoError(t, err)
		var plan []string
		for rows.Next() {
			var id, parent, unused int
			var detail string
			require.NoError(t, rows.Scan(&id, &parent, &unused, &detail))
			plan = append(plan, detail)
		}
		require.NoError(t, rows.Close())
		text := strings.Join(plan, "; ")
		require.Contains(t, text, "USING INDEX", statement)
		require.NotContains(t, text, "SCAN oncehttp_intents", statement)
		require.NotContains(t, text, "TEMP B-TREE", statement)
	}
	t.Logf("%d statements; the last: %s", len(statements), statements[len(statements)-1])
	recs, err := s.List(t.Context(), oncehttp.Query{States: []oncehttp.State{oncehttp.StateOpen}, Limit: 1000})
	require.NoError(t, err)
	require.Len(t, recs, 100)
	n, err := s.Prune(t.Context(), time.Date(2026, 2, 1, 0, 0, 0, 50_001_000, time.UTC), 1000)
	require.NoError(t, err)
	require.Equal(t, 1000, n)
}
