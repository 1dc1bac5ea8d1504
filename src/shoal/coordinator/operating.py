"""What an operator does to a pool, beside its running coordinator: make its folder, invite, steer members.

    DIR/identity.pem       the coordinator's key           DIR/config.toml          the resolved config
    DIR/coordinator.json   the pool's URL and run name     DIR/invites/NAME.invite  one per node, mode 0600
    DIR/tasks/             the task set, by hash

Invariants: `coordinator.json` is written last, so a folder that has it is complete; an existing folder is never changed.
Members are steered by the table in `nodes`, in the coordinator's database; the coordinator sees it at the member's next
heartbeat.
Left out: backups (docs/operate.md copies a folder with SQLite's own tool).
"""

import shlex
import time
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from shoal import config as config_module
from shoal.config import Config
from shoal.config.config import LOOPBACK
from shoal.coordinator.database import PoolError
from shoal.coordinator.nodes import Nodes
from shoal.coordinator.state import KEY, TASKS, PoolFolderError, open_tables
from shoal.coordinator.trust import EvidenceTable
from shoal.files import write_file
from shoal.protocol.identity import Identity, IdentityError
from shoal.protocol.invite import Address, AddressError, Invite, InviteError, make_invite, run_id, server_url
from shoal.protocol.messages import Role
from shoal.shardcast.fetch.reach import narrowest

CONFIG, INVITES = "config.toml", "invites"
INVITE_DAYS = 30.0  # until the invites of a new pool expire
STEERED = {"ban": "evicted", "drain": "drained", "readmit": "readmitted"}


def invited(config: Config) -> dict[str, Role]:
    """Every node that gets an invite, by its name, in the order to start them."""
    counted: dict[Role, int] = {
        "relay": config.relays.count,
        "validator": config.validator.count,
        "worker": config.workers.count,
    }
    named: dict[str, Role] = {"learner": "learner", "origin": "origin"}
    named |= {f"{role}-{number}": role for role, count in counted.items() for number in range(count)}
    return named | {"evaluator": "evaluator"}


def check_new(folder: Path) -> None:
    """Raise PoolFolderError if the folder holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PoolFolderError(
            f"{folder} is not empty; choose another --dir, or add a node to the pool there: shoal pool invite {folder}"
        )


def found_pool(folder: Path, config: Config, run: str, url: str, *, task_data: Path | None = None) -> list[str]:
    """Make a pool's folder; `task_data`, a folder beside it, becomes its task set. Returns what to do next, line by line.

    Raises PoolFolderError, AddressError.
    """
    url = server_url(url)
    settings = _reachable(config, url)
    check_new(folder)
    expires_s = int(time.time() + INVITE_DAYS * 86_400)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # the key is in it
    (folder / INVITES).mkdir()
    identity = Identity.load_or_create(folder / KEY)
    address = Address(url=url, run=run_id(run, identity.public))
    roles = invited(config)
    for name, role in roles.items():
        invite = make_invite(identity, url=address.url, run=address.run, role=role, name=name, expires_s=expires_s)
        invite.save(folder / INVITES / f"{name}.invite")
    if task_data is not None:
        task_data.rename(folder / TASKS)
    write_file(folder / CONFIG, config_module.dumps(settings).encode())
    address.write(folder)
    return _next_steps(folder, settings, address, roles)


def open_pool(folder: Path) -> tuple[Config, Address]:
    """Config and address of the pool that `found_pool` made in `folder`. Raises PoolFolderError, ConfigError."""
    if not (folder / CONFIG).exists():
        raise PoolFolderError(
            f"{folder} holds no pool; make one with `shoal pool init CONFIG --dir {folder} --url URL`"
        )
    return config_module.load(folder / CONFIG), Address.read(folder)


def invite_from(folder: Path, role: Role, name: str, url: str | None, days: float, *, open: bool = False) -> Invite:
    """An invite by the coordinator that uses this folder; an `open` one is for strangers with stake. Raises InviteError."""
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
        raise InviteError(f"{name[:60]!r} is not a node's name: use a to z, 0 to 9 and -, at most 40") from error


def steer(folder: Path, name: str, event: Literal["ban", "drain", "readmit"]) -> None:
    """Let an operator's event happen to a member.

        ban      of a relay: nobody asks it from the next heartbeats on, and its key can read no weights
        drain    of a worker: no new tasks; it finishes the one that it holds, and leaves; nothing is held against it
        readmit  tasks again for a worker that was dismissed, drains, has left, or was too slow; what was held against it is
                 forgotten. A suspension stays, and who was slashed stays banned

    Raises PoolFolderError, PoolError.
    """
    connection, role = open_tables(folder), "relay" if event == "ban" else "worker"
    every = [node for node in Nodes(connection).all() if node.role == role]
    node = next((one for one in every if one.name == name), None)
    if node is None:
        names = ", ".join(one.name for one in every if not one.evicted)
        raise PoolFolderError(f"{name} is not a {role} of this pool; its {role}s are: {names or 'none'}")
    with connection.transaction():
        if not Nodes(connection).move(node.key, event, f"{STEERED[event]} by the operator", time.time()):
            raise PoolError(f"{name} is {node.state} ({node.reason or 'no reason given'}): `{event}` changes nothing")
        if event == "readmit":
            EvidenceTable(connection).forget(node.key)


def _reachable(config: Config, url: str) -> Config:
    """Listen on the URL's port, and on all interfaces unless the URL is local or the config names a host.

    Relays may be as near as the coordinator: one on a private network has relays there too.
    """
    parts, section = urlsplit(url), config.coordinator
    host, port, outside = section.host, section.port or parts.port or 80, parts.hostname not in LOOPBACK
    if not section.port and parts.scheme == "https":
        raise PoolFolderError(
            f"{url} is a proxy's (the coordinator itself speaks http): add --set coordinator.listen=HOST:PORT"
        )
    if "listen" not in section.model_fields_set and outside:
        host = "::" if ":" in (parts.hostname or "") else "0.0.0.0"
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    reach = narrowest(parts.hostname or "") if config.relays.reach == "auto" else config.relays.reach
    relays = config.relays.model_copy(update={"reach": reach})
    return config.model_copy(update={"coordinator": section.model_copy(update={"listen": listen}), "relays": relays})


def _next_steps(folder: Path, config: Config, address: Address, roles: dict[str, Role]) -> list[str]:
    """The commands that start the pool, and what the config lacks for nodes elsewhere."""
    lines = [
        f"pool {address.run}: {len(roles)} invites in {folder / INVITES}, each for one node. Keep them secret.",
        "",
    ]
    lines += [
        "here:",
        f"  shoal coordinator --dir {shlex.quote(str(folder))}",
        "",
        f"on each node's machine, with its invite from {folder / INVITES}:",
    ]
    for name, role in roles.items():
        more = " --watch learner/versions" if role == "origin" else ""
        lines.append(f"  shoal {role} --join {name}.invite --dir {name}{more}")
    lines += ["", "from anywhere:", f"  shoal pool status {address.url}"]
    local = urlsplit(address.url).hostname in LOOPBACK
    unreachable = [
        f"{key}.listen"
        for key, section in (("origin", config.origin), ("relays", config.relays))
        if section.host in LOOPBACK and not local
    ]
    if unreachable:
        lines += [
            "",
            f"{' and '.join(unreachable)} announce 127.0.0.1: set them in {folder / CONFIG} to addresses that",
            "other machines reach, before the coordinator starts.",
        ]
    return lines
