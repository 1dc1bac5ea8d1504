"""Who checks whose work, and whose second opinion it takes before anything is held against anyone.

Nodes whose fingerprints agree compute alike, to the last bit: they are one exactness class. A node reports a fingerprint for
each version that it loads; two are of one class if theirs agree for the newest version that both reported. A submission goes
to a live validator of its worker's class where there is one. Whether its tolerance is zero does not rest on this: the
validator compares the worker's fingerprint for the submission's version with its own.

A hard rejection, or one as `inexact`, waits for a second validator where one is alive that can judge it: the submission
returns to the queue, and another validator's verdict counts. Where there is none, the first verdict counts; its validator
had loaded its weights again before it gave it.

    both reject           hard: slashed, as ever. inexact: no pay, and the mismatch is counted
    the second accepts    the first validator is the odd one: it is asked for a new fingerprint; the worker is paid
    nobody to confirm     the first verdict counts; inexact: no pay

Nobody can confirm it any more once the relays no longer hold the version, or the run's last step is trained. Then the first
verdict counts too (`judgement`): a liar must not gain by the time that a second opinion takes.

Every worker with an inexact submission is asked to load its weights again and to report a new fingerprint. If it is another
one, the worker is in another class from then on. MISMATCHES confirmed ones within WINDOW_S suspend it. As many that nobody
could confirm put it into no class for WINDOW_S: its work is judged by the limits, which costs it nothing, and costs the
validator no second prefill. What was uploaded before a worker could renew counts once.

Invariants: a false fingerprint gains nothing; it only chooses who checks, and makes that check stricter. A flipped bit, in
whichever machine, costs at most the pay of submissions that it made inexact. A submission's fingerprint is the one at its
first claim, and it is doubted at most once, by its first validator.
docs/trust.md says why a false verdict of one validator is doubted, though validators are trusted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.coordinator.submissions import Submission
from shoal.ledger.connection import Connection
from shoal.protocol.messages import HARD, Heartbeat, Reason, Verdict

KEPT = 8  # versions per node
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
    """`asked` counts the requests to one node, `done` those that it has carried out, the last at `done_s`. Until `outside_s`
    it is in no class, whatever it reports."""

    asked: int = 0
    done: int = 0
    done_s: float = 0.0
    outside_s: float = 0.0

    @property
    def pending(self) -> bool:
        return self.asked > self.done


@dataclass(frozen=True)
class Doubt:
    """A rejection that another validator is to confirm."""

    by: str
    reason: Reason
    verdict: str  # all of it, as JSON: it counts if no second one comes


class Fingerprints:
    """What each node computed with the newest versions, who must renew it, and whose work differed from its class's."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def of(self, key: str) -> dict[int, str]:
        """By version, newest first."""
        rows = self.connection.rows("SELECT version, value FROM fingerprints WHERE key = ? ORDER BY version DESC", key)
        return dict(rows)

    def put(self, key: str, version: int, value: str) -> None:
        self.connection.change(
            "INSERT INTO fingerprints VALUES (?, ?, ?) ON CONFLICT (key, version) DO UPDATE SET value = excluded.value",
            *(key, version, value),
        )
        oldest = sorted(self.of(key), reverse=True)[:KEPT][-1]
        self.connection.change("DELETE FROM fingerprints WHERE key = ? AND version < ?", key, oldest)

    def forget(self, key: str) -> None:
        self.connection.change("DELETE FROM fingerprints WHERE key = ?", key)

    # --- renewals ----------------------------------------------------------------------------------------------------

    def renewal(self, key: str) -> Renewal:
        row = self.connection.row("SELECT asked, done, done_s, outside_s FROM renewals WHERE key = ?", key)
        return Renewal(*row) if row else Renewal()

    def ask(self, key: str) -> None:
        """Ask this node for a new fingerprint."""
        self.connection.change(
            "INSERT INTO renewals (key, asked) VALUES (?, 1)"
            " ON CONFLICT (key) DO UPDATE SET asked = renewals.asked + 1",
            key,
        )

    def set_done(self, key: str, done: int, now_s: float) -> None:
        self.connection.change("UPDATE renewals SET done = ?, done_s = ? WHERE key = ?", done, now_s, key)

    def set_outside(self, key: str, until_s: float) -> None:
        """Of no class until then. Its fingerprints and mismatches are forgotten."""
        self.connection.change("UPDATE renewals SET outside_s = ? WHERE key = ?", until_s, key)
        self.forget(key)
        self.forgive(key)

    # --- mismatches --------------------------------------------------------------------------------------------------

    def add_mismatch(self, key: str, at_s: float, *, confirmed: bool) -> None:
        self.connection.change("INSERT INTO mismatches VALUES (?, ?, ?)", key, at_s, int(confirmed))

    def mismatches(self, key: str, since_s: float, *, confirmed: bool) -> int:
        count = "SELECT count(*) FROM mismatches WHERE key = ? AND confirmed = ? AND at_s >= ?"
        return int(self.connection.value(count, key, int(confirmed), since_s))

    def forgive(self, key: str) -> None:
        self.connection.change("DELETE FROM mismatches WHERE key = ?", key)


class Replays:
    """Which class each checked submission claimed, who doubts it, and what was replayed without tolerance."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def fingerprint(self, submission: str) -> str | None:
        """The worker's for the submission's version; "": it claimed no class; None: the submission was not claimed yet."""
        found: str | None = self.connection.value("SELECT fingerprint FROM replays WHERE submission = ?", submission)
        return found

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
        """Every submission that was doubted, judged ones included."""
        rows = self.connection.rows("SELECT submission FROM replays WHERE doubted_by IS NOT NULL ORDER BY submission")
        return [submission for (submission,) in rows]

    def set_replayed(self, submission: str, *, tokens: int, mismatched: int, accepted: bool) -> None:
        self.connection.change(
            "UPDATE replays SET tokens = ?, mismatched = ?, accepted = ? WHERE submission = ?",
            *(tokens, mismatched, accepted, submission),
        )

    def totals(self) -> tuple[int, int, int]:
        """Accepted submissions that were replayed without tolerance, their tokens, and mismatched tokens of all."""
        row = self.connection.row(
            "SELECT coalesce(sum(CASE WHEN accepted THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(CASE WHEN accepted THEN tokens ELSE 0 END), 0), coalesce(sum(mismatched), 0)"
            " FROM replays WHERE tokens > 0"
        )
        return row[0], row[1], row[2]


class Checkers:
    def __init__(self, db: Database, config: Config, notify: Callable[[str], None]) -> None:
        """`notify` tells the operator."""
        self.db = db
        self.config = config
        self.notify = notify
        self.fingerprints, self.replays = Fingerprints(db.connection), Replays(db.connection)

    # --- what nodes report -------------------------------------------------------------------------------------------

    def report(self, key: str, beat: Heartbeat) -> None:
        """Record the fingerprint in a heartbeat. One of a version that nobody published is ignored."""
        table, found = self.fingerprints, beat.fingerprint
        known, renewal = table.of(key), table.renewal(key)
        if renewal.done < beat.renewals <= renewal.asked:
            table.set_done(key, beat.renewals, self.db.clock())
        if found is None:
            table.forget(key)
            return
        if self.db.clock() < renewal.outside_s:
            return
        if known.get(found.version) == found.value or self.db.policies.digest(found.version) is None:
            return
        if found.version in known:  # the machine, its libraries or its memory changed: it is in another class now
            log.info("%s has another fingerprint for version %d than before", key[:16], found.version)
            table.forget(key)
        table.put(key, found.version, found.value)

    def renewals(self, key: str) -> int:
        """How often this node was asked to load its weights again and to report a new fingerprint."""
        return self.fingerprints.renewal(key).asked

    def why_no_task(self, worker: str) -> str:
        """What a worker has to wait for before it gets a task; "" if nothing."""
        renewal = self.fingerprints.renewal(worker)
        if renewal.pending:
            return "this worker to load its weights again and to report a new fingerprint"
        left_s = renewal.outside_s - self.db.clock()
        if self.config.validator.classes == "exact" and left_s > 0:
            return f"{left_s:.0f} s: its work differed too often from that of the class that it reported"
        if self.config.validator.classes == "exact" and not self.peers(worker):
            return (
                'a validator whose fingerprint is this worker\'s: with validator.classes = "exact" only machines that '
                "compute like a validator get tasks"
            )
        return ""

    # --- who checks what ---------------------------------------------------------------------------------------------

    def together(self, one: str, other: str) -> bool:
        """Whether two nodes are of one class, by the newest version that both reported."""
        mine, theirs = self.fingerprints.of(one), self.fingerprints.of(other)
        newest = next((version for version in mine if version in theirs), None)
        return newest is not None and mine[newest] == theirs[newest]

    def live_validators(self) -> list[str]:
        return self.db.nodes.live_keys("validator", self.db.clock())

    def peers(self, worker: str) -> list[str]:
        """The live validators of a worker's class."""
        return [key for key in self.live_validators() if self.together(worker, key)]

    def checkers(self, submission: Submission) -> list[str]:
        """The live validators that may check this submission now.

        A doubted one goes to another validator than before. That one must be of the worker's class to confirm that the work
        is inexact; what is beyond the limits, any validator can confirm.
        """
        live, peers = self.live_validators(), self.peers(submission.worker)
        doubt = self.replays.doubt(submission.id)
        if doubt is None:
            return peers or live
        able = self.confirmers(submission, doubt.by, doubt.reason)
        return [key for key in able if key in peers] or able or live

    def may(self, validator: str, submission: Submission) -> bool:
        """Whether this validator may check this submission now."""
        able = self.checkers(submission)
        return validator in able or not able

    def confirmers(self, submission: Submission, validator: str, reason: Reason) -> list[str]:
        """The other live validators that could confirm such a rejection by this one."""
        able = self.peers(submission.worker) if reason is Reason.INEXACT else self.live_validators()
        return [key for key in able if key != validator]

    def fingerprint(self, submission: Submission) -> str:
        """The worker's fingerprint for the submission's version, as it was at the submission's first claim."""
        found = self.replays.fingerprint(submission.id)
        if found is None:
            found = self.fingerprints.of(submission.worker).get(submission.version, "")
            self.replays.add(submission.id, found)
        return found

    # --- second opinions -----------------------------------------------------------------------------------------------

    def opens(self, submission: Submission, validator: str, verdict: Verdict) -> bool:
        """Whether this verdict waits for a second one. If so, the submission is back in the queue."""
        reason = verdict.reason
        if reason is None or not (reason in HARD or reason is Reason.INEXACT) or self.replays.doubt(submission.id):
            return False
        if self.db.is_trained(self.config.run.steps) or not self.confirmers(submission, validator, reason):
            return False
        self.replays.set_doubt(submission.id, validator, reason.value, verdict.model_dump_json())
        # Back in the queue without what this validator stored. The next one checks all of it.
        return self.db.submissions.move(submission, "doubt", validator=None, accepted_hash=None, full_check=True)

    def first(self, submission: Submission) -> tuple[str, Verdict] | None:
        """The validator and its verdict, of a submission that waits for a second one; else None."""
        doubt = self.replays.doubt(submission.id)
        return None if doubt is None else (doubt.by, Verdict.model_validate_json(doubt.verdict))

    def was_first(self, submission: Submission, validator: str) -> bool:
        """Whether this validator gave its verdict on the submission already, and another one has it now."""
        doubt = self.replays.doubt(submission.id)
        return doubt is not None and doubt.by == validator != submission.validator

    def settle(self, submission: Submission, validator: str, verdict: Verdict, reason: Reason | None) -> Reason | None:
        """The reason that counts, after a verdict that waits for nobody. Holds against each what is to be held."""
        first = self.replays.doubt(submission.id)
        if first is not None and first.by == validator:
            first = None  # it judges alone, after all
        if first and first.reason is Reason.INEXACT and verdict.replay is None and reason is None:
            # The second one computes unlike the worker and the first: it cannot say that the first is wrong.
            self._renew(validator, f"could not replay {submission.id} exactly, unlike {self.db.nodes.name(first.by)}")
            reason, first = Reason.INEXACT, None
        if first and not (reason is not None and (reason in HARD or reason is Reason.INEXACT)):
            who = self.db.nodes.name(validator)
            self._renew(first.by, f"rejected {submission.id} ({first.reason.value}), {who} did not")
        if reason is Reason.INEXACT:
            self._mismatch(submission, confirmed=first is not None)
        if verdict.replay is not None and (reason is None or reason is Reason.INEXACT):
            tokens, mismatched = verdict.replay.tokens, verdict.replay.mismatched
            self.replays.set_replayed(submission.id, tokens=tokens, mismatched=mismatched, accepted=reason is None)
        return reason

    def _mismatch(self, submission: Submission, *, confirmed: bool) -> None:
        renewal, uploaded_s = self.fingerprints.renewal(submission.worker), submission.uploaded_s or 0.0
        if not renewal.pending:
            self.fingerprints.ask(submission.worker)
        name, now_s = self.db.nodes.name(submission.worker), self.db.clock()
        if not confirmed:
            self.notify(f"{submission.id} by {name} is inexact, and no second validator could confirm it")
        if renewal.pending or uploaded_s <= renewal.done_s:
            return  # the same cause as the mismatch for which it was asked to renew
        self.fingerprints.add_mismatch(submission.worker, now_s, confirmed=confirmed)
        if self.fingerprints.mismatches(submission.worker, now_s - WINDOW_S, confirmed=confirmed) < MISMATCHES:
            return
        if confirmed:
            why = f"{MISMATCHES} inexact submissions within {WINDOW_S:.0f} s"
            self.db.nodes.suspend(submission.worker, why, now_s)
            self.fingerprints.forgive(submission.worker)
        else:
            self.fingerprints.set_outside(submission.worker, now_s + WINDOW_S)
            self.notify(
                f"{name} is in no exactness class for {WINDOW_S:.0f} s: a second validator would tell whose fault it is"
            )

    def _renew(self, validator: str, why: str) -> None:
        if not self.fingerprints.renewal(validator).pending:
            self.fingerprints.ask(validator)
        text = f"{self.db.nodes.name(validator)} {why}: it is asked to load its weights again"
        self.notify(text)
        log.info("%s", text)
