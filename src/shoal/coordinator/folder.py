"""A coordinator's folder: its creation, its databases and their lock, invites, and the operator's actions on members.

    identity.pem       the coordinator's key           config.toml          the resolved config
    coordinator.json   the pool's URL and run name     invites/NAME.invite  one per node, mode 0600
    tasks/             the task set, by hash           open.invite          the published open invite
    pool.sqlite        tables and ledger, which change together
    nonces.sqlite      used nonces, so that no signed request is served twice

Nonces are not synced to disk, because a sync costs milliseconds per request, and a member may flood the coordinator
with requests. The nonces survive a crash of this process, but not of the machine. So after a restart of the machine, or
in a restored copy of the folder, the coordinator refuses every request dated before it reopened the database (by its
own clock). PostgreSQL can replace both databases. There, the table of nonces is unlogged: a database crash empties it,
so the same rule applies.

Invariants: `coordinator.json` is written last, so a folder that has it is complete. A spent nonce stays refused, even
after a restart or when the clock jumps back. One coordinator at a time uses a folder or a PostgreSQL schema: a second
one refuses to start. PostgreSQL's lock belongs to the session that writes, so a coordinator that has lost the lock
cannot write any more. An operator's action changes the member's state at once, and the member learns of it at its next
heartbeat.
Left out: backups (docs/operate.md shows how to copy a folder with SQLite's own tool).
"""

import secrets
import shlex
import time
from contextlib import closing
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from shoal import config as config_module
from shoal.config import Config
from shoal.config.config import LOOPBACK
from shoal.config.sections import CoordinatorSection
from shoal.coordinator.database import PoolError
from shoal.coordinator.nodes import Nodes
from shoal.coordinator.trust import EvidenceTable
from shoal.errors import UserError, check_extra
from shoal.files import lock, write_file
from shoal.ledger.connection import Connection, open_sqlite
from shoal.protocol.identity import Identity, IdentityError
from shoal.protocol.invite import Address, AddressError, Invite, InviteError, make_invite, run_id, server_url
from shoal.protocol.messages import Role
from shoal.protocol.signing import MAX_AGE_S, SignatureError
from shoal.shardcast.fetch.reach import narrowest
from shoal.watch.record import STATE

TABLES, NONCES, LOCK = "pool.sqlite", "nonces.sqlite", "coordinator.lock"
KEY, CONFIG, INVITES = "identity.pem", "config.toml", "invites"
TASKS = "tasks"  # the task set: files by their hash
SERVED = f"{TASKS}/public"  # the set that workers get
BUILT = f"{TASKS}/built.json"  # names both sets (`tasks.compiling`)
OPEN_INVITE = "open.invite"  # written by `shoal pool invite --open --publish`
NONCES_SCHEMA = [
    "CREATE TABLE IF NOT EXISTS nonces (key TEXT NOT NULL, nonce TEXT NOT NULL, created_s BIGINT NOT NULL,"
    " PRIMARY KEY (key, nonce))",
    "CREATE TABLE IF NOT EXISTS machine (boot TEXT NOT NULL, since_s BIGINT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS nonces_by_age ON nonces (created_s)",
]
BOOT = Path("/proc/sys/kernel/random/boot_id")
LOCK_S = 20.0  # PostgreSQL notices within this time that the previous coordinator was killed or disconnected
INVITE_DAYS = 30.0  # validity of a new pool's invites
PARTICIPLES = {"ban": "evicted", "drain": "drained", "readmit": "readmitted"}


class PoolFolderError(UserError):
    """The folder holds no pool, is in use, or has no such member; the message says what to do."""


# --- the coordinator's databases --------------------------------------------------------------------------------------


class Nonces:
    """A `signing.NonceStore` that survives restarts.

    A nonce is kept until one that is more than `keep_s` newer is stored. From then on, requests as old as the deleted
    nonce are refused. So a clock that jumps back cannot make a used nonce valid again. `keep_s` must be at
    least twice MAX_AGE_S, or slow requests are refused. Do not call `spend` inside a transaction: a rollback would undo
    it.
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
        """`boot` identifies the machine's boot. `served_before`: whether requests were served earlier. The table of
        nonces cannot show this, because it is empty after a crash of the database server and in a restored copy."""
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
            raise SignatureError(
                "too old",
                f"dated {self._since_s - created_s} s before this server opened its database: sign it again; if that "
                "does not help, this machine's clock or the server's is wrong, or was: check both (NTP)",
            )
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
            later_s = self.connection.value("SELECT max(created_s) FROM nonces") - created_s
            if later_s > self._keep_s:
                raise SignatureError(
                    "too old",
                    f"this server has served requests dated {later_s} s later, so this machine's clock or the server's "
                    "is wrong, or was: check both (NTP)",
                )
            return False
        if created_s > self._newest_s:  # otherwise no further nonce has become too old
            self._newest_s = created_s
            self.connection.change(
                "DELETE FROM nonces WHERE created_s < (SELECT max(created_s) FROM nonces) - ?", self._keep_s
            )
        return True

    def check(self) -> None:
        """Raise DatabaseLostError if the database is lost."""
        self.connection.row("SELECT boot FROM machine")


def open_state(folder: Path, section: CoordinatorSection) -> tuple[Connection, Nonces]:
    """Open and lock a coordinator's tables and nonces.

    Raise PoolFolderError if another coordinator uses them, or if the tables of a coordinator that has run are missing.
    Raise DatabaseLostError.
    """
    tables: Connection
    spent: Connection
    if section.database:
        check_extra("postgres", "coordinator.database")
        from shoal.ledger.postgres import open_postgres

        server = open_postgres(section.database)
        if not server.lock(LOCK_S):
            raise PoolFolderError(
                f"another coordinator uses {server.place}: stop it, or name another database or schema"
            )
        tables, spent, boot = server, server, "server"
    else:
        if not lock(folder / LOCK):
            raise PoolFolderError(f"another coordinator uses {folder}: stop it first")
        spent = open_sqlite(folder / NONCES, survives_power_cuts=False)
        served = spent.has_table("nonces") and spent.row("SELECT 1 FROM nonces") is not None
        if (served or (folder / STATE).exists()) and not (folder / TABLES).exists():
            raise PoolFolderError(
                f"{folder / TABLES} is missing, but this coordinator has run: restore it from a backup"
            )
        tables = open_sqlite(folder / TABLES)
        # Without a boot id, each start counts as a reboot, which is safe.
        boot = BOOT.read_text().strip() if BOOT.exists() else secrets.token_hex(16)
    return tables, Nonces(spent, boot=boot, now_s=time.time(), served_before=tables.has_table("run"))


def open_tables(folder: Path) -> Connection:
    """Open the tables of this folder's coordinator. Raise PoolFolderError, ConfigError, DatabaseLostError."""
    if (folder / TABLES).is_file():
        return open_sqlite(folder / TABLES)
    for path in (folder / CONFIG, folder.parent / CONFIG):  # the config of a pool; else the config of `shoal run`
        if path.is_file() and (database := config_module.load(path).coordinator.database):
            check_extra("postgres", "coordinator.database")
            from shoal.ledger.postgres import open_postgres

            return open_postgres(database)
    raise PoolFolderError(f"no coordinator has run in {folder}; name the folder of a coordinator")


# --- the operator's actions -------------------------------------------------------------------------------------------


def invited_nodes(config: Config) -> dict[str, Role]:
    """Return the role of every node that gets an invite, by name, in the order in which to start the nodes.

    Each of a learner's sites is a node: `learner`, `learner-1`, ...
    """
    counts: dict[Role, int] = {
        "relay": config.relays.count,
        "validator": config.validator.count,
        "worker": config.workers.count,
    }
    learners = ["learner", *(f"learner-{number}" for number in range(1, config.learner.sites))]
    roles: dict[str, Role] = dict.fromkeys(learners, "learner")
    roles["origin"] = "origin"
    roles |= {f"{role}-{number}": role for role, count in counts.items() for number in range(count)}
    return roles | {"evaluator": "evaluator"}


def check_empty(folder: Path) -> None:
    """Raise PoolFolderError if the folder is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PoolFolderError(
            f"{folder} is not empty; choose another --dir, or add a node to the pool there: shoal pool invite {folder}"
        )


def create_pool(folder: Path, config: Config, run: str, url: str, *, task_data: Path | None = None) -> list[str]:
    """Create a pool's folder. Return the next steps as lines of text. Raise PoolFolderError, AddressError.

    `task_data`: a folder in the same file system, which is moved into the new folder as the task set.
    """
    url = server_url(url)
    settings = _reachable(config, url)
    check_empty(folder)
    expires_s = int(time.time() + INVITE_DAYS * 86_400)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # because the key is in it
    (folder / INVITES).mkdir()
    identity = Identity.load_or_create(folder / KEY)
    address = Address(url=url, run=run_id(run, identity.public))
    roles = invited_nodes(config)
    for name, role in roles.items():
        invite = make_invite(identity, url=address.url, run=address.run, role=role, name=name, expires_s=expires_s)
        invite.save(folder / INVITES / f"{name}.invite")
    if task_data is not None:
        task_data.rename(folder / TASKS)
    write_file(folder / CONFIG, config_module.dumps(settings).encode())
    address.write(folder)
    return _next_steps(folder, settings, address, roles)


def open_pool(folder: Path) -> tuple[Config, Address]:
    """Return the config and address of the pool in `folder`. Raise PoolFolderError, ConfigError."""
    if not (folder / CONFIG).exists():
        raise PoolFolderError(
            f"{folder} holds no pool; make one with `shoal pool init CONFIG --dir {folder} --url URL`"
        )
    return config_module.load(folder / CONFIG), Address.read(folder)


def create_invite(folder: Path, role: Role, name: str, url: str | None, days: float, *, open: bool = False) -> Invite:
    """Make an invite signed by this folder's coordinator. `open`: admit any key with stake. Raise InviteError."""
    try:
        address, identity = Address.read(folder), Identity.load(folder / KEY)
    except (AddressError, IdentityError) as error:
        raise InviteError(
            f"{folder} is not the folder of a coordinator; make one with `shoal pool init CONFIG --dir {folder} --url URL`"
        ) from error
    expires_s = int(time.time() + days * 86_400)
    try:
        return make_invite(
            identity, url=url or address.url, run=address.run, role=role, name=name, expires_s=expires_s, open=open
        )
    except ValidationError as error:
        if open and role != "worker":
            raise InviteError(f"an open invite is for workers, not for the role {role}") from error
        raise InviteError(
            f"{name[:60]!r} is not a valid node name: use at most 40 characters of a to z, 0 to 9 and -"
        ) from error


def check_name(folder: Path, name: str) -> None:
    """Raise InviteError if a node with this name has joined. With PostgreSQL, only the coordinator checks this."""
    if (folder / TABLES).is_file():
        with closing(open_sqlite(folder / TABLES, read_only=True)) as tables:
            if tables.has_table("nodes") and Nodes(tables).is_taken(name):
                raise InviteError(f"a node of this pool is already named {name}; choose another --name")


def apply_event(folder: Path, name: str, event: Literal["ban", "drain", "readmit"]) -> None:
    """Apply an operator's event to a member.

        ban      a relay: nodes stop using it at their next heartbeats, and its key can read no weights
        drain    a worker: it gets no new tasks, finishes those it has, and leaves without penalty
        readmit  a worker that was dismissed, is draining or has left: it gets tasks again and its evidence is deleted.
                 A suspension stays in force, and a slashed worker stays banned

    Raise PoolFolderError, PoolError.
    """
    connection, role = open_tables(folder), "relay" if event == "ban" else "worker"
    candidates = [node for node in Nodes(connection).all() if node.role == role]
    node = next((node for node in candidates if node.name == name), None)
    if node is None:
        names = ", ".join(node.name for node in candidates if not node.evicted)
        raise PoolFolderError(f"{name} is not a {role} of this pool; its {role}s are: {names or 'none'}")
    with connection.transaction():
        if not Nodes(connection).move(node.key, event, f"{PARTICIPLES[event]} by the operator", time.time()):
            raise PoolError(f"{name} is {node.state} ({node.reason or 'no reason given'}): `{event}` changes nothing")
        if event == "readmit":
            EvidenceTable(connection).forget(node.key)


def _reachable(config: Config, url: str) -> Config:
    """Return the config, set to listen on the URL's port.

    The coordinator listens on all interfaces, unless the URL is local or the config names a host. If the URL is on a
    private network, relays may be there too, so `relays.reach` is derived from the URL.
    """
    parts, section = urlsplit(url), config.coordinator
    host, port, is_remote = section.host, section.port or parts.port or 80, parts.hostname not in LOOPBACK
    if not section.port and parts.scheme == "https":
        raise PoolFolderError(
            f"{url} needs a proxy, because the coordinator itself speaks http: add --set coordinator.listen=HOST:PORT"
        )
    if "listen" not in section.model_fields_set and is_remote:
        host = "::" if ":" in (parts.hostname or "") else "0.0.0.0"
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    reach = narrowest(parts.hostname or "") if config.relays.reach == "auto" else config.relays.reach
    relays = config.relays.model_copy(update={"reach": reach})
    return config.model_copy(update={"coordinator": section.model_copy(update={"listen": listen}), "relays": relays})


def _next_steps(folder: Path, config: Config, address: Address, roles: dict[str, Role]) -> list[str]:
    """Return the commands that start the pool, and the settings that nodes on other machines still need."""
    lines = [
        f"pool {address.run}: {len(roles)} invites in {folder / INVITES}, each for one node. Keep them secret.",
        "",
    ]
    coordinator, sites = f"  shoal coordinator --dir {shlex.quote(str(folder))}", config.learner.sites
    if sites:
        meet = f"  shoal pool meet {shlex.quote(str(folder / CONFIG))} --dir meet"
        lines += ["Start the coordinator and the meeting of the learner's sites on this machine:", coordinator, meet]
    else:
        lines += ["Start every node except the workers on this machine:", f"  shoal pool up {shlex.quote(str(folder))}"]
        lines += ["", "Or start only the coordinator on this machine:", coordinator]
    lines += ["", f"Start each remaining node on its own machine, with its invite from {folder / INVITES}:"]
    for name, role in roles.items():
        more = f" --watch {'meet' if sites else 'learner'}/versions" if role == "origin" else ""
        if role == "learner" and sites:
            more = f" --site site-{name.removeprefix('learner').lstrip('-') or 0}.invite"
        lines.append(f"  shoal {role} --join {name}.invite --dir {name}{more}")
    if sites:
        lines += [
            "",
            "The meeting writes the sites' invites to meet/invites. The origin runs on the meeting's machine.",
        ]
    lines += ["", "Show the pool's state, from any machine:", f"  shoal pool status {address.url}"]
    local = urlsplit(address.url).hostname in LOOPBACK
    servers = {"origin": config.origin, "relays": config.relays} | ({"sites": config.sites} if sites else {})
    announced = {key: getattr(section, "url", "") or f"http://{section.listen}" for key, section in servers.items()}
    unreachable = [f"{key}.listen" for key, url in announced.items() if urlsplit(url).hostname in LOOPBACK]
    if unreachable and not local:
        lines += [
            "",
            "Other machines cannot reach 127.0.0.1. Before you start the coordinator,",
            f"set {', '.join(unreachable)} in {folder / CONFIG} to addresses that they can reach (behind NAT, origin.url).",
        ]
    return lines
