"""Opens what a coordinator keeps: its tables, its ledger and its nonces, in SQLite files or in the PostgreSQL it leads.

Invariant: tables and ledger are in one database and change together. Called by `routes` at start, and by
`steering`.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import load
from shoal.coordinator.tables.connection import Connection, open_sqlite
from shoal.coordinator.tables.nonces import Nonces, this_boot
from shoal.ledger.interface import Ledger
from shoal.ledger.sqlite import SqliteLedger
from shoal.protocol.address import AddressError
from shoal.protocol.identity import Identity

if TYPE_CHECKING:
    from shoal.coordinator.state.lead import Lead


@dataclass(frozen=True)
class State:
    connection: Connection
    ledger: Ledger
    nonces: Nonces


def open_state(folder: Path, identity: Identity, lead: "Lead | None") -> State:
    """What `folder` holds; with `lead`, what its database holds. Raises LedgerError if another key wrote it."""
    return _in_files(folder, identity) if lead is None else _in_postgres(lead, identity)


def open_tables(folder: Path) -> Connection:
    """The tables of the coordinator that uses this folder. Raises AddressError, ConfigError, DatabaseLostError."""
    if (folder / "pool.sqlite").is_file():
        return open_sqlite(folder / "pool.sqlite")
    if database := named_database(folder):
        from shoal.coordinator.tables.postgres import open_postgres

        return open_postgres(database)
    raise AddressError(f"{folder} is not the folder of a coordinator that has run; name that folder")


def named_database(folder: Path) -> str:
    """`coordinator.database` of the coordinator that uses this folder; "" if it uses none. Raises ConfigError."""
    for path in (folder / "config.toml", folder.parent / "config.toml"):  # of a pool; of `shoal run`
        if path.is_file() and (database := load(path).coordinator.database):
            return database
    return ""


def _in_files(folder: Path, identity: Identity) -> State:
    pool = open_sqlite(folder / "pool.sqlite")
    spent = open_sqlite(folder / "nonces.sqlite", survives_power_cuts=False)
    return State(
        pool,
        SqliteLedger(pool.sqlite, identity, clock=time.time),
        Nonces(spent, boot=this_boot(), now_s=time.time()),
    )


def _in_postgres(lead: "Lead", identity: Identity) -> State:
    """The server empties the table of nonces after its own crash. Then, as after a machine's, older requests are refused."""
    from shoal.ledger.postgres import PostgresLedger

    return State(
        lead.connection,
        PostgresLedger(lead.connection.postgres, identity, clock=time.time),
        Nonces(lead.connection, boot="server", now_s=time.time(), served_before=lead.term > 1),
    )
