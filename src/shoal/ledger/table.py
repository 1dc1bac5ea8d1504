"""The ledger: the chain as a table of the database that holds whatever changes together with it.

Invariants: an appended entry is never changed, reordered or removed, and its position is part of what is signed. It is
appended in the caller's transaction if one is open. Entries are read page by page, so no cursor stays open.
Left out: several writers: a database has one coordinator (`coordinator/state`), and a ledger has one key.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from shoal.ledger.chain import JSON, Entry, LedgerError, canonical_json, check_head, line, next_entry
from shoal.ledger.connection import Connection
from shoal.protocol.identity import Identity

PAGE_ROWS = 1000
LINES = 100  # of a page that is sent
BEFORE_ALL = -(2**63)  # the smallest seq that a row could be given
COLUMNS = ", ".join(Entry.model_fields)
MARKS = ", ".join("?" for _ in Entry.model_fields)


class Ledger:
    def __init__(
        self, connection: Connection, identity: Identity | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Open or create what `identity` writes; None: only read it. Raises LedgerError if another key wrote it."""
        self._connection, self._identity, self._clock = connection, identity, clock
        if identity is None:
            return
        if not connection.has_table("ledger"):
            with connection.transaction():
                for statement in connection.ledger_schema:
                    connection.change(statement)
        check_head(self.head(), identity.public)

    def append(self, kind: str, body: Mapping[str, JSON]) -> Entry:
        """Add an entry and return it. Part of the caller's transaction if one is open. Raises LedgerError."""
        if self._identity is None:
            raise LedgerError("a ledger that is only read is not changed")
        text = canonical_json(body)
        with self._connection.transaction():
            entry = next_entry(self.head(), kind, text, int(self._clock()), self._identity)
            values = entry.model_dump().values()
            self._connection.change(f"INSERT INTO ledger ({COLUMNS}) VALUES ({MARKS})", *values)
        return entry

    def entries(self, since: int = 0, kind: str | None = None) -> Iterator[Entry]:
        """The entries with seq > since, oldest first, unverified; only of `kind` if it is given. Raises LedgerError."""
        where, more = ("seq > ?", []) if kind is None else ("seq > ? AND kind = ?", [kind])
        while page := self._page(f"{where} ORDER BY seq", since, *more):
            yield from page
            since = page[-1].seq

    def every_row(self) -> Iterator[Entry]:
        """Likewise, also what no ledger would have appended."""
        return self.entries(BEFORE_ALL)

    def head(self) -> Entry | None:
        """The newest entry, None in an empty ledger."""
        newest = self._page("seq = (SELECT max(seq) FROM ledger)")
        return newest[0] if newest else None

    def lines(self, since: int) -> Iterator[bytes]:
        """The entries with seq > since as they are exported, one line of JSON each, without a look at them."""
        select = f"SELECT {COLUMNS} FROM ledger WHERE seq > ? ORDER BY seq LIMIT {LINES}"
        while page := self._connection.rows(select, since):
            yield from (line(*row) for row in page)
            since = page[-1][0]

    def _page(self, where: str, *arguments: object) -> list[Entry]:
        select = f"SELECT {COLUMNS} FROM ledger WHERE {where} LIMIT {PAGE_ROWS}"
        return [_entry(row) for row in self._connection.rows(select, *arguments)]


def _entry(row: tuple[Any, ...]) -> Entry:
    try:
        return Entry.model_validate(dict(zip(Entry.model_fields, row, strict=True)))
    except ValidationError as error:
        raise LedgerError(f"ledger entry {row[0]} is damaged in the database") from error
