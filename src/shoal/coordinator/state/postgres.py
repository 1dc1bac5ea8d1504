"""PostgreSQL: the same tables, on a server that outlives the coordinator's machine, and which of several coordinators leads.

    follower: stands by, opens no port -> leads, serves -> lost its session: stops, and its supervisor starts it again

Invariants: one session does everything, so when the server ends it (the coordinator died, or another one took over) nothing
more of it can be written. It never reconnects: a coordinator that loses it stops with DatabaseLostError and starts again.
At most one session holds the lead, and the leader writes through that very session, so two never write. A leader that gives
no sign of life for SILENT_S (it hangs, or is cut off) is ended by the database on a follower's demand. No clock is
compared: a follower counts the leader's signs of life by its own watch.
Needs the extra `postgres` (psycopg). Left out: a password in the URL, because configs are shown to every node; libpq finds
it in PGPASSWORD or ~/.pgpass. Sending nodes to the leader; both have one address, on one machine by the same port,
elsewhere by a proxy that tries both (docs/outgrown.md).
"""

import functools
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import psycopg
from psycopg.adapt import Loader
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from shoal.coordinator.state.connection import SERIAL, Connection, DatabaseFullError, DatabaseLostError
from shoal.errors import first_line

T = TypeVar("T")
log = logging.getLogger(__name__)
CONNECT_S = 10
ANSWER_S = 10.0  # a server that is silent for longer is lost: one that was unplugged cannot say so
# What libpq and the server do about a peer that is gone without a word.
LIVENESS = {
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": int(ANSWER_S * 1000),
}
SESSION = (
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
    f"SET statement_timeout = {int(ANSWER_S * 1000)}",
    "SET timezone = 'UTC'",
)
LOOK_S, SIGN_S, SILENT_S = 0.5, 1.0, 10.0
LEAD_SCHEMA = [
    """CREATE TABLE IF NOT EXISTS lead (
    one BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (one), term BIGINT NOT NULL, signs BIGINT NOT NULL, holder TEXT NOT NULL,
    pid BIGINT NOT NULL, session_start TIMESTAMPTZ NOT NULL)""",
    "INSERT INTO lead (term, signs, holder, pid, session_start) VALUES (0, 0, '', 0, now()) ON CONFLICT (one) DO NOTHING",
]
LOCK = f"{0x5301}, hashtext(current_schema())"  # one per schema of the database


class PostgresConnection(Connection):
    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        if not connection.autocommit:
            raise ValueError("open the connection with autocommit=True, so that transactions are explicit")
        connection.adapters.register_loader("numeric", _Number)
        self.postgres = connection
        info = connection.info
        self._place = f"PostgreSQL database {info.dbname} at {info.host or 'this machine'}, port {info.port}"

    def rows(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self._execute(sql, arguments, lambda cursor: cursor.fetchall())

    def change(self, sql: str, *arguments: object) -> int:
        return self._execute(sql, arguments, lambda cursor: int(cursor.rowcount))

    def create(self, statement: str, *, survives_power_cuts: bool = True) -> None:
        """A table that need not survive them is emptied by the server after its own crash, and not written to its log."""
        if not survives_power_cuts:
            statement = statement.replace("CREATE TABLE", "CREATE UNLOGGED TABLE", 1)
        self.change(statement.replace(SERIAL, "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self.in_transaction:
            yield
            return
        self.change("BEGIN")
        try:
            with self._loss_named():  # also of what the ledger does
                yield
            self.change("COMMIT")
        except BaseException:
            if self.in_transaction:  # not if the session is lost: the server itself rolls back then
                self.change("ROLLBACK")
            raise

    @property
    def in_transaction(self) -> bool:
        status = self.postgres.info.transaction_status
        return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def has_table(self, name: str) -> bool:
        return self.value("SELECT to_regclass(?)", name) is not None

    @property
    def place(self) -> str:
        return self._place

    @property
    def format(self) -> int:
        return int(self.value("SELECT number FROM format")) if self.has_table("format") else 0

    def set_format(self, number: int) -> None:
        with self.transaction():
            self.change("CREATE TABLE IF NOT EXISTS format (number BIGINT NOT NULL)")
            self.change("DELETE FROM format")
            self.change("INSERT INTO format (number) VALUES (?)", number)

    def close(self) -> None:
        self.postgres.close()

    def _execute(self, sql: str, arguments: tuple[object, ...], take: Callable[[psycopg.Cursor[Any]], T]) -> T:
        """Raises DatabaseFullError, DatabaseLostError."""
        with self._loss_named():
            return take(self.postgres.execute(_in_psycopg(sql), [_storable(one) for one in arguments]))

    @contextmanager
    def _loss_named(self) -> Iterator[None]:
        try:
            yield
        except psycopg.errors.DiskFull as error:
            raise DatabaseFullError(f"the disk of {self.place} is full: free space there") from error
        except psycopg.errors.QueryCanceled as error:
            self.postgres.close()
            raise DatabaseLostError(f"{self.place} took more than {ANSWER_S:.0f} s; is it overloaded?") from error
        except psycopg.OperationalError as error:
            if not self.postgres.closed:
                raise
            raise DatabaseLostError(f"lost {self.place}: {first_line(error)}; see its log") from error


class _Number(Loader):
    """PostgreSQL sums integers into `numeric`; SQLite gives an int, or a float for an average, and so does this."""

    def load(self, data: Any) -> int | float:
        text = bytes(data)
        return float(text) if b"." in text or b"N" in text else int(text)


def _storable(argument: object) -> object:
    """PostgreSQL's text holds no NUL; a model's output, which an error may quote, can."""
    return argument.replace("\0", "\ufffd") if isinstance(argument, str) else argument


@functools.cache
def _in_psycopg(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode()


def open_postgres(url: str) -> PostgresConnection:
    """Raises DatabaseLostError if the server is not there, or refuses."""
    if urlsplit(url).password or "password" in parse_qs(urlsplit(url).query):
        raise ValueError("a database's URL holds no password")  # config.sections refuses it before
    try:
        connection = psycopg.connect(make_conninfo(url, **LIVENESS), autocommit=True)
        for statement in SESSION:
            connection.execute(statement.encode())
    except psycopg.OperationalError as error:
        raise DatabaseLostError(f"cannot use the database {url}: {first_line(error)}") from error
    return PostgresConnection(connection)


# --- who leads -----------------------------------------------------------------------------------------------------


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
