"""Which of several coordinators over one PostgreSQL leads.

    follower: stands by, opens no port -> leads, serves -> lost its session: stops, and its supervisor starts it again

Invariants: at most one session holds the lead, and the leader writes through that very session, so two never write. A leader
that gives no sign of life for SILENT_S (it hangs, or is cut off) is ended by the database on a follower's demand. No clock
is compared: a follower counts the leader's signs of life by its own watch.
Left out: sending nodes to the leader; both have one address, on one machine by the same port, elsewhere by a proxy that
tries both (docs/outgrown.md).
"""

import logging
import os
import platform
import threading
import time
from dataclasses import dataclass

from shoal.ledger.connection import Connection, DatabaseLostError
from shoal.ledger.postgres import PostgresConnection, open_postgres

log = logging.getLogger(__name__)
LOOK_S, SIGN_S, SILENT_S = 0.5, 1.0, 10.0
LEAD_SCHEMA = [
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
            for statement in LEAD_SCHEMA:
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


@dataclass
class Lead:
    """What this coordinator holds while it leads."""

    connection: PostgresConnection
    table: LeadTable
    term: int  # from 1; each leader has its own
    signed_s: float

    @property
    def is_lost(self) -> bool:
        return self.connection.postgres.closed

    def live_on(self) -> None:
        """Give a sign of life, if it is time. Raises DatabaseLostError if another coordinator has taken over."""
        if time.monotonic() - self.signed_s < SIGN_S:
            return
        try:
            self.table.live_on()
        except DatabaseLostError as error:
            raise DatabaseLostError(
                f"{error}; this coordinator no longer leads: start it again, to stand by"
            ) from error
        self.signed_s = time.monotonic()


def stand_by(url: str, stop: threading.Event, *, silent_s: float = SILENT_S) -> Lead | None:
    """Wait until this process leads. None if it was told to stop before. Raises DatabaseLostError."""
    connection = open_postgres(url)
    table = LeadTable(connection)
    me = f"{platform.node()} (pid {os.getpid()})"
    seen, since_s = Seen("", -1, -1), time.monotonic()
    while (term := table.take(me)) is None:
        found = table.look()
        if found.term != seen.term:
            log.info("standing by: %s leads", found.holder)
        if found != seen:
            seen, since_s = found, time.monotonic()
        elif time.monotonic() - since_s >= silent_s and table.end(seen):
            log.warning("%s gave no sign of life for %.0f s: its session is ended", seen.holder, silent_s)
        if stop.wait(LOOK_S):
            connection.close()
            return None
    log.info("leading, term %d", term)
    return Lead(connection, table, term, time.monotonic())
