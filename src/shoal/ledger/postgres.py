"""The ledger in PostgreSQL: the same chain, in one table of the coordinator's own database.

Invariant: the database itself refuses UPDATE, DELETE, TRUNCATE and any INSERT that does not extend the head.
Called by the coordinator's process; everything else uses `interface`. What it shares with SQLite is in `table`. Needs the
extra `postgres`. Left out: several writers: the session that leads is the only one (`coordinator/state/postgres`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from shoal.ledger.table import TableLedger
from shoal.protocol.identity import Identity

SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger (
    seq BIGINT PRIMARY KEY, time_s BIGINT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    previous TEXT NOT NULL, digest TEXT NOT NULL, signature TEXT NOT NULL);
CREATE OR REPLACE FUNCTION ledger_refuses() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN RAISE EXCEPTION ''the ledger is append-only''; END';
CREATE OR REPLACE FUNCTION ledger_extends() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN IF NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger) THEN
        RAISE EXCEPTION ''the ledger is append-only: an entry must extend its head''; END IF; RETURN NEW; END';
CREATE OR REPLACE TRIGGER ledger_no_change BEFORE UPDATE OR DELETE ON ledger
    FOR EACH ROW EXECUTE FUNCTION ledger_refuses();
CREATE OR REPLACE TRIGGER ledger_no_truncate BEFORE TRUNCATE ON ledger
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuses();
CREATE OR REPLACE TRIGGER ledger_extends_head BEFORE INSERT ON ledger
    FOR EACH ROW EXECUTE FUNCTION ledger_extends();
"""


class PostgresLedger(TableLedger):
    """The ledger of one coordinator."""

    def __init__(
        self, connection: psycopg.Connection[tuple[Any, ...]], identity: Identity, *, clock: Callable[[], float]
    ) -> None:
        """Open or create the ledger. LedgerError if another key wrote it."""
        if not connection.autocommit:
            raise ValueError("open the connection with autocommit=True, so that transactions are the caller's")
        self._connection = connection
        if connection.execute("SELECT to_regclass('ledger')").fetchone() == (None,):
            connection.execute(SCHEMA)  # one transaction
        super().__init__(identity, clock)

    def _rows(self, sql: str, arguments: Sequence[object]) -> Sequence[tuple[Any, ...]]:
        return self._connection.execute(sql.replace("?", "%s").encode(), arguments).fetchall()

    def _transaction(self) -> AbstractContextManager[object]:
        if self._connection.info.transaction_status == TransactionStatus.INTRANS:
            return nullcontext()
        return self._connection.transaction()
