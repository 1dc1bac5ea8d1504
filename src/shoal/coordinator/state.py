"""A coordinator's databases, in its folder or in PostgreSQL, and the lock that keeps a second coordinator out.

    pool.sqlite     tables and ledger, which change together
    nonces.sqlite   used nonces, so that no signed request is served twice

Nonces are not synced to disk, because a sync costs milliseconds per request, even for a flooding member's. They survive a
crash of this process, but not of the machine. So after a restart of the machine, or in a restored copy of the folder, every
request signed, by our clock, before the database was reopened is refused. In PostgreSQL the table is unlogged and is emptied
after a database crash: the same rule applies.

Invariants: a spent nonce stays refused, also after a restart and when the clock jumps back. One coordinator at a time uses a
folder or a PostgreSQL schema: a second one refuses to start. PostgreSQL's lock belongs to the session that writes, so a
coordinator that has lost it can write nothing more.
"""

import fcntl
import os
import secrets
import time
from pathlib import Path

from shoal.config import load
from shoal.config.sections import CoordinatorSection
from shoal.errors import UserError
from shoal.ledger.connection import Connection, open_sqlite
from shoal.protocol.signing import MAX_AGE_S

TABLES, NONCES, LOCK = "pool.sqlite", "nonces.sqlite", "coordinator.lock"
KEY = "identity.pem"
TASKS = "tasks"  # the task set: files by their hash
OPEN_INVITE = "open.invite"  # written by `shoal pool invite --open --publish`
NONCES_SCHEMA = [
    "CREATE TABLE IF NOT EXISTS nonces (key TEXT NOT NULL, nonce TEXT NOT NULL, created_s BIGINT NOT NULL,"
    " PRIMARY KEY (key, nonce))",
    "CREATE TABLE IF NOT EXISTS machine (boot TEXT NOT NULL, since_s BIGINT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS nonces_by_age ON nonces (created_s)",
]
BOOT = Path("/proc/sys/kernel/random/boot_id")
LOCK_S = 20.0  # PostgreSQL notices within this time that the previous coordinator was killed or disconnected


class PoolFolderError(UserError):
    """The folder is not a pool's, is in use, or has no such member; the message says what to do."""


class Nonces:
    """A `signing.NonceStore` that survives restarts.

    It forgets a nonce only once it has a nonce more than keep_s younger. From then on it refuses everything that old, so
    neither a changed setting nor a clock that jumps back makes a used nonce valid again. keep_s must be at least twice
    MAX_AGE_S, or slow requests are refused. Do not call `spend` inside a transaction: a rollback would undo it.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        keep_s: int = 2 * MAX_AGE_S,
        boot: str = "",
        now_s: float = 0.0,
        served_before: bool = False,
    ) -> None:
        """`boot` identifies the machine's boot. `served_before`: requests were served earlier, even if the table of nonces
        is empty because the server crashed or the folder is a restored copy."""
        self.connection = connection
        self._keep_s = keep_s
        self._newest_s = -1  # newest `created_s` that this process served
        for statement in NONCES_SCHEMA:
            connection.create(statement, survives_power_cuts=False)
        before = connection.row("SELECT boot, since_s FROM machine")
        if before and before[0] == boot:
            self._since_s = before[1]
        else:
            self._since_s = int(now_s) + 1 if before or served_before else 0
        with connection.transaction():
            connection.change("DELETE FROM machine")
            connection.change("INSERT INTO machine (boot, since_s) VALUES (?, ?)", boot, self._since_s)

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        if created_s < self._since_s:
            return False
        # One statement, so that another process cannot purge between the check and the insert.
        spent = self.connection.change(
            "INSERT INTO nonces (key, nonce, created_s) SELECT ?, ?, ?"
            " WHERE ? >= coalesce((SELECT max(created_s) FROM nonces) - ?, ?) ON CONFLICT (key, nonce) DO NOTHING",
            key,
            nonce,
            created_s,
            created_s,
            self._keep_s,
            created_s,
        )
        if spent != 1:
            return False
        if created_s > self._newest_s:  # else no nonce became too old since the last request
            self._newest_s = created_s
            self.connection.change(
                "DELETE FROM nonces WHERE created_s < (SELECT max(created_s) FROM nonces) - ?", self._keep_s
            )
        return True


def open_state(folder: Path, section: CoordinatorSection) -> tuple[Connection, Nonces]:
    """Open and lock a coordinator's tables and nonces. Raise PoolFolderError if another coordinator uses them."""
    tables: Connection
    spent: Connection
    if section.database:
        from shoal.ledger.postgres import open_postgres

        server = open_postgres(section.database)
        if not server.lock(LOCK_S):
            raise PoolFolderError(
                f"another coordinator uses {server.place}: stop it, or name another database or schema"
            )
        tables, spent, boot = server, server, "server"
    else:
        _lock(folder / LOCK)
        tables, spent = open_sqlite(folder / TABLES), open_sqlite(folder / NONCES, survives_power_cuts=False)
        boot = BOOT.read_text().strip() if BOOT.exists() else secrets.token_hex(16)  # counts as a reboot, which is safe
    return tables, Nonces(spent, boot=boot, now_s=time.time(), served_before=tables.has_table("run"))


def _lock(path: Path) -> None:
    """Lock a file until this process ends. Raise PoolFolderError if another one holds it."""
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)  # never closed
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise PoolFolderError(f"another coordinator uses {path.parent}: stop it first") from error


def open_tables(folder: Path) -> Connection:
    """Open the tables of the coordinator that uses this folder. Raise PoolFolderError, ConfigError, DatabaseLostError."""
    if (folder / TABLES).is_file():
        return open_sqlite(folder / TABLES)
    for path in (folder / "config.toml", folder.parent / "config.toml"):  # of a pool; of `shoal run`
        if path.is_file() and (database := load(path).coordinator.database):
            from shoal.ledger.postgres import open_postgres

            return open_postgres(database)
    raise PoolFolderError(f"{folder} is not the folder of a coordinator that has run; name that folder")
