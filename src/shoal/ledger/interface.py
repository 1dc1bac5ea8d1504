"""What the pool needs of a ledger, whichever backend stores it.

Invariant: an appended entry is never changed, reordered or removed, and its position is part of what is signed.
Called by the coordinator, which depends on this interface only. Backends: `sqlite`, `postgres`.
Stakes, which may be on an EVM chain, are in `stakes`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict

from shoal.errors import ShoalError

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]


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
    kind: str  # docs/audit.md lists them
    body: str  # canonical JSON text of an object
    previous: str  # digest of entry seq - 1; GENESIS for the first
    digest: str  # entry_digest of all fields above, 64 hex characters
    signature: str  # of the digest, domain "ledger"


class Ledger(Protocol):
    def append(self, kind: str, body: Mapping[str, JSON]) -> Entry:
        """Add an entry and return it. Part of the caller's transaction if one is open. Raises LedgerError."""
        ...

    def entries(self, since: int = 0, kind: str | None = None) -> Iterator[Entry]:
        """The entries with seq > since, oldest first; of one kind only if `kind` is given."""
        ...

    def head(self) -> Entry | None:
        """The newest entry, None in an empty ledger."""
        ...
