"""The table of the run's history: metrics of trained steps, evaluations, and sample completions, by sequence number.

Invariant: every entry, including a replacement, gets a higher sequence number than all before it. Called by `history`.
"""

from typing import Literal

from shoal.coordinator.tables.connection import SERIAL, Connection

SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS history (
    seq {SERIAL}, kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (kind, key))"""
]

Kind = Literal["step", "evaluation", "sample"]


class HistoryTable:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def put(self, kind: Kind, key: str, body: str) -> bool:
        """Append an entry and remove an earlier one of the same kind and key. True if there was none."""
        replaced = self.connection.change("DELETE FROM history WHERE kind = ? AND key = ?", kind, key)
        self.connection.change("INSERT INTO history (kind, key, body) VALUES (?, ?, ?)", kind, key, body)
        return replaced == 0

    def keep_newest(self, kind: Kind, limit: int) -> None:
        self.connection.change(
            "DELETE FROM history WHERE kind = ? AND seq <="
            " (SELECT seq FROM history WHERE kind = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)",
            kind,
            kind,
            limit,
        )

    def after(self, cursor: int, limit: int) -> list[tuple[int, Kind, str]]:
        """Sequence number, kind and body of the entries after `cursor`, oldest first."""
        return self.connection.rows(
            "SELECT seq, kind, body FROM history WHERE seq > ? ORDER BY seq LIMIT ?", cursor, limit
        )

    def newest(self, kind: Kind) -> str | None:
        """The body of the newest entry of a kind."""
        found: str | None = self.connection.value(
            "SELECT body FROM history WHERE kind = ? ORDER BY seq DESC LIMIT 1", kind
        )
        return found

    def bodies(self, kind: Kind) -> list[str]:
        """Of all entries of a kind, oldest first."""
        return [body for (body,) in self.connection.rows("SELECT body FROM history WHERE kind = ? ORDER BY seq", kind)]

    def has(self, kind: Kind, key: str) -> bool:
        return self.connection.row("SELECT 1 FROM history WHERE kind = ? AND key = ?", kind, key) is not None

    def count(self, kind: Kind) -> int:
        return int(self.connection.value("SELECT count(*) FROM history WHERE kind = ?", kind))
