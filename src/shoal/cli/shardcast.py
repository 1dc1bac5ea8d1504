"""`shoal origin PATH`, `shoal relay --upstream URL`, `shoal fetch URL`: SHARDCAST from the command line, without a pool.

Servers print JSON lines: first their URL and public key, then each version that they publish or mirror.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, add_command, real, say, whole
from shoal.config.section import Listening
from shoal.errors import UserError

if TYPE_CHECKING:  # slow imports, not needed to parse a command line
    from shoal.shardcast import ShardStore

RUN_NAME = "shardcast"
HERE = ("127.0.0.1", 0)
PUBLIC_KEY = re.compile("[0-9a-f]{64}")


def origin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, nargs="?", help="a file, a folder, or a folder of versions v000000, ...")
    _store_arguments(parser)
    parser.add_argument(
        "--key-file",
        type=Path,
        default=Path("origin.pem"),
        help="private key, created if absent; must lie outside of PATH",
    )


def relay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--upstream", type=_urls, default=[], help="origins and relays, separated by commas")
    parser.add_argument("--key", help="the origin's public key")
    _store_arguments(parser)


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """`fetch`; `origin` and `relay` are among the nodes."""
    example = f"http://10.0.0.2:8720 --key {'0' * 64} --out versions"
    parser = add_command(commands, "fetch", "download published versions from relays to a folder", example)
    parser.add_argument("urls", type=_urls, help="relays or the origin, separated by commas")
    parser.add_argument("--key", required=True, help="the origin's public key, which the origin prints")
    parser.add_argument("--out", type=Path, required=True, help="writes OUT/v000007/; reuses earlier versions there")
    parser.add_argument("--version", type=whole(0, 1 << 40), help="default: the newest")
    parser.add_argument("--follow", action="store_true", help="keep fetching new versions")
    parser.add_argument(
        "--wait", type=real(0, 1e6), default=0.0, metavar="S", help="wait for a relay or a first version"
    )
    parser.add_argument(
        "--timeout",
        type=real(0, 1e6),
        default=24 * 3600.0,
        metavar="S",
        help="give up a version that is not complete after this long (default: a day)",
    )


def run_origin(arguments: argparse.Namespace, stop: threading.Event) -> None:
    from shoal.protocol.identity import Identity
    from shoal.shardcast import Origin
    from shoal.shardcast.alone import serve_origin
    from shoal.shardcast.origin import check_apart

    if not arguments.path.exists():
        raise UserError(f"nothing is at {arguments.path}; name a file, a folder, or a folder of versions")
    check_apart(arguments.path, arguments.store, arguments.key_file)  # before a key is created
    store = _store(arguments)
    origin = Origin(store, Identity.load_or_create(arguments.key_file).private_key, run=RUN_NAME)
    asyncio.run(serve_origin(arguments.path, origin, arguments.listen or HERE, stop, _say))


def run_relay(arguments: argparse.Namespace, stop: threading.Event) -> None:
    from shoal.shardcast import Access, Relay
    from shoal.shardcast.alone import serve_relay

    relay = Relay(arguments.upstream, _store(arguments), Access(_public_key(arguments), RUN_NAME))
    asyncio.run(serve_relay(relay, arguments.listen or HERE, stop, _say))


def run_fetch(arguments: argparse.Namespace) -> None:
    from shoal.shardcast.alone import fetch, watch
    from shoal.watch.terminal.progress import FetchBar

    key = _public_key(arguments)
    with FetchBar() as bars:
        if arguments.follow:
            following = watch(
                arguments.urls,
                arguments.out,
                key,
                timeout_s=arguments.timeout,
                progress=bars.show,
            )
            for folder, _ in following:
                say(str(folder))
        else:
            folder, _ = fetch(
                arguments.urls,
                arguments.out,
                key,
                version=arguments.version,
                wait_s=arguments.wait,
                timeout_s=arguments.timeout,
                progress=bars.show,
            )
            say(str(folder))


def _say(facts: dict[str, object]) -> None:
    say(json.dumps(facts))


def _store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", type=Path, default=Path("shardcast"), help="folder of published versions; must lie outside of PATH"
    )
    parser.add_argument(
        "--listen",
        type=_listen,
        metavar="HOST:PORT",
        help="where to listen, and what to announce; port 0: a free one (default: 127.0.0.1:0, or as the run's config says)",
    )
    parser.add_argument(
        "--url", type=_url, default="", help="with --join: the URL to announce, if a proxy stands in front"
    )
    parser.add_argument(
        "--keep", type=whole(1, 1_000_000), default=5, help="newest versions to keep, with their parents"
    )


def _store(arguments: argparse.Namespace) -> ShardStore:
    from shoal.shardcast import ShardStore

    return ShardStore(arguments.store, keep=arguments.keep)


def _listen(text: str) -> tuple[str, int]:
    try:
        found = Listening(listen=text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:0") from error
    return found.host, found.port


def _url(text: str) -> str:
    from shoal.protocol.invite import AddressError, server_url

    try:
        if text:  # argparse passes the default, too
            server_url(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _public_key(arguments: argparse.Namespace) -> str:
    """The origin's. Raises UserError."""
    key: str = arguments.key
    if not PUBLIC_KEY.fullmatch(key):
        raise UserError(f"--key {key[:80]!r} is not a public key: 64 hex digits, which the origin prints")
    return key


def _urls(text: str) -> list[str]:
    return [url for url in text.split(",") if url]
