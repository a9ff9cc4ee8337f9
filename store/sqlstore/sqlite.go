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
	// ready reads the settings that durability hangs on, and refuses weak ones.
	ready func(ctx context.Context, db *sql.DB, conn *sql.Conn, allowWeak bool) error
	// lazy and durable switch the connection between commits that may be lost
	// with the power and commits that may not.
	lazy, durable string
	// busy reports that the database was locked by someone else: try again.
	busy func(error) bool
}

// ApplicationID and SchemaVersion mark a SQLite file as one of this package's.
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
	s := strings.Join(d.schema, ";\n\n") + ";\n"
	if d.name == "SQLite" {
		s += fmt.Sprintf("\nPRAGMA application_id=%d;\nPRAGMA user_version=%d;\n", ApplicationID, SchemaVersion)
	}
	return s
}

// sqliteReady checks the mark, creates what is missing, and reads back what
// durability hangs on: journal_mode is the file's, synchronous the connection's.
func sqliteReady(ctx context.Context, _ *sql.DB, conn *sql.Conn, allowWeak bool) error {
	number := func(pragma string) (n int64, err error) {
		err = conn.QueryRowContext(ctx, "PRAGMA "+pragma).Scan(&n)
		return n, err
	}
	id, err := number("application_id")
	if err != nil {
		return err
	}
	version, err := number("user_version")
	if err != nil {
		return err
	}
	tables, err := number("page_count")
	switch {
	case err != nil:
		return err
	case id == 0 && version == 0 && tables == 0:
		if _, err := conn.ExecContext(ctx, fmt.Sprintf("PRAGMA application_id=%d", ApplicationID)); err != nil {
			return err
		}
		if _, err := conn.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version=%d", SchemaVersion)); err != nil {
			return err
		}
	case id != ApplicationID:
		return errors.New("the file is another application's: its application_id is not oncehttp's")
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
	if _, err := conn.ExecContext(ctx, sqliteDurable); err != nil {
		return err
	}
	level, err := number("synchronous")
	if err != nil {
		return err
	}
	if level < 2 && !allowWeak {
		return fmt.Errorf("synchronous is %d, not FULL or EXTRA: acknowledged claims could be lost with the power", level)
	}
	return nil
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
