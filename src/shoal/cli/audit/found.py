"""What the walk along the ledger collects: submissions, batches, records of steps, punishments, credit.

Invariant: what is in it passed its checks. Filled by `work` and `pay`; read by the rest of this room.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shoal.config import Config
from shoal.protocol.messages import Reason, StepRecord


@dataclass(frozen=True)
class Accepted:
    """An accepted submission, as the ledger and its two files agree on it."""

    id: str
    number: int  # among the tasks of its worker
    worker: str
    validator: str
    step: int
    version: int
    nonce: str
    full: bool
    tokens: int  # sampled, counted here
    useful: list[bool]  # of each group: its rewards differ
    group_tokens: list[int]
    file: str  # hashes in the store
    accepted: str
    content: str  # digest of its rows


@dataclass(frozen=True)
class Rejected:
    """A rejected submission, as its entry says."""

    body: dict[str, Any]
    config: Config  # in force at that entry

    @property
    def worker(self) -> str:
        return str(self.body["worker"])

    @property
    def reason(self) -> Reason:
        return Reason(self.body["reason"])


@dataclass
class Found:
    """What the walk has seen so far."""

    config: Config  # in force at the entry that is being read

    names: dict[str, str] = field(default_factory=dict)  # by key
    roles: dict[str, str] = field(default_factory=dict)
    policies: dict[int, str] = field(default_factory=dict)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    rejected: dict[str, Rejected] = field(default_factory=dict)
    slashed: dict[str, str] = field(default_factory=dict)  # worker -> submission
    credit: dict[str, str] = field(default_factory=dict)  # credited or forfeited, by submission
    batches: list[list[tuple[str, int]]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)  # of each record: a resumed run may have another one
    batched: set[tuple[str, int]] = field(default_factory=set)
    unproven: Counter[str] = field(default_factory=Counter)  # what the audit cannot check, and how often

    @property
    def has_ended(self) -> bool:
        """Whether the run's last step is trained."""
        return len(self.records) == self.config.run.steps
