"""Claims and verdicts: a validator claims uploaded submissions, and its verdicts accept or reject them.

Invariants: only the validator with the claim gives a verdict, and signs it. `checkers` says how many validators must
judge a submission, and which opinion stands. Groups are credited exactly when their submission is accepted. Only a hard
reason that two validators signed slashes. A ban drops all of the worker's unjudged submissions: nothing from a banned
key is accepted or credited. Nothing that a validator reports without its signature has consequences for a worker, except
the figures of an accepted file, which an audit compares with the file.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.config import Config
from shoal.coordinator.arrivals import Arrivals
from shoal.coordinator.batches import Batches
from shoal.coordinator.checkers import Checkers, Judged
from shoal.coordinator.credit import Escrow
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.submissions import UNSETTLED, Submission
from shoal.coordinator.trust import Trust
from shoal.errors import printable
from shoal.ledger.chain import JSON, LedgerError, open_opinion
from shoal.protocol.history import WorkerSample
from shoal.protocol.messages import HARD, LEASE_S, UNUSABLE, Assignment, Claim, Claims, Opinion, Reason, Verdict

ACCIDENTS, REMEMBERED = 1, 20  # up to ACCIDENTS unusable files among the newest REMEMBERED have no further consequence

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Judgement:
    db: Database
    config: Config
    run: str
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
        the result in advance.
        """
        self.close_waiting()
        with self.db.transaction():
            now_s = self.db.clock()
            waiting = self.db.submissions.claimable(validator, now_s)
            eligible = [submission for submission in waiting if self._may_claim(validator, submission, now_s)]
            taken = [submission for submission in eligible if submission.version == eligible[0].version][:limit]
            claims = [self._lease(validator, submission, now_s) for submission in taken]
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

    def close_waiting(self) -> None:
        """Close submissions that no validator will judge any more.

        Relays have dropped the version, so waiting for it would block a validator; or a further opinion is overdue.
        The opinions so far decide. Without any, the submission expires.
        """
        lines: list[str] = []
        with self.db.transaction():
            now_s, oldest_held = self.db.clock(), self.db.oldest_held()
            kept = self.db.kept_versions() if oldest_held is not None else []
            for submission in self.db.submissions.waiting(now_s):
                gone = oldest_held is not None and submission.version < oldest_held and submission.version not in kept
                if self._get(submission.id).state == "expired":  # with its worker's ban, just now
                    continue
                if submission.opinions and (gone or self.checkers.is_overdue(submission)):
                    lines += self._conclude(submission, self.checkers.opinions.of(submission.id))
                elif gone and not submission.opinions:
                    self.db.submissions.move(submission, "drop")
                    name, version = self.db.nodes.name(submission.worker), submission.version
                    lines.append(
                        f"{submission.id} by {name} expired unchecked: relays no longer hold version {version}"
                    )
        _log_all(lines)

    def damaged(self, id: str) -> None:
        """Let a submission expire whose file is damaged. Its groups are assigned again."""
        if self.db.submissions.move(self._get(id), "drop"):
            log.error("%s expires: its file in the store is damaged", id)

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
        """Record a verdict. Accept or reject the submission, unless another validator must judge it, too."""
        size, max_tokens = self.config.sampling.group_size, self.config.sampling.max_tokens
        with self.db.transaction():
            submission = self._get(verdict.submission)
            opinion = self._opinion(submission, validator, verdict)
            replayed = max(opinion.replay.tokens, opinion.replay.mismatched) if opinion.replay else 0
            counts = [*(group.tokens for group in verdict.groups), -(-replayed // submission.groups)]
            if len(verdict.groups) > submission.groups or max(counts) > size * max_tokens:
                raise PoolError(f"{submission.id}: the verdict has more groups or tokens than its task allows", 400)
            judged = self.checkers.opinions.of(submission.id)
            if any(each.validator == validator for each in judged):
                return  # the validator repeats its verdict because it did not get the response
            submission = self._claimed(validator, verdict.submission)
            if opinion.reason is None and submission.accepted_hash != opinion.accepted:
                raise PoolError(f"{submission.id}: store the accepted file before accepting it")
            own = Judged(validator, verdict, opinion, self.db.clock())
            self.checkers.opinions.add(own)
            judged.append(own)
            if self.checkers.needs_another(submission.worker, judged):
                # The next validator stores its own accepted file, and prefills the whole submission.
                cleared = {"validator": None, "accepted_hash": None, "full_check": True, "opinions": len(judged)}
                self.db.submissions.move(submission, "doubt", **cleared)
                outcome = f"rejected by {validator[:16]}: {opinion.reason}" if opinion.reason else "accepted by one"
                lines = [f"{submission.id} {outcome}; another validator must judge it"]
            else:
                lines = self._conclude(submission, judged)
        _log_all(lines)

    def _opinion(self, submission: Submission, validator: str, verdict: Verdict) -> Opinion:
        """Return the opinion. Raise PoolError unless this validator signed it about this submission's file."""
        try:
            opinion = open_opinion(verdict.opinion, validator)
        except LedgerError as error:
            raise PoolError(f"{submission.id}: {error}", 400) from error
        if (opinion.run, opinion.submission, opinion.file) != (self.run, submission.id, submission.file_hash):
            raise PoolError(f"{submission.id}: the signed opinion is about another run, submission or file", 400)
        tokens = sum(group.tokens for group in verdict.groups)
        if (opinion.reason is None) != bool(opinion.accepted) or opinion.tokens != tokens:
            raise PoolError(f"{submission.id}: the opinion has no accepted file, or not the tokens of its groups", 400)
        if opinion.reason is Reason.SPENDING:
            raise PoolError(f"{submission.id}: only the coordinator finds spending, over several submissions", 400)
        if opinion.reason is Reason.INEXACT and not self.checkers.fingerprint(submission):
            raise PoolError(f"{submission.id}: its worker claims no exactness class, so it cannot be inexact", 400)
        return opinion

    def close(self) -> None:
        """After the run's last step: release all pending credit, except of workers whose work is still in doubt."""
        with self.db.transaction():
            self.escrow.close(doubted=self.db.submissions.doubted_workers())

    def _conclude(self, submission: Submission, judged: Sequence[Judged]) -> list[str]:
        """Carry out the opinion that stands. Return lines to log."""
        standing, confirmed = self.checkers.decide(submission, judged)
        reason, detail = standing.reason, standing.verdict.detail
        if reason is None and (why := self.trust.observe(submission, standing.validator, standing.opinion)):
            reason, detail = Reason.SPENDING, why
        self.db.submissions.move(
            submission,
            "reject" if reason else "accept",
            validator=standing.validator,
            accepted_hash=standing.opinion.accepted or None,
            reason=reason,
            opinions=0,
            verdict=standing.verdict.model_dump_json(exclude={"groups": {"__all__": {"sample"}}}),
            judged_s=self.db.clock(),
        )
        submission = replace(submission, validator=standing.validator, accepted_hash=standing.opinion.accepted)
        entry = _entry(submission) | {"opinions": [each.verdict.opinion for each in judged]}
        if reason is None:
            lines = self._accept(submission, standing, entry)
        else:
            lines = self._reject(submission, reason, detail, entry, confirmed=confirmed)
        if self.db.is_trained(self.config.run.steps):
            self.close()
        return lines

    def _accept(self, submission: Submission, standing: Judged, entry: Mapping[str, JSON]) -> list[str]:
        verdict, tokens = standing.verdict, standing.opinion.tokens
        self.arrivals.accepted(submission)
        counts = {"tokens": tokens, "groups": len(verdict.groups), "accepted": submission.accepted_hash}
        self.db.ledger.append("accepted", {**entry, **counts})
        filled = self.batches.credit(
            submission.id, submission.version, verdict.groups, checked=bool(submission.full_check)
        )
        worker = self.db.nodes.name(submission.worker)
        self.db.history.put_samples(_samples(submission, worker, verdict))
        self.escrow.accepted(submission.worker, submission.id, tokens)
        full = [f"batch of step {step + 1} of {self.config.run.steps} is full" for step in filled]
        return [f"{submission.id} by {worker} accepted, {len(verdict.groups)} groups", *full]

    def _reject(
        self, submission: Submission, reason: Reason, detail: str, entry: Mapping[str, JSON], *, confirmed: bool
    ) -> list[str]:
        self.db.ledger.append("rejected", {**entry, "reason": reason.value, "detail": detail})
        worker = self.db.nodes.name(submission.worker)
        lines = [f"{submission.id} by {worker} rejected: {reason}: {printable(detail[:200], keep='')}"]
        if reason is Reason.SPENDING and self.trust.dismiss(submission.worker, submission.id, detail):
            self.escrow.forfeit(submission.worker)
        if reason in UNUSABLE:
            self._back_off(submission.worker, reason)
        if reason in HARD and confirmed and self._slash(submission, reason):
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
        single one does not count, because a disk error may be its cause, nor one that a single validator rejected."""
        faults = self.checkers.opinions.count_confirmed(worker, UNUSABLE, newest=REMEMBERED)
        if faults > ACCIDENTS:
            why = f"{faults} of its newest {REMEMBERED} files were unusable, the last one: {reason.value}"
            self.db.nodes.suspend(worker, why, self.db.clock())

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


def _entry(submission: Submission) -> dict[str, JSON]:
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
