"""The table of assigned tasks and their submissions, and their state machine: (state, event) -> state.

    open        its worker works on it          accepted, rejected  judged
    uploaded    waits for a validator           expired             nobody will finish it
    validating  a validator has claimed it      stale               its version became too old before the upload

    miss    its worker requests another task instead of uploading it, or uploads a file other than the announced one
    drop    its worker was dismissed or banned, or no validator can get its version any more
    doubt   another validator must judge it, too

Invariants: an id, made of the worker's key and the submission's number, is unique. Only `move` writes the state, by
compare-and-swap. Accepted, rejected, expired and stale are final. Only `credit` writes `tokens` and `credit`.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal

from shoal.ledger.connection import SERIAL, Connection
from shoal.protocol.messages import LEASE_S

SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS submissions (
    seq {SERIAL}, id TEXT UNIQUE NOT NULL, worker TEXT NOT NULL, number BIGINT NOT NULL, step BIGINT NOT NULL,
    version BIGINT NOT NULL, digest TEXT NOT NULL, groups BIGINT NOT NULL, deadline_s DOUBLE PRECISION NOT NULL,
    state TEXT NOT NULL, announced TEXT NOT NULL DEFAULT '', file_hash TEXT, accepted_hash TEXT, nonce TEXT NOT NULL,
    assigned_s DOUBLE PRECISION NOT NULL, validator TEXT, full_check BOOLEAN,
    lease_s DOUBLE PRECISION, opinions BIGINT NOT NULL DEFAULT 0, reason TEXT, verdict TEXT, uploaded_s DOUBLE PRECISION,
    judged_s DOUBLE PRECISION, tokens BIGINT NOT NULL DEFAULT 0, credit TEXT NOT NULL DEFAULT '')""",
    "CREATE INDEX IF NOT EXISTS submissions_state ON submissions (state, seq)",
    "CREATE INDEX IF NOT EXISTS submissions_worker ON submissions (worker, state, seq)",
    "CREATE INDEX IF NOT EXISTS submissions_file ON submissions (file_hash)",
    "CREATE INDEX IF NOT EXISTS submissions_accepted ON submissions (accepted_hash)",
]

State = Literal["open", "uploaded", "validating", "accepted", "rejected", "expired", "stale"]
Event = Literal["upload", "miss", "late", "claim", "doubt", "accept", "reject", "drop"]

TABLE: dict[tuple[State, Event], State] = {
    ("open", "upload"): "uploaded",
    ("open", "miss"): "expired",
    ("open", "late"): "stale",
    ("open", "drop"): "expired",
    ("uploaded", "claim"): "validating",
    ("uploaded", "accept"): "accepted",  # by the opinions so far, when no other one can follow
    ("uploaded", "reject"): "rejected",
    ("uploaded", "drop"): "expired",
    ("validating", "claim"): "validating",  # by the same validator, or after the lease
    ("validating", "doubt"): "uploaded",
    ("validating", "accept"): "accepted",
    ("validating", "reject"): "rejected",
    ("validating", "drop"): "expired",
}
HELD_S = 60.0  # how long a batch waits for a submission that a validator holds
UNSETTLED: tuple[State, ...] = ("open", "uploaded", "validating")
EVENT_COLUMNS = {
    *("file_hash", "uploaded_s", "accepted_hash", "validator", "lease_s", "full_check"),
    *("reason", "verdict", "judged_s", "opinions"),
}


@dataclass(frozen=True)
class Submission:
    id: str
    worker: str
    number: int  # counts the worker's tasks
    step: int
    version: int
    digest: str  # of the version's manifest
    groups: int
    nonce: str
    assigned_s: float
    deadline_s: float  # after this time, a worker that lost the task gets another one
    state: State = "open"
    announced: str = ""  # hash of the file being uploaded; "": the worker is still generating
    file_hash: str | None = None  # of the uploaded file
    accepted_hash: str | None = None  # of the validator's accepted file
    validator: str | None = None  # key of the validator with the claim
    full_check: bool | None = None  # whether it is prefilled whole; drawn at the first claim
    uploaded_s: float | None = None
    lease_s: float = 0.0  # end of the validator's claim
    opinions: int = 0  # of validators that judged it while it waits for another one's


COLUMNS = ", ".join(field.name for field in fields(Submission))


class Submissions:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(self, task: Submission) -> None:
        marks = ", ".join("?" for _ in fields(Submission))
        self.connection.change(f"INSERT INTO submissions ({COLUMNS}) VALUES ({marks})", *astuple(task))

    def get(self, id: str) -> Submission | None:
        return next(iter(self._all("id = ?", id)), None)

    def held_by(self, worker: str) -> list[Submission]:
        """Return a worker's open tasks, in progress or being uploaded (announced), oldest first."""
        return self._all("worker = ? AND state = 'open' ORDER BY seq", worker)

    def announce(self, id: str, file_hash: str) -> None:
        self.connection.change("UPDATE submissions SET announced = ? WHERE id = ?", file_hash, id)

    # --- states ------------------------------------------------------------------------------------------------------

    def move(self, submission: Submission, event: Event, **columns: object) -> bool:
        """Apply an event and write these columns. If the event does not apply, change nothing and return False."""
        assert columns.keys() <= EVENT_COLUMNS
        if (state := TABLE.get((submission.state, event))) is None:
            return False
        names = "".join(f", {name} = ?" for name in columns)
        changed = self.connection.change(
            f"UPDATE submissions SET state = ?{names} WHERE id = ? AND state = ?",
            *(state, *columns.values(), submission.id, submission.state),
        )
        return changed == 1

    def drop_all(self, worker: str, states: Sequence[State] = ("open",)) -> None:
        """Drop a worker's submissions in these states."""
        marks = ", ".join("?" * len(states))
        for submission in self._all(f"worker = ? AND state IN ({marks}) ORDER BY seq", worker, *states):
            self.move(submission, "drop")

    # --- assigning ---------------------------------------------------------------------------------------------------

    def next_number(self, worker: str) -> int:
        return self._integer("SELECT coalesce(max(number), -1) + 1 FROM submissions WHERE worker = ?", worker)

    def newest_version_of(self, worker: str) -> int:
        """Return the newest version of this worker's tasks; -1 if it has had none."""
        return self._integer("SELECT coalesce(max(version), -1) FROM submissions WHERE worker = ?", worker)

    def groups_unjudged(self, now_s: float) -> int:
        """Count the groups in uploaded submissions that somebody will soon judge.

        No batch waits for a submission that is in doubt, nor longer than HELD_S for one that a validator holds.
        """
        return self._integer(
            "SELECT coalesce(sum(groups), 0) FROM submissions"
            " WHERE (state = 'uploaded' AND opinions = 0) OR (state = 'validating' AND lease_s >= ?)",
            now_s + LEASE_S - HELD_S,
        )

    def open_at(self, seen_since_s: float, now_s: float) -> list[tuple[int, float, float]]:
        """Return each open task's groups, its age, and its worker's usual time for a task (0: no accepted work yet).

        Include only tasks whose worker may finish them and was seen since `seen_since_s`. Times are in seconds.
        """
        return self.connection.rows(
            "SELECT groups, ? - assigned_s, took_s FROM submissions JOIN nodes ON key = worker"
            " WHERE submissions.state = 'open' AND seen_s >= ? AND nodes.state IN ('active', 'draining')",
            now_s,
            seen_since_s,
        )

    # --- checking ----------------------------------------------------------------------------------------------------

    def claimable(self, validator: str, now_s: float) -> list[Submission]:
        """Return submissions that are unclaimed, claimed by this validator, or under an expired lease; oldest first."""
        return self._all(
            "state = 'uploaded' OR (state = 'validating' AND (lease_s < ? OR validator = ?)) ORDER BY seq",
            now_s,
            validator,
        )

    def waiting(self, now_s: float) -> list[Submission]:
        """Return submissions that wait for a verdict and that no validator holds, oldest first."""
        return self._all("state = 'uploaded' OR (state = 'validating' AND lease_s < ?) ORDER BY seq", now_s)

    def versions_in_check(self, below: int, now_s: float, limit: int) -> list[int]:
        """Return the newest versions below this one of which a validator holds work, or should judge doubted work.

        Once a claim has lapsed, its version is kept for as long again, so that another validator can judge the work.
        """
        rows = self.connection.rows(
            "SELECT DISTINCT version FROM submissions WHERE version < ? AND state IN ('uploaded', 'validating')"
            " AND (opinions > 0 OR (state = 'validating' AND lease_s >= ?)) ORDER BY version DESC LIMIT ?",
            *(below, now_s - LEASE_S, limit),
        )
        return [version for (version,) in rows]

    def doubted_workers(self) -> list[str]:
        """Return the workers with submissions that wait for a further opinion."""
        rows = self.connection.rows(
            "SELECT DISTINCT worker FROM submissions WHERE state IN ('uploaded', 'validating') AND opinions > 0"
        )
        return [worker for (worker,) in rows]

    def set_accepted_hash(self, id: str, accepted_hash: str) -> None:
        """Record the file that the claiming validator has stored."""
        self.connection.change("UPDATE submissions SET accepted_hash = ? WHERE id = ?", accepted_hash, id)

    def honest_in_a_row(self, worker: str) -> int:
        """Count the worker's submissions that passed a full check since its last rejection."""
        return self._integer(
            "SELECT count(*) FROM submissions WHERE worker = ? AND state = 'accepted' AND full_check AND seq >"
            " (SELECT coalesce(max(seq), 0) FROM submissions WHERE worker = ? AND state = 'rejected')",
            worker,
            worker,
        )

    def groups_unchecked(self) -> int:
        """Count the groups in claimed submissions that will not be prefilled whole."""
        return self._integer(
            "SELECT coalesce(sum(groups), 0) FROM submissions WHERE state = 'validating' AND NOT full_check"
        )

    # --- counting ----------------------------------------------------------------------------------------------------

    def count_by_worker_and_state(self) -> dict[tuple[str, State], int]:
        rows = self.connection.rows("SELECT worker, state, count(*) FROM submissions GROUP BY worker, state")
        return {(worker, state): count for worker, state, count in rows}

    def count_missed(self) -> dict[str, int]:
        """Count the expired tasks that were never uploaded, by worker."""
        return dict(
            self.connection.rows(
                "SELECT worker, count(*) FROM submissions WHERE state = 'expired' AND file_hash IS NULL GROUP BY worker"
            )
        )

    def files(self) -> list[tuple[str, str | None, str | None]]:
        """Return the id of every uploaded submission, and the hashes of its uploaded and its accepted file."""
        return self.connection.rows(
            "SELECT id, file_hash, accepted_hash FROM submissions WHERE file_hash IS NOT NULL ORDER BY seq"
        )

    def has_file(self, kind: Literal["submissions", "accepted"], content_hash: str) -> bool:
        """Return whether a submission has this file."""
        column = "file_hash" if kind == "submissions" else "accepted_hash"
        return self.connection.row(f"SELECT 1 FROM submissions WHERE {column} = ?", content_hash) is not None

    def groups_too_late(self) -> int:
        """Count the groups in stale submissions."""
        return self._integer("SELECT coalesce(sum(groups), 0) FROM submissions WHERE state = 'stale'")

    def count_by_state(self) -> dict[State, int]:
        return dict(self.connection.rows("SELECT state, count(*) FROM submissions GROUP BY state"))

    def count_by_reason(self) -> dict[str, int]:
        return dict(
            self.connection.rows("SELECT reason, count(*) FROM submissions WHERE reason IS NOT NULL GROUP BY reason")
        )

    def oldest_upload_s(self) -> float | None:
        """Return the upload time of the oldest submission without a verdict."""
        oldest_s: float | None = self.connection.value(
            "SELECT min(uploaded_s) FROM submissions WHERE state IN ('uploaded', 'validating')"
        )
        return oldest_s

    def verdict_totals(self) -> tuple[int, int, float]:
        """Return the number of verdicts, how many followed a full check, and total seconds from upload to verdict."""
        counts: tuple[int, int, float] = self.connection.row(
            "SELECT count(*), coalesce(sum(CASE WHEN full_check THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(judged_s - uploaded_s), 0)"
            " FROM submissions WHERE state IN ('accepted', 'rejected') AND judged_s IS NOT NULL"
        )
        return counts

    # --- reading -----------------------------------------------------------------------------------------------------

    def _all(self, where: str, *arguments: object) -> list[Submission]:
        rows = self.connection.rows(f"SELECT {COLUMNS} FROM submissions WHERE {where}", *arguments)
        tasks = [Submission(*row) for row in rows]
        return [task if task.full_check is None else replace(task, full_check=bool(task.full_check)) for task in tasks]

    def _integer(self, sql: str, *arguments: object) -> int:
        return int(self.connection.value(sql, *arguments))
