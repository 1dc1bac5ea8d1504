"""Which validator may check a submission, and when a second validator must confirm a rejection.

Nodes whose fingerprints agree compute bit-identically: they form one exactness class. A node reports a fingerprint for
each version that it loads. Two nodes are in one class if their fingerprints agree for the newest version that both
reported. A submission goes to a live validator of its worker's class if there is one. That validator then compares the
worker's fingerprint for the submission's version with its own to decide whether the tolerance is zero.

A rejection waits for a second verdict if it is hard or its reason is `inexact`, and if another live validator can judge
the submission. The submission returns to the queue, and the second verdict counts. Without another validator, the first
verdict counts. If a prefill gives a hard reason, the validator reloads its weights and repeats the prefill before it
rejects.

    both reject           hard: the worker is slashed. inexact: no credit, and the mismatch is counted
    the second accepts    the worker gets credit; the first validator is suspect and is asked for a new fingerprint
    no second verdict     the first verdict counts. hard: the worker is slashed. inexact: no credit

Once the relays have dropped the version, or the run's last step is trained, nobody can confirm a rejection. Then the
first verdict counts (`judgement`), so a liar gains nothing by a delay.

A worker with an inexact submission is asked to reload its weights and to report a new fingerprint. A different
fingerprint puts it into another class. MISMATCHES confirmed inexact submissions within WINDOW_S suspend the worker. The
same number of unconfirmed ones excludes it from all classes for WINDOW_S. Its work is then judged with tolerances. This
costs the worker nothing and saves the validator a second prefill. Inexact submissions that were uploaded before the
worker could report a new fingerprint count as one mismatch.

Invariants: a worker gains nothing by a false fingerprint, which only chooses the validator and makes the check
stricter. A flipped bit in any machine costs at most the credit of the submissions that it made inexact. A submission
keeps the fingerprint that its worker had when it was first claimed. Only a submission's first rejection can wait for
confirmation.
docs/trust.md explains why one validator's rejection needs confirmation, even though validators are trusted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.coordinator.submissions import Submission
from shoal.ledger.connection import Connection
from shoal.protocol.messages import HARD, Heartbeat, Reason, Verdict

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
    """CREATE TABLE IF NOT EXISTS replays (
    submission TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, doubted_by TEXT, doubt TEXT, verdict TEXT,
    tokens BIGINT NOT NULL DEFAULT 0, mismatched BIGINT NOT NULL DEFAULT 0, accepted BOOLEAN NOT NULL DEFAULT FALSE)""",
]
MISMATCHES, WINDOW_S = 3, 3600.0

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
class Doubt:
    """A rejection that another validator must confirm."""

    by: str
    reason: Reason
    verdict: str  # JSON of the first verdict, which counts if no second one follows


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


class Replays:
    """For each claimed submission: its worker's fingerprint, any doubt about it, and the result of its exact replay."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def fingerprint(self, submission: str) -> str | None:
        """Return the worker's fingerprint at the first claim; "" if it had none; None before the first claim."""
        value: str | None = self.connection.value("SELECT fingerprint FROM replays WHERE submission = ?", submission)
        return value

    def doubt(self, submission: str) -> Doubt | None:
        row = self.connection.row("SELECT doubted_by, doubt, verdict FROM replays WHERE submission = ?", submission)
        return Doubt(row[0], Reason(row[1]), row[2]) if row and row[0] else None

    def add(self, submission: str, fingerprint: str) -> None:
        self.connection.change("INSERT INTO replays (submission, fingerprint) VALUES (?, ?)", submission, fingerprint)

    def set_doubt(self, submission: str, validator: str, reason: str, verdict: str) -> None:
        self.connection.change(
            "UPDATE replays SET doubted_by = ?, doubt = ?, verdict = ? WHERE submission = ?",
            *(validator, reason, verdict, submission),
        )

    def doubted(self) -> list[str]:
        """Return every submission that was ever doubted."""
        rows = self.connection.rows("SELECT submission FROM replays WHERE doubted_by IS NOT NULL ORDER BY submission")
        return [submission for (submission,) in rows]

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
        self.fingerprints, self.replays = Fingerprints(db.connection), Replays(db.connection)

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

    def live_validators(self) -> list[str]:
        return self.db.nodes.live_validators(self.db.clock())

    def peers(self, worker: str) -> list[str]:
        """Return the live validators of a worker's class."""
        return [key for key in self.live_validators() if self.same_class(worker, key)]

    def may_check(self, validator: str, submission: Submission) -> bool:
        """Return whether this validator may check a submission now.

        If the worker's class has live validators, only they may check it. A doubted submission goes to a different
        validator. Only a validator of the worker's class can confirm that work is inexact. Any validator can confirm a
        hard rejection.
        """
        eligible, doubt = self.peers(submission.worker), self.replays.doubt(submission.id)
        if doubt is not None:
            confirmers = self.confirmers(submission, doubt.by, doubt.reason)
            eligible = [key for key in confirmers if key in eligible] or confirmers
        eligible = eligible or self.live_validators()
        return validator in eligible or not eligible

    def confirmers(self, submission: Submission, validator: str, reason: Reason) -> list[str]:
        """Return the other live validators that could confirm this validator's rejection."""
        keys = self.peers(submission.worker) if reason is Reason.INEXACT else self.live_validators()
        return [key for key in keys if key != validator]

    def fingerprint(self, submission: Submission) -> str:
        """Return the worker's fingerprint for the submission's version, as it was at the first claim."""
        value = self.replays.fingerprint(submission.id)
        if value is None:
            value = self.fingerprints.of(submission.worker).get(submission.version, "")
            self.replays.add(submission.id, value)
        return value

    # --- second opinions ---------------------------------------------------------------------------------------------

    def defer(self, submission: Submission, validator: str, verdict: Verdict) -> bool:
        """Return whether this verdict waits for a second one. If so, put the submission back into the queue."""
        reason = verdict.reason
        if reason is None or not (reason in HARD or reason is Reason.INEXACT) or self.replays.doubt(submission.id):
            return False
        if self.db.is_trained(self.config.run.steps) or not self.confirmers(submission, validator, reason):
            return False
        self.replays.set_doubt(submission.id, validator, reason.value, verdict.model_dump_json())
        # Discard the file that this validator stored. The next validator prefills the whole submission.
        return self.db.submissions.move(submission, "doubt", validator=None, accepted_hash=None, full_check=True)

    def first_verdict(self, submission: Submission) -> tuple[str, Verdict] | None:
        """Return a doubted submission's first validator and its verdict; None for other submissions."""
        doubt = self.replays.doubt(submission.id)
        return None if doubt is None else (doubt.by, Verdict.model_validate_json(doubt.verdict))

    def is_repeat(self, submission: Submission, validator: str) -> bool:
        """Return whether this validator gave the first verdict and does not hold the current claim."""
        doubt = self.replays.doubt(submission.id)
        return doubt is not None and doubt.by == validator != submission.validator

    def settle(self, submission: Submission, validator: str, verdict: Verdict, reason: Reason | None) -> Reason | None:
        """Return the reason of the final verdict; None if it accepts.

        Record a mismatch of the worker, or ask a validator that is at fault for a new fingerprint.
        """
        first = self.replays.doubt(submission.id)
        if first is not None and first.by == validator:
            first = None  # the same validator judges again, because no other one is left
        if first and first.reason is Reason.INEXACT and verdict.replay is None and reason is None:
            # The second validator is in another class, so it cannot refute the first.
            self._renew(validator, f"could not replay {submission.id} exactly, unlike {self.db.nodes.name(first.by)}")
            reason, first = Reason.INEXACT, None
        if first and not (reason is not None and (reason in HARD or reason is Reason.INEXACT)):
            who = self.db.nodes.name(validator)
            self._renew(first.by, f"rejected {submission.id} ({first.reason.value}), but {who} did not")
        if reason is Reason.INEXACT:
            self._mismatch(submission, confirmed=first is not None)
        if verdict.replay is not None and (reason is None or reason is Reason.INEXACT):
            tokens, mismatched = verdict.replay.tokens, verdict.replay.mismatched
            self.replays.set_replayed(submission.id, tokens=tokens, mismatched=mismatched, accepted=reason is None)
        return reason

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
