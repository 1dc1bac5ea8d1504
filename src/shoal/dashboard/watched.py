"""A run as the dashboard sees it: its state and its history, from its folder or from its coordinator's open routes.

Invariant: it changes nothing. A folder can be read during the run (SQLite, write-ahead log) and after it. By a coordinator's
URL only what its open routes tell can be seen: state, curves, nodes and samples. A pool whose tables are in PostgreSQL is
read there, in a session that cannot write; its folder names the database.
Called by the feed and the report, in one thread.
"""

import json
import sqlite3
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import httpx

from shoal.config import Config, ConfigError, parse
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.http.reports import read_status
from shoal.coordinator.state.folder import named_database
from shoal.dashboard.queries import Queries
from shoal.errors import UserError
from shoal.ledger.connection import Connection, SqliteConnection
from shoal.ledger.stakes import LedgerStakes
from shoal.ledger.table import Ledger
from shoal.protocol.address import Address, AddressError, server_url
from shoal.protocol.history import RunHistory
from shoal.protocol.messages import Status
from shoal.protocol.watch import PoolWatch
from shoal.watch import legs
from shoal.watch.summary import read_summary

DATABASE = "pool.sqlite"
AWAY_S = 60.0  # a run in which nothing has happened for this long has ended, finished or not


class WatchedError(UserError):
    """A folder or address that holds no run; the message names it and the next step."""


class Watched(Protocol):
    """A run. `look` brings `history` up to date."""

    name: str
    history: RunHistory
    queries: Queries | None  # None: only the open routes are known
    config: Config | None
    folder: Path | None

    def look(self) -> Status: ...

    def changed(self) -> bool:
        """Whether a look may show anything new."""
        ...

    def running(self) -> bool: ...

    def wall_s(self, status: Status) -> float:
        """What the run has taken: as its summary says, or `shoal run` measures, else since its coordinator first started."""
        ...

    def stakes(self) -> Mapping[str, int] | None:
        """What each node has at stake, by name, where anything is; None: not known here."""
        ...


class WatchedFolder:
    """The folder of a run, or of a pool's coordinator."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises WatchedError."""
        self.folder: Path | None = folder
        self.clock = clock
        self.coordinator = folder / "coordinator" if (folder / "coordinator").is_dir() else folder
        self.connection = _connect(self.coordinator)
        self._now_s = 0.0  # of the newest look
        self._accounts = LedgerStakes(Ledger(self.connection), lambda: self._now_s)
        try:
            self.db = Database(self.connection, self._accounts.ledger, lambda: self._now_s)
        except PoolError as error:
            raise WatchedError(f"{error}. Look at it with that version") from error
        self.queries: Queries | None = Queries(self.connection)
        self.config: Config | None = self._config()
        self.history = RunHistory()
        self.name = self._name()
        self._seen = -1
        self._staked, self._searched = False, 0  # whether stakes were found, in entries up to this one

    def now_s(self) -> float:
        """The clock of a run that goes on; the last moment of one that has ended."""
        assert self.queries is not None
        now_s, newest_s = self.clock(), self.queries.newest_s()
        return now_s if now_s - newest_s < AWAY_S else newest_s

    def running(self) -> bool:
        assert self.queries is not None and self.config is not None
        return self.clock() - self.queries.newest_s() < AWAY_S and not self.db.is_finished(self.config.run.steps)

    def wall_s(self, status: Status) -> float:
        assert self.folder is not None
        if status.state == "finished" and (told := read_summary(self.folder).get("wall_s")):
            return float(told)
        measured = legs.wall_s(self.folder, self.clock(), running=self.running())
        return status.now_s - status.started_s if measured is None else measured

    def look(self) -> Status:
        assert self.config is not None
        self._now_s = self.now_s()
        while self.history.add(self.db.history.after(self.history.cursor)):
            pass
        return read_status(self.db, self.config, self.name, [])

    def changed(self) -> bool:
        if not isinstance(self.connection, SqliteConnection):
            return True  # PostgreSQL does not say; a look is cheap beside the server's own work
        seen = int(self.connection.value("PRAGMA data_version"))
        self._seen, before = seen, self._seen
        return seen != before

    def stakes(self) -> Mapping[str, int] | None:
        assert self.config is not None and self.queries is not None
        if self.config.ledger.contract:
            return self.queries.staked()
        searched, self._searched = self._searched, self.queries.newest_entry()
        self._staked = self._staked or self.queries.has_stakes(searched)
        if not self._staked:
            return {}
        names = self.queries.names()
        return {names[key]: one.stake + one.leaving for key, one in self._accounts.accounts().items() if key in names}

    def close(self) -> None:
        self.connection.close()

    def _config(self) -> Config:
        """What the ledger says the run goes by since its last start."""
        body = self.connection.value("SELECT body FROM ledger WHERE kind = 'started' ORDER BY seq DESC LIMIT 1")
        if body is None:
            raise WatchedError(f"the run in {self.folder} has not started yet")
        try:
            return parse(tomllib.loads(json.loads(body)["config"]), source="ledger entry 'started'")
        except (ValueError, KeyError, ConfigError) as error:
            raise WatchedError(f"the ledger in {self.coordinator} holds no config of this version: {error}") from error

    def _name(self) -> str:
        try:
            return Address.read(self.coordinator).run
        except AddressError:
            return self.coordinator.name


class WatchedPool:
    """A coordinator elsewhere, by its URL."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.pool = PoolWatch(server_url(url), client)
        self.history = self.pool.history
        self.name = url
        self.queries: Queries | None = None
        self.config: Config | None = None
        self.folder: Path | None = None
        self._state = "running"

    def look(self) -> Status:
        """Raises UnreachableError."""
        status = self.pool.look()
        self.name, self._state = status.run, status.state
        return status

    def changed(self) -> bool:
        return True

    def running(self) -> bool:
        return self._state == "running"

    def wall_s(self, status: Status) -> float:
        return status.now_s - status.started_s

    def stakes(self) -> Mapping[str, int] | None:
        return None


def _connect(folder: Path) -> Connection:
    """A coordinator's tables, to read. One thread at a time uses them; which one may change. Raises WatchedError."""
    path = folder / DATABASE
    if path.is_file():
        return SqliteConnection(
            sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
        )
    if database := named_database(folder):
        from shoal.ledger.postgres import open_postgres  # needs the extra `postgres`

        connection = open_postgres(database)
        connection.change("SET default_transaction_read_only = on")
        return connection
    raise WatchedError(f"no {DATABASE} in {folder}: name the folder of a run, of a coordinator, or its URL")


def watch(where: str) -> WatchedFolder | WatchedPool:
    """The run at a folder or a URL. Raises WatchedError or AddressError."""
    if where.startswith(("http://", "https://")):
        return WatchedPool(where, httpx.Client(timeout=5))
    return WatchedFolder(Path(where))
