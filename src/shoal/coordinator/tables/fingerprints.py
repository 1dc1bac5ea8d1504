"""The tables of exactness classes: what each node computed with the newest versions, who must renew it, and whose work
differed from its class's.

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
    done_s DOUBLE PRECISION NOT NULL DEFAULT 0, outside_s DOUBLE PRECISION NOT NULL DEFAULT 0)""",
    """CREATE TABLE IF NOT EXISTS mismatches (
    key TEXT NOT NULL, at_s DOUBLE PRECISION NOT NULL, confirmed BIGINT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS mismatches_by_key ON mismatches (key)",
]


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
        row = self.connection.row("SELECT asked, done, done_s, outside_s FROM renewals WHERE key = ?", key)
        return Renewal(*row) if row else Renewal()

    def ask(self, key: str) -> None:
        """Ask this node for a new fingerprint."""
        self.connection.change(
            "INSERT INTO renewals (key) SELECT ? WHERE NOT EXISTS (SELECT 1 FROM renewals WHERE key = ?)", key, key
        )
        self.connection.change("UPDATE renewals SET asked = asked + 1 WHERE key = ?", key)

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
        row = self.connection.row(
            "SELECT COUNT(*) FROM mismatches WHERE key = ? AND confirmed = ? AND at_s >= ?",
            key,
            int(confirmed),
            since_s,
        )
        return int(row[0]) if row else 0

    def forgive(self, key: str) -> None:
        self.connection.change("DELETE FROM mismatches WHERE key = ?", key)
