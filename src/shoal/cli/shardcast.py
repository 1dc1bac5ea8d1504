"""`shoal origin PATH`, `shoal relay --upstream URL`, `shoal fetch URL`: SHARDCAST from the command line, without a pool.

Servers print one JSON object a line: where they listen and under which key first, then what they publish or mirror.
Called by `cli`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # heavy, and not needed to read a command line
    from shoal.shardcast import Store
    from shoal.shardcast.alone import Address

RUN_NAME = "shardcast"
CA = "PEM file of the certificate authority to trust for https (default: the system's)"


def origin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, nargs="?", help="a file, a folder, or a folder of versions v000000, ...")
    _store_arguments(parser)
    parser.add_argument(
        "--key-file", type=Path, default=Path("origin.pem"), help="its private key, made if absent; keep it from others"
    )
    parser.add_argument("--anchor-every", type=int, default=10, help="versions between two that can be fetched whole")
    parser.add_argument("--shard-bytes", type=int, help="default: a 256th of a version, 64 KiB to 16 MiB")


def relay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--upstream", type=_urls, default=[], help="origins and relays, with commas between them")
    parser.add_argument("--key", help="the origin's public key")
    parser.add_argument("--ca", type=Path, help=CA)
    _store_arguments(parser)


def fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", type=_urls, help="relays, or the origin, with commas between them")
    parser.add_argument("--key", required=True, help="the origin's public key: the origin prints it")
    parser.add_argument("--out", type=Path, required=True, help="versions come to DIR/v000007/; what is there is used")
    parser.add_argument("--ca", type=Path, help=CA)
    parser.add_argument("--version", type=int, help="default: the newest")
    parser.add_argument("--follow", action="store_true", help="go on with every new version")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="for a relay, or the first version")


def run_origin(arguments: argparse.Namespace, stop: threading.Event) -> None:
    from shoal.protocol.identity import Identity
    from shoal.shardcast import Origin
    from shoal.shardcast.alone import serve_origin

    store = _store(arguments)
    origin = Origin(
        store,
        Identity.load_or_create(arguments.key_file).private_key,
        run=RUN_NAME,
        shard_size_bytes=arguments.shard_bytes,
        anchor_every=arguments.anchor_every,
    )
    asyncio.run(serve_origin(arguments.path, origin, _address(arguments), stop, _say))


def run_relay(arguments: argparse.Namespace, stop: threading.Event) -> None:
    from shoal.shardcast import Access, Relay
    from shoal.shardcast.alone import serve_relay
    from shoal.shardcast.serve.tls import trusting

    relay = Relay(arguments.upstream, _store(arguments), Access(arguments.key, RUN_NAME, tls=trusting(arguments.ca)))
    asyncio.run(serve_relay(relay, _address(arguments), stop, _say))


def run_fetch(arguments: argparse.Namespace) -> None:
    from shoal.shardcast.alone import fetch, watch
    from shoal.shardcast.serve.tls import trusting
    from shoal.view.fetch import FetchBar

    tls = trusting(arguments.ca)
    with FetchBar() as bars:
        if arguments.follow:
            for folder, _ in watch(arguments.urls, arguments.out, arguments.key, tls=tls, progress=bars.show):
                bars.say(str(folder))
        else:
            folder, _ = fetch(
                arguments.urls,
                arguments.out,
                arguments.key,
                version=arguments.version,
                wait_s=arguments.wait,
                tls=tls,
                progress=bars.show,
            )
            bars.say(str(folder))


def _say(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", type=Path, default=Path("shardcast"), help="folder of versions: all of it may be served"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tls-cert", type=Path, help="certificate (chain) in PEM: serve https")
    parser.add_argument("--tls-key", type=Path, help="its private key")
    parser.add_argument("--keep", type=int, default=5, help="newest versions held, with what they are deltas of")
    parser.add_argument("--quota-bytes", type=int, help="of disk; fewer versions are held where it binds")


def _store(arguments: argparse.Namespace) -> Store:
    from shoal.shardcast import Store

    return Store(arguments.store, keep=arguments.keep, quota_bytes=arguments.quota_bytes)


def _address(arguments: argparse.Namespace) -> Address:
    from shoal.shardcast.alone import Address
    from shoal.shardcast.serve.tls import serving

    return Address(arguments.host, arguments.port, serving(arguments.tls_cert, arguments.tls_key))


def _urls(text: str) -> list[str]:
    return [url for url in text.split(",") if url]
