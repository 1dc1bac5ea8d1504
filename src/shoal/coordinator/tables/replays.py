"""The table of checked submissions: which class each claimed, who doubts it, and what was replayed without tolerance.

Invariant: a submission's fingerprint is the one at its first claim, and it is doubted at most once, by its first validator.
Called by `submissions`, `classes`, `doubts` and `status`.
"""

from dataclasses import dataclass, fields

from shoal.coordinator.tables.connection import Connection

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS replays (
    submission TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, doubted_by TEXT, doubt TEXT, verdict TEXT,
    tokens BIGINT NOT NULL DEFAULT 0, mismatched BIGINT NOT NULL DEFAULT 0, accepted BOOLEAN NOT NULL DEFAULT FALSE)"""
]


@dataclass(frozen=True)
class Replayed:
    fingerprint: str  # the worker's for the submission's version; "": it claimed no class
    doubted_by: str | None = None  # the validator whose rejection another one is to confirm
    doubt: str | None = None  # its reason
    verdict: str | None = None  # all of it, as JSON: it counts if no second one comes


COLUMNS = ", ".join(field.name for field in fields(Replayed))


class Replays:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def get(self, submission: str) -> Replayed | None:
        row = self.connection.row(f"SELECT {COLUMNS} FROM replays WHERE submission = ?", submission)
        return None if row is None else Replayed(*row)

    def add(self, submission: str, fingerprint: str) -> None:
        self.connection.change("INSERT INTO replays (submission, fingerprint) VALUES (?, ?)", submission, fingerprint)

    def set_doubt(self, submission: str, validator: str, reason: str, verdict: str) -> None:
        self.connection.change(
            "UPDATE replays SET doubted_by = ?, doubt = ?, verdict = ? WHERE submission = ?",
            validator,
            reason,
            verdict,
            submission,
        )

    def doubted(self) -> list[str]:
        """Every submission that was doubted, judged ones included."""
        rows = self.connection.rows("SELECT submission FROM replays WHERE doubted_by IS NOT NULL ORDER BY submission")
        return [submission for (submission,) in rows]

    def set_replayed(self, submission: str, *, tokens: int, mismatched: int, accepted: bool) -> None:
        self.connection.change(
            "UPDATE replays SET tokens = ?, mismatched = ?, accepted = ? WHERE submission = ?",
            tokens,
            mismatched,
            accepted,
            submission,
        )

    def totals(self) -> tuple[int, int, int]:
        """Accepted submissions that were replayed without tolerance, their tokens, and mismatched tokens of all."""
        row = self.connection.row(
            "SELECT coalesce(sum(CASE WHEN accepted THEN 1 ELSE 0 END), 0),"
            " coalesce(sum(CASE WHEN accepted THEN tokens ELSE 0 END), 0), coalesce(sum(mismatched), 0)"
            " FROM replays WHERE tokens > 0"
        )
        return row[0], row[1], row[2]
