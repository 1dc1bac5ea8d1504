"""The connection to the database, and everything that differs between SQLite and PostgreSQL.

Invariant: what happens inside `transaction()` happens whole or not at all. Called by the tables. Statements use `?` for
arguments and RETURNING for new rows; a second database needs another class with these methods, and another SERIAL.
Left out: PostgreSQL itself; threads (one thread uses a connection).
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError

SERIAL = "INTEGER PRIMARY KEY AUTOINCREMENT"  # PostgreSQL: BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY


class DatabaseFullError(ShoalError):
    """The disk that holds the database is full."""


class Connection:
    def __init__(self, connection: sqlite3.Connection) -> None:
        if connection.isolation_level is not None:
            raise ValueError("open the connection with isolation_level=None, so that transactions are explicit")
        self.sqlite = connection

    def rows(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self.sqlite.execute(sql, arguments).fetchall()

    def row(self, sql: str, *arguments: object) -> Any:
        """The first row, None if there is none."""
        return self.sqlite.execute(sql, arguments).fetchone()

    def value(self, sql: str, *arguments: object) -> Any:
        """The first column of the first row, None if there is none."""
        found = self.row(sql, *arguments)
        return None if found is None else found[0]

    def change(self, sql: str, *arguments: object) -> int:
        """Returns how many rows changed. Raises DatabaseFullError."""
        with self._full_disk_named():
            return self.sqlite.execute(sql, arguments).rowcount

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or nothing of it. A nested block belongs to the outer one: an error undoes both."""
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
            raise DatabaseFullError(f"the disk of {self.file} is full: free space there") from error

    def has_table(self, name: str) -> bool:
        return self.row("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", name) is not None

    @property
    def file(self) -> str:
        """Where the database is, for messages."""
        return str(self.row("PRAGMA database_list")[2])

    @property
    def format(self) -> int:
        """The number that the creator of this database stored in it; 0 in a new one."""
        return int(self.value("PRAGMA user_version"))

    @format.setter
    def format(self, number: int) -> None:
        self.sqlite.execute(f"PRAGMA user_version = {number:d}")


def open_sqlite(path: Path, *, survives_power_cuts: bool = True) -> sqlite3.Connection:
    """Open or create a database that survives kill -9, and power cuts unless its owner says that it need not."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if survives_power_cuts else 'NORMAL'}")
    return connection
