"""A head of a ledger: the newest entry that somebody has seen, by its position and digest; and a signature over it.

Invariant: a chain that holds a head also holds, unchanged, every entry before it. So whoever keeps a head notices if the
ledger is cut off before it. `SEQ:DIGEST` is how a head is printed and named on a command line.
Called by the validator (signs), the coordinator (records), the audit and `shoal ledger` (compare).
"""

import re
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.ledger.interface import Entry, LedgerError
from shoal.protocol.identity import Identity, IdentityError, Signed

DOMAIN = "ledger-head"
TEXT = re.compile("([0-9]{1,15}):([0-9a-f]{64})")


class Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str = Field(max_length=200)
    seq: int = Field(ge=1)
    digest: str = Field(pattern="^[0-9a-f]{64}$")

    @classmethod
    def parse(cls, text: str, run: str) -> Self:
        """Raises LedgerError."""
        found = TEXT.fullmatch(text)
        if not found or not int(found[1]):
            raise LedgerError(f"{text[:80]!r} is not a head: it is printed as SEQ:DIGEST")
        return cls(run=run, seq=int(found[1]), digest=found[2])

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest}"


def sign_head(head: Head, identity: Identity) -> Signed:
    return Signed.make(identity, head.model_dump_json(), domain=DOMAIN)


def open_head(signed: Signed, key: str) -> Head:
    """Raises LedgerError unless `key` signed a head."""
    try:
        return Head.model_validate_json(signed.open(key, domain=DOMAIN))
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
