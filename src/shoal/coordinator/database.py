"""The pool's one SQLite file: its tables, transactions, and the questions about the run that several parts ask.

    submission:  open -> uploaded -> validating -> accepted | rejected          open -> expired (deadline passed)
    group:       accepted -> in the batch of one step | stale                   (useful groups only)

Invariant: what happens inside `transaction()`, ledger entries included, happens whole or not at all, so kill -9 at any
moment leaves a state that is whole. Called by the other parts of the pool: members, assignments, submissions, batches,
learning and status. One thread uses it; time is an argument. Left out: PostgreSQL.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.errors import ShoalError
from shoal.ledger.chain import Ledger

FORMAT = 2  # of a run: its tables, its manifests, its submissions. One that another version began is not gone on with.

SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    key TEXT PRIMARY KEY, name TEXT UNIQUE NOT NULL, role TEXT NOT NULL, url TEXT, invite TEXT UNIQUE NOT NULL,
    seen_s REAL NOT NULL, version INTEGER, stats TEXT NOT NULL DEFAULT '{}', evicted INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS submissions (
    seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, worker TEXT NOT NULL, number INTEGER NOT NULL,
    step INTEGER NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, deadline_s REAL NOT NULL,
    state TEXT NOT NULL, hash TEXT, validator TEXT, lease_s REAL, content TEXT, accepted_hash TEXT,
    reason TEXT, verdict TEXT, full INTEGER, uploaded_s REAL, judged_s REAL);
CREATE INDEX IF NOT EXISTS submissions_state ON submissions (state, seq);
CREATE INDEX IF NOT EXISTS submissions_content ON submissions (content);
CREATE TABLE IF NOT EXISTS groups (
    seq INTEGER PRIMARY KEY, submission TEXT NOT NULL, grp INTEGER NOT NULL, version INTEGER NOT NULL,
    reward REAL NOT NULL, useful INTEGER NOT NULL, flat INTEGER NOT NULL, tokens INTEGER NOT NULL, during INTEGER NOT NULL,
    batch INTEGER, stale INTEGER NOT NULL DEFAULT 0, UNIQUE (submission, grp));
CREATE INDEX IF NOT EXISTS groups_batch ON groups (batch, seq);
CREATE TABLE IF NOT EXISTS policies (
    version INTEGER PRIMARY KEY, digest TEXT NOT NULL, size_bytes INTEGER NOT NULL, published_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS history (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (kind, key));
CREATE TABLE IF NOT EXISTS run (started_s REAL NOT NULL);
"""


class PoolError(ShoalError):
    """A request that the pool's state does not allow; `status` is its HTTP code."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class Database:
    """The tables and the ledger, which lie in one file and change together."""

    def __init__(self, connection: sqlite3.Connection, ledger: Ledger, clock: Callable[[], float]) -> None:
        connection.row_factory = sqlite3.Row
        _check_format(connection)
        connection.executescript(SCHEMA)
        if connection.execute("SELECT 1 FROM run").fetchone() is None:
            connection.execute("INSERT INTO run VALUES (?)", (clock(),))
        self.connection = connection
        self.ledger = ledger
        self.clock = clock

    def one(self, sql: str, *arguments: object) -> Any:
        """The first row, None where there is none."""
        return self.connection.execute(sql, arguments).fetchone()

    def all(self, sql: str, *arguments: object) -> list[sqlite3.Row]:
        return self.connection.execute(sql, arguments).fetchall()

    def change(self, sql: str, *arguments: object) -> None:
        self.connection.execute(sql, arguments)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or nothing of it. A block inside another is part of that one: an error undoes both."""
        if self.connection.in_transaction:
            yield
            return
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    # --- what several parts ask --------------------------------------------------------------------------------------

    def open_step(self) -> int:
        """The smallest step that lacks accepted groups."""
        last = self.one("SELECT max(batch) AS step FROM groups")["step"]
        return 0 if last is None else int(last) + 1

    def waiting(self) -> int:
        """Useful groups that are in no batch yet and may still come into one."""
        return int(self.one("SELECT count(*) AS n FROM groups WHERE useful AND batch IS NULL AND NOT stale")["n"])

    def newest(self) -> int | None:
        """The newest published version."""
        version: int | None = self.one("SELECT max(version) AS version FROM policies")["version"]
        return version

    def evaluated_last(self, steps: int) -> bool:
        """Whether the last version, after so many steps, was evaluated, which ends the run."""
        return self.one("SELECT 1 FROM history WHERE kind = 'evaluation' AND key = ?", f"{steps} final") is not None


def _check_format(connection: sqlite3.Connection) -> None:
    """Note the format in a new file. Raises PoolError where the file is of another."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    is_new = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'run'").fetchone() is None
    if is_new:
        connection.execute(f"PRAGMA user_version = {FORMAT}")
    elif found != FORMAT:
        file = connection.execute("PRAGMA database_list").fetchone()["file"]
        raise PoolError(
            f"{file} is of a run in format {found}, and this version of Shoal goes on with format {FORMAT} only: finish the "
            "run with the version that began it, or start a new one from its last weights (model.name)"
        )
