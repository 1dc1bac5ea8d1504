"""PostgreSQL: the same tables on a server.

Invariant: there is one session and no reconnection, so nothing is written after the server has ended the session. The
process then stops with DatabaseLostError and must be restarted.
This module needs the extra `postgres` (psycopg). Left out: a password in the URL, because people share config
files. Instead, libpq reads the password from PGPASSWORD or ~/.pgpass.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.adapt import Loader
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from shoal.errors import first_line
from shoal.ledger.connection import SERIAL, Connection, DatabaseFullError, DatabaseLostError

T = TypeVar("T")
LOCK = 0x5301  # the coordinator's advisory lock
ANSWER_S = 10.0  # a server that takes longer to answer counts as lost
# How libpq and the server detect a peer that is gone, for example unplugged.
LIVENESS = {
    "connect_timeout": 10,
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


class PostgresConnection(Connection):
    ledger_schema = (
        "CREATE TABLE ledger (seq BIGINT PRIMARY KEY, time_s BIGINT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,"
        " previous TEXT NOT NULL, digest TEXT NOT NULL, signature TEXT NOT NULL)",
        "CREATE OR REPLACE FUNCTION ledger_refuses() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN RAISE EXCEPTION ''the ledger is append-only''; END'",
        "CREATE OR REPLACE FUNCTION ledger_extends() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN IF NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger) THEN"
        " RAISE EXCEPTION ''the ledger is append-only: an entry must extend its head''; END IF; RETURN NEW; END'",
        "CREATE TRIGGER ledger_no_change BEFORE UPDATE OR DELETE ON ledger"
        " FOR EACH ROW EXECUTE FUNCTION ledger_refuses()",
        "CREATE TRIGGER ledger_no_truncate BEFORE TRUNCATE ON ledger"
        " FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuses()",
        "CREATE TRIGGER ledger_extends_head BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION ledger_extends()",
    )

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        if not connection.autocommit:
            raise ValueError("open the connection with autocommit=True, so that transactions are explicit")
        connection.adapters.register_loader("numeric", _Number)
        self.postgres = connection
        info = connection.info
        self.place = f"PostgreSQL database {info.dbname} at {info.host or 'this machine'}, port {info.port}"

    def rows(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self._execute(sql, arguments, lambda cursor: cursor.fetchall())

    def change(self, sql: str, *arguments: object) -> int:
        return self._execute(sql, arguments, lambda cursor: int(cursor.rowcount))

    def create(self, statement: str, *, survives_power_cuts: bool = True) -> None:
        """Create a table or index. The server does not log writes to an UNLOGGED table, and empties it after a crash."""
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
            with self._named_errors():
                yield
            self.change("COMMIT")
        except BaseException:
            if self.in_transaction:  # if the session is lost, the server rolls back by itself
                self.change("ROLLBACK")
            raise

    def lock(self, wait_s: float) -> bool:
        """Lock this schema until the session ends. Return False if another session still has the lock after `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        while not self.value(f"SELECT pg_try_advisory_lock({LOCK}, hashtext(current_schema()))"):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.2)
        return True

    @property
    def in_transaction(self) -> bool:
        status = self.postgres.info.transaction_status
        return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def has_table(self, name: str) -> bool:
        return self.value("SELECT to_regclass(?)", name) is not None

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
        """Run a statement. Return the result of `take` for its cursor. Raise DatabaseFullError, DatabaseLostError."""
        with self._named_errors():
            return take(self.postgres.execute(_psycopg_sql(sql), [_storable(argument) for argument in arguments]))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
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
            raise DatabaseLostError(
                f"lost the connection to {self.place}: {first_line(error)}; see the server's log"
            ) from error


class _Number(Loader):
    """Load a `numeric` (the type of sums and averages of integers) as an int or a float, which SQLite returns, too."""

    def load(self, data: Any) -> int | float:
        text = bytes(data)
        return float(text) if b"." in text or b"N" in text else int(text)


def _storable(argument: object) -> object:
    """Replace NUL characters. Quoted model output may contain them, but PostgreSQL cannot store them in text."""
    return argument.replace("\0", "\ufffd") if isinstance(argument, str) else argument


@functools.cache
def _psycopg_sql(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode()


def open_postgres(url: str, **settings: str) -> PostgresConnection:
    """Connect to a database. Raise DatabaseLostError if the server is unreachable or refuses.

    `settings`: libpq's, in place of those in `url`.
    """
    try:
        connection = psycopg.connect(make_conninfo(url, **LIVENESS, **settings), autocommit=True)
        for statement in SESSION:
            connection.execute(statement.encode())
    except psycopg.OperationalError as error:
        raise DatabaseLostError(f"cannot use the database {url}: {first_line(error)}") from error
    return PostgresConnection(connection)
