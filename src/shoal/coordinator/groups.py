"""Accepted groups: their batches, their scores, and statistics over many groups.

    accepted -> in the batch of one step | stale            (useful groups only)

Invariants: a group is in at most one batch, and stays in it. Scores are sums of whole millionths, so the order of the
additions does not change them.
"""

from dataclasses import dataclass

from shoal.ledger.connection import SERIAL, Connection
from shoal.protocol.history import Signal
from shoal.protocol.messages import MILLION, GroupResult

SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS groups (
    seq {SERIAL}, submission TEXT NOT NULL, grp BIGINT NOT NULL, version BIGINT NOT NULL, reward DOUBLE PRECISION NOT NULL,
    useful BOOLEAN NOT NULL, flat BOOLEAN NOT NULL, tokens BIGINT NOT NULL, accepted_during BIGINT NOT NULL, batch BIGINT,
    stale BOOLEAN NOT NULL DEFAULT FALSE, task BIGINT NOT NULL, source TEXT NOT NULL, target BIGINT NOT NULL,
    score BIGINT NOT NULL, graded BIGINT NOT NULL, wrong_format BIGINT NOT NULL, grader_error BIGINT NOT NULL,
    checked BOOLEAN NOT NULL DEFAULT TRUE, UNIQUE (submission, grp))""",
    """CREATE TABLE IF NOT EXISTS group_parts (
    submission TEXT NOT NULL, grp BIGINT NOT NULL, name TEXT NOT NULL, mean DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (submission, grp, name))""",
    "CREATE INDEX IF NOT EXISTS groups_batch ON groups (batch, seq)",
    "CREATE INDEX IF NOT EXISTS groups_accepted ON groups (accepted_during)",
]
WAITING = "useful AND batch IS NULL AND NOT stale"
ROLLOUTS = "(graded + wrong_format + grader_error)"
EQUAL = "flat AND NOT useful AND grader_error = 0"  # true for groups that the online filter left out
SUMS = f"""coalesce(sum(reward * {ROLLOUTS}), 0.0), coalesce(sum(score), 0), coalesce(sum(tokens), 0), count(*),
    coalesce(sum(graded), 0), coalesce(sum(wrong_format), 0), coalesce(sum(grader_error), 0),
    coalesce(sum(CASE WHEN {EQUAL} THEN 1 ELSE 0 END), 0),
    coalesce(sum(CASE WHEN {EQUAL} AND score = {MILLION} * {ROLLOUTS} THEN 1 ELSE 0 END), 0),
    coalesce(sum(CASE WHEN {EQUAL} AND score = 0 THEN 1 ELSE 0 END), 0)"""
KNOWN = f"{ROLLOUTS} > 0"


@dataclass(frozen=True)
class Scored:
    """The summed scores of some accepted groups."""

    reward: float  # summed over rollouts
    score: int  # summed over rollouts, in millionths
    tokens: int
    groups: int
    graded: int
    wrong_format: int
    grader_error: int
    filtered: int  # groups with equal rewards, left out by the online filter
    all_right: int  # those of `filtered` in which every rollout has the full score
    all_wrong: int  # those of `filtered` in which every score is 0

    @property
    def rollouts(self) -> int:
        return self.graded + self.wrong_format + self.grader_error

    @property
    def reward_mean(self) -> float:
        return self.reward / self.rollouts

    @property
    def score_mean(self) -> float:
        return self.score / MILLION / self.rollouts

    @property
    def length_mean(self) -> float:
        return self.tokens / self.rollouts


class Groups:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(
        self,
        submission: str,
        group: int,
        result: GroupResult,
        *,
        version: int,
        useful: bool,
        checked: bool,
        accepted_during: int,
    ) -> None:
        """`useful`: the group may be trained on. `checked`: it was prefilled whole. `accepted_during`: the open step."""
        outcomes = result.outcomes
        self.connection.change(
            "INSERT INTO groups (submission, grp, version, reward, useful, flat, tokens, accepted_during,"
            " task, source, target, score, graded, wrong_format, grader_error, checked)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(
                submission,
                group,
                version,
                result.reward_mean,
                useful,
                not result.useful,
                result.tokens,
                accepted_during,
            ),
            *(result.task, result.source, result.target_length, result.score_millionths),
            *(outcomes.graded, outcomes.wrong_format, outcomes.grader_error, checked),
        )
        for name, mean in result.parts.items():
            self.connection.change(
                "INSERT INTO group_parts (submission, grp, name, mean) VALUES (?, ?, ?, ?)",
                *(submission, group, name, mean),
            )

    def open_step(self) -> int:
        """Return the smallest step whose batch is not full."""
        return int(self.connection.value("SELECT coalesce(max(batch), -1) + 1 FROM groups"))

    def of_batch(self, step: int) -> list[tuple[str, int]]:
        """Return submission and group number of each group in a step's batch, oldest first."""
        return self.connection.rows("SELECT submission, grp FROM groups WHERE batch = ? ORDER BY seq", step)

    def count_waiting(self, *, max_unchecked: int) -> int:
        """Count useful groups that are in no batch and not stale; at most `max_unchecked` unchecked ones count."""
        checked = int(self.connection.value(f"SELECT count(*) FROM groups WHERE {WAITING} AND checked"))
        return checked + min(self.count_waiting_unchecked(), max_unchecked)

    def count_waiting_unchecked(self) -> int:
        return int(self.connection.value(f"SELECT count(*) FROM groups WHERE {WAITING} AND NOT checked"))

    def oldest_waiting(self, limit: int, *, max_unchecked: int) -> list[tuple[int, str, int]]:
        """Return the oldest `limit` groups that `count_waiting` counts: sequence number, submission, group number."""
        return self.connection.rows(
            f"SELECT seq, submission, grp FROM groups WHERE {WAITING} AND (checked OR seq IN"
            f" (SELECT seq FROM groups WHERE {WAITING} AND NOT checked ORDER BY seq LIMIT ?)) ORDER BY seq LIMIT ?",
            max_unchecked,
            limit,
        )

    def put_in_batch(self, seq: int, step: int) -> None:
        self.connection.change("UPDATE groups SET batch = ? WHERE seq = ?", step, seq)

    def mark_stale(self, older_than: int) -> None:
        """Mark waiting groups of versions below `older_than` as stale."""
        self.connection.change(
            "UPDATE groups SET stale = TRUE WHERE useful AND batch IS NULL AND version < ?", older_than
        )

    def mark_all_stale(self, worker: str) -> None:
        """Mark this worker's unbatched groups as stale."""
        self.connection.change(
            "UPDATE groups SET stale = TRUE WHERE useful AND batch IS NULL AND submission IN"
            " (SELECT id FROM submissions WHERE worker = ?)",
            worker,
        )

    def recent_useful_share(self, limit: int) -> float | None:
        """Return the share of useful groups among the newest `limit` groups; None if there are no groups."""
        share: float | None = self.connection.value(
            "SELECT avg(CASE WHEN useful THEN 1.0 ELSE 0.0 END)"
            " FROM (SELECT useful FROM groups ORDER BY seq DESC LIMIT ?) AS recent",
            limit,
        )
        return share

    def rewards_during(self, step: int) -> tuple[float, float] | None:
        """Return the mean reward of the groups accepted while `step` was open, and the share of them with equal rewards."""
        reward, flat = self.connection.row(
            "SELECT avg(reward), avg(CASE WHEN flat THEN 1.0 ELSE 0.0 END) FROM groups WHERE accepted_during = ?", step
        )
        return None if reward is None else (reward, flat)

    def signal(self, step: int) -> Signal:
        """Count the groups accepted while `step` was open, and how many of them have unequal rewards.

        Also count the groups since the run's last group with unequal rewards, and give the lowest and the highest mean
        reward among them.
        """
        groups, useful = self.connection.row(
            "SELECT count(*), coalesce(sum(CASE WHEN flat THEN 0 ELSE 1 END), 0) FROM groups WHERE accepted_during = ?",
            step,
        )
        flat, lowest, highest = self.connection.row(
            "SELECT count(*), min(reward), max(reward) FROM groups"
            " WHERE seq > coalesce((SELECT max(seq) FROM groups WHERE NOT flat), 0)"
        )
        return Signal(groups=groups, useful=useful, flat=flat, lowest=lowest, highest=highest)

    def totals(self) -> tuple[int, int, int]:
        """Return the total numbers of tokens, of stale groups and of useful groups."""
        totals: tuple[int, int, int] = self.connection.row(
            "SELECT coalesce(sum(tokens), 0), coalesce(sum(CASE WHEN stale THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(CASE WHEN useful THEN 1 ELSE 0 END), 0) FROM groups"
        )
        return totals


class Grades:
    """Read-only statistics: scores by source and by target length, and grader errors."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def by_source(self, step: int | None = None) -> dict[str, Scored]:
        """Return scores by source, for the groups accepted while `step` was open, or in the whole run."""
        where, arguments = ("", ()) if step is None else (" AND accepted_during = ?", (step,))
        rows = self.connection.rows(
            f"SELECT source, {SUMS} FROM groups WHERE {KNOWN}{where} GROUP BY source ORDER BY source", *arguments
        )
        return {source: Scored(*sums) for source, *sums in rows}

    def by_target(self, step: int) -> dict[int, Scored]:
        """Return scores by target length (0: none), for the groups accepted while `step` was open."""
        rows = self.connection.rows(
            f"SELECT target, {SUMS} FROM groups WHERE {KNOWN} AND accepted_during = ? GROUP BY target ORDER BY target",
            step,
        )
        return {target: Scored(*sums) for target, *sums in rows}

    def by_part(self, step: int) -> dict[tuple[str, str], float]:
        """Return mean scores by source and part of a weighted reward, for the groups accepted while `step` was open."""
        rows = self.connection.rows(
            f"SELECT source, name, sum(mean * {ROLLOUTS}) / sum({ROLLOUTS}) FROM group_parts"
            " JOIN groups ON groups.submission = group_parts.submission AND groups.grp = group_parts.grp"
            f" WHERE {KNOWN} AND accepted_during = ? GROUP BY source, name ORDER BY source, name",
            step,
        )
        return {(source, name): mean for source, name, mean in rows}

    def total(self) -> int:
        """Return the number of rollouts accepted in the whole run."""
        return int(self.connection.value(f"SELECT coalesce(sum({ROLLOUTS}), 0) FROM groups"))

    def recent(self, groups: int) -> tuple[int, int]:
        """Count the rollouts and the grader errors in the newest groups."""
        counts: tuple[int, int] = self.connection.row(
            f"SELECT coalesce(sum({ROLLOUTS}), 0), coalesce(sum(grader_error), 0)"
            f" FROM (SELECT * FROM groups WHERE {KNOWN} ORDER BY seq DESC LIMIT ?) AS newest",
            groups,
        )
        return counts
