"""The ledger in SQLite: the chain in one table of the coordinator's own database.

Invariant: the database itself refuses UPDATE, DELETE and any INSERT that does not extend the head.
Called by the coordinator's process; everything else uses `interface`. What it shares with PostgreSQL is in `table`.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.ledger.table import TableLedger
from shoal.protocol.identity import Identity

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


class SqliteLedger(TableLedger):
    """The ledger of one coordinator."""

    def __init__(self, connection: sqlite3.Connection, identity: Identity, *, clock: Callable[[], float]) -> None:
        """Open or create the ledger. LedgerError if another key wrote it."""
        if connection.isolation_level is not None:
            raise ValueError("open the connection with isolation_level=None, so that transactions are the caller's")
        self._connection = connection
        for statement in (TABLE, *TRIGGERS):
            connection.execute(statement)
        super().__init__(identity, clock)

    def _rows(self, sql: str, arguments: Sequence[object]) -> Sequence[tuple[Any, ...]]:
        return self._connection.execute(sql, arguments).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._connection.in_transaction:
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself rolls back when the disk is full
                self._connection.execute("ROLLBACK")
            raise
