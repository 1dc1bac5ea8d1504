"""Which of several coordinators over one PostgreSQL leads: a lock that its database session holds, and a sign of life.

Invariant: at most one session holds the lock, and the leader writes through that very session. So a coordinator that lost
the lock can write nothing any more. No clock is compared: a follower counts the leader's signs of life by its own watch.
Called by `coordinator/state/lead`. PostgreSQL only: a SQLite file has one coordinator.
"""

from dataclasses import dataclass

from shoal.coordinator.tables.connection import Connection

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS lead (
    one BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (one), term BIGINT NOT NULL, signs BIGINT NOT NULL, holder TEXT NOT NULL,
    pid BIGINT NOT NULL, session_start TIMESTAMPTZ NOT NULL)""",
    "INSERT INTO lead (term, signs, holder, pid, session_start) VALUES (0, 0, '', 0, now()) ON CONFLICT (one) DO NOTHING",
]
LOCK = f"{0x5301}, hashtext(current_schema())"  # one per schema of the database


@dataclass(frozen=True)
class Seen:
    """What a follower sees of the leader. `signs` grows while the leader lives."""

    holder: str
    term: int
    signs: int


class LeadTable:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        with connection.transaction():  # so that two that start together do not make it twice
            connection.value(f"SELECT pg_advisory_xact_lock({0x5300}, 0)")
            for statement in SCHEMA:
                connection.create(statement)

    def take(self, holder: str) -> int | None:
        """Become the leader; the number of this term, from 1. None: another session leads."""
        if not self.connection.value(f"SELECT pg_try_advisory_lock({LOCK})"):
            return None
        return int(
            self.connection.value(
                "UPDATE lead SET term = term + 1, signs = signs + 1, holder = ?, pid = pg_backend_pid(), session_start ="
                " (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()) RETURNING term",
                holder,
            )
        )

    def live_on(self) -> None:
        """The leader's sign of life."""
        self.connection.change("UPDATE lead SET signs = signs + 1")

    def look(self) -> Seen:
        return Seen(*self.connection.row("SELECT holder, term, signs FROM lead"))

    def end(self, seen: Seen) -> bool:
        """End the session of a leader that gave no sign of life since it was `seen`, and with it its lock."""
        ended = self.connection.rows(
            "SELECT pg_terminate_backend(session.pid) FROM lead JOIN pg_stat_activity AS session"
            " ON session.pid = lead.pid AND session.backend_start = lead.session_start WHERE term = ? AND signs = ?",
            seen.term,
            seen.signs,
        )
        return bool(ended)
