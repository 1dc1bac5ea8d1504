"""Claims and verdicts: a validator claims uploaded submissions, and its verdicts accept or reject them.

Invariants: only the validator with the claim gives the verdict; groups are credited exactly when their submission is
accepted. A hard rejection counts once a second validator confirms it (`checkers`), or if no second validator can. A
ban drops all of the worker's unjudged submissions: nothing from a banned key is accepted or credited.

The pool itself rejects for one hard reason, `replayed`: an earlier submission of the same worker with the same content
was accepted. Earlier copies that were rejected or not yet judged, or that another worker submitted, do not count,
because anyone can upload a copy.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from shoal.config import Config
from shoal.coordinator.arrivals import Arrivals
from shoal.coordinator.batches import Batches
from shoal.coordinator.checkers import Checkers
from shoal.coordinator.credit import Escrow
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.submissions import UNSETTLED, Submission
from shoal.coordinator.trust import Trust
from shoal.errors import printable
from shoal.protocol.history import WorkerSample
from shoal.protocol.messages import HARD, LEASE_S, Assignment, Claim, Claims, ContentOwner, Reason, Verdict
from shoal.shardcast.store import KEEP

# Soft reasons that depend on the file alone. `unrepeatable` is not among them, because its cause is a program
# that the model wrote.
UNUSABLE = (Reason.UNREADABLE, Reason.BOUNDS, Reason.SIGNATURE, Reason.CONTEXT)
ACCIDENTS, REMEMBERED = 1, 20  # up to ACCIDENTS unusable files among the newest REMEMBERED have no further consequence

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Judgement:
    db: Database
    config: Config
    describe: Callable[[Submission], Assignment]
    arrivals: Arrivals
    batches: Batches
    checkers: Checkers
    trust: Trust
    escrow: Escrow

    def claim(self, validator: str, limit: int) -> Claims:
        """Lease up to `limit` submissions to a validator: the oldest that it may check, and others of the same version.

        A repeated claim does not extend its lease. A submission with an expired lease goes to another validator if one may
        check it. A random draw decides here, after the upload, whether to prefill a submission whole, so no worker knows
        the result in advance. A submission whose version the relays have dropped expires, because waiting for that
        version would block a validator. If it already has a first verdict, that verdict counts instead.
        """
        with self.db.transaction():
            now_s = self.db.clock()
            lines = self._close_uncheckable(validator, now_s)
            waiting = self.db.submissions.claimable(validator, now_s)
            eligible = [submission for submission in waiting if self._may_claim(validator, submission, now_s)]
            taken = [submission for submission in eligible if submission.version == eligible[0].version][:limit]
            claims = [self._lease(validator, submission, now_s) for submission in taken]
        _log_all(lines)
        return Claims(claims=claims)

    def _may_claim(self, validator: str, submission: Submission, now_s: float) -> bool:
        """Return whether this validator may claim a submission that no other validator holds."""
        if submission.validator == validator and not _is_leased(submission, now_s):
            others = (key for key in self.checkers.live_validators() if key != validator)
            if any(self.checkers.may_check(other, submission) for other in others):
                return False
        return self.checkers.may_check(validator, submission)

    def _lease(self, validator: str, submission: Submission, now_s: float) -> Claim:
        lease_s = submission.lease_s if _is_leased(submission, now_s) else now_s + LEASE_S
        full = submission.full_check
        if full is None:
            full = self.trust.draw(submission.worker, submission.groups)
        self.db.submissions.move(submission, "claim", validator=validator, lease_s=lease_s, full_check=full)
        return Claim(
            assignment=self.describe(submission),
            worker=submission.worker,
            lease_s=lease_s,
            full=full,
            fingerprint=self.checkers.fingerprint(submission),
        )

    def _close_uncheckable(self, validator: str, now_s: float) -> list[str]:
        """Close submissions that no validator can check any more. Return lines to log."""
        oldest_held = self.db.policies.oldest_of_newest(KEEP)
        lines: list[str] = []
        for submission in self.db.submissions.claimable(validator, now_s):
            if oldest_held is None or submission.version >= oldest_held or self._get(submission.id).state == "expired":
                continue
            if (first := self.checkers.first_verdict(submission)) is not None:
                lines += self._conclude(submission, *first)
                continue
            self.db.submissions.move(submission, "drop")
            name = self.db.nodes.name(submission.worker)
            lines.append(
                f"{submission.id} by {name} expired unchecked: relays no longer hold version {submission.version}"
            )
        return lines

    def damaged(self, id: str) -> None:
        """Let a submission expire whose file is damaged. Its groups are assigned again."""
        if self.db.submissions.move(self._get(id), "drop"):
            log.error("%s expires: its file in the store is damaged", id)

    def content_owner(self, content: str) -> ContentOwner:
        """Return the accepted submission with this content."""
        return ContentOwner(submission=self.db.submissions.content_owner(content))

    def hashes(self, id: str) -> tuple[str, str]:
        """Return the content hashes of the uploaded and the accepted file, "" for a missing one."""
        submission = self._get(id)
        return submission.file_hash or "", submission.accepted_hash or ""

    def may_store_accepted(self, validator: str, id: str, content_hash: str = "") -> None:
        """Raise PoolError unless this validator has the claim."""
        self._claimed(validator, id)

    def accepted_stored(self, validator: str, id: str, content_hash: str) -> None:
        """Record the accepted file that the claiming validator has stored."""
        with self.db.transaction():
            self._claimed(validator, id)
            self.db.submissions.set_accepted_hash(id, content_hash)

    def judge(self, validator: str, verdict: Verdict) -> None:
        """Accept or reject. A hard rejection, once confirmed by a second validator, slashes the worker and bans it."""
        size, max_tokens = self.config.sampling.group_size, self.config.sampling.max_tokens
        with self.db.transaction():
            submission = self._get(verdict.submission)
            if len(verdict.groups) > submission.groups or any(g.tokens > size * max_tokens for g in verdict.groups):
                raise PoolError(f"{submission.id}: the verdict has more groups or tokens than its task allows", 400)
            if submission.state in ("accepted", "rejected") and submission.validator == validator:
                return  # the validator repeats its verdict because it did not get the response
            if self.checkers.is_repeat(submission, validator):
                return  # the validator repeats a first verdict that awaits confirmation
            submission = self._claimed(validator, verdict.submission)
            if self.checkers.defer(submission, validator, verdict):
                rejected = f"{submission.id} rejected by {validator[:16]}: {verdict.reason}"
                lines = [f"{rejected}; another validator must confirm it"]
            else:
                lines = self._conclude(submission, validator, verdict)
        _log_all(lines)

    def close(self) -> None:
        """After the run's last step: let deferred first verdicts count, then release all pending credit."""
        with self.db.transaction():
            lines: list[str] = []
            for id in self.checkers.replays.doubted():
                submission = self._get(id)
                if (
                    submission.state in ("uploaded", "validating")
                    and (first := self.checkers.first_verdict(submission)) is not None
                ):
                    lines += self._conclude(submission, *first)
            self.escrow.close()
        _log_all(lines)

    def _conclude(self, submission: Submission, validator: str, verdict: Verdict) -> list[str]:
        """Carry out a final verdict. Return lines to log."""
        reason = self.checkers.settle(submission, validator, verdict, self._reason(submission, verdict))
        detail = verdict.detail
        if reason is None and (why := self.trust.observe(submission, verdict)):
            reason, detail = Reason.SPENDING, why
        if reason is None and (submission.accepted_hash is None or submission.accepted_hash != verdict.accepted_hash):
            raise PoolError(f"{submission.id}: store the accepted file before accepting it")
        self.db.submissions.move(
            submission,
            "reject" if reason else "accept",
            validator=validator,
            reason=reason,
            content=verdict.content,
            verdict=verdict.model_dump_json(exclude={"groups": {"__all__": {"sample"}}}),
            judged_s=self.db.clock(),
        )
        submission = replace(submission, validator=validator)
        return self._reject(submission, reason, detail) if reason else self._accept(submission, verdict)

    def _accept(self, submission: Submission, verdict: Verdict) -> list[str]:
        tokens = sum(group.tokens for group in verdict.groups)
        self.arrivals.accepted(submission)
        counts = {"tokens": tokens, "groups": len(verdict.groups), "accepted": submission.accepted_hash}
        self.db.ledger.append("accepted", _entry(submission) | counts)
        filled = self.batches.credit(
            submission.id, submission.version, verdict.groups, checked=bool(submission.full_check)
        )
        worker = self.db.nodes.name(submission.worker)
        self.db.history.put_samples(_samples(submission, worker, verdict))
        self.escrow.accepted(submission.worker, submission.id, tokens)
        full = [f"batch of step {step + 1} of {self.config.run.steps} is full" for step in filled]
        return [f"{submission.id} by {worker} accepted, {len(verdict.groups)} groups", *full]

    def _reject(self, submission: Submission, reason: Reason, detail: str) -> list[str]:
        self.db.ledger.append("rejected", _entry(submission) | {"reason": reason.value, "detail": detail})
        worker = self.db.nodes.name(submission.worker)
        lines = [f"{submission.id} by {worker} rejected: {reason}: {printable(detail[:200], keep='')}"]
        if reason is Reason.SPENDING and self.trust.dismiss(submission.worker, submission.id, detail):
            self.escrow.forfeit(submission.worker)
        if reason in UNUSABLE:
            self._back_off(submission.worker, reason)
        if reason in HARD and self._slash(submission, reason):
            lines.append(f"{worker} slashed and evicted: {reason} in {submission.id}")
        return lines

    def _slash(self, submission: Submission, reason: Reason) -> bool:
        """Ban the worker, forfeit its pending credit, drop its unused work. Return False if it was already banned."""
        why = f"slashed: {reason.value} in {submission.id}"
        if not self.db.nodes.move(submission.worker, "ban", why, self.db.clock()):
            return False
        self.db.ledger.append("slashed", _entry(submission) | {"reason": reason.value})
        self.escrow.forfeit(submission.worker)
        self.db.submissions.drop_all(submission.worker, UNSETTLED)
        self.db.groups.mark_all_stale(submission.worker)
        return True

    def _back_off(self, worker: str, reason: Reason) -> None:
        """Suspend a worker after repeated unusable files, because each may cost a validator its whole time limit. A
        single one does not count, because a disk error may be its cause."""
        faults = self.db.submissions.count_rejected(worker, [str(reason) for reason in UNUSABLE], newest=REMEMBERED)
        if faults > ACCIDENTS:
            why = f"{faults} of its newest {REMEMBERED} files were unusable, the last one: {reason.value}"
            self.db.nodes.suspend(worker, why, self.db.clock())

    def _reason(self, submission: Submission, verdict: Verdict) -> Reason | None:
        """Return the validator's reason, or another one if it accepted content that was already accepted.

        Content of the worker's own earlier submission is `replayed`. Content of another worker's submission is
        `context`, a soft reason. Rows contain their worker's seeds. So if the rows of two workers are equal, a
        validator is broken, and nobody knows which worker lied.
        """
        owner = self.db.submissions.content_owner(verdict.content) if verdict.content else None
        if verdict.reason is not None or owner is None:
            return verdict.reason
        return Reason.REPLAYED if self._get(owner).worker == submission.worker else Reason.CONTEXT

    def _get(self, id: str) -> Submission:
        if (submission := self.db.submissions.get(id)) is None:
            raise PoolError(f"no submission {id}", 404)
        return submission

    def _claimed(self, validator: str, id: str) -> Submission:
        submission = self._get(id)
        if submission.state != "validating" or submission.validator != validator:
            raise PoolError(f"{id} is {submission.state} and not claimed by this validator")
        return submission


def _is_leased(submission: Submission, now_s: float) -> bool:
    return submission.state == "validating" and submission.lease_s >= now_s


def _samples(submission: Submission, worker: str, verdict: Verdict) -> list[WorkerSample]:
    return [
        WorkerSample(
            **group.sample.model_dump(),
            submission=submission.id,
            group=number,
            worker=worker,
            policy_version=submission.version,
        )
        for number, group in enumerate(verdict.groups)
        if group.sample is not None
    ]


def _log_all(lines: Iterable[str]) -> None:
    """Log events. Call it after the transaction, which an error might still undo."""
    for line in lines:
        log.info("%s", line)


def _entry(submission: Submission) -> dict[str, str | int | bool | None]:
    """Return the fields common to ledger entries about a submission."""
    return {
        "submission": submission.id,
        "worker": submission.worker,
        "step": submission.step,
        "version": submission.version,
        "groups": submission.groups,
        "nonce": submission.nonce,
        "file": submission.file_hash,
        "full": bool(submission.full_check),
        "validator": submission.validator,
    }
