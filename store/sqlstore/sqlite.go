package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
)

// A Dialect is the SQL of one kind of database.
type Dialect struct {
	name   string
	schema []string
	begin  string
	// ready checks what is the database's, and refuses weak settings.
	ready func(ctx context.Context, conn *sql.Conn, allowWeak bool) error
	// lazy and durable switch the connection between commits that may be lost
	// with the power and commits that may not. They are never prepared: SQLite
	// carries out a PRAGMA synchronous while it is being prepared, and a driver
	// that prepares early would leave the last one in force.
	lazy, durable string
	// safe reads back that durable is in force.
	safe func(ctx context.Context, conn *sql.Conn) error
	// damaged reports that the database is not whole.
	damaged func(error) bool
	// busy reports that the database was locked by someone else: try again.
	busy func(error) bool
}

// ApplicationID and SchemaVersion mark a SQLite file that is nothing but a store:
// PRAGMA application_id and user_version. In a database of the caller's own they
// are the caller's.
const (
	ApplicationID = 0x6f6e6365 // "once"
	SchemaVersion = 1
)

// SQLite is for SQLite 3.24 and later, by any driver. The database must be in
// WAL mode; Open sets synchronous=FULL on the connection that writes.
var SQLite = Dialect{
	name: "SQLite",
	schema: []string{
		`CREATE TABLE IF NOT EXISTS oncehttp_intents (
	id          TEXT    NOT NULL PRIMARY KEY,
	upstream    TEXT    NOT NULL,
	scope       TEXT    NOT NULL,
	intent      TEXT    NOT NULL,
	key         TEXT    NOT NULL,
	state       TEXT    NOT NULL, -- reserved, sending, done, rejected, notsent, open, unknown
	owner       TEXT    NOT NULL,
	version     INTEGER NOT NULL,
	lease       TEXT,             -- times are UTC, YYYY-MM-DDThh:mm:ss.ffffffZ
	first_sent  TEXT,
	updated     TEXT,
	expires     TEXT,
	attempts    INTEGER NOT NULL,
	status      INTEGER NOT NULL,
	fingerprint TEXT    NOT NULL, -- SHA-256, hex
	note        TEXT    NOT NULL,
	request     TEXT,             -- JSON
	response    TEXT              -- JSON
)`,
		// Settled records are many and nobody lists them; the others are few.
		`CREATE INDEX IF NOT EXISTS oncehttp_unsettled ON oncehttp_intents (state, updated, id) WHERE ` + unsettled,
		`CREATE INDEX IF NOT EXISTS oncehttp_prunable ON oncehttp_intents (expires, id) WHERE ` + prunable,
	},
	begin:   "BEGIN IMMEDIATE",
	durable: sqliteDurable,
	lazy:    "PRAGMA synchronous=NORMAL",
	ready:   sqliteReady,
	safe:    sqliteSafe,
	damaged: sqliteDamaged,
	busy:    sqliteBusy,
}

const sqliteDurable = "PRAGMA synchronous=FULL"

// The predicates of the partial indexes. SQLite uses one only if the query
// holds the same words.
const (
	unsettled = `state IN ('reserved', 'sending', 'open', 'unknown')`
	prunable  = `state IN ('done', 'rejected', 'notsent', 'reserved')`
)

// Schema returns the statements that create the table, for those who migrate
// by hand. Running them again changes nothing.
func (d Dialect) Schema() string {
	return strings.Join(d.schema, ";\n\n") + ";\n"
}

// sqliteReady checks the version, if the file is marked as ours, and the
// journal mode, which is the file's.
func sqliteReady(ctx context.Context, conn *sql.Conn, allowWeak bool) error {
	id, err := pragma(ctx, conn, "application_id")
	if err != nil {
		return err
	}
	version, err := pragma(ctx, conn, "user_version")
	switch {
	case err != nil:
		return err
	case id != ApplicationID: // a database of the caller's own: its marks are not ours to read
	case version > SchemaVersion:
		return fmt.Errorf("the schema has version %d, this program knows %d: it was written by a newer one", version, SchemaVersion)
	case version < SchemaVersion:
		return fmt.Errorf("the schema has version %d, this program needs %d", version, SchemaVersion)
	}
	var mode string
	if err := conn.QueryRowContext(ctx, "PRAGMA journal_mode").Scan(&mode); err != nil {
		return err
	}
	if !strings.EqualFold(mode, "wal") && !allowWeak {
		return fmt.Errorf("journal_mode is %s, not WAL: acknowledged claims could be lost with the power", mode)
	}
	return nil
}

// sqliteSafe reads back that the connection's commits wait for the disk.
func sqliteSafe(ctx context.Context, conn *sql.Conn) error {
	level, err := pragma(ctx, conn, "synchronous")
	if err == nil && level < 2 {
		err = fmt.Errorf("synchronous is %d, not FULL or EXTRA: acknowledged claims could be lost with the power", level)
	}
	return err
}

func pragma(ctx context.Context, conn *sql.Conn, name string) (n int64, err error) {
	err = conn.QueryRowContext(ctx, "PRAGMA "+name).Scan(&n)
	return n, err
}

// sqliteDamaged knows SQLITE_CORRUPT and SQLITE_NOTADB.
func sqliteDamaged(err error) bool {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		primary := coded.Code() & 0xff
		return primary == 11 || primary == 26
	}
	return err != nil && strings.Contains(err.Error(), "database disk image is malformed")
}

// sqliteBusy knows SQLITE_BUSY and SQLITE_LOCKED by the code that drivers give,
// or by SQLite's own text.
func sqliteBusy(err error) bool {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		primary := coded.Code() & 0xff
		return primary == 5 || primary == 6
	}
	return err != nil && strings.Contains(err.Error(), "database is locked")
}
