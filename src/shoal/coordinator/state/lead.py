"""One of several coordinators leads, the others stand by: what a coordinator over PostgreSQL waits for before it serves.

    follower: stands by, opens no port -> leads, serves -> lost its session: stops, and its supervisor starts it again

Invariant: a coordinator answers only while its own session with the database holds the lead, and writes only through that
session, so two never write. A leader that gives no sign of life for SILENT_S (it hangs, or is cut off) is ended by
the database on a follower's demand. Called by `service`. Left out: sending nodes to the leader; both have one address, on
one machine by the same port, elsewhere by a proxy that tries both (docs/outgrown.md).
"""

import logging
import os
import platform
import threading
import time
from dataclasses import dataclass

from shoal.coordinator.tables.connection import DatabaseLostError
from shoal.coordinator.tables.lead import LeadTable, Seen
from shoal.coordinator.tables.postgres import PostgresConnection, open_postgres

LOOK_S = 0.5
SIGN_S = 1.0
SILENT_S = 10.0

log = logging.getLogger(__name__)


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
