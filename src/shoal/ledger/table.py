"""The ledger: the hash chain as a table in the coordinator's database.

Invariants: an appended entry is never changed, reordered or removed, and the signature covers its position. An append joins
the caller's transaction if one is open. Entries are read page by page, so no cursor stays open.
Left out: several writers, because a database has one coordinator (`coordinator/folder`) and a ledger has one key.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from shoal.ledger.chain import JSON, Entry, LedgerError, canonical_json, check_head, next_entry
from shoal.ledger.connection import Connection
from shoal.protocol.identity import Identity

PAGE_ROWS = 1000
LINES = 100  # entries per page of `lines`
FIELDS = tuple(Entry.model_fields)
COLUMNS = ", ".join(FIELDS)
MARKS = ", ".join("?" for _ in FIELDS)


class Ledger:
    def __init__(
        self, connection: Connection, identity: Identity | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Open or create a ledger. Without `identity`, open it read-only. Raise LedgerError if another key wrote it."""
        self._connection, self._identity, self._clock = connection, identity, clock
        if identity is None:
            return
        if not connection.has_table("ledger"):
            with connection.transaction():
                for statement in connection.ledger_schema:
                    connection.change(statement)
        check_head(self.head(), identity.public)

    def append(self, kind: str, body: Mapping[str, JSON]) -> Entry:
        """Append an entry and return it, within the caller's transaction if one is open. Raise LedgerError."""
        if self._identity is None:
            raise LedgerError("this ledger was opened read-only")
        text = canonical_json(body)
        with self._connection.transaction():
            entry = next_entry(self.head(), kind, text, int(self._clock()), self._identity)
            values = entry.model_dump().values()
            self._connection.change(f"INSERT INTO ledger ({COLUMNS}) VALUES ({MARKS})", *values)
        return entry

    def entries(self, since: int = 0, kind: str | None = None) -> Iterator[Entry]:
        """Yield entries with seq > `since`, oldest first, unverified; only those of `kind` if given. Raise LedgerError."""
        where, more = ("seq > ?", []) if kind is None else ("seq > ? AND kind = ?", [kind])
        while page := self._page(f"{where} ORDER BY seq", since, *more):
            yield from page
            since = page[-1].seq

    def every_row(self) -> Iterator[Entry]:
        """Yield all rows, even those with an impossible seq, which only tampering can add. Raise LedgerError."""
        return self.entries(since=-(2**63))

    def head(self) -> Entry | None:
        """Return the newest entry; None if the ledger is empty."""
        newest = self._page("seq = (SELECT max(seq) FROM ledger)")
        return newest[0] if newest else None

    def lines(self, since: int) -> Iterator[bytes]:
        """Yield the entries with seq > `since` as JSON lines, as in an export, without validating them."""
        select = f"SELECT {COLUMNS} FROM ledger WHERE seq > ? ORDER BY seq LIMIT {LINES}"
        while page := self._connection.rows(select, since):
            yield from (to_json(dict(zip(FIELDS, row, strict=True))) + b"\n" for row in page)
            since = page[-1][0]

    def _page(self, where: str, *arguments: object) -> list[Entry]:
        select = f"SELECT {COLUMNS} FROM ledger WHERE {where} LIMIT {PAGE_ROWS}"
        return [_entry(row) for row in self._connection.rows(select, *arguments)]


def _entry(row: tuple[Any, ...]) -> Entry:
    try:
        return Entry.model_validate(dict(zip(FIELDS, row, strict=True)))
    except ValidationError as error:
        raise LedgerError(f"ledger entry {row[0]} is damaged in the database") from error
