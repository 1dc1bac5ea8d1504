"""The chain: entries, how they are hashed, linked, signed, verified and exported, and heads. Pure functions; no storage.

Invariants: entry n holds the digest of entry n-1, and the coordinator signs each digest. If an entry of a copy is changed,
moved or removed, `verify_chain` names the first wrong entry. A head is the newest entry that somebody has seen, by its
position and digest; `SEQ:DIGEST` is how it is printed. A chain that holds a head also holds, unchanged, every entry before
it. So whoever keeps a head notices if the ledger is cut off before it.

Left out: truncation (a log without its last entries is still a valid chain; to detect it, keep an earlier head), which run
the log belongs to (its first entry says so), several writers (that needs a chain), and the evidence itself (bodies hold its
digest).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeAlias

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ShoalError
from shoal.files import new_file
from shoal.protocol.identity import Identity, IdentityError, Signed, verify

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]
DOMAIN, HEAD_DOMAIN = "ledger", "ledger-head"
GENESIS = "0" * 64
KIND = re.compile("[a-z][a-z_]{0,31}")
HEAD = re.compile("([0-9]{1,15}):([0-9a-f]{64})")


class LedgerError(ShoalError, ValueError):
    """A ledger that cannot be written or trusted; `seq` names the first bad entry, if there is one."""

    def __init__(self, message: str, seq: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq


class Entry(BaseModel):
    """One entry of the ledger, as stored, exported and verified."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    seq: int  # from 1, without gaps
    time_s: int  # the coordinator's clock; may step back
    kind: str  # docs/trust.md lists them
    body: str  # canonical JSON text of an object
    previous: str  # digest of entry seq - 1; GENESIS for the first
    digest: str  # entry_digest of all fields above, 64 hex characters
    signature: str  # of the digest, domain "ledger"


def next_entry(head: Entry | None, kind: str, body: str, time_s: int, identity: Identity) -> Entry:
    """The signed entry that follows `head`; `body` is canonical JSON. Raises LedgerError for a bad kind."""
    if not KIND.fullmatch(kind):
        raise LedgerError(f"bad ledger kind {kind!r}: 1 to 32 lowercase letters and underscores")
    seq, previous = (head.seq + 1, head.digest) if head else (1, GENESIS)
    digest = entry_digest(seq, time_s, kind, body, previous)
    signature = identity.sign(bytes.fromhex(digest), domain=DOMAIN)
    return Entry(seq=seq, time_s=time_s, kind=kind, body=body, previous=previous, digest=digest, signature=signature)


def check_head(head: Entry | None, public_key: str) -> None:
    """Raise LedgerError if another key wrote the head: a ledger has one writer."""
    if head and _fault(head, head.seq, head.previous, public_key):
        raise LedgerError(
            f"the ledger's head, entry {head.seq}, was not written by {public_key}:"
            " use the key that the ledger was started with, or start a new ledger",
            head.seq,
        )


def verify_chain(entries: Iterable[Entry], public_key: str, *, after: tuple[int, str] = (0, GENESIS)) -> None:
    """Check a whole log from its first entry, or from the one after `after` (seq and digest of a known entry).

    LedgerError names the first seq that is wrong or missing.
    """
    known, previous = after
    for seq, entry in enumerate(entries, start=known + 1):
        if fault := _fault(entry, seq, previous, public_key):
            raise LedgerError(f"ledger entry {seq}: {fault}", seq)
        previous = entry.digest


def line(seq: int, time_s: int, kind: str, body: str, previous: str, digest: str, signature: str) -> bytes:
    """An entry as it is exported and sent: one line of JSON."""
    return (
        f'{{"seq":{seq},"time_s":{time_s},"kind":"{kind}","body":{json.dumps(body)},'
        f'"previous":"{previous}","digest":"{digest}","signature":"{signature}"}}\n'
    ).encode()


def write_export(entries: Iterable[Entry], path: Path) -> None:
    """Write entries as JSON lines. Replaces `path` whole or not at all."""
    with new_file(path) as file:
        size_bytes = 0
        for entry in entries:
            data = entry.model_dump_json().encode() + b"\n"
            file.write(size_bytes, data)
            size_bytes += len(data)
        file.commit()


def read_export(path: Path) -> Iterator[Entry]:
    """Yield the entries of an export, unverified. LedgerError names a line that is not an entry."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield Entry.model_validate_json(line)
            except ValidationError as error:
                raise LedgerError(f"line {number} of {path} is not a ledger entry", number) from error


def entry_digest(seq: int, time_s: int, kind: str, body: str, previous: str) -> str:
    """The BLAKE3 digest, in hex, of the canonical JSON of these five fields (body as a string)."""
    fields: dict[str, JSON] = {"seq": seq, "time_s": time_s, "kind": kind, "body": body, "previous": previous}
    return blake3(canonical_json(fields).encode("ascii")).hexdigest()


def canonical_json(value: Mapping[str, JSON]) -> str:
    """The canonical text of an object: sorted keys, no spaces, ASCII. LedgerError if it is not JSON."""
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


# --- heads ---------------------------------------------------------------------------------------------------------------


class Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str = Field(max_length=200)
    seq: int = Field(ge=1)
    digest: str = Field(pattern="^[0-9a-f]{64}$")

    @classmethod
    def parse(cls, text: str, run: str) -> Self:
        """Raises LedgerError."""
        found = HEAD.fullmatch(text)
        if not found or not int(found[1]):
            raise LedgerError(f"{text[:80]!r} is not a head: it is printed as SEQ:DIGEST")
        return cls(run=run, seq=int(found[1]), digest=found[2])

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest}"


def sign_head(head: Head, identity: Identity) -> Signed:
    return Signed.make(identity, head.model_dump_json(), domain=HEAD_DOMAIN)


def open_head(signed: Signed, key: str) -> Head:
    """Raises LedgerError unless `key` signed a head."""
    try:
        return Head.model_validate_json(signed.open(key, domain=HEAD_DOMAIN))
    except (IdentityError, ValidationError) as error:
        raise LedgerError(f"not a head that {key[:16]} signed: {error}") from error


def check_held(head: Head, chain: Sequence[Entry], whose: str) -> None:
    """Raise LedgerError unless the verified chain holds this head; `whose` says in the message where it is from."""
    if head.seq > len(chain):
        raise LedgerError(
            f"ledger entry {len(chain) + 1}: cut off; {whose} saw entry {head.seq} ({head.digest[:16]})", len(chain) + 1
        )
    if chain[head.seq - 1].digest != head.digest:
        raise LedgerError(f"ledger entry {head.seq}: {whose} saw another one, {head.digest[:16]}", head.seq)
