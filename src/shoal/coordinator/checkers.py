"""Which validators judge a submission, how many, and what follows if they disagree.

Nodes whose fingerprints agree compute bit-identically: they form one exactness class. A node reports a fingerprint for
each version that it loads. Two nodes are in one class if their fingerprints agree for the newest version that both
reported. A submission goes to a live validator of its worker's class if there is one. That validator then compares the
worker's fingerprint for the submission's version with its own to decide whether the tolerance is zero.

Each verdict holds an opinion that its validator signed. Another live validator must judge the submission, too, if

    an opinion rejects it
    an opinion accepts it, and a random draw after the verdict decides so (SECOND_OPINIONS)
    two opinions contradict each other

The opinions of at most MAX_OPINIONS validators count. More rejections than acceptances reject the submission:

    two hard reasons         the worker is slashed
    two unusable files       counted; repeated ones suspend the worker (`judgement`)
    two inexact results      no credit, and the mismatch is counted
    one rejection            costs only the submission

Otherwise the worker gets credit. The coordinator asks an outvoted validator for a new fingerprint, and tells the
operator. If none judges within DOUBT_S, or no other validator was seen within that time, the opinions so far decide. So one
validator cannot slash, dismiss or suspend anybody. If a prefill gives a hard reason, the validator reloads its
weights and repeats the prefill before it rejects.

A worker with an inexact submission is asked to reload its weights and to report a new fingerprint. A different
fingerprint puts it into another class. MISMATCHES confirmed inexact submissions within WINDOW_S suspend the worker. The
same number of unconfirmed ones excludes it from all classes for WINDOW_S. Its work is then judged with tolerances. This
costs the worker nothing and saves the validator a second prefill. Inexact submissions that were uploaded before the
worker could report a new fingerprint count as one mismatch.

Invariants: a worker gains nothing by a false fingerprint, which only chooses the first validator and makes the check
stricter. A flipped bit in any machine costs at most the credit of the submissions that it made inexact. A submission
keeps the fingerprint that its worker had when it was first claimed. Nobody judges a submission twice.
docs/trust.md explains why one validator's rejection needs confirmation, even though validators are trusted.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import SystemRandom

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.coordinator.submissions import Submission
from shoal.ledger.chain import open_opinion
from shoal.ledger.connection import Connection
from shoal.protocol.messages import HARD, LEASE_S, Heartbeat, Opinion, Reason, Verdict

MAX_VERSIONS = 8  # number of fingerprints kept per node
SCHEMA = [
    """CREATE TABLE IF NOT EXISTS fingerprints (
    key TEXT NOT NULL, version BIGINT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (key, version))""",
    """CREATE TABLE IF NOT EXISTS renewals (
    key TEXT PRIMARY KEY, asked BIGINT NOT NULL DEFAULT 0, done BIGINT NOT NULL DEFAULT 0,
    done_s DOUBLE PRECISION NOT NULL DEFAULT 0, outside_s DOUBLE PRECISION NOT NULL DEFAULT 0)""",
    """CREATE TABLE IF NOT EXISTS mismatches (
    key TEXT NOT NULL, at_s DOUBLE PRECISION NOT NULL, confirmed BIGINT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS mismatches_by_key ON mismatches (key)",
    """CREATE TABLE IF NOT EXISTS opinions (
    submission TEXT NOT NULL, validator TEXT NOT NULL, reason TEXT, verdict TEXT NOT NULL, at_s DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (submission, validator))""",
    """CREATE TABLE IF NOT EXISTS replays (
    submission TEXT PRIMARY KEY, fingerprint TEXT NOT NULL,
    tokens BIGINT NOT NULL DEFAULT 0, mismatched BIGINT NOT NULL DEFAULT 0, accepted BOOLEAN NOT NULL DEFAULT FALSE)""",
]
MISMATCHES, WINDOW_S = 3, 3600.0
MAX_OPINIONS = 3  # opinions on one submission
SECOND_OPINIONS = 1 / 32  # share of accepted submissions that a second validator judges, too
DOUBT_S = 2 * LEASE_S  # longest wait for another opinion

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renewal:
    """How often a node was asked for a new fingerprint and how often it reported one, the last time at `done_s`. The
    node is in no class until `excluded_until_s`, whatever it reports."""

    requested: int = 0
    done: int = 0
    done_s: float = 0.0
    excluded_until_s: float = 0.0

    @property
    def pending(self) -> bool:
        return self.requested > self.done


@dataclass(frozen=True)
class Judged:
    """One validator's verdict on a submission."""

    validator: str
    verdict: Verdict
    opinion: Opinion  # as the validator signed it
    at_s: float

    @property
    def reason(self) -> Reason | None:
        return self.opinion.reason


class Fingerprints:
    """Each node's fingerprints by version, requests to renew them, and mismatches between its work and its class."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def of(self, key: str) -> dict[int, str]:
        """Return a node's fingerprints by version, newest first."""
        rows = self.connection.rows("SELECT version, value FROM fingerprints WHERE key = ? ORDER BY version DESC", key)
        return dict(rows)

    def newest(self) -> dict[str, str]:
        """Return each node's fingerprint for the newest version that it reported, by key."""
        return dict(self.connection.rows("SELECT key, value FROM fingerprints ORDER BY version"))  # the last one stays

    def put(self, key: str, version: int, value: str) -> None:
        self.connection.change(
            "INSERT INTO fingerprints VALUES (?, ?, ?) ON CONFLICT (key, version) DO UPDATE SET value = excluded.value",
            *(key, version, value),
        )
        oldest = sorted(self.of(key), reverse=True)[:MAX_VERSIONS][-1]
        self.connection.change("DELETE FROM fingerprints WHERE key = ? AND version < ?", key, oldest)

    def forget(self, key: str) -> None:
        self.connection.change("DELETE FROM fingerprints WHERE key = ?", key)

    # --- renewals ----------------------------------------------------------------------------------------------------

    def renewal(self, key: str) -> Renewal:
        row = self.connection.row("SELECT asked, done, done_s, outside_s FROM renewals WHERE key = ?", key)
        return Renewal(*row) if row else Renewal()

    def request_renewal(self, key: str) -> None:
        """Ask this node for a new fingerprint."""
        self.connection.change(
            "INSERT INTO renewals (key, asked) VALUES (?, 1)"
            " ON CONFLICT (key) DO UPDATE SET asked = renewals.asked + 1",
            key,
        )

    def set_done(self, key: str, done: int, now_s: float) -> None:
        self.connection.change("UPDATE renewals SET done = ?, done_s = ? WHERE key = ?", done, now_s, key)

    def exclude(self, key: str, until_s: float) -> None:
        """Exclude a node from all classes until `until_s`. Forget its fingerprints and mismatches."""
        self.connection.change("UPDATE renewals SET outside_s = ? WHERE key = ?", until_s, key)
        self.forget(key)
        self.clear_mismatches(key)

    # --- mismatches --------------------------------------------------------------------------------------------------

    def add_mismatch(self, key: str, at_s: float, *, confirmed: bool) -> None:
        self.connection.change("INSERT INTO mismatches VALUES (?, ?, ?)", key, at_s, int(confirmed))

    def mismatches(self, key: str, since_s: float, *, confirmed: bool) -> int:
        count = "SELECT count(*) FROM mismatches WHERE key = ? AND confirmed = ? AND at_s >= ?"
        return int(self.connection.value(count, key, int(confirmed), since_s))

    def clear_mismatches(self, key: str) -> None:
        self.connection.change("DELETE FROM mismatches WHERE key = ?", key)


class Opinions:
    """The verdicts on submissions."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def of(self, submission: str) -> list[Judged]:
        """Return the verdicts on a submission, oldest first."""
        rows = self.connection.rows(
            "SELECT validator, verdict, at_s FROM opinions WHERE submission = ? ORDER BY at_s, validator", submission
        )
        verdicts = [(validator, Verdict.model_validate_json(text), at_s) for validator, text, at_s in rows]
        return [Judged(each, given, open_opinion(given.opinion, each), at_s) for each, given, at_s in verdicts]

    def add(self, judged: Judged) -> None:
        text = judged.verdict.model_dump_json()
        self.connection.change(
            "INSERT INTO opinions (submission, validator, reason, verdict, at_s) VALUES (?, ?, ?, ?, ?)",
            *(judged.opinion.submission, judged.validator, judged.reason, text, judged.at_s),
        )

    def count_confirmed(self, worker: str, reasons: Collection[Reason], newest: int) -> int:
        """Count those of a worker's `newest` judged submissions that two validators rejected for one of these reasons."""
        marks = ", ".join("?" * len(reasons))
        return int(
            self.connection.value(
                "SELECT count(*) FROM (SELECT id FROM submissions WHERE worker = ? AND judged_s IS NOT NULL"
                " ORDER BY seq DESC LIMIT ?) AS judged WHERE"
                f" (SELECT count(*) FROM opinions WHERE submission = judged.id AND reason IN ({marks})) > 1",
                *(worker, newest, *map(str, reasons)),
            )
        )


class Replays:
    """For each claimed submission: its worker's fingerprint, and the result of its exact replay."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def fingerprint(self, submission: str) -> str | None:
        """Return the worker's fingerprint at the first claim; "" if it had none; None before the first claim."""
        value: str | None = self.connection.value("SELECT fingerprint FROM replays WHERE submission = ?", submission)
        return value

    def add(self, submission: str, fingerprint: str) -> None:
        self.connection.change("INSERT INTO replays (submission, fingerprint) VALUES (?, ?)", submission, fingerprint)

    def set_replayed(self, submission: str, *, tokens: int, mismatched: int, accepted: bool) -> None:
        self.connection.change(
            "UPDATE replays SET tokens = ?, mismatched = ?, accepted = ? WHERE submission = ?",
            *(tokens, mismatched, accepted, submission),
        )

    def totals(self) -> tuple[int, int, int]:
        """Count the accepted submissions that were replayed exactly, their tokens, and all mismatched tokens."""
        row = self.connection.row(
            "SELECT coalesce(sum(CASE WHEN accepted THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(CASE WHEN accepted THEN tokens ELSE 0 END), 0), coalesce(sum(mismatched), 0)"
            " FROM replays WHERE tokens > 0"
        )
        return row[0], row[1], row[2]


class Checkers:
    def __init__(self, db: Database, config: Config, notify: Callable[[str], None]) -> None:
        """`notify` shows a line to the operator."""
        self.db = db
        self.config = config
        self.notify = notify
        self.random = SystemRandom().random  # uniform in [0, 1)
        self.fingerprints, self.replays = Fingerprints(db.connection), Replays(db.connection)
        self.opinions = Opinions(db.connection)

    # --- what nodes report -------------------------------------------------------------------------------------------

    def report(self, key: str, beat: Heartbeat) -> None:
        """Record the fingerprint in a heartbeat, unless its version is unpublished or the node is excluded."""
        table, reported = self.fingerprints, beat.fingerprint
        known, renewal = table.of(key), table.renewal(key)
        if renewal.done < beat.renewals <= renewal.requested:
            table.set_done(key, beat.renewals, self.db.clock())
        if reported is None:
            table.forget(key)
            return
        if self.db.clock() < renewal.excluded_until_s:
            return
        if known.get(reported.version) == reported.value or self.db.policies.digest(reported.version) is None:
            return
        if reported.version in known:  # the machine, its libraries or its memory changed, so its class changed too
            log.info("%s changed its fingerprint for version %d", key[:16], reported.version)
            table.forget(key)
        table.put(key, reported.version, reported.value)

    def renewals(self, key: str) -> int:
        """Return how often this node was asked to reload its weights and report a new fingerprint."""
        return self.fingerprints.renewal(key).requested

    def why_no_task(self, worker: str) -> str:
        """Return what a worker must wait for before it gets a task; "" if nothing."""
        renewal = self.fingerprints.renewal(worker)
        if renewal.pending:
            return "this worker to reload its weights and report a new fingerprint"
        left_s = renewal.excluded_until_s - self.db.clock()
        if self.config.validator.classes == "exact" and left_s > 0:
            return f"{left_s:.0f} s: its work differed too often from the class that it reported"
        if self.config.validator.classes == "exact" and not self.peers(worker):
            return (
                'a validator with the same fingerprint as this worker: with validator.classes = "exact", only workers '
                "in the exactness class of a validator get tasks"
            )
        return ""

    # --- which validator checks a submission -------------------------------------------------------------------------

    def same_class(self, key: str, other_key: str) -> bool:
        """Return whether two nodes' fingerprints agree for the newest version that both reported."""
        values, others = self.fingerprints.of(key), self.fingerprints.of(other_key)
        newest = next((version for version in values if version in others), None)
        return newest is not None and values[newest] == others[newest]

    def live_validators(self, ago_s: float = 0.0) -> list[str]:
        """Return the validators that are live, or were `ago_s` ago or later."""
        return self.db.nodes.live_validators(self.db.clock() - ago_s)

    def peers(self, worker: str, ago_s: float = 0.0) -> list[str]:
        """Return the live validators of a worker's class, or those that were live `ago_s` ago or later."""
        return [key for key in self.live_validators(ago_s) if self.same_class(worker, key)]

    def may_check(self, validator: str, submission: Submission) -> bool:
        """Return whether this validator may check a submission now.

        If the worker's class has live validators, only they may give the first opinion. Any other live validator may
        give a further one, so a worker cannot choose it by its fingerprint.
        """
        if submission.opinions:
            return validator in self.others(submission.worker, self.opinions.of(submission.id))
        eligible = self.peers(submission.worker) or self.live_validators()
        return validator in eligible or not eligible

    def others(self, worker: str, judged: Sequence[Judged]) -> list[str]:
        """Return the validators that may give a further opinion, now or when they come back within DOUBT_S.

        Only the worker's class can replay its work.
        """
        inexact = any(each.reason is Reason.INEXACT for each in judged)
        keys = self.peers(worker, DOUBT_S) if inexact else self.live_validators(DOUBT_S)
        return [key for key in keys if all(key != each.validator for each in judged)]

    def fingerprint(self, submission: Submission) -> str:
        """Return the worker's fingerprint for the submission's version, as it was at the first claim."""
        value = self.replays.fingerprint(submission.id)
        if value is None:
            value = self.fingerprints.of(submission.worker).get(submission.version, "")
            self.replays.add(submission.id, value)
        return value

    # --- second opinions ---------------------------------------------------------------------------------------------

    def needs_another(self, worker: str, judged: Sequence[Judged]) -> bool:
        """Return whether a further validator must judge a submission with these opinions, and can. Draw if all accept."""
        if len(judged) >= MAX_OPINIONS or not self.others(worker, judged):
            return False
        if len(judged) > 1:
            accepting, rejecting = sides([each.opinion for each in judged])
            return bool(accepting) and bool(rejecting)
        reason = judged[0].reason
        return reason is not None or self.random() < SECOND_OPINIONS

    def is_overdue(self, submission: Submission) -> bool:
        """Return whether a submission that waits for a further opinion must be decided without it."""
        judged = self.opinions.of(submission.id)
        return not self.others(submission.worker, judged) or self.db.clock() > judged[-1].at_s + DOUBT_S

    def decide(self, submission: Submission, judged: Sequence[Judged]) -> tuple[Judged, bool]:
        """Return the opinion that stands, and whether a second validator shares it.

        Record a mismatch of the worker, and ask validators that were outvoted for a new fingerprint.
        """
        opinion, sharing = standing([each.opinion for each in judged])
        stands = next(each for each in judged if each.opinion is opinion)
        for each in judged:
            if (each.reason is None, each.opinion.tokens) != (opinion.reason is None, opinion.tokens):
                self._renew(each.validator, f"{_said(each)} {submission.id}, but {self._names(judged, each)} did not")
        if opinion.reason is Reason.INEXACT:
            self._mismatch(submission, confirmed=sharing > 1)
        if opinion.replay is not None and opinion.reason in (None, Reason.INEXACT):
            tokens, mismatched = opinion.replay.tokens, opinion.replay.mismatched
            accepted = opinion.reason is None
            self.replays.set_replayed(submission.id, tokens=tokens, mismatched=mismatched, accepted=accepted)
        if opinion.reason in HARD and sharing == 1:
            name = self.db.nodes.name(submission.worker)
            self.notify(
                f"{submission.id} by {name} is rejected as {opinion.reason}, but no second validator confirmed it: the"
                " worker keeps its membership, stake and credit. Run two validators, or evict it"
            )
        return stands, sharing > 1

    def _names(self, judged: Sequence[Judged], but: Judged) -> str:
        return " and ".join(self.db.nodes.name(each.validator) for each in judged if each is not but)

    def _mismatch(self, submission: Submission, *, confirmed: bool) -> None:
        renewal, uploaded_s = self.fingerprints.renewal(submission.worker), submission.uploaded_s or 0.0
        if not renewal.pending:
            self.fingerprints.request_renewal(submission.worker)
        name, now_s = self.db.nodes.name(submission.worker), self.db.clock()
        if not confirmed:
            self.notify(f"{submission.id} by {name} is inexact, and no second validator could confirm it")
        if renewal.pending or uploaded_s <= renewal.done_s:
            return  # this mismatch and the one that caused the renewal count as one
        self.fingerprints.add_mismatch(submission.worker, now_s, confirmed=confirmed)
        if self.fingerprints.mismatches(submission.worker, now_s - WINDOW_S, confirmed=confirmed) < MISMATCHES:
            return
        if confirmed:
            why = f"{MISMATCHES} inexact submissions within {WINDOW_S:.0f} s"
            self.db.nodes.suspend(submission.worker, why, now_s)
            self.fingerprints.clear_mismatches(submission.worker)
        else:
            self.fingerprints.exclude(submission.worker, now_s + WINDOW_S)
            self.notify(
                f"{name} is in no exactness class for {WINDOW_S:.0f} s, because nobody could confirm that its work is"
                " inexact; run a second validator to find out whether the worker or the validator is at fault"
            )

    def _renew(self, validator: str, why: str) -> None:
        if not self.fingerprints.renewal(validator).pending:
            self.fingerprints.request_renewal(validator)
        text = f"{self.db.nodes.name(validator)} must reload its weights: it {why}"
        self.notify(text)
        log.info("%s", text)


def sides(opinions: Sequence[Opinion]) -> tuple[list[Opinion], list[Opinion]]:
    """Return the opinions that accept, and those that reject.

    If one finds the work inexact, an acceptance without exact replay refutes nothing, so it is on no side.
    """
    rejecting = [each for each in opinions if each.reason is not None]
    inexact = any(each.reason is Reason.INEXACT for each in rejecting)
    accepting = [each for each in opinions if each.reason is None and not (inexact and each.replay is None)]
    return accepting, rejecting


def standing(opinions: Sequence[Opinion]) -> tuple[Opinion, int]:
    """Return the opinion that stands, and how many validators share it. `opinions`: of different validators."""
    accepting, rejecting = sides(opinions)
    hard = [each for each in rejecting if each.reason in HARD]
    if len(rejecting) <= len(accepting):
        sharing = accepting
    elif len(hard) > 1:
        sharing = hard
    else:  # one hard reason among several rejections is unconfirmed, so a soft one stands
        sharing = [each for each in rejecting if each.reason not in HARD] or hard
    # Of several acceptances, the one that credits least: a validator alone cannot count too much once another judges.
    return min(reversed(sharing), key=lambda each: each.tokens), len(sharing)


def _said(judged: Judged) -> str:
    return f"counted {judged.opinion.tokens} tokens in" if judged.reason is None else f"rejected ({judged.reason})"
