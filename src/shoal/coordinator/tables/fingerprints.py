"""The tables of exactness classes: what each node computed with the newest versions, and who must renew it.

Invariant: a node has one fingerprint per version; only the newest KEPT of each node are held. Called by `classes` and
`status`.
"""

from dataclasses import dataclass

from shoal.coordinator.tables.connection import Connection

KEPT = 8  # versions per node
SCHEMA = [
    """CREATE TABLE IF NOT EXISTS fingerprints (
    key TEXT NOT NULL, version BIGINT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (key, version))""",
    """CREATE TABLE IF NOT EXISTS renewals (
    key TEXT PRIMARY KEY, asked BIGINT NOT NULL DEFAULT 0, done BIGINT NOT NULL DEFAULT 0,
    done_s DOUBLE PRECISION NOT NULL DEFAULT 0, mismatches BIGINT NOT NULL DEFAULT 0)""",
]


@dataclass(frozen=True)
class Renewal:
    """`asked` counts the requests to one node, `done` those that it has carried out, the last at `done_s`."""

    asked: int = 0
    done: int = 0
    done_s: float = 0.0
    mismatches: int = 0  # confirmed ones since its fingerprint changed

    @property
    def pending(self) -> bool:
        return self.asked > self.done


class Fingerprints:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def of(self, key: str) -> dict[int, str]:
        """By version, newest first."""
        rows = self.connection.rows("SELECT version, value FROM fingerprints WHERE key = ? ORDER BY version DESC", key)
        return dict(rows)

    def put(self, key: str, version: int, value: str) -> None:
        self.connection.change("DELETE FROM fingerprints WHERE key = ? AND version = ?", key, version)
        self.connection.change("INSERT INTO fingerprints VALUES (?, ?, ?)", key, version, value)
        oldest = sorted(self.of(key), reverse=True)[:KEPT][-1]
        self.connection.change("DELETE FROM fingerprints WHERE key = ? AND version < ?", key, oldest)

    def forget(self, key: str) -> None:
        self.connection.change("DELETE FROM fingerprints WHERE key = ?", key)

    # --- renewals ----------------------------------------------------------------------------------------------------

    def renewal(self, key: str) -> Renewal:
        row = self.connection.row("SELECT asked, done, done_s, mismatches FROM renewals WHERE key = ?", key)
        return Renewal(*row) if row else Renewal()

    def ask(self, key: str) -> None:
        """Ask this node for a new fingerprint."""
        self.connection.change(
            "INSERT INTO renewals (key) SELECT ? WHERE NOT EXISTS (SELECT 1 FROM renewals WHERE key = ?)", key, key
        )
        self.connection.change("UPDATE renewals SET asked = asked + 1 WHERE key = ?", key)

    def set_done(self, key: str, done: int, now_s: float) -> None:
        self.connection.change("UPDATE renewals SET done = ?, done_s = ? WHERE key = ?", done, now_s, key)

    def set_mismatches(self, key: str, mismatches: int) -> None:
        self.connection.change("UPDATE renewals SET mismatches = ? WHERE key = ?", mismatches, key)
