"""The table of curriculum pages: one for each step that opened, with what became known of tasks before it.

Invariant: a page never changes, and each continues where the one before it ended. Called by `curriculum`.
"""

from dataclasses import dataclass

from shoal.coordinator.tables.connection import Connection
from shoal.coordinator.tables.grades import ROLLOUTS

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS curricula (
    step BIGINT PRIMARY KEY, digest TEXT UNIQUE NOT NULL, body TEXT NOT NULL, until BIGINT NOT NULL)"""
]


@dataclass(frozen=True)
class Newest:
    digest: str = ""
    until: int = 0  # sequence number of the newest group that it or an earlier page covers


class Curricula:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(self, step: int, digest: str, body: str, until: int) -> None:
        self.connection.change(
            "INSERT INTO curricula (step, digest, body, until) VALUES (?, ?, ?, ?)", step, digest, body, until
        )

    def newest(self) -> Newest:
        row = self.connection.row("SELECT digest, until FROM curricula ORDER BY step DESC LIMIT 1")
        return Newest(*row) if row else Newest()

    def digest(self, step: int) -> str:
        """Of the newest page that was there when `step` opened; "" if there was none."""
        found: str | None = self.connection.value(
            "SELECT digest FROM curricula WHERE step <= ? ORDER BY step DESC LIMIT 1", step
        )
        return found or ""

    def body(self, digest: str) -> str | None:
        found: str | None = self.connection.value("SELECT body FROM curricula WHERE digest = ?", digest)
        return found

    def newest_group(self) -> int:
        return int(self.connection.value("SELECT coalesce(max(seq), 0) FROM groups"))

    def scored(self, after: int, until: int) -> list[tuple[int, int, int]]:
        """Task, rollouts and summed score of the groups in this range, by task. Groups with a grader error say nothing."""
        return self.connection.rows(
            f"SELECT task, sum({ROLLOUTS}), sum(score) FROM groups WHERE seq > ? AND seq <= ? AND grader_error = 0"
            f" AND {ROLLOUTS} > 0 GROUP BY task ORDER BY task",
            after,
            until,
        )
