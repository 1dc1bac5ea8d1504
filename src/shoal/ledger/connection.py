"""The database connection, and everything that differs between SQLite (here) and PostgreSQL (in `postgres`).

Invariants: `transaction()` is atomic. The ledger's table refuses UPDATE, DELETE and any INSERT that does not extend its
head. Two tables of the same name have the same `table_digest` if and only if they have the same rows.
Statements use SQL that both databases accept, including RETURNING. `?` marks an argument, and SERIAL stands for an
auto-increment key.
Left out: threads (only one thread uses a connection).
"""

import json
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from shoal.errors import ShoalError

T = TypeVar("T")
SERIAL = "BIGSERIAL PRIMARY KEY"  # each backend replaces it


class DatabaseFullError(ShoalError):
    """The disk that holds the database is full."""


class DatabaseLostError(ShoalError):
    """The database server is gone, or closed this connection. Uncommitted changes are lost."""

    restart_helps = True


class DatabaseFileError(DatabaseLostError):
    """SQLite cannot read or write its file. The connection is not used any more."""

    restart_helps = False


class Connection(ABC):
    ledger_schema: Sequence[str]  # the ledger's table, and the triggers that allow only appends
    place: str  # where the database is, for messages

    @abstractmethod
    def rows(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]: ...

    def row(self, sql: str, *arguments: object) -> Any:
        """Return the first row; None if there is none."""
        rows = self.rows(sql, *arguments)
        return rows[0] if rows else None

    def value(self, sql: str, *arguments: object) -> Any:
        """Return the first column of the first row; None if there is none."""
        row = self.row(sql, *arguments)
        return None if row is None else row[0]

    @abstractmethod
    def change(self, sql: str, *arguments: object) -> int:
        """Run a statement and return how many rows it changed. Raise DatabaseFullError, DatabaseLostError."""

    @abstractmethod
    def create(self, statement: str, *, survives_power_cuts: bool = True) -> None:
        """Create a table or index. Without `survives_power_cuts`, writes may be faster, and power cuts may undo them."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Run a block atomically. A nested block joins the outer one: an error rolls back both."""

    @abstractmethod
    def has_table(self, name: str) -> bool: ...

    @property
    @abstractmethod
    def format(self) -> int:
        """The schema version stored in the database; 0 in a new one."""

    @abstractmethod
    def set_format(self, number: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class SqliteConnection(Connection):
    ledger_schema = (
        "CREATE TABLE ledger (seq INTEGER PRIMARY KEY, time_s INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,"
        " previous TEXT NOT NULL, digest TEXT NOT NULL, signature TEXT NOT NULL)",
        "CREATE TRIGGER ledger_no_update BEFORE UPDATE ON ledger"
        " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
        "CREATE TRIGGER ledger_no_delete BEFORE DELETE ON ledger"
        " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
        # INSERT OR REPLACE deletes without firing the delete trigger, so inserts are checked as well.
        "CREATE TRIGGER ledger_extends_head BEFORE INSERT ON ledger"
        " WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM ledger)"
        " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: an entry must extend its head'); END",
    )

    def __init__(self, connection: sqlite3.Connection, *, survives_power_cuts: bool = True) -> None:
        if connection.isolation_level is not None:
            raise ValueError("open the connection with isolation_level=None, so that transactions are explicit")
        self.sqlite = connection
        self.place = str(connection.execute("PRAGMA database_list").fetchone()[2])
        self._survives_power_cuts = survives_power_cuts
        self._lost: DatabaseLostError | None = None

    def rows(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self._execute(sql, arguments, lambda cursor: cursor.fetchall())

    def row(self, sql: str, *arguments: object) -> Any:
        return self._execute(sql, arguments, lambda cursor: cursor.fetchone())  # reads only the first row

    def change(self, sql: str, *arguments: object) -> int:
        return self._execute(sql, arguments, lambda cursor: int(cursor.rowcount))

    def create(self, statement: str, *, survives_power_cuts: bool = True) -> None:
        self.change(statement.replace(SERIAL, "INTEGER PRIMARY KEY AUTOINCREMENT"))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self.sqlite.in_transaction:
            yield
            return
        self.change("BEGIN IMMEDIATE")
        try:
            yield
            self.change("COMMIT")
        except BaseException:
            if self.sqlite.in_transaction:  # SQLite rolls back by itself when the disk is full
                self.sqlite.execute("ROLLBACK")
            raise

    def _execute(self, sql: str, arguments: tuple[object, ...], take: Callable[[sqlite3.Cursor], T]) -> T:
        """Run a statement. Return the result of `take` for its cursor. Raise DatabaseFullError, DatabaseLostError."""
        if self._lost:
            raise self._lost
        try:
            with _named_errors(self.place, self._survives_power_cuts):
                return take(self.sqlite.execute(sql, arguments))
        except DatabaseLostError as error:
            self._lost = error
            raise

    def has_table(self, name: str) -> bool:
        return self.row("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", name) is not None

    @property
    def format(self) -> int:
        return int(self.value("PRAGMA user_version"))

    def set_format(self, number: int) -> None:
        self.change(f"PRAGMA user_version = {number:d}")

    def close(self) -> None:
        self.sqlite.close()


def open_sqlite(path: Path | str, *, survives_power_cuts: bool = True, read_only: bool = False) -> SqliteConnection:
    """Open or create a database whose commits survive kill -9 and, by default, power cuts.

    `read_only`: open an existing file, even while another process uses it. Raise DatabaseFullError, DatabaseLostError.
    """
    with _named_errors(str(path), survives_power_cuts):
        if read_only:
            uri = f"{Path(path).resolve().as_uri()}?mode=ro"  # escapes #, ? and %
            return SqliteConnection(sqlite3.connect(uri, uri=True, isolation_level=None))
        connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if survives_power_cuts else 'NORMAL'}")
        return SqliteConnection(connection, survives_power_cuts=survives_power_cuts)


@contextmanager
def _named_errors(place: str, survives_power_cuts: bool) -> Iterator[None]:
    """Raise DatabaseFullError or DatabaseFileError in place of SQLite's errors of a disk or a file."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:  # the low byte is the kind of error
            case sqlite3.SQLITE_FULL:
                raise DatabaseFullError(f"the disk of {place} is full: free space there") from error
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                remedy = (
                    "restore it from a backup" if survives_power_cuts else "remove it: the next start makes a new one"
                )
                raise DatabaseFileError(f"{place} is damaged ({error}): {remedy}") from error
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY:
                raise DatabaseFileError(
                    f"cannot use {place}: {error}; check its disk and its permissions, then start again"
                ) from error
        raise


def table_names(schema: Sequence[str]) -> list[str]:
    """Return the names of the tables that these statements create."""
    return re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", "\n".join(schema))


def table_digest(connection: Connection, table: str) -> str:
    """Return the BLAKE3 digest, in hex, of the sorted digests of the rows. Booleans count as 0 or 1, as in SQLite."""
    rows = connection.rows(f"SELECT * FROM {table}")
    digest = blake3(table.encode())
    plain = ([int(value) if isinstance(value, bool) else value for value in row] for row in rows)
    for row_digest in sorted(blake3(json.dumps(row, separators=(",", ":")).encode()).digest() for row in plain):
        digest.update(row_digest)
    return digest.hexdigest()
