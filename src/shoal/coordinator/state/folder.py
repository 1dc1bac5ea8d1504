"""What a coordinator keeps in its folder, or in the PostgreSQL that it leads, opened.

    pool.sqlite     tables and ledger, which change together
    nonces.sqlite   used nonces, so that no signed request is served twice

A nonce is not synced to the disk when it is written: that is milliseconds for every request, of members that flood us too.
It survives whatever this process may die of, but not the machine's own end. So after a restart of the machine nothing is
served that was signed, by our clock, before the database was opened again. PostgreSQL keeps the table out of its log and
empties it after a crash of its own: then the same holds. A coordinator that takes over finds what the one before it has
spent.

Invariant: a spent nonce stays refused, also after a restart and when the clock jumps back.
"""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import load
from shoal.errors import UserError
from shoal.ledger.connection import Connection, open_sqlite
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity
from shoal.protocol.signing import MAX_AGE_S

if TYPE_CHECKING:
    from shoal.coordinator.state.lead import Lead

TABLES, NONCES = "pool.sqlite", "nonces.sqlite"
KEY = "identity.pem"
TASKS = "tasks"  # the task set: files by their hash
OPEN_INVITE = "open.invite"  # what `shoal pool invite --open --publish` wrote
NONCES_SCHEMA = [
    "CREATE TABLE IF NOT EXISTS nonces (key TEXT NOT NULL, nonce TEXT NOT NULL, created_s BIGINT NOT NULL,"
    " PRIMARY KEY (key, nonce))",
    "CREATE TABLE IF NOT EXISTS machine (boot TEXT NOT NULL, since_s BIGINT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS nonces_by_age ON nonces (created_s)",
]
BOOT = Path("/proc/sys/kernel/random/boot_id")


class FolderError(UserError):
    """A folder without a coordinator's state; the message says what to do."""


class Nonces:
    """A `signing.NonceStore` that survives restarts.

    It forgets a nonce only when a newer one is more than keep_s younger. From then on it refuses everything that old, so
    neither a setting nor a clock that jumps back can reopen a used nonce. keep_s must be at least twice MAX_AGE_S, or
    slow requests are refused. Do not spend inside an open transaction: a rollback would undo it.
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
        """`boot` names the machine's start (`this_boot`), `now_s` is the time. `served_before`: requests were served, also
        if no table says so, because the server emptied it after a crash."""
        self.connection = connection
        self._keep_s = keep_s
        self._newest_s = -1  # of the requests that this process served
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
        if created_s > self._newest_s:  # else nothing has grown too old since the last request
            self._newest_s = created_s
            self.connection.change(
                "DELETE FROM nonces WHERE created_s < (SELECT max(created_s) FROM nonces) - ?", self._keep_s
            )
        return True


@dataclass(frozen=True)
class State:
    connection: Connection
    ledger: Ledger
    nonces: Nonces


def open_state(folder: Path, identity: Identity, lead: "Lead | None") -> State:
    """What `folder` holds; with `lead`, what its database holds. Raises LedgerError if another key wrote it.

    PostgreSQL empties the table of nonces after a crash of its own. Then, as after a machine's, older requests are refused.
    """
    now_s = time.time()
    if lead:
        nonces = Nonces(lead.connection, boot="server", now_s=now_s, served_before=lead.term > 1)
        return State(lead.connection, Ledger(lead.connection, identity), nonces)
    pool, spent = open_sqlite(folder / TABLES), open_sqlite(folder / NONCES, survives_power_cuts=False)
    return State(pool, Ledger(pool, identity), Nonces(spent, boot=this_boot(), now_s=now_s))


def open_tables(folder: Path, *, read_only: bool = False) -> Connection:
    """The tables of the coordinator that uses this folder, beside it. Raises FolderError, ConfigError, DatabaseLostError."""
    if (folder / TABLES).is_file():
        return open_sqlite(folder / TABLES, read_only=read_only)
    if database := named_database(folder):
        from shoal.ledger.postgres import open_postgres

        return open_postgres(database)
    raise FolderError(f"{folder} is not the folder of a coordinator that has run; name that folder")


def named_database(folder: Path) -> str:
    """`coordinator.database` of the coordinator that uses this folder; "" if it uses none. Raises ConfigError."""
    for path in (folder / "config.toml", folder.parent / "config.toml"):  # of a pool; of `shoal run`
        if path.is_file() and (database := load(path).coordinator.database):
            return database
    return ""


def this_boot() -> str:
    """A name for the machine's present start; a new one each time where the system has none, which is safe."""
    return BOOT.read_text().strip() if BOOT.exists() else secrets.token_hex(16)
