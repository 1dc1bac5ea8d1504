"""What accepted groups scored, counted by source and by target length, and how often the reward itself failed.

Invariant: it only reads the tables of groups. Scores are sums of whole millionths, so they do not depend on order.
Called by `step_metrics`, `status` and `metrics`.
"""

from dataclasses import dataclass

from shoal.coordinator.tables.connection import Connection
from shoal.protocol.messages import MILLION

ROLLOUTS = "(graded + wrong_format + grader_error)"
EQUAL = "flat AND NOT useful AND grader_error = 0"  # left out by the online filter
SUMS = f"""coalesce(sum(reward * {ROLLOUTS}), 0.0), coalesce(sum(score), 0), coalesce(sum(tokens), 0), count(*),
    coalesce(sum(graded), 0), coalesce(sum(wrong_format), 0), coalesce(sum(grader_error), 0),
    coalesce(sum(CASE WHEN {EQUAL} THEN 1 ELSE 0 END), 0),
    coalesce(sum(CASE WHEN {EQUAL} AND score = {MILLION} * {ROLLOUTS} THEN 1 ELSE 0 END), 0),
    coalesce(sum(CASE WHEN {EQUAL} AND score = 0 THEN 1 ELSE 0 END), 0)"""
KNOWN = f"{ROLLOUTS} > 0"


@dataclass(frozen=True)
class Scored:
    """What some accepted groups scored."""

    reward: float  # summed over their rollouts
    score: int  # likewise, in millionths
    tokens: int
    groups: int
    graded: int
    wrong_format: int
    grader_error: int
    filtered: int  # groups with equal rewards, left out by the online filter
    all_right: int  # of these
    all_wrong: int

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


class Grades:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def by_source(self, step: int | None = None) -> dict[str, Scored]:
        """Of the groups accepted while `step` was open, or of the whole run."""
        where, arguments = ("", ()) if step is None else (" AND accepted_during = ?", (step,))
        rows = self.connection.rows(
            f"SELECT source, {SUMS} FROM groups WHERE {KNOWN}{where} GROUP BY source ORDER BY source", *arguments
        )
        return {source: Scored(*sums) for source, *sums in rows}

    def by_target(self, step: int) -> dict[int, Scored]:
        """Of the groups accepted while `step` was open; 0: those without a target."""
        rows = self.connection.rows(
            f"SELECT target, {SUMS} FROM groups WHERE {KNOWN} AND accepted_during = ? GROUP BY target ORDER BY target",
            step,
        )
        return {target: Scored(*sums) for target, *sums in rows}

    def by_part(self, step: int) -> dict[tuple[str, str], float]:
        """Mean score by source and reward, of the groups accepted while `step` was open, where rewards are weighted."""
        rows = self.connection.rows(
            f"SELECT source, name, sum(mean * {ROLLOUTS}) / sum({ROLLOUTS}) FROM group_parts"
            " JOIN groups ON groups.submission = group_parts.submission AND groups.grp = group_parts.grp"
            f" WHERE {KNOWN} AND accepted_during = ? GROUP BY source, name ORDER BY source, name",
            step,
        )
        return {(source, name): mean for source, name, mean in rows}

    def total(self) -> int:
        """Rollouts accepted in the whole run."""
        return int(self.connection.value(f"SELECT coalesce(sum({ROLLOUTS}), 0) FROM groups"))

    def recent(self, groups: int) -> tuple[int, int]:
        """Rollouts and grader errors among the newest groups."""
        found: tuple[int, int] = self.connection.row(
            f"SELECT coalesce(sum({ROLLOUTS}), 0), coalesce(sum(grader_error), 0)"
            f" FROM (SELECT * FROM groups WHERE {KNOWN} ORDER BY seq DESC LIMIT ?) AS newest",
            groups,
        )
        return found

    def newest_error(self) -> str:
        """Why a reward failed last; "" if none did."""
        found: str | None = self.connection.value(
            "SELECT error FROM groups WHERE grader_error > 0 ORDER BY seq DESC LIMIT 1"
        )
        return found or ""
