"""The table of downloads: which node received which version, from when to when, as its heartbeats say. For people to see.

Invariant: one row for a node and a version; the newest KEPT are kept. It is not sealed: it holds claims, and nothing is
decided by them. Called by `beats`; the dashboard reads it.
"""

from collections.abc import Sequence

from shoal.coordinator.tables.connection import SERIAL, Connection

SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS transfers (
    seq {SERIAL}, node TEXT NOT NULL, version BIGINT NOT NULL, from_s DOUBLE PRECISION NOT NULL,
    to_s DOUBLE PRECISION NOT NULL, size_bytes BIGINT NOT NULL, UNIQUE (node, version))""",
    "CREATE INDEX IF NOT EXISTS transfers_to ON transfers (to_s)",
]
KEPT = 100_000
Row = tuple[str, int, float, float, int]  # key, version, from when to when by the coordinator's clock, bytes


class Transfers:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add_all(self, rows: Sequence[Row]) -> None:
        """Record downloads; one that is known already changes nothing."""
        for row in rows:
            self.connection.change(
                "INSERT INTO transfers (node, version, from_s, to_s, size_bytes) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (node, version) DO NOTHING",
                *row,
            )
        if rows:
            self.connection.change("DELETE FROM transfers WHERE seq <= (SELECT max(seq) FROM transfers) - ?", KEPT)
