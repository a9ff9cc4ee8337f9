// Package sqlitestore is the embedded oncehttp.KeyStore: one SQLite file, no
// server, no cgo. Several processes on one host may share it, and any SQLite
// tool can read it while they run. The file, its log ("-wal") and "-shm" belong
// together: to copy a store, use VACUUM INTO; to put a copy back, stop the
// processes and delete the other two.
//
//	store, err := sqlitestore.Open(ctx, "/var/lib/shop/intents.db")
//	defer store.Close()
//	t := &oncehttp.Transport{Store: store}
package sqlitestore

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/oncehttp/oncehttp/store/sqlstore"
	_ "modernc.org/sqlite" // pure Go SQLite, the driver "sqlite"
)

// Store is a oncehttp.KeyStore on one SQLite file. An acknowledged claim
// survives the process, and the power too if the disk keeps what it was told
// to flush: WAL with synchronous=FULL, read back by Open.
type Store struct {
	*sqlstore.Store
	db   *sql.DB
	file os.FileInfo
	path string
}

// Open opens the store at path, and creates it, readable only by its owner, if
// there is no such file; its folder must exist. A file that is empty, cut
// short, not SQLite, another application's or of a newer version is refused: a
// store that has forgotten its keys would charge again. Where another process
// has locked the file, Open waits until ctx ends.
func Open(ctx context.Context, path string) (*Store, error) {
	s, err := open(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("sqlitestore: %s: %w", path, err)
	}
	return s, nil
}

func open(ctx context.Context, path string) (*Store, error) {
	if path == "" || strings.Contains(path, ":memory:") || strings.HasPrefix(path, "file:") {
		return nil, errors.New("a path to a file is needed: a database in memory, or a DSN, would not survive a crash")
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		if log, err := os.Stat(path + "-wal"); err == nil && log.Size() > 0 {
			return nil, errors.New("the file is gone but its log, -wal, is there: the two belong together; restore the file")
		}
		if err = create(ctx, path); err == nil {
			info, err = os.Stat(path)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := checkHeader(path); err != nil {
		return nil, err
	}
	db, err := connect(path, "journal_mode(WAL)")
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, file: info, path: path}
	s.Store, err = sqlstore.Open(ctx, db, sqlstore.SQLite, sqlstore.Options{BeforeWrite: s.inPlace})
	if err != nil {
		db.Close()
		return nil, err
	}
	return s, nil
}

// Close closes the file. Calls under way end first.
func (s *Store) Close() error {
	return errors.Join(s.Store.Close(), s.db.Close())
}

// inPlace fails if the file was deleted or replaced: claims written to it would
// be found by no one, least of all by this process after a restart.
func (s *Store) inPlace() error {
	now, err := os.Stat(s.path)
	if err != nil {
		return fmt.Errorf("sqlitestore: the file is gone: %w", err)
	}
	if !os.SameFile(s.file, now) {
		return fmt.Errorf("sqlitestore: %s was replaced by another file", s.path)
	}
	return nil
}

// connect opens the database by a URI, in which a path may hold any character.
func connect(path string, pragmas ...string) (*sql.DB, error) {
	q := url.Values{}
	for _, p := range append(pragmas, "busy_timeout(50)") {
		q.Add("_pragma", p)
	}
	u := url.URL{Scheme: "file", Path: filepath.ToSlash(path), RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", u.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(4) // one writes, the others read beside it
	return db, nil
}

// create makes the file under another name and then gives it its own, so that
// no one ever sees half of it. Two processes may do this at once: the one that
// comes second finds that there is a file, and uses that.
func create(ctx context.Context, path string) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	if err := tmp.Close(); err != nil {
		return err
	}
	db, err := connect(tmp.Name(), "synchronous(FULL)")
	if err != nil {
		return err
	}
	marks := fmt.Sprintf("PRAGMA application_id=%d; PRAGMA user_version=%d", sqlstore.ApplicationID, sqlstore.SchemaVersion)
	if _, err := db.ExecContext(ctx, sqlstore.SQLite.Schema()+marks); err != nil {
		db.Close()
		return err
	}
	if err := db.Close(); err != nil {
		return err
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes the new name durable. Where folders cannot be synced (Windows),
// the system does it by itself.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	if err := d.Sync(); err != nil && !errors.Is(err, fs.ErrInvalid) && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return nil
}

// checkHeader looks at the first 100 bytes, which have SQLite's own mark and
// ours: https://sqlite.org/fileformat2.html §1.3.
func checkHeader(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("it is a directory, or no regular file")
	}
	var h [100]byte
	n, err := io.ReadFull(f, h[:])
	switch {
	case n == 0 && errors.Is(err, io.EOF):
		return errors.New("the file is empty; if it held intents, restore it, and only otherwise delete it")
	case err != nil && n < len(h):
		return fmt.Errorf("the file is cut short or not SQLite: %d bytes", n)
	case string(h[:16]) != "SQLite format 3\x00":
		return errors.New("the file is not SQLite")
	case binary.BigEndian.Uint32(h[68:]) != sqlstore.ApplicationID:
		return errors.New("the file is another application's: its application_id is not oncehttp's")
	}
	pageSize := int64(binary.BigEndian.Uint16(h[16:]))
	if pageSize == 1 {
		pageSize = 65536
	}
	if info.Size() < pageSize || info.Size()%pageSize != 0 {
		return errors.New("the file is cut short: its size is not whole pages")
	}
	return nil
}
