"""What happens to a task: its worker uploads, a validator claims, the validator's verdict accepts or rejects.

Invariant: a submission is uploaded once, by the worker it was assigned to and within its grant; only the validator that
holds the claim gives the verdict; groups are credited exactly when their submission is accepted. A hard rejection counts
once a second validator confirms it, where there is one (`doubts`), or once no second opinion can come any more. An eviction
closes all that its worker has uploaded: nothing of a banned key is accepted or credited.
Called by the coordinator's routes, and by `learning` at the run's end.

The pool itself gives one hard reason, `replayed`. It rests on an accepted submission of the same worker with the same
content. A rejected or unjudged copy does not count, because anyone can make one, and neither does another worker's.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from shoal.config import Config
from shoal.coordinator.credit.escrow import Escrow
from shoal.coordinator.jobs.assignments import Assignments
from shoal.coordinator.jobs.batches import Batches
from shoal.coordinator.jobs.fitness import Fitness
from shoal.coordinator.reports.history import HistoryLog
from shoal.coordinator.standing import states
from shoal.coordinator.standing.suspension import suspend
from shoal.coordinator.state.database import Database, PoolError
from shoal.coordinator.tables.submissions import Submission
from shoal.coordinator.trust.checking import Trust
from shoal.coordinator.trust.classes import Classes
from shoal.coordinator.trust.doubts import Doubts
from shoal.coordinator.trust.spending import Spending
from shoal.protocol.messages import HARD, Claim, Claims, ContentOwner, MissedTasks, Reason, Verdict, WorkerSample

MOST_MISSED = 256  # in one answer

# Soft reasons that rest on the file alone. What a program of the model's printed (`unrepeatable`) is nobody's fault.
UNUSABLE = (Reason.UNREADABLE, Reason.BOUNDS, Reason.SIGNATURE, Reason.CONTEXT)
ACCIDENTS, REMEMBERED = 1, 20  # so many among the newest judged files cost nothing but themselves

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Submissions:
    db: Database
    config: Config
    assignments: Assignments
    batches: Batches
    trust: Trust
    history: HistoryLog
    classes: Classes
    doubts: Doubts
    spending: Spending
    escrow: Escrow
    fitness: Fitness

    # --- the worker's side -------------------------------------------------------------------------------------------

    def may_upload(self, worker: str, id: str, content_hash: str = "") -> None:
        """Raise PoolError unless this worker's grant for this submission, and for the file with this hash, is valid.

        It is valid while it is the worker's oldest, until no batch can take the version, or the worker takes another task.
        A late upload is not penalised: its task becomes stale here. Another file than the announced one ends the task as
        missed: the worker signed both.
        """
        found = self._get(id)
        if found.worker != worker:
            raise PoolError(f"{id} is another worker's task", 403)
        if found.state != "open":
            raise PoolError(f"{id} is {found.state}, not open for upload")
        if found.version < (oldest := self.db.open_step() - self.config.coordinator.async_level):
            self.db.submissions.set_stale(id)  # its worker came, so it missed nothing
            self.assignments.arrivals.late(found)
            raise PoolError(f"{id} is of version {found.version}, older than {oldest}; take a new task")
        if (first := self.db.submissions.held_by(worker)[0]).id != id:
            raise PoolError(f"{id} comes after {first.id}, which has to be uploaded first")
        if content_hash and found.announced not in ("", content_hash):
            with self.db.transaction():
                self.assignments.arrivals.missed([found])
            log.info("%s: %s sent another file than it had announced", id, self._name(worker))
            raise PoolError(f"{id} is not the file that was announced, {found.announced[:16]}; take a new task")

    def uploaded(self, worker: str, id: str, content_hash: str) -> None:
        self.may_upload(
            worker, id, content_hash
        )  # outside the transaction, which an error would undo with what it records
        self.db.submissions.set_uploaded(id, content_hash, self.db.clock())
        log.info("%s uploaded by %s", id, self._name(worker))

    # --- the validator's side ----------------------------------------------------------------------------------------

    def claim(self, validator: str, most: int) -> Claims:
        """Lease the oldest unchecked submission, and up to `most` of the same version. Expired leases are included.

        What another live validator is to check is left to it: one of the worker's exactness class, or a second one.
        Which ones are prefilled is drawn here, after upload, so no worker can know it. Submissions of a version that relays
        need not hold any more expire: a validator that waited for it would check nothing else. Where one of them waits for a
        second opinion, the first verdict counts.
        """
        with self.db.transaction():
            now_s = self.db.clock()
            closed = self._close_gone(validator, now_s)
            found = [one for one in self.db.submissions.claimable(validator, now_s) if self._is_for(validator, one)]
            found = [one for one in found if one.version == found[0].version][:most]
            lease_s = now_s + self.config.coordinator.claim_lease_s
            claims = []
            for one in found:
                full = self.trust.draw(one.worker, one.groups) if one.full_check is None else one.full_check
                self.db.submissions.set_claimed(one.id, validator, lease_s, full)
                claim = Claim(
                    assignment=self.assignments.describe(one),
                    worker=one.worker,
                    lease_s=lease_s,
                    full=full,
                    fingerprint=self.classes.fingerprint(one),
                )
                claims.append(claim)
        _tell(closed)
        return Claims(claims=claims)

    def _close_gone(self, validator: str, now_s: float) -> list[str]:
        """Close what no validator can check any more. Returns what to log."""
        oldest_held = self.db.policies.oldest_of_newest(self.config.relays.keep)
        lines: list[str] = []
        for one in self.db.submissions.claimable(validator, now_s):
            if oldest_held is None or one.version >= oldest_held or self._get(one.id).state == "expired":
                continue
            if (first := self.doubts.first(one)) is not None:
                lines += self._conclude(one, *first)
                continue
            self.db.submissions.expire(one.id)
            name = self._name(one.worker)
            lines.append(f"{one.id} by {name} expired unchecked: relays no longer hold version {one.version}")
        return lines

    def _is_for(self, validator: str, submission: Submission) -> bool:
        checkers = self.classes.checkers(submission)
        return validator in checkers or not checkers

    def content_owner(self, content: str) -> ContentOwner:
        """The accepted submission with this content."""
        return ContentOwner(submission=self.db.submissions.content_owner(content))

    def missed(self, worker: str) -> MissedTasks:
        """The tasks that a worker was given and never uploaded, or too late: whoever has the task set can derive what it
        left out. Those that came too late are not counted as missed."""
        given, missed = self.db.submissions.count_of(worker)
        tasks = self.db.submissions.missed_of(worker, MOST_MISSED)
        return MissedTasks(
            worker=worker,
            given=given,
            missed=missed,
            newest=[self.assignments.describe(task) for task in tasks],
        )

    def hashes(self, id: str) -> tuple[str, str]:
        """Content hashes of the uploaded and of the accepted file, "" for a file that does not exist yet."""
        found = self._get(id)
        return found.file_hash or "", found.accepted_hash or ""

    def may_store_accepted(self, validator: str, id: str, content_hash: str = "") -> None:
        """Raise PoolError unless this validator holds the claim."""
        self._claimed(validator, id)

    def accepted_stored(self, validator: str, id: str, content_hash: str) -> None:
        """Record the accepted file that the validator with the claim has stored."""
        with self.db.transaction():
            self._claimed(validator, id)
            self.db.submissions.set_accepted_hash(id, content_hash)

    def judge(self, validator: str, verdict: Verdict) -> None:
        """Accept or reject. A hard rejection slashes the worker and evicts it; a second validator confirms it first."""
        with self.db.transaction():
            found = self._get(verdict.submission)
            if found.state in ("accepted", "rejected") and found.validator == validator:
                return  # the validator repeats a verdict because it did not get the answer
            if self.doubts.was_first(found, validator):
                return  # likewise, of a verdict that waits for a second one
            found = self._claimed(validator, verdict.submission)
            if self.doubts.opens(found, validator, verdict):
                lines = [f"{found.id} is {verdict.reason} to {validator[:16]}; another validator is to confirm it"]
            else:
                lines = self._conclude(found, validator, verdict)
        _tell(lines)

    def close(self) -> None:
        """The run's last step is trained: first verdicts count where a second one was awaited, then all credit is paid."""
        with self.db.transaction():
            lines: list[str] = []
            for id in self.db.replays.doubted():
                found = self._get(id)
                if found.state in ("uploaded", "validating") and (first := self.doubts.first(found)) is not None:
                    lines += self._conclude(found, *first)
            self.escrow.close()
        _tell(lines)

    def _conclude(self, found: Submission, validator: str, verdict: Verdict) -> list[str]:
        """Carry out a verdict that waits for no other. Returns what to log."""
        found = replace(found, validator=validator)
        reason = self.doubts.settle(found, validator, verdict, self._reason(verdict))
        detail = verdict.detail
        if reason is None and (why := self.spending.finds(found, verdict)):
            reason, detail = Reason.SPENDING, why
        if reason is None and (found.accepted_hash is None or found.accepted_hash != verdict.accepted_hash):
            raise PoolError(f"{found.id}: store the accepted file before accepting it")
        self.db.submissions.set_judged(
            found.id,
            "rejected" if reason else "accepted",
            validator,
            reason,
            verdict.content,
            verdict.model_dump_json(exclude={"groups": {"__all__": {"sample"}}}),
            self.db.clock(),
        )
        worker = self._name(found.worker)
        if reason is None:
            filled = [
                f"batch of step {step + 1} of {self.config.run.steps} is full" for step in self._accept(found, verdict)
            ]
            return [f"{found.id} by {worker} accepted, {len(verdict.groups)} groups", *filled]
        lines = [f"{found.id} by {worker} rejected: {reason}: {_printable(detail)}"]
        if self._reject(found, reason, detail):
            lines.append(f"{worker} slashed and evicted: {reason} in {found.id}")
        return lines

    def _accept(self, found: Submission, verdict: Verdict) -> list[int]:
        """Returns the steps whose batches became full."""
        self.assignments.arrivals.came(found)
        tokens = sum(group.tokens for group in verdict.groups)
        counts = {"tokens": tokens, "groups": len(verdict.groups), "accepted": found.accepted_hash}
        self.db.ledger.append("accepted", _entry(found) | counts | self.assignments.curriculum.evidence(verdict.groups))
        filled = self.batches.credit(found.id, found.version, verdict.groups, checked=bool(found.full_check))
        self.history.put_samples(self._samples(found, verdict))
        self.fitness.came(found, tokens)
        self.escrow.accepted(found.worker, found.id, tokens)
        if filled:
            self.assignments.curriculum.close(self.db.open_step())
        return filled

    def _reject(self, found: Submission, reason: Reason, detail: str) -> bool:
        """Returns whether the worker was slashed for it."""
        self.db.ledger.append("rejected", _entry(found) | {"reason": reason.value, "detail": detail})
        if reason is Reason.SPENDING and self.spending.dismiss(found.worker, found.id, detail):
            self.escrow.forfeit(found.worker)
        if reason in UNUSABLE:
            self._back_off(found.worker, reason)
        why = f"slashed: {reason.value} in {found.id}"
        if reason not in HARD or not states.move(self.db.nodes, found.worker, "ban", why, self.db.clock()):
            return False
        self.db.ledger.append("slashed", _entry(found) | {"reason": reason.value})
        self.escrow.forfeit(found.worker)
        self.db.submissions.expire_all_of(found.worker)
        self.db.groups.mark_all_stale(found.worker)
        return True

    def _back_off(self, worker: str, reason: Reason) -> None:
        """A file that cannot be used costs a validator up to its time limit. One may be an accident of a disk; who sends
        more gets no tasks for a while, longer each time."""
        faults = self.db.submissions.count_rejected_of(worker, [str(one) for one in UNUSABLE], newest=REMEMBERED)
        if faults > ACCIDENTS:
            suspend(self.db, worker, f"{faults} of its newest {REMEMBERED} files were {reason.value}")

    def _samples(self, found: Submission, verdict: Verdict) -> list[WorkerSample]:
        worker = self._name(found.worker)
        return [
            WorkerSample(
                **group.sample.model_dump(),
                submission=found.id,
                group=number,
                worker=worker,
                policy_version=found.version,
            )
            for number, group in enumerate(verdict.groups)
            if group.sample is not None
        ]

    def _reason(self, verdict: Verdict) -> Reason | None:
        """The validator's reason, or another one if it accepted what is in an accepted submission already.

        A worker's own earlier submission makes it `replayed`. Another worker's makes it `context`, which is soft: rows hold
        their worker's seeds, so two workers with the same rows mean that a validator is broken, not which worker lied.
        """
        owner = self.db.submissions.content_owner(verdict.content) if verdict.content else None
        if verdict.reason is not None or owner is None:
            return verdict.reason
        before = self._get(owner)
        return Reason.REPLAYED if before.worker == self._get(verdict.submission).worker else Reason.CONTEXT

    def _name(self, worker: str) -> str:
        node = self.db.nodes.get(worker)
        return node.name if node else worker[:16]

    def _get(self, id: str) -> Submission:
        return self.db.submissions.get(id) or _not_found(id)

    def _claimed(self, validator: str, id: str) -> Submission:
        found = self._get(id)
        if found.state != "validating" or found.validator != validator:
            raise PoolError(f"{id} is {found.state} and not claimed by this validator")
        return found


def _not_found(id: str) -> NoReturn:
    raise PoolError(f"no submission {id}", 404)


def _tell(lines: Iterable[str]) -> None:
    """Log what happened, after the transaction: an error in it would undo it."""
    for line in lines:
        log.info("%s", line)


def _printable(detail: str) -> str:
    """One short line. A detail may quote a worker's file, so it may hold anything."""
    return "".join(character if character.isprintable() else " " for character in detail[:200])


def _entry(found: Submission) -> dict[str, str | int | bool | None]:
    """What every ledger entry about a submission says."""
    return {
        "submission": found.id,
        "worker": found.worker,
        "step": found.step,
        "version": found.version,
        "groups": found.groups,
        "nonce": found.nonce,
        "file": found.file_hash,
        "full": bool(found.full_check),
        "validator": found.validator,
    }
