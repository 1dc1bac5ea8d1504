"""`shoal doctor [ROLE]`: will this machine do, and if not, what to do? One line for each thing that matters.

Invariant: nothing is joined and no invite is used up. Exit status 0: nothing fails, 1: something does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, UsageError, port, say
from shoal.cli.nodes import ROLES

if TYPE_CHECKING:
    from shoal.doctor import Role, Targets

WHOLE: Role = "run"  # what `shoal run` starts: everything on one machine


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="is this machine fit for a role, and what to do if not?")
    parser.add_argument(
        "role", nargs="?", choices=[WHOLE, "coordinator", *ROLES], help="(default: the invite's, else everything)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--join", metavar="INVITE", help="an invite, or a file that holds one; it stays unused")
    where.add_argument("--url", help="instead of an invite: the coordinator's URL")
    parser.add_argument("--relay", action="append", default=[], metavar="URL", help="a relay (default: the pool's)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the node's folder will be (default: here)")
    parser.add_argument("--device", help="torch device (default: the run's, else cpu)")
    parser.add_argument("--port", action="append", type=port, help="to listen on (default: those of docs/deploy.md)")
    parser.add_argument("--json", action="store_true", help="facts and findings as JSON")


def doctor(arguments: argparse.Namespace) -> int:
    targets, role = _targets(arguments)
    import httpx

    from shoal import doctor as room

    with httpx.Client() as client:
        reached, config = room.look(targets, client)
    device = arguments.device or (config.model.device if config else "cpu")
    facts = room.gather(role, arguments.dir, device, arguments.port)
    findings = room.examine(role, facts, reached, config)
    if arguments.json:
        report = {"role": role, "findings": [asdict(one) for one in findings], "facts": asdict(facts)}
        say(json.dumps(report | {"reached": [asdict(one) for one in reached]}, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        say("\n".join(one.line(width) for one in findings))
    return int(any(one.verdict == "fails" for one in findings))


def _targets(arguments: argparse.Namespace) -> tuple[Targets, Role]:
    """Whom to ask, and for which role."""
    from shoal.doctor import Targets
    from shoal.protocol.address import coordinator_url
    from shoal.protocol.invite import InviteError, open_payload, read_invite

    if arguments.join is None:
        return Targets(
            coordinator_url(arguments.url) if arguments.url else "", arguments.relay
        ), arguments.role or WHOLE
    try:
        invite = read_invite(arguments.join)
        payload = open_payload(invite.signed.model_dump_json(), invite.key, invite.run)
    except InviteError as error:
        raise UsageError(str(error)) from error
    if arguments.role and arguments.role != payload.role:
        raise UsageError(f"the invite is for the role {payload.role}, not {arguments.role}")
    return Targets(invite.url, arguments.relay, invite), payload.role
