"""The state that an audit collects from the ledger's entries, and the rules of pay and punishment.

An entry of one of these kinds must come after:

    slashed      a hard rejection of the same submission, with the same facts, that two validators signed
    dismissed    a rejection with the reason "spending"; the evidence follows from what several validators signed, and
                 exceeds the run's limit
    credited     accepted work that is not settled yet; before the last step is trained, later checks must cover it
    forfeited    accepted work of a worker that was slashed or dismissed

Later checks cover a submission once `escrow_checks` of its worker's accepted submissions with higher task numbers were
prefilled whole.

Invariants, if no error is raised: accepted work is paid as soon as later checks cover it, and by the run's end at the
latest. Work that was unpaid when its worker was slashed or dismissed is forfeited instead. Work that was accepted after
a slash may be paid or forfeited. A worker is slashed for a hard rejection that two validators signed. `AuditState`
contains only facts that passed the checks.
Left out: the operator's reason to readmit a worker, because no entry states it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.cli.audit.run import BrokenError, Checks, first_three
from shoal.config import Config
from shoal.coordinator.trust import DISMISSAL_NATS, bets, shared_evidence
from shoal.evidence import Process
from shoal.ledger.chain import Entry
from shoal.protocol.messages import HARD, Opinion, Reason, StepRecord

# If an entry of these kinds requires another entry, such as a slash, that one must come before the next of these kinds.
NEXT = ("accepted", "rejected", "trained")


@dataclass(frozen=True)
class Accepted:
    """An accepted submission, on which the ledger and its two files agree."""

    id: str
    number: int  # of its worker's task
    worker: str
    validator: str
    step: int
    version: int
    nonce: str
    full: bool
    tokens: int  # sampled by the model, counted in the file
    useful: list[bool]  # by group: whether its rewards differ
    group_tokens: list[int]
    file: str  # hash in the store
    accepted: str  # hash in the store
    config: Config  # in force at its entry


@dataclass(frozen=True)
class Rejected:
    """A rejected submission, as its entry describes it."""

    body: dict[str, Any]
    config: Config  # in force at that entry
    confirmed: bool  # whether two validators signed a reason of its kind

    @property
    def worker(self) -> str:
        return str(self.body["worker"])

    @property
    def reason(self) -> Reason:
        return Reason(self.body["reason"])


@dataclass
class AuditState:
    """The facts that the entries so far establish."""

    config: Config  # in force at the current entry
    text: str = ""  # the same as TOML; empty before the first entry
    changes: list[str] = field(default_factory=list)  # what restarts changed in the config
    names: dict[str, str] = field(default_factory=dict)  # by key
    roles: dict[str, str] = field(default_factory=dict)
    policies: dict[int, str] = field(default_factory=dict)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    rejected: dict[str, Rejected] = field(default_factory=dict)
    slashed: dict[str, str] = field(default_factory=dict)  # worker -> submission
    credit: dict[str, str] = field(default_factory=dict)  # submission -> "credited" or "forfeited"
    batches: list[list[tuple[str, int]]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)  # by step: a resumed run may have another config
    batched: set[tuple[str, int]] = field(default_factory=set)
    checks: Checks = field(default_factory=Checks)

    @property
    def has_ended(self) -> bool:
        """Return whether the run's last step is trained."""
        return len(self.records) == self.config.run.steps


# --- pay -------------------------------------------------------------------------------------------------------------


class Pay:
    """Check the entries about pay and punishment against the entries before them."""

    def __init__(self, state: AuditState) -> None:
        self.state = state
        # worker -> (submission, validator, the bets on its opinion) of each submission that is evidence
        self._observed: dict[str, list[tuple[str, str, dict[str, float]]]] = {}
        self.ever_dismissed: set[str] = set()
        self._dismissed: set[str] = set()  # dismissed workers that were not readmitted
        self._lost: set[str] = set()  # submissions that may only be forfeited
        self._work: dict[str, list[Accepted]] = {}  # by worker
        self._link = ""
        # an entry that requires a further one: its link, and a function that returns the missing fact, or ""
        self._required: tuple[str, Callable[[], str]] | None = None

    def begin(self, entry: Entry) -> None:
        """Start with the next entry. Raise BrokenError if an earlier entry requires one that is missing."""
        if entry.kind in NEXT:
            self._check_required()
        self._link = f"ledger entry {entry.seq}"

    def end(self) -> None:
        """Check the state after the last entry. Raise BrokenError."""
        self._check_required()
        if self.state.has_ended and (unsettled := self._unsettled(self.state.accepted.values())):
            why = f"ends the ledger of a finished run, but {first_three(unsettled)} is neither paid nor forfeited"
            raise BrokenError(self._link, why)

    def _check_required(self) -> None:
        if self._required is not None:
            link, missing = self._required
            self._required = None
            if why := missing():
                raise BrokenError(link, why)

    # --- verdicts ----------------------------------------------------------------------------------------------------

    def accepted(self, submission: Accepted, opinion: Opinion) -> None:
        worker = submission.worker
        self._dismissed.discard(worker)  # the operator must have readmitted it
        self._work.setdefault(worker, []).append(submission)
        self._observe(worker, submission.validator, opinion)
        self._required = self._link, lambda: self._unpaid(worker)

    def rejected(self, id: str, rejection: Rejected, opinion: Opinion) -> None:
        worker = rejection.worker
        if rejection.reason in HARD and rejection.confirmed:
            self._required = self._link, lambda: "" if worker in self.state.slashed else f"nobody is slashed for {id}"
        if rejection.reason is Reason.SPENDING and worker not in self._dismissed:
            self._observe(worker, str(rejection.body["validator"]), opinion)
            self._required = self._link, lambda: "" if worker in self._dismissed else f"nobody is dismissed for {id}"

    def _observe(self, worker: str, validator: str, opinion: Opinion) -> None:
        if opinion.spent is not None and opinion.replay is None:
            placed = bets(opinion.spent, self.state.config)
            self._observed.setdefault(worker, []).append((opinion.submission, validator, placed))

    def _unpaid(self, worker: str) -> str:
        if worker in self.state.slashed or self.state.has_ended:  # `end` checks what was paid after the last step
            return ""
        overdue = self._unsettled(self._work.get(worker, [])) & self._covered(worker)
        return f"does not pay {first_three(overdue)}, which later checks cover" if overdue else ""

    # --- punishments -------------------------------------------------------------------------------------------------

    def slashed(self, body: dict[str, Any]) -> None:
        rejection = self.state.rejected.get(body["submission"])
        if rejection is None or rejection.worker != body["worker"] or rejection.reason not in HARD:
            raise ValueError(f"slashes {body['worker'][:16]} without a hard rejection of {body['submission']}")
        if not rejection.confirmed:
            raise ValueError(f"slashes {body['worker'][:16]} for a rejection that only one validator signed")
        if body != {name: value for name, value in rejection.body.items() if name not in ("detail", "opinions")}:
            raise ValueError(f"slashes for {body['submission']} with facts that differ from its rejection")
        if body["worker"] in self.state.slashed:
            raise ValueError(f"slashes {body['worker'][:16]} twice")
        self.state.slashed[body["worker"]] = body["submission"]
        self._lost |= self._unsettled(self._work.get(body["worker"], []))

    def dismissed(self, body: dict[str, Any]) -> None:
        worker, rejection = body["worker"], self.state.rejected.get(body["submission"])
        if rejection is None or (rejection.worker, rejection.reason) != (worker, Reason.SPENDING):
            raise ValueError(f"dismisses {worker[:16]} without a rejection of {body['submission']} for spending")
        observed, count = self._observed.get(worker, []), body["submissions"]
        if not observed or observed[-1][0] != body["submission"] or not 1 <= count <= len(observed):
            raise ValueError(f"dismisses {worker[:16]} for {count} submissions, but not all of them were judged before")
        processes: dict[str, Process] = {}
        for _, validator, placed in observed[-count:]:
            processes[validator] = processes.get(validator, Process()).after(placed)
        nats = shared_evidence(processes)
        if not nats >= DISMISSAL_NATS or not math.isclose(nats, body["evidence"], rel_tol=1e-6):
            evidence = f"the opinions give {nats:.3f} nats, the entry says {body['evidence']:.3f}"
            raise ValueError(f"dismisses {worker[:16]}, but {evidence}, and {DISMISSAL_NATS:.1f} are required")
        self._dismissed.add(worker)
        self.ever_dismissed.add(worker)
        self._lost |= self._unsettled(self._work.get(worker, []))

    # --- credit ------------------------------------------------------------------------------------------------------

    def credited(self, body: dict[str, Any]) -> None:
        if lost := self._lost.intersection(body["submissions"]):
            raise ValueError(f"pays {first_three(lost)}, which its worker lost when it was slashed or dismissed")
        self._settle(body, "credited")
        if self.state.has_ended:
            return  # all unsettled work may be paid
        if early := set(body["submissions"]) - self._covered(body["worker"]):
            raise ValueError(f"pays {first_three(early)} before later checks cover it")

    def forfeited(self, body: dict[str, Any]) -> None:
        if body["worker"] not in self.state.slashed and not self._lost.issuperset(body["submissions"]):
            raise ValueError(f"takes the pay of {body['worker'][:16]}, who was neither slashed nor dismissed before")
        self._settle(body, "forfeited")

    def _settle(self, body: dict[str, Any], how: str) -> None:
        tokens = 0
        if not body["submissions"]:
            raise ValueError("names no submission")
        for id in body["submissions"]:
            submission = self.state.accepted.get(id)
            if submission is None or submission.worker != body["worker"] or id in self.state.credit:
                raise ValueError(f"{id} is not an accepted, unsettled submission of {body['worker'][:16]}")
            self.state.credit[id] = how
            tokens += submission.tokens
        if tokens != body["tokens"]:
            raise ValueError(f"{how} {body['tokens']} tokens; the validators counted {tokens}")

    def _covered(self, worker: str) -> set[str]:
        """Return the worker's submissions that later checks cover; after the last step, all its submissions."""
        work = self._work.get(worker, [])
        if self.state.has_ended:
            return {submission.id for submission in work}
        checked = sorted(submission.number for submission in work if submission.full)
        needed = self.state.config.validator.escrow_checks
        return {each.id for each in work if len(checked) >= needed and each.number < checked[-needed]}

    def _unsettled(self, accepted: Iterable[Accepted]) -> set[str]:
        return {submission.id for submission in accepted if submission.id not in self.state.credit}
