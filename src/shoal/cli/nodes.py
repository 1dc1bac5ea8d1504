"""The six commands that join a pool with an invite, and SHARDCAST (file sharing) without a pool.

`shoal learner`, `origin`, `relay`, `worker`, `validator`, `evaluator` join a pool. `shoal origin PATH`, `shoal relay
--upstream URL` and `shoal fetch URL` need no pool. The servers print JSON lines: first their URL and public key, then
each version that they publish or mirror. Invariant: the invite is checked before any slow import.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from shoal.cli.arguments import PUBLIC_KEY, Commands, add_command, add_threads, real, say, whole
from shoal.config import EngineName
from shoal.config.section import Listening
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.protocol.invite import Invite
    from shoal.protocol.messages import Role
    from shoal.shardcast import ShardStore

EVICTED = 3
ROLES: dict[Role, str] = {
    "learner": "train on accepted rollouts and publish policy versions",
    "origin": "split published versions into shards and serve them",
    "relay": "mirror the origin and serve its versions to other nodes",
    "worker": "generate rollouts",
    "validator": "check submissions",
    "evaluator": "measure held-out accuracy",
}
SHARDCAST = "shardcast"  # name of the run, for files that are shared without a pool
LOOPBACK = ("127.0.0.1", 0)
KEEP = whole(1, 1_000_000)
ORDER = ("public", "private", "local")
POOLED = ["dir", "watch", "url", "reach", "disk"]  # arguments that an origin or a relay uses only with --join
ALONE = ["path", "upstream", "key", "key_file", "store", "keep"]  # those that it uses only without


def add_commands(commands: Commands) -> None:
    for role, what in ROLES.items():
        serves = role in ("origin", "relay")
        example = f"--join {role}.invite --dir {role}" + " --watch learner/versions" * (role == "origin")
        parser = add_command(commands, role, serve_or_join if serves else join, what, example)
        add = parser.add_argument
        add("--join", required=not serves, metavar="INVITE", help="an invite, or a file that holds one")
        add("--dir", type=Path, required=not serves, help="this node's own folder: key, cache, state")
        add_threads(parser)
        if role == "learner":
            site = "if the config sets learner.sites: this site's invite, which `shoal pool meet` writes"
            add("--site", metavar="INVITE", help=site)
        if role in ("worker", "validator", "evaluator"):
            where = "where this node computes, for example cuda (default: the config's model.device)"
            add("--device", default="", help=where)
        if role != "origin":
            near = "nearest addresses to connect to, if the config allows them (default: as near as the coordinator)"
            add("--reach", choices=ORDER, help=near)
            disk = "GB that one version may reserve on this disk (default: half of the free space)"
            add("--disk", type=real(0.001, 1e6), metavar="GB", help=disk)
        if role == "worker":
            engine = "engine that generates rollouts (for vllm, see docs/operate.md)"
            add("--engine", choices=get_args(EngineName), default="torch", help=engine)
        if role == "origin":
            path = "without --join: the file, folder or folder of versions (v000000, ...) to serve"
            add("path", type=Path, nargs="?", help=path)
            add("--watch", type=Path, help="with --join: the learner's folder of versions")
            key = (
                "without --join: file of the private key, created if absent; must be outside PATH (default: origin.pem)"
            )
            add("--key-file", type=Path, help=key)
        if role == "relay":
            add("--upstream", type=_urls, default=[], help="without --join: URLs to mirror, separated by commas")
            add("--key", help="without --join: the origin's public key")
        if serves:
            store = "without --join: folder of the versions" + ", which must be outside PATH" * (role == "origin")
            add("--store", type=Path, help=f"{store} (default: shardcast)")
            listen = "address to listen on; port 0: any free port (default: from the config, or 127.0.0.1:0)"
            add("--listen", type=_listen, metavar="HOST:PORT", help=listen)
            url = "with --join: the URL to announce if a proxy stands in front (default: the --listen address)"
            add("--url", type=_url, default="", help=url)
            keep = "without --join: newest versions to keep, besides those that their deltas need (default: 5)"
            add("--keep", type=KEEP, help=keep)
    example = f"http://10.0.0.2:8720 --key {'0' * 64} --out versions"
    add = add_command(commands, "fetch", run_fetch, "download published versions to a folder", example).add_argument
    add("urls", type=_urls, help="URLs of relays or the origin, separated by commas")
    add("--key", required=True, help="the origin's public key, which the origin prints")
    out = "folder for the versions (v000007, ...); those already there are reused"
    add("--out", type=Path, required=True, help=out)
    add("--version", type=whole(0, 1 << 40), help="number of the version to fetch (default: the newest)")
    add("--follow", action="store_true", help="keep fetching new versions")
    wait = "seconds to wait for a relay and a first version (default: 0)"
    add("--wait", type=real(0, 1e6), default=0.0, metavar="S", help=wait)
    timeout = "seconds after which to give up on an incomplete version (default: a day)"
    add("--timeout", type=real(0, 1e6), default=24 * 3600.0, metavar="S", help=timeout)


def begin(name: str, arguments: argparse.Namespace) -> threading.Event:
    """Set up this process as a server. Return the event that a signal sets."""
    from shoal.cli.launch import process
    from shoal.shardcast.connections import raise_limit

    os.umask(0o077)
    raise_limit()
    return process.begin(name, threads=arguments.threads)


# --- in a pool -------------------------------------------------------------------------------------------------------


def join(arguments: argparse.Namespace) -> int:
    """Join a pool and work in the command's role until the run ends."""
    role: Role = arguments.command_name
    _require(arguments, ["dir", "watch"] if role == "origin" else ["dir"], "with --join")
    invite = _checked_invite(role, arguments)
    stop = begin(role, arguments)
    from shoal.protocol.calling import StoppedError

    try:
        ended = _work(role, invite, arguments, stop)
    except StoppedError:
        return 0
    logging.getLogger(__name__).info("ended: %s", ended)
    return EVICTED if ended == "evicted" else 0


def _require(arguments: argparse.Namespace, names: list[str], condition: str) -> None:
    """Raise UserError unless all arguments with these names are given. `condition`: when they are needed."""
    if missing := [name for name in names if not getattr(arguments, name)]:
        raise UserError(f"{condition}, {arguments.command_name} also needs {' and '.join(map(_option, missing))}")


def _refuse(arguments: argparse.Namespace, names: list[str], condition: str) -> None:
    """Raise UserError if any argument with these names is given. `condition`: when they are used."""
    if given := [name for name in names if getattr(arguments, name, None)]:
        raise UserError(f"{_option(given[0])} applies only {condition}: leave it out")


def _option(name: str) -> str:
    return "PATH" if name == "path" else f"--{name.replace('_', '-')}"


def _checked_invite(role: Role, arguments: argparse.Namespace) -> Invite:
    """Read and check the invite. Raise UserError, because a restart would not help."""
    from shoal.protocol.invite import InviteError, read_invite

    joined_before = (arguments.dir / "identity.pem").exists()  # such a node may rejoin after its invite has expired
    try:
        invite = read_invite(arguments.join)
        invite.check(role, None if joined_before else time.time())
    except InviteError as error:
        raise UserError(str(error)) from error
    return invite


def _work(role: Role, invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    """Run the role. Return how the run ended."""
    from shoal.cli import origin_and_relay, roles
    from shoal.protocol.node import Bounds, Node

    folder, threads, device = arguments.dir, arguments.threads, getattr(arguments, "device", "")
    disk = getattr(arguments, "disk", None)
    Node.bounds = Bounds(getattr(arguments, "reach", None), round(disk * 1e9) if disk else None)
    match role:
        case "origin":
            return origin_and_relay.run_origin(invite, folder, arguments.watch, stop, arguments.listen, arguments.url)
        case "relay":
            return origin_and_relay.run_relay(invite, folder, stop, arguments.listen, arguments.url)
        case "learner":
            from shoal.protocol.invite import read_invite

            site = read_invite(arguments.site) if arguments.site else None
            return roles.run_learner(invite, folder, threads, stop, site)
        case "worker":
            return roles.run_worker(invite, folder, threads, stop, engine=arguments.engine, device=device)
        case "validator":
            return roles.run_validator(invite, folder, threads, stop, device)
        case "evaluator":
            return roles.run_evaluator(invite, folder, threads, stop, device)


# --- without a pool --------------------------------------------------------------------------------------------------


def serve_or_join(arguments: argparse.Namespace) -> int:
    """Run an origin or a relay: in a pool with --join, else standalone."""
    if arguments.join:
        _refuse(arguments, ALONE, "without --join")
        return join(arguments)
    _refuse(arguments, POOLED, "with --join")
    name = arguments.command_name
    _require(arguments, ["path"] if name == "origin" else ["upstream", "key"], "without --join")
    (run_origin if name == "origin" else run_relay)(arguments, begin(name, arguments))
    return 0


def run_origin(arguments: argparse.Namespace, stop: threading.Event) -> None:
    from shoal.protocol.identity import Identity
    from shoal.shardcast import Origin
    from shoal.shardcast.alone import serve_origin
    from shoal.shardcast.origin import check_apart

    if not arguments.path.exists():
        raise UserError(f"no such file or folder: {arguments.path}; name a file, a folder, or a folder of versions")
    key_file = arguments.key_file or Path("origin.pem")
    check_apart(arguments.path, _store_folder(arguments), key_file)  # before a key is created
    origin = Origin(_store(arguments), Identity.load_or_create(key_file).private_key, run=SHARDCAST)
    asyncio.run(serve_origin(arguments.path, origin, arguments.listen or LOOPBACK, stop, _print_event))


def run_relay(arguments: argparse.Namespace, stop: threading.Event) -> None:
    from shoal.shardcast import Access, Relay
    from shoal.shardcast.alone import serve_relay

    relay = Relay(arguments.upstream, _store(arguments), Access(_public_key(arguments), SHARDCAST))
    asyncio.run(serve_relay(relay, arguments.listen or LOOPBACK, stop, _print_event))


def run_fetch(arguments: argparse.Namespace) -> None:
    from shoal.shardcast import alone
    from shoal.watch.terminal.progress import FetchBar

    if arguments.follow and (arguments.version is not None or arguments.wait):
        option = "--wait" if arguments.version is None else "--version"
        raise UserError(f"{option} cannot be combined with --follow, which waits for each new version: leave it out")
    source = arguments.urls, arguments.out, _public_key(arguments)
    with FetchBar() as bars:
        settings = {"timeout_s": arguments.timeout, "progress": bars.show}
        if arguments.follow:
            for folder, _ in alone.watch(*source, **settings):
                say(str(folder))
            return
        folder, _ = alone.fetch(*source, version=arguments.version, wait_s=arguments.wait, **settings)
        say(str(folder))


def _print_event(event: dict[str, object]) -> None:
    say(json.dumps(event))


def _store(arguments: argparse.Namespace) -> ShardStore:
    from shoal.shardcast import ShardStore

    return ShardStore(_store_folder(arguments), keep=arguments.keep or 5)


def _store_folder(arguments: argparse.Namespace) -> Path:
    return arguments.store or Path("shardcast")


def _public_key(arguments: argparse.Namespace) -> str:
    """Return the origin's public key. Raise UserError."""
    key: str = arguments.key
    if not PUBLIC_KEY.fullmatch(key):
        raise UserError(f"--key {key[:80]!r} is not a public key, which has 64 hex digits; the origin prints it")
    return key


# --- types for argparse ----------------------------------------------------------------------------------------------


def _listen(text: str) -> tuple[str, int]:
    try:
        address = Listening(listen=text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT; write for example 127.0.0.1:0") from error
    return address.host, address.port


def _url(text: str) -> str:
    from shoal.protocol.invite import AddressError, server_url

    try:
        if text:  # argparse also passes the default
            server_url(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _urls(text: str) -> list[str]:
    return [url for url in text.split(",") if url]
