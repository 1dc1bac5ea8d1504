"""The ledger as a table: what its backends in SQLite and PostgreSQL do alike.

Invariant: an entry is appended in the caller's transaction if one is open, so the coordinator's tables and the ledger change
together; and read page by page, so that no cursor stays open.
Called by `sqlite` and `postgres`, which say how a statement runs and what a transaction is; `read_all` also by the audit,
`read_lines` by the coordinator.
Statements use `?` for arguments. Left out: thread safety (the caller's).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pydantic import ValidationError

from shoal.ledger.chain import canonical_json, check_head, check_kind, line, next_entry
from shoal.ledger.interface import JSON, Entry, LedgerError
from shoal.protocol.identity import Identity

PAGE_ROWS = 1000
LINES = 100  # of a page that is sent
BEFORE_ALL = -(2**63)  # the smallest seq that a row could be given
COLUMNS = ", ".join(Entry.model_fields)
MARKS = ", ".join("?" for _ in Entry.model_fields)
Rows = Callable[[str, Sequence[object]], Sequence[tuple[Any, ...]]]  # a statement and its arguments


class TableLedger(ABC):
    """The ledger of one coordinator, in a table that is there."""

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        """LedgerError if another key wrote it."""
        self._identity = identity
        self._clock = clock
        check_head(self.head(), identity.public)

    @abstractmethod
    def _rows(self, sql: str, arguments: Sequence[object]) -> Sequence[tuple[Any, ...]]: ...

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[object]:
        """Within one that is open, nothing of its own."""

    def append(self, kind: str, body: Mapping[str, JSON]) -> Entry:
        check_kind(kind)
        text = canonical_json(body)
        with self._transaction():
            entry = next_entry(self.head(), kind, text, int(self._clock()), self._identity)
            values = tuple(entry.model_dump().values())
            self._rows(f"INSERT INTO ledger ({COLUMNS}) VALUES ({MARKS}) RETURNING seq", values)
        return entry

    def entries(self, since: int = 0, kind: str | None = None) -> Iterator[Entry]:
        return read_since(self._rows, since, kind)

    def head(self) -> Entry | None:
        newest = _page(self._rows, "seq = (SELECT max(seq) FROM ledger)", [])
        return newest[0] if newest else None


def read_all(rows: Rows) -> Iterator[Entry]:
    """Every row of the table in order, unverified, of a database that may be open for reading only. Raises LedgerError."""
    return read_since(rows, BEFORE_ALL)


def read_since(rows: Rows, since: int, kind: str | None = None) -> Iterator[Entry]:
    """Likewise, the rows with seq > since; of one kind only if `kind` is given."""
    where, more = ("seq > ?", []) if kind is None else ("seq > ? AND kind = ?", [kind])
    while page := _page(rows, f"{where} ORDER BY seq", [since, *more]):
        yield from page
        since = page[-1].seq


def read_lines(rows: Rows, since: int) -> Iterator[bytes]:
    """The rows with seq > since as they are exported, one line of JSON each, without a look at them."""
    while page := rows(f"SELECT {COLUMNS} FROM ledger WHERE seq > ? ORDER BY seq LIMIT {LINES}", [since]):
        yield from (line(*row) for row in page)
        since = page[-1][0]


def _page(rows: Rows, where: str, arguments: Sequence[object]) -> list[Entry]:
    return [_entry(row) for row in rows(f"SELECT {COLUMNS} FROM ledger WHERE {where} LIMIT {PAGE_ROWS}", arguments)]


def _entry(row: tuple[Any, ...]) -> Entry:
    try:
        return Entry.model_validate(dict(zip(Entry.model_fields, row, strict=True)))
    except ValidationError as error:
        raise LedgerError(f"ledger entry {row[0]} is damaged in the database") from error
