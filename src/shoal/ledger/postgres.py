"""The ledger in PostgreSQL: the same chain, in one table of the coordinator's own database.

Invariant: the database itself refuses UPDATE, DELETE, TRUNCATE and any INSERT that does not extend the head. `append` takes
part in the caller's transaction, so the coordinator's tables and the ledger change together.
Called by the coordinator's process; everything else uses `interface`. Needs the extra `postgres`.
Left out: several writers: the session that leads is the only one (`coordinator.lead`).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from shoal.ledger.chain import canonical_json, check_head, check_kind, next_entry
from shoal.ledger.interface import JSON, Entry
from shoal.ledger.sqlite import read_entry
from shoal.protocol.identity import Identity

PAGE_ROWS = 1000
COLUMNS = ", ".join(Entry.model_fields)
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


class PostgresLedger:
    """The ledger of one coordinator."""

    def __init__(
        self, connection: psycopg.Connection[tuple[Any, ...]], identity: Identity, *, clock: Callable[[], float]
    ) -> None:
        """Open or create the ledger. LedgerError if another key wrote it."""
        if not connection.autocommit:
            raise ValueError("open the connection with autocommit=True, so that transactions are the caller's")
        self._connection = connection
        self._identity = identity
        self._clock = clock
        if connection.execute("SELECT to_regclass('ledger')").fetchone() == (None,):
            connection.execute(SCHEMA)  # one transaction
        check_head(self.head(), identity.public)

    def append(self, kind: str, body: Mapping[str, JSON]) -> Entry:
        check_kind(kind)
        text = canonical_json(body)
        if self._connection.info.transaction_status == TransactionStatus.INTRANS:
            return self._append(kind, text)
        with self._connection.transaction():
            return self._append(kind, text)

    def entries(self, since: int = 0, kind: str | None = None) -> Iterator[Entry]:
        """Reads page by page, so that no cursor stays open."""
        only = "" if kind is None else " AND kind = %s"
        while page := self._read(f"seq > %s{only} ORDER BY seq", since, *([kind] if only else [])):
            yield from page
            since = page[-1].seq

    def head(self) -> Entry | None:
        newest = self._read("seq = (SELECT max(seq) FROM ledger)")
        return newest[0] if newest else None

    def _append(self, kind: str, body: str) -> Entry:
        entry = next_entry(self.head(), kind, body, int(self._clock()), self._identity)
        values = tuple(entry.model_dump().values())
        self._connection.execute(f"INSERT INTO ledger ({COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s)".encode(), values)
        return entry

    def _read(self, where: str, *values: object) -> list[Entry]:
        statement = f"SELECT {COLUMNS} FROM ledger WHERE {where} LIMIT {PAGE_ROWS}"
        return [read_entry(row) for row in self._connection.execute(statement.encode(), values).fetchall()]
