"""What accepted submissions earn: the columns `tokens` and `credit` of the table of submissions.

    "" -> pending -> credited | forfeited

Invariant: only these two columns are written, and only of accepted submissions. Called by `escrow`, which decides when, and
by `checking` and `status`.
"""

from typing import Literal

from shoal.coordinator.tables.connection import Connection


class Credits:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def set_pending(self, id: str, tokens: int) -> None:
        """An accepted submission, whose credit waits."""
        self.connection.change("UPDATE submissions SET tokens = ?, credit = 'pending' WHERE id = ?", tokens, id)

    def pending_before(self, worker: str, checks: int) -> list[tuple[str, int]]:
        """Id and tokens of what waits and has at least so many accepted full checks of this worker after it."""
        return self.connection.rows(
            "SELECT id, tokens FROM submissions WHERE worker = ? AND credit = 'pending' AND seq <"
            " (SELECT seq FROM submissions WHERE worker = ? AND state = 'accepted' AND full_check"
            " ORDER BY seq DESC LIMIT 1 OFFSET ?) ORDER BY seq",
            worker,
            worker,
            checks - 1,
        )

    def pending_of(self, worker: str) -> list[tuple[str, int]]:
        return self.connection.rows(
            "SELECT id, tokens FROM submissions WHERE worker = ? AND credit = 'pending' ORDER BY seq", worker
        )

    def waiting_of(self, worker: str) -> tuple[int, int]:
        """How many accepted submissions wait for their credit, and how many groups these hold."""
        count, groups = self.connection.row(
            "SELECT count(*), coalesce(sum(groups), 0) FROM submissions WHERE worker = ? AND credit = 'pending'", worker
        )
        return int(count), int(groups)

    def workers_with_pending(self) -> list[str]:
        rows = self.connection.rows("SELECT DISTINCT worker FROM submissions WHERE credit = 'pending' ORDER BY worker")
        return [worker for (worker,) in rows]

    def set_credit(self, id: str, credit: Literal["credited", "forfeited"]) -> None:
        self.connection.change("UPDATE submissions SET credit = ? WHERE id = ?", credit, id)

    def tokens_by_credit(self) -> dict[tuple[str, str], int]:
        """Summed tokens by worker and what became of their credit: pending, credited or forfeited."""
        rows = self.connection.rows(
            "SELECT worker, credit, sum(tokens) FROM submissions WHERE credit != '' GROUP BY worker, credit"
        )
        return {(worker, credit): tokens for worker, credit, tokens in rows}
