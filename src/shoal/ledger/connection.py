"""The connection to a database, and everything that SQLite and PostgreSQL do in their own ways.

Invariants: what happens inside `transaction()` happens whole or not at all. The ledger's table refuses UPDATE, DELETE and
any INSERT that does not extend its head. Two tables with the same rows have the same digest; any changed, missing, added
or doubled row gives another one.
Statements use `?` for arguments, RETURNING for new rows, and SERIAL for a column that numbers them: all other SQL runs on
both. Backends: SQLite, here; PostgreSQL in `postgres`. Left out: threads (one thread uses a connection).
"""

import json
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.errors import ShoalError

SERIAL = "BIGSERIAL PRIMARY KEY"  # each backend writes it in its own words


class DatabaseFullError(ShoalError):
    """The disk that holds the database is full."""


class DatabaseLostError(ShoalError):
    """The database's server is gone, or has ended this connection. What was not committed did not happen."""

    restart_helps = True


class Connection(ABC):
    ledger_schema: Sequence[str]  # the ledger's table, and what refuses any change of it but an append

    @abstractmethod
    def rows(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]: ...

    def row(self, sql: str, *arguments: object) -> Any:
        """The first row, None if there is none."""
        found = self.rows(sql, *arguments)
        return found[0] if found else None

    def value(self, sql: str, *arguments: object) -> Any:
        """The first column of the first row, None if there is none."""
        found = self.row(sql, *arguments)
        return None if found is None else found[0]

    @abstractmethod
    def change(self, sql: str, *arguments: object) -> int:
        """Returns how many rows changed. Raises DatabaseFullError."""

    @abstractmethod
    def create(self, statement: str, *, survives_power_cuts: bool = True) -> None:
        """Create a table or index, if it is not there. One that need not survive them is faster to write."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """All of the block or nothing of it. A nested block belongs to the outer one: an error undoes both."""

    @abstractmethod
    def has_table(self, name: str) -> bool: ...

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the database is, for messages."""

    @property
    @abstractmethod
    def format(self) -> int:
        """The number that the creator of this database stored in it; 0 in a new one."""

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
        # INSERT OR REPLACE deletes without firing a delete trigger, so a trigger checks inserts as well.
        "CREATE TRIGGER ledger_extends_head BEFORE INSERT ON ledger"
        " WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM ledger)"
        " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: an entry must extend its head'); END",
    )

    def __init__(self, connection: sqlite3.Connection) -> None:
        if connection.isolation_level is not None:
            raise ValueError("open the connection with isolation_level=None, so that transactions are explicit")
        self.sqlite = connection

    def rows(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self.sqlite.execute(sql, arguments).fetchall()

    def row(self, sql: str, *arguments: object) -> Any:
        return self.sqlite.execute(sql, arguments).fetchone()  # reads no more than it returns

    def change(self, sql: str, *arguments: object) -> int:
        with self._full_disk_named():
            return self.sqlite.execute(sql, arguments).rowcount

    def create(self, statement: str, *, survives_power_cuts: bool = True) -> None:
        """What survives power cuts is the whole file's matter (`open_sqlite`)."""
        self.change(statement.replace(SERIAL, "INTEGER PRIMARY KEY AUTOINCREMENT"))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self.sqlite.in_transaction:
            yield
            return
        with self._full_disk_named():
            self.sqlite.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.sqlite.execute("COMMIT")
            except BaseException:
                if self.sqlite.in_transaction:  # SQLite itself rolls back when the disk is full
                    self.sqlite.execute("ROLLBACK")
                raise

    @contextmanager
    def _full_disk_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
                raise
            raise DatabaseFullError(f"the disk of {self.place} is full: free space there") from error

    def has_table(self, name: str) -> bool:
        return self.row("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", name) is not None

    @property
    def place(self) -> str:
        return str(self.row("PRAGMA database_list")[2])

    @property
    def format(self) -> int:
        return int(self.value("PRAGMA user_version"))

    def set_format(self, number: int) -> None:
        self.sqlite.execute(f"PRAGMA user_version = {number:d}")

    def close(self) -> None:
        self.sqlite.close()


def open_sqlite(path: Path | str, *, survives_power_cuts: bool = True, read_only: bool = False) -> SqliteConnection:
    """Open or create a database that survives kill -9, and power cuts unless its owner says that it need not.

    `read_only`: open it as it is, beside its owner. Raises sqlite3.OperationalError if it cannot be read.
    """
    if read_only:
        return SqliteConnection(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None))
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if survives_power_cuts else 'NORMAL'}")
    return SqliteConnection(connection)


def table_names(schema: Sequence[str]) -> list[str]:
    """The tables that these statements create."""
    return re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", "\n".join(schema))


def table_digest(connection: Connection, table: str) -> str:
    """BLAKE3, hex, of the sorted digests of the rows. A truth value counts as 0 or 1, as SQLite stores it."""
    rows = connection.rows(f"SELECT * FROM {table}")
    digest = blake3(table.encode())
    for row in sorted(blake3(_text(row)).digest() for row in rows):
        digest.update(row)
    return digest.hexdigest()


def _text(row: tuple[object, ...]) -> bytes:
    plain = [int(value) if isinstance(value, bool) else value for value in row]
    return json.dumps(plain, separators=(",", ":")).encode()
