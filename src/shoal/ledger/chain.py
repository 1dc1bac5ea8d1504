"""The hash chain: how entries are hashed, linked, signed, verified and exported. `table` stores the entries.

Invariants: entry n holds the digest of entry n-1, and the coordinator signs each digest. If an entry in a copy is changed,
moved or removed, `verify_chain` names the first wrong entry. A head is the position and digest of the newest entry that
somebody has seen, printed as `SEQ:DIGEST`. A chain that contains a head also contains every entry before it, unchanged. So
anyone who keeps a head can detect that the ledger was truncated before it.

Left out: detecting truncation without a head (a log without its last entries is still a valid chain); which run the log
belongs to (its first entry names it); several writers; the evidence for a rejection (the entry's body holds only its
digest).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeAlias

from blake3 import blake3
from pydantic import Field, ValidationError

from shoal.errors import ShoalError
from shoal.files import write_pieces
from shoal.protocol.identity import Identity, IdentityError, Signed, verify
from shoal.protocol.messages import LARGEST, Count, Hex64, Message, Opinion

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]
DOMAIN, HEAD_DOMAIN, OPINION_DOMAIN = "ledger", "ledger-head", "opinion"
GENESIS = "0" * 64
KIND = re.compile("[a-z][a-z_]{0,31}")
HEAD = re.compile("([0-9]{1,15}):([0-9a-f]{64})")


class LedgerError(ShoalError, ValueError):
    """The ledger cannot be written or trusted. `seq` is the first bad entry, if there is one."""

    def __init__(self, message: str, seq: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq


class Entry(Message):
    """One entry of the ledger."""

    seq: Count  # from 1, without gaps
    time_s: int = Field(ge=-LARGEST, le=LARGEST)  # by the coordinator's clock, which may jump back
    kind: str  # docs/trust.md lists the kinds
    body: str  # canonical JSON text of an object
    previous: str  # digest of entry seq - 1; GENESIS in the first entry
    digest: str  # `entry_digest` of the fields above, 64 hex characters
    signature: str  # of the digest, in the domain "ledger"


def next_entry(head: Entry | None, kind: str, body: str, time_s: int, identity: Identity) -> Entry:
    """Return the signed entry that follows `head`; `body` is canonical JSON. Raise LedgerError for a bad kind."""
    if not KIND.fullmatch(kind):
        raise LedgerError(f"bad ledger kind {kind!r}: use 1 to 32 lowercase letters and underscores")
    seq, previous = (head.seq + 1, head.digest) if head else (1, GENESIS)
    digest = entry_digest(seq, time_s, kind, body, previous)
    signature = identity.sign(bytes.fromhex(digest), domain=DOMAIN)
    return Entry(seq=seq, time_s=time_s, kind=kind, body=body, previous=previous, digest=digest, signature=signature)


def check_head(head: Entry | None, public_key: str) -> None:
    """Raise LedgerError if another key signed the head, because a ledger has one writer."""
    if head and _fault(head, head.seq, head.previous, public_key):
        raise LedgerError(
            f"the ledger's newest entry, {head.seq}, was not signed by {public_key}:"
            " use the key that the ledger was started with, or start a new ledger",
            head.seq,
        )


def verify_chain(entries: Iterable[Entry], public_key: str, *, after: tuple[int, str] = (0, GENESIS)) -> None:
    """Verify a log from its first entry, or from the entry after `after` (the seq and digest of a verified entry).

    Raise LedgerError, naming the first seq that is wrong or missing.
    """
    verified, previous = after
    for seq, entry in enumerate(entries, start=verified + 1):
        if fault := _fault(entry, seq, previous, public_key):
            raise LedgerError(f"ledger entry {seq}: {fault}", seq)
        previous = entry.digest


def write_export(entries: Iterable[Entry], path: Path) -> None:
    """Write entries as JSON lines, atomically."""
    write_pieces(path, (entry.model_dump_json().encode() + b"\n" for entry in entries))


def read_export(path: Path) -> Iterator[Entry]:
    """Yield the entries of an export, unverified. Raise LedgerError, naming the first line that is not an entry."""
    with path.open("rb") as file:
        yield from parse_entries(file, str(path))


def parse_entries(lines: Iterable[bytes], source: str) -> Iterator[Entry]:
    """Yield the entries in JSON lines, unverified. Raise LedgerError, naming the first line that is not an entry."""
    for number, line in enumerate(lines, start=1):
        try:
            entry = Entry.model_validate_json(line)
            if entry.model_dump_json().encode() != line.rstrip(b"\n"):
                raise ValueError("not the text of an export")
            yield entry
        except ValueError as error:  # also pydantic's ValidationError
            raise LedgerError(f"line {number} of {source} is not a ledger entry", number) from error


def entry_digest(seq: int, time_s: int, kind: str, body: str, previous: str) -> str:
    """Return the BLAKE3 digest, in hex, of the canonical JSON of these five fields (body as a string)."""
    fields: dict[str, JSON] = {"seq": seq, "time_s": time_s, "kind": kind, "body": body, "previous": previous}
    return blake3(canonical_json(fields).encode("ascii")).hexdigest()


def canonical_json(value: Mapping[str, JSON]) -> str:
    """Return an object as canonical JSON: sorted keys, no spaces, ASCII. Raise LedgerError if it is not JSON."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"a ledger body must be JSON: {error}") from error


def _fault(entry: Entry, seq: int, previous: str, public_key: str) -> str | None:
    if entry.seq != seq:
        return f"missing: entry {entry.seq} is in its place"
    if entry.previous != previous:
        return "does not follow from the entry before it"
    if not _is_canonical(entry.body):
        return "its body is not a JSON object in canonical form"
    if entry.digest != entry_digest(entry.seq, entry.time_s, entry.kind, entry.body, entry.previous):
        return "its content does not match its digest"
    if not verify(public_key, bytes.fromhex(entry.digest), entry.signature, domain=DOMAIN):
        return f"not signed by {public_key}"
    return None


def _is_canonical(body: str) -> bool:
    try:
        return isinstance(value := json.loads(body), dict) and canonical_json(value) == body
    except (ValueError, RecursionError):
        return False


# --- heads ---------------------------------------------------------------------------------------------------------------


class Head(Message):
    """The newest entry that somebody has seen in a run's ledger."""

    run: str = Field(pattern=r"^[\x20-\x7e]{0,120}$")  # "": not known yet
    seq: int = Field(ge=1, le=LARGEST)
    digest: str = Hex64

    @classmethod
    def parse(cls, text: str, run: str) -> Self:
        """Parse `SEQ:DIGEST`. Raise LedgerError."""
        match = HEAD.fullmatch(text)
        if not match or not int(match[1]):
            raise LedgerError(f"{text[:80]!r} is not a head: write SEQ:DIGEST")
        return cls(run=run, seq=int(match[1]), digest=match[2])

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest}"


def sign_head(head: Head, identity: Identity) -> Signed:
    return Signed.make(identity, head.model_dump_json(), domain=HEAD_DOMAIN)


def open_head(signed: Signed, key: str) -> Head:
    """Verify and parse a signed head. Raise LedgerError unless `key` signed it."""
    try:
        return Head.model_validate_json(signed.open(key, domain=HEAD_DOMAIN))
    except (IdentityError, ValidationError) as error:
        raise LedgerError(f"not a head that {key[:16]} signed: {error}") from error


# --- opinions ------------------------------------------------------------------------------------------------------------


def sign_opinion(opinion: Opinion, identity: Identity) -> Signed:
    return Signed.make(identity, opinion.model_dump_json(), domain=OPINION_DOMAIN)


def open_opinion(text: str, key: str) -> Opinion:
    """Verify and parse the JSON of a signed opinion. Raise LedgerError unless `key` signed it."""
    try:
        return Opinion.model_validate_json(Signed.model_validate_json(text).open(key, domain=OPINION_DOMAIN))
    except (IdentityError, ValidationError) as error:
        raise LedgerError(f"not an opinion that {key[:16]} signed: {error}") from error


def check_contains(chain: Sequence[Entry], head: Head, source: str) -> None:
    """Raise LedgerError unless the verified chain contains this head. `source`: who saw the head, for the message."""
    if head.seq > len(chain):
        raise LedgerError(
            f"ledger entry {len(chain) + 1}: missing; {source} saw entry {head.seq} ({head.digest[:16]})",
            len(chain) + 1,
        )
    if chain[head.seq - 1].digest != head.digest:
        raise LedgerError(f"ledger entry {head.seq}: {source} saw a different one, {head.digest[:16]}", head.seq)
