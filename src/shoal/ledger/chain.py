"""The ledger: an append-only, hash-chained, signed log of what happened in the pool.

Invariant: entry n names the digest of entry n-1, and each digest is signed by the coordinator, so a copy of
the log cannot be changed, reordered or thinned out without the first wrong entry being found
(`verify_chain`). The database refuses UPDATE, DELETE and any INSERT that does not extend the head.

Called by the coordinator, which appends inside its own transaction so that its tables and the ledger change
together, and by the audit, which needs only an export and the coordinator's public key.

Kinds in use: registered, accepted, rejected, slashed, policy, trained.

Left out: a shortened log (cutting off the end leaves a valid chain: who must notice keeps an earlier head),
which run the log is of (the body of its first entry says), agreement between several writers (the EVM
ledger), evidence itself (bodies name it by digest).
"""

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ShoalError
from shoal.protocol.identity import Identity, verify

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

DOMAIN = "ledger"
GENESIS = "0" * 64
KIND = re.compile("[a-z][a-z_]{0,31}")
PAGE_ROWS = 1000

COLUMNS = "seq, time_s, kind, body, previous, digest, signature"
TABLE = """
CREATE TABLE IF NOT EXISTS ledger (
    seq INTEGER PRIMARY KEY, time_s INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    previous TEXT NOT NULL, digest TEXT NOT NULL, signature TEXT NOT NULL)
"""
# INSERT OR REPLACE deletes without firing a delete trigger, so inserts are watched as well.
TRIGGERS = (
    "CREATE TRIGGER IF NOT EXISTS ledger_no_update BEFORE UPDATE ON ledger"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "CREATE TRIGGER IF NOT EXISTS ledger_no_delete BEFORE DELETE ON ledger"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "CREATE TRIGGER IF NOT EXISTS ledger_extends_head BEFORE INSERT ON ledger"
    " WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM ledger)"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: an entry must extend its head'); END",
)


class LedgerError(ShoalError, ValueError):
    """A ledger that cannot be written or believed; `seq` names the first bad entry, if there is one."""

    def __init__(self, message: str, seq: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq


class Entry(BaseModel):
    """One line of the ledger, as stored, exported and verified."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    seq: int  # from 1, without gaps
    time_s: int  # the coordinator's clock; not promised to be monotonic
    kind: str
    body: str  # canonical JSON text of an object
    previous: str  # digest of entry seq - 1; GENESIS for the first
    digest: str  # entry_digest of all fields above, 64 hex characters
    signature: str  # of the digest, domain "ledger"


class Ledger:
    """The log of one coordinator in one SQLite database; thread safety is the caller's."""

    def __init__(self, connection: sqlite3.Connection, identity: Identity, *, clock: Callable[[], float]) -> None:
        """Open or create the log; LedgerError when another key wrote it."""
        if connection.isolation_level is not None:
            raise ValueError("open the connection with isolation_level=None, so that transactions are the caller's")
        self._connection = connection
        self._identity = identity
        self._clock = clock
        for statement in (TABLE, *TRIGGERS):
            connection.execute(statement)
        self._refuse_other_key()

    def append(self, kind: str, body: Mapping[str, JSON]) -> Entry:
        """Add an entry and return it: inside the caller's transaction if one is open, else in its own."""
        if not KIND.fullmatch(kind):
            raise LedgerError(f"bad ledger kind {kind!r}: 1 to 32 lowercase letters and underscores")
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
        """Yield the entries with seq > since, in order, read page by page so that no cursor stays open."""
        while page := self._read("seq > ? AND (? IS NULL OR kind = ?) ORDER BY seq", since, kind, kind):
            yield from page
            since = page[-1].seq

    def head(self) -> Entry | None:
        """Return the newest entry, None in an empty ledger."""
        newest = self._read("seq = (SELECT max(seq) FROM ledger)")
        return newest[0] if newest else None

    def export(self, path: Path) -> None:
        """Write all entries as JSON lines, replacing path whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.writelines(entry.model_dump_json().encode() + b"\n" for entry in self.entries())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _append(self, kind: str, body: str) -> Entry:
        head = self.head()
        seq = head.seq + 1 if head else 1
        previous = head.digest if head else GENESIS
        time_s = int(self._clock())
        digest = entry_digest(seq, time_s, kind, body, previous)
        signature = self._identity.sign(bytes.fromhex(digest), domain=DOMAIN)
        self._connection.execute(
            f"INSERT INTO ledger ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (seq, time_s, kind, body, previous, digest, signature),
        )
        return Entry(
            seq=seq,
            time_s=time_s,
            kind=kind,
            body=body,
            previous=previous,
            digest=digest,
            signature=signature,
        )

    def _read(self, where: str, *values: object) -> list[Entry]:
        rows = self._connection.execute(
            f"SELECT {COLUMNS} FROM ledger WHERE {where} LIMIT {PAGE_ROWS}", values
        ).fetchall()
        return [_entry(row) for row in rows]

    def _refuse_other_key(self) -> None:
        head = self.head()
        if head and _fault(head, head.seq, head.previous, self._identity.public):
            raise LedgerError(
                f"the ledger's head, entry {head.seq}, was not written by {self._identity.public}:"
                " use the key that the ledger was started with, or start a new ledger",
                head.seq,
            )


def verify_chain(entries: Iterable[Entry], public_key: str) -> None:
    """Check a whole log from its first entry; LedgerError names the first seq that is wrong or missing."""
    previous = GENESIS
    for seq, entry in enumerate(entries, start=1):
        if fault := _fault(entry, seq, previous, public_key):
            raise LedgerError(f"ledger entry {seq}: {fault}", seq)
        previous = entry.digest


def read_export(path: Path) -> Iterator[Entry]:
    """Yield the entries of an export; LedgerError for a line that is not one. Nothing is verified here."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield Entry.model_validate_json(line)
            except ValidationError as error:
                raise LedgerError(f"line {number} of {path} is not a ledger entry", number) from error


def entry_digest(seq: int, time_s: int, kind: str, body: str, previous: str) -> str:
    """Return the BLAKE3 digest, hex, of the canonical JSON of these five fields (body as a string)."""
    fields: dict[str, JSON] = {"seq": seq, "time_s": time_s, "kind": kind, "body": body, "previous": previous}
    return blake3(canonical_json(fields).encode("ascii")).hexdigest()


def canonical_json(value: Mapping[str, JSON]) -> str:
    """Return the one text of an object: sorted keys, no spaces, ASCII; LedgerError for what is not JSON."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"a ledger body must be JSON: {error}") from error


def _fault(entry: Entry, seq: int, previous: str, public_key: str) -> str | None:
    if entry.seq != seq:
        return f"entry {entry.seq} stands in its place"
    if entry.previous != previous:
        return "does not follow from the entry before it"
    if entry.digest != entry_digest(entry.seq, entry.time_s, entry.kind, entry.body, entry.previous):
        return "its content does not match its digest"
    if not verify(public_key, bytes.fromhex(entry.digest), entry.signature, domain=DOMAIN):
        return f"not signed by {public_key}"
    return None


def _entry(row: tuple[object, ...]) -> Entry:
    try:
        return Entry.model_validate(dict(zip(COLUMNS.split(", "), row, strict=True)))
    except ValidationError as error:
        raise LedgerError(f"ledger entry {row[0]} is damaged in the database") from error
