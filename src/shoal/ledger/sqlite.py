"""The ledger in SQLite: the chain in one table of the coordinator's own database.

Invariant: the database itself refuses UPDATE, DELETE and any INSERT that does not extend the head. `append` takes part in
the caller's transaction, so the coordinator's tables and the ledger change together.
Called by the coordinator's process; everything else uses `interface`. The one file of this room that holds SQL.
Left out: thread safety (the caller's), PostgreSQL (other triggers, same table).
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping

from pydantic import ValidationError

from shoal.ledger.chain import canonical_json, check_head, check_kind, next_entry
from shoal.ledger.interface import JSON, Entry, LedgerError
from shoal.protocol.identity import Identity

PAGE_ROWS = 1000
BEFORE_ALL = -(2**63)  # the smallest seq that a row could be given

COLUMNS = ", ".join(Entry.model_fields)
TABLE = """
CREATE TABLE IF NOT EXISTS ledger (
    seq INTEGER PRIMARY KEY, time_s INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    previous TEXT NOT NULL, digest TEXT NOT NULL, signature TEXT NOT NULL)
"""
# INSERT OR REPLACE deletes without firing a delete trigger, so a trigger checks inserts as well.
TRIGGERS = (
    "CREATE TRIGGER IF NOT EXISTS ledger_no_update BEFORE UPDATE ON ledger"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "CREATE TRIGGER IF NOT EXISTS ledger_no_delete BEFORE DELETE ON ledger"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "CREATE TRIGGER IF NOT EXISTS ledger_extends_head BEFORE INSERT ON ledger"
    " WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM ledger)"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: an entry must extend its head'); END",
)


class SqliteLedger:
    """The ledger of one coordinator."""

    def __init__(self, connection: sqlite3.Connection, identity: Identity, *, clock: Callable[[], float]) -> None:
        """Open or create the ledger. LedgerError if another key wrote it."""
        if connection.isolation_level is not None:
            raise ValueError("open the connection with isolation_level=None, so that transactions are the caller's")
        self._connection = connection
        self._identity = identity
        self._clock = clock
        for statement in (TABLE, *TRIGGERS):
            connection.execute(statement)
        check_head(self.head(), identity.public)

    def append(self, kind: str, body: Mapping[str, JSON]) -> Entry:
        check_kind(kind)
        text = canonical_json(body)
        if self._connection.in_transaction:
            return self._append(kind, text)
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            entry = self._append(kind, text)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself rolls back when the disk is full
                self._connection.execute("ROLLBACK")
            raise
        return entry

    def entries(self, since: int = 0, kind: str | None = None) -> Iterator[Entry]:
        """Reads page by page, so that no cursor stays open."""
        while page := self._read("seq > ? AND (? IS NULL OR kind = ?) ORDER BY seq", since, kind, kind):
            yield from page
            since = page[-1].seq

    def head(self) -> Entry | None:
        newest = self._read("seq = (SELECT max(seq) FROM ledger)")
        return newest[0] if newest else None

    def _append(self, kind: str, body: str) -> Entry:
        entry = next_entry(self.head(), kind, body, int(self._clock()), self._identity)
        values = tuple(entry.model_dump().values())
        self._connection.execute(f"INSERT INTO ledger ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        return entry

    def _read(self, where: str, *values: object) -> list[Entry]:
        return _read(self._connection, where, *values)


def read_all(connection: sqlite3.Connection) -> Iterator[Entry]:
    """Every row of the table in order, unverified, of a database that may be open for reading only. Raises LedgerError."""
    since = BEFORE_ALL
    while page := _read(connection, "seq > ? ORDER BY seq", since):
        yield from page
        since = page[-1].seq


def _read(connection: sqlite3.Connection, where: str, *values: object) -> list[Entry]:
    statement = f"SELECT {COLUMNS} FROM ledger WHERE {where} LIMIT {PAGE_ROWS}"
    return [read_entry(row) for row in connection.execute(statement, values).fetchall()]


def read_entry(row: tuple[object, ...]) -> Entry:
    try:
        return Entry.model_validate(dict(zip(Entry.model_fields, row, strict=True)))
    except ValidationError as error:
        raise LedgerError(f"ledger entry {row[0]} is damaged in the database") from error
