"""The tables of accepted groups: which step's batch each one is in, and what each of several rewards gave it. `grades`
counts what they scored.

    accepted -> in the batch of one step | stale            (useful groups only)

Invariant: a group is in at most one batch, and stays in it. Called by `batches`, `learning`, `submissions`, `status` and
`metrics`.
"""

from dataclasses import dataclass

from shoal.coordinator.tables.connection import SERIAL, Connection
from shoal.protocol.messages import GroupResult

SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS groups (
    seq {SERIAL}, submission TEXT NOT NULL, grp BIGINT NOT NULL, version BIGINT NOT NULL, reward DOUBLE PRECISION NOT NULL,
    useful BOOLEAN NOT NULL, flat BOOLEAN NOT NULL, tokens BIGINT NOT NULL, accepted_during BIGINT NOT NULL, batch BIGINT,
    stale BOOLEAN NOT NULL DEFAULT FALSE, task BIGINT NOT NULL, source TEXT NOT NULL, target BIGINT NOT NULL,
    score BIGINT NOT NULL, graded BIGINT NOT NULL, wrong_format BIGINT NOT NULL, grader_error BIGINT NOT NULL,
    error TEXT NOT NULL, checked BOOLEAN NOT NULL DEFAULT TRUE, UNIQUE (submission, grp))""",
    """CREATE TABLE IF NOT EXISTS group_parts (
    submission TEXT NOT NULL, grp BIGINT NOT NULL, name TEXT NOT NULL, mean DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (submission, grp, name))""",
    "CREATE INDEX IF NOT EXISTS groups_batch ON groups (batch, seq)",
    "CREATE INDEX IF NOT EXISTS groups_accepted ON groups (accepted_during)",
]
WAITING = "useful AND batch IS NULL AND NOT stale"


@dataclass(frozen=True)
class GroupTotals:
    tokens: int
    stale: int
    useful: int


@dataclass(frozen=True)
class GroupSignal:
    groups: int
    useful: int
    flat: int
    lowest: float | None
    highest: float | None


class Groups:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(
        self,
        submission: str,
        group: int,
        found: GroupResult,
        *,
        version: int,
        useful: bool,
        checked: bool,
        accepted_during: int,
    ) -> None:
        """`useful`: may be trained on; `checked`: prefilled whole; `accepted_during`: the step that was open."""
        outcomes = found.outcomes
        self.connection.change(
            "INSERT INTO groups (submission, grp, version, reward, useful, flat, tokens, accepted_during,"
            " task, source, target, score, graded, wrong_format, grader_error, error, checked)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(submission, group, version, found.reward_mean, useful, not found.useful, found.tokens, accepted_during),
            *(found.task, found.source, found.target_length, found.score_millionths),
            *(outcomes.graded, outcomes.wrong_format, outcomes.grader_error, found.error, checked),
        )
        for name, mean in found.parts.items():
            self.connection.change(
                "INSERT INTO group_parts (submission, grp, name, mean) VALUES (?, ?, ?, ?)",
                *(submission, group, name, mean),
            )

    def open_step(self) -> int:
        """The smallest step that lacks accepted groups."""
        return int(self.connection.value("SELECT coalesce(max(batch), -1) + 1 FROM groups"))

    def of_batch(self, step: int) -> list[tuple[str, int]]:
        """Submission and group number, oldest first."""
        return self.connection.rows("SELECT submission, grp FROM groups WHERE batch = ? ORDER BY seq", step)

    def count_waiting(self, *, most_unchecked: int) -> int:
        """Useful groups that are in no batch yet and not stale; of unchecked ones at most so many."""
        checked = int(self.connection.value(f"SELECT count(*) FROM groups WHERE {WAITING} AND checked"))
        return checked + min(self.count_waiting_unchecked(), most_unchecked)

    def count_waiting_unchecked(self) -> int:
        return int(self.connection.value(f"SELECT count(*) FROM groups WHERE {WAITING} AND NOT checked"))

    def oldest_waiting(self, limit: int, *, most_unchecked: int) -> list[tuple[int, str, int]]:
        """The oldest so many of them: sequence number, submission and group number."""
        return self.connection.rows(
            f"SELECT seq, submission, grp FROM groups WHERE {WAITING} AND (checked OR seq IN"
            f" (SELECT seq FROM groups WHERE {WAITING} AND NOT checked ORDER BY seq LIMIT ?)) ORDER BY seq LIMIT ?",
            most_unchecked,
            limit,
        )

    def put_in_batch(self, seq: int, step: int) -> None:
        self.connection.change("UPDATE groups SET batch = ? WHERE seq = ?", step, seq)

    def mark_stale(self, older_than: int) -> None:
        """Waiting groups of a version below this one."""
        self.connection.change(
            "UPDATE groups SET stale = TRUE WHERE useful AND batch IS NULL AND version < ?", older_than
        )

    def mark_all_stale(self, worker: str) -> None:
        """Unbatched groups of this worker."""
        self.connection.change(
            "UPDATE groups SET stale = TRUE WHERE useful AND batch IS NULL AND submission IN"
            " (SELECT id FROM submissions WHERE worker = ?)",
            worker,
        )

    def recent_useful_share(self, limit: int) -> float | None:
        """Share of useful groups among the newest ones, None if there are none."""
        share: float | None = self.connection.value(
            "SELECT avg(CASE WHEN useful THEN 1.0 ELSE 0.0 END)"
            " FROM (SELECT useful FROM groups ORDER BY seq DESC LIMIT ?) AS recent",
            limit,
        )
        return share

    def rewards_during(self, step: int) -> tuple[float, float] | None:
        """Mean reward, and share of groups with equal rewards, of all groups accepted while `step` was open."""
        reward, flat = self.connection.row(
            "SELECT avg(reward), avg(CASE WHEN flat THEN 1.0 ELSE 0.0 END) FROM groups WHERE accepted_during = ?", step
        )
        return None if reward is None else (reward, flat)

    def signal(self, step: int) -> GroupSignal:
        """What the groups accepted while `step` was open taught, and the newest groups in a row that taught nothing."""
        counts = self.connection.row(
            "SELECT count(*), coalesce(sum(CASE WHEN flat THEN 0 ELSE 1 END), 0) FROM groups WHERE accepted_during = ?",
            step,
        )
        flat = self.connection.row(
            "SELECT count(*), min(reward), max(reward) FROM groups"
            " WHERE seq > coalesce((SELECT max(seq) FROM groups WHERE NOT flat), 0)"
        )
        return GroupSignal(*counts, *flat)

    def totals(self) -> GroupTotals:
        row = self.connection.row(
            "SELECT coalesce(sum(tokens), 0), coalesce(sum(CASE WHEN stale THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(CASE WHEN useful THEN 1 ELSE 0 END), 0) FROM groups"
        )
        return GroupTotals(*row)
