"""The table of published policy versions.

Invariant: a version has one digest. Called by `learning`, `assignments`, `status` and `metrics`.
"""

from shoal.coordinator.tables.connection import Connection

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS policies (
    version BIGINT PRIMARY KEY, digest TEXT NOT NULL, size_bytes BIGINT NOT NULL, published_s DOUBLE PRECISION NOT NULL)"""
]


class Policies:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(self, version: int, digest: str, size_bytes: int, published_s: float) -> None:
        self.connection.change(
            "INSERT INTO policies (version, digest, size_bytes, published_s) VALUES (?, ?, ?, ?)",
            version,
            digest,
            size_bytes,
            published_s,
        )

    def digest(self, version: int) -> str | None:
        found: str | None = self.connection.value("SELECT digest FROM policies WHERE version = ?", version)
        return found

    def oldest_of_newest(self, count: int) -> int | None:
        """The oldest of the newest `count` versions; None if fewer were published."""
        found: int | None = self.connection.value(
            "SELECT version FROM policies ORDER BY version DESC LIMIT 1 OFFSET ?", count - 1
        )
        return found

    def newest(self) -> int | None:
        found: int | None = self.connection.value("SELECT max(version) FROM policies")
        return found
