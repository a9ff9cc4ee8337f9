package main

import (
	"context"
	"database/sql"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/store/sqlitestore"
)

func read(t *testing.T, path string) string {
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

// killedShop leaves the store of a shop that had claimed an intent.
func killedShop(t *testing.T) (path string) {
	path = filepath.Join(t.TempDir(), "intents.db")
	s := shop{Scene: "killed before sending", Store: path, StopAt: beforeSending}
	require.NoError(t, s.killed(t.Context(), nil))
	return path
}

func TestTheReadmesQueryFindsWhatHasNotEnded(t *testing.T) {
	_, query, ok := strings.Cut(read(t, "../../README.md"), "```sql\n")
	require.True(t, ok)
	query, _, _ = strings.Cut(query, "```")
	db, err := sql.Open("sqlite", killedShop(t)) // any driver or tool
	require.NoError(t, err)
	defer db.Close()
	var intent, state, upstream, owner string
	var attempts int
	var firstSent sql.NullString
	require.NoError(t, db.QueryRow(query).Scan(&intent, &state, &upstream, &attempts, &firstSent, &owner))
	require.Equal(t, []string{"charge:order-1001", "sending", provider}, []string{intent, state, upstream})
	require.Regexp(t, "^shop ", owner)
}

// pruning is the README's.
func pruning(ctx context.Context, store *sqlitestore.Store) {
	for range time.Tick(time.Minute) { // in a goroutine of its own
		if _, err := store.Prune(ctx, time.Now(), 1000); err != nil { // 1,000 at most: claims wait for it
			log.Print("pruning intents: ", err)
		}
	}
}

func TestTheReadmesPruningCompiles(t *testing.T) {
	_ = pruning
	_, code, _ := strings.Cut(read(t, "docs_test.go"), "Store) {\n\tfor range")
	code, _, _ = strings.Cut(code, "\n}\n")
	require.Contains(t, read(t, "../../README.md"), "for range"+strings.ReplaceAll(code, "\n\t", "\n"))
}

// A backup of the file alone is an older file than it seems.
func TestACopyWithoutItsWALLacksTheNewestClaims(t *testing.T) {
	path := killedShop(t)
	dir := t.TempDir()
	alone, whole := filepath.Join(dir, "alone.db"), filepath.Join(dir, "whole.db")
	require.NoError(t, os.WriteFile(alone, []byte(read(t, path)), 0o600))
	db, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	defer db.Close()
	_, err = db.Exec("VACUUM INTO ?", whole)
	require.NoError(t, err)
	for path, claims := range map[string]int{alone: 0, whole: 1} {
		store, err := sqlitestore.Open(t.Context(), path)
		require.NoError(t, err)
		recs, err := store.List(t.Context(), oncehttp.Query{})
		require.NoError(t, err)
		require.Len(t, recs, claims, path)
		require.NoError(t, store.Close())
	}
}

// A sentence of the docs names the test that holds it.
func TestEveryTestThatTheDocsNameExists(t *testing.T) {
	var tests strings.Builder
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			tests.WriteString(read(t, path))
		}
		return err
	}))
	names := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(read(t, "../../docs/what-survives.md"), -1)
	require.Greater(t, len(names), 30)
	for _, n := range names {
		require.Contains(t, tests.String(), "func "+n[1]+"(t *testing.T)")
	}
}
