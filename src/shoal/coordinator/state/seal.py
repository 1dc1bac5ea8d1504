"""The ledger's first and last words: which run a coordinator serves when it starts, and what its tables hold when it stops.

    started   run, config, formats: at each start
    sealed    the digest of every table: at each stop that is not a kill; the next start ends its validity

Invariant: while a ledger ends with `sealed`, its database holds what it held when the coordinator stopped, or somebody else
changed it. A ledger that ends otherwise is of a coordinator that runs or was killed, or its end was cut off.
Called by `service`; read by the audit.
"""

from shoal import config as config_module
from shoal.config import Config
from shoal.coordinator.state.database import FORMAT, TABLE_NAMES, Database
from shoal.coordinator.tables.connection import Connection
from shoal.coordinator.tables.digests import table_digest
from shoal.ledger.interface import JSON
from shoal.protocol.messages import VERSION


def start(db: Database, run: str, key: str, config: Config) -> None:
    body: dict[str, JSON] = {
        "run": run,
        "key": key,
        "config": config_text(config),
        "format": FORMAT,
        "protocol": VERSION,
    }
    db.ledger.append("started", body)


def config_text(config: Config) -> str:
    """The config as TOML, without what is nobody else's matter: members read the ledger."""
    section = config.coordinator.model_copy(update={"database": ""})
    ledger = config.ledger.model_copy(update={"rpc": "", "key_file": ""})
    return config_module.dumps(config.model_copy(update={"coordinator": section, "ledger": ledger}))


def seal(db: Database) -> None:
    with db.transaction():
        db.ledger.append("sealed", {"tables": table_digests(db.connection)})


def table_digests(connection: Connection) -> dict[str, str]:
    """The digest of each of the pool's tables. The ledger is none of them: its entries are signed one by one."""
    return {name: table_digest(connection, name) for name in TABLE_NAMES}
