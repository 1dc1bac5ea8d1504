"""What the walk along the ledger collects, and the rules of pay and punishment: each entry about them rests on earlier ones.

    slashed      a hard rejection, with its facts
    dismissed    a rejection for spending, and evidence above the run's limit (`standing` computes it again)
    credited     accepted work, once: covered by later checks, or at the run's end
    forfeited    accepted work of a worker that was slashed or dismissed

Invariant: a walk without an error means that work which was accepted is paid as soon as later checks cover it, and all of it
by the run's end, except what a worker had not been paid yet when it was slashed or dismissed; and that every hard rejection
slashes. Pay of what was accepted after a slash may go either way.
`Found` holds only what passed its checks. Left out: why the operator readmitted a worker, which is in no entry.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.cli.audit.opened import BrokenError, first_of
from shoal.config import Config
from shoal.evidence import ALPHA
from shoal.ledger.chain import Entry
from shoal.protocol.messages import HARD, Reason, StepRecord

NEXT = ("accepted", "rejected", "trained")  # what follows from an entry of these stands before the next one of them


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


# --- pay -------------------------------------------------------------------------------------------------------------


class Pay:
    def __init__(self, found: Found) -> None:
        self.found = found
        self.observed: dict[str, list[tuple[str, Config]]] = {}  # what may be evidence of spending, by worker
        self.dismissals: list[tuple[str, dict[str, Any], list[tuple[str, Config]]]] = []  # link, body, observations
        self._dismissed: set[str] = set()  # and not readmitted, as far as entries tell
        self._lost: set[str] = set()  # submissions that may only be forfeited
        self._works: dict[str, list[Accepted]] = {}  # accepted, by worker
        self._link = ""
        self._owed: tuple[str, Callable[[], str]] | None = None  # what an entry calls for: its link, why it is missing

    def begin(self, entry: Entry) -> None:
        """Called with each entry. Raises BrokenError if the one before it lacks what follows from it."""
        if entry.kind in NEXT:
            self._check_owed()
        self._link = f"ledger entry {entry.seq}"

    def end(self) -> None:
        """After the last entry. Raises BrokenError."""
        self._check_owed()
        if self.found.has_ended and (unsettled := self._waiting(self.found.accepted.values())):
            why = f"ends the ledger of a finished run, and {first_of(unsettled)} is neither paid nor forfeited"
            raise BrokenError(self._link, why)

    def _check_owed(self) -> None:
        if self._owed is not None:
            link, why = self._owed
            self._owed = None
            if missing := why():
                raise BrokenError(link, missing)

    # --- verdicts ----------------------------------------------------------------------------------------------------

    def accepted(self, one: Accepted) -> None:
        self._dismissed.discard(one.worker)  # the operator readmitted it
        self._works.setdefault(one.worker, []).append(one)
        self.observed.setdefault(one.worker, []).append((one.id, self.found.config))
        self._owed = self._link, lambda: self._unpaid(one.worker)

    def rejected(self, id: str, one: Rejected) -> None:
        if one.reason in HARD:
            self._owed = self._link, lambda: "" if one.worker in self.found.slashed else f"slashes nobody for {id}"
        if one.reason is Reason.SPENDING and one.worker not in self._dismissed:
            self.observed.setdefault(one.worker, []).append((id, self.found.config))
            self._owed = self._link, lambda: "" if one.worker in self._dismissed else f"dismisses nobody for {id}"

    def _unpaid(self, worker: str) -> str:
        if worker in self.found.slashed:
            return ""
        late = self._waiting(self._works.get(worker, [])) & self._covered(worker)
        return f"does not pay {first_of(late)}, which later checks cover" if late else ""

    # --- punishments -------------------------------------------------------------------------------------------------

    def slashed(self, body: dict[str, Any]) -> None:
        known = self.found.rejected.get(body["submission"])
        if known is None or known.worker != body["worker"] or known.reason not in HARD:
            raise ValueError(f"slashes {body['worker'][:16]} without a hard rejection of {body['submission']}")
        if body != {name: value for name, value in known.body.items() if name != "detail"}:
            raise ValueError(f"slashes for {body['submission']} by other facts than those of its rejection")
        if body["worker"] in self.found.slashed:
            raise ValueError(f"slashes {body['worker'][:16]} twice")
        self.found.slashed[body["worker"]] = body["submission"]
        self._lost |= self._waiting(self._works.get(body["worker"], []))

    def dismissed(self, body: dict[str, Any]) -> None:
        worker, known = body["worker"], self.found.rejected.get(body["submission"])
        if known is None or (known.worker, known.reason) != (worker, Reason.SPENDING):
            raise ValueError(f"dismisses {worker[:16]} without a rejection of {body['submission']} for spending")
        observed, count = self.observed.get(worker, []), body["submissions"]
        if not observed or observed[-1][0] != body["submission"] or not 1 <= count <= len(observed):
            raise ValueError(f"dismisses {worker[:16]} for {count} submissions, of which not all were judged before")
        if not body["evidence"] >= (least := math.log(1 / ALPHA)):
            evidence = f"{body['evidence']} nats; the run asks for {least:.1f}"
            raise ValueError(f"dismisses {worker[:16]} on evidence of {evidence}")
        self.dismissals.append((self._link, body, list(observed)))
        self._dismissed.add(worker)
        self._lost |= self._waiting(self._works.get(worker, []))

    # --- credit ------------------------------------------------------------------------------------------------------

    def credited(self, body: dict[str, Any]) -> None:
        if lost := self._lost.intersection(body["submissions"]):
            raise ValueError(f"pays {first_of(lost)}, which its worker lost when it was slashed or dismissed")
        self._settle(body, "credited")
        if self.found.has_ended:
            return  # all that waits is paid
        if early := set(body["submissions"]) - self._covered(body["worker"]):
            raise ValueError(f"pays {first_of(early)} before later checks cover it")

    def forfeited(self, body: dict[str, Any]) -> None:
        if body["worker"] not in self.found.slashed and not self._lost.issuperset(body["submissions"]):
            raise ValueError(f"takes the pay of {body['worker'][:16]}, who was neither slashed nor dismissed before")
        self._settle(body, "forfeited")

    def _settle(self, body: dict[str, Any], how: str) -> None:
        tokens = 0
        if not body["submissions"]:
            raise ValueError("names no submission")
        for id in body["submissions"]:
            one = self.found.accepted.get(id)
            if one is None or one.worker != body["worker"] or id in self.found.credit:
                raise ValueError(f"{id} is not accepted work of {body['worker'][:16]} whose credit waits")
            self.found.credit[id] = how
            tokens += one.tokens
        if tokens != body["tokens"]:
            raise ValueError(f"{how} {body['tokens']} tokens; the validators counted {tokens}")

    def _covered(self, worker: str) -> set[str]:
        """Its submissions that enough whole prefills of later ones cover; all of them at the run's end."""
        theirs = {one.number: one for one in self._works.get(worker, [])}
        checked = sorted(number for number, one in theirs.items() if one.full)
        needed = self.found.config.validator.escrow_checks
        if self.found.has_ended:
            return {one.id for one in theirs.values()}
        return {one.id for number, one in theirs.items() if len(checked) >= needed and number < checked[-needed]}

    def _waiting(self, accepted: Iterable[Accepted]) -> set[str]:
        """Those whose credit waits."""
        return {one.id for one in accepted if one.id not in self.found.credit}
