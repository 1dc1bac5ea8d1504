"""The six node commands: `shoal learner`, `origin`, `relay`, `worker`, `validator`, `evaluator`, each with an invite.

Invariant: the invite is checked before anything heavy is imported. Origin and relay also run without a pool (`shardcast`).
"""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from shoal.cli import shardcast
from shoal.cli.arguments import Commands, add_command, need, takes_threads
from shoal.config import EngineName
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.protocol.invite import Invite
    from shoal.protocol.messages import Role

EVICTED = 3
ROLES: dict[Role, str] = {
    "learner": "trains on accepted rollouts and publishes policy versions",
    "origin": "cuts published versions into shards and serves them",
    "relay": "mirrors the origin for workers",
    "worker": "generates rollouts",
    "validator": "checks submissions",
    "evaluator": "measures held-out accuracy",
}


EXAMPLES = {
    "origin": "--join origin.invite --dir origin --watch learner/versions",
    "learner": "--join learner.invite --dir learner",
}


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    for role, what in ROLES.items():
        parser = add_command(commands, role, what, EXAMPLES.get(role, f"--join {role}.invite --dir {role}"))
        alone = role in ("origin", "relay")
        parser.add_argument("--join", required=not alone, metavar="INVITE", help="an invite, or a file that holds one")
        parser.add_argument("--dir", type=Path, required=not alone, help="this node's own folder: key, cache, state")
        takes_threads(parser)
        if role == "learner":
            parser.add_argument(
                "--site",
                metavar="INVITE",
                help="this site's invite of `shoal pool meet`, if the config sets learner.sites",
            )
        elif role == "worker":
            parser.add_argument(
                "--engine", choices=get_args(EngineName), default="torch", help="what generates (vllm: docs/operate.md)"
            )
        elif role == "origin":
            parser.add_argument("--watch", type=Path, help="with --join: the learner's folder of versions")
            shardcast.origin_arguments(parser)
        elif role == "relay":
            shardcast.relay_arguments(parser)


def node(arguments: argparse.Namespace) -> int:
    """Join a pool and do the role's work until the run ends."""
    role: Role = arguments.command_name
    need(arguments, ["dir", "watch"] if role == "origin" else ["dir"], "--join")
    invite = _checked_invite(role, arguments)
    stop = begin(role, arguments)
    from shoal.protocol.calling import StoppedError

    try:
        ended = _work(role, invite, arguments, stop)
    except StoppedError:
        return 0
    logging.getLogger(__name__).info("ended: %s", ended)
    return EVICTED if ended == "evicted" else 0


def origin(arguments: argparse.Namespace) -> int:
    if arguments.join:
        return node(arguments)
    need(arguments, ["path"], "no --join")
    shardcast.run_origin(arguments, begin("origin", arguments))
    return 0


def relay(arguments: argparse.Namespace) -> int:
    if arguments.join:
        return node(arguments)
    need(arguments, ["upstream", "key"], "no --join")
    shardcast.run_relay(arguments, begin("relay", arguments))
    return 0


def begin(name: str, arguments: argparse.Namespace) -> threading.Event:
    """Set this process up as a server; returns the event that a signal sets."""
    from shoal.cli.launch import process
    from shoal.shardcast.connections import raise_limit

    os.umask(0o077)
    raise_limit()
    return process.begin(name, threads=arguments.threads)


def _checked_invite(role: Role, arguments: argparse.Namespace) -> Invite:
    """Raises UserError: starting the same command again does not help."""
    from shoal.protocol.invite import InviteError, read_invite

    joined_before = (arguments.dir / "identity.pem").exists()  # such a node may return after its invite has expired
    try:
        invite = read_invite(arguments.join)
        invite.check(role, None if joined_before else time.time())
    except InviteError as error:
        raise UserError(str(error)) from error
    return invite


def _work(role: Role, invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    """Return how the run ended."""
    from shoal.cli import origin_and_relay, roles

    folder, threads = arguments.dir, arguments.threads
    if role in ("origin", "relay"):
        listen, url = arguments.listen, arguments.url
        if role == "origin":
            return origin_and_relay.run_origin(invite, folder, arguments.watch, stop, listen, url)
        return origin_and_relay.run_relay(invite, folder, stop, listen, url)
    if role == "learner":
        from shoal.protocol.invite import read_invite

        site = read_invite(arguments.site) if arguments.site else None
        return roles.run_learner(invite, folder, threads, stop, site)
    if role == "worker":
        return roles.run_worker(invite, folder, threads, stop, engine=arguments.engine)
    return (roles.run_validator if role == "validator" else roles.run_evaluator)(invite, folder, threads, stop)
