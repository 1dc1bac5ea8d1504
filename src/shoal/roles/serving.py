"""Shared by origin and relay: listen, join the pool with that address, serve the run's nodes, ban the evicted ones.

Called by the roles `origin` and `relay`.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from shoal.config import Config
from shoal.files import write_file
from shoal.protocol.address import server_url
from shoal.protocol.clock import PoolClock
from shoal.protocol.invite import Invite
from shoal.protocol.node import Node
from shoal.shardcast import Guard, Store, app, serve
from shoal.shardcast.serve.connections import server_context
from shoal.shardcast.serve.server import url_of

WATCH_S = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listen:
    """Where one origin or relay listens, and what it announces, in place of what the run's config says for all of them."""

    host: str | None = None
    port: int | None = None
    url: str = ""  # a proxy's in front of it; "": where it listens

    def __post_init__(self) -> None:
        """Raises AddressError."""
        if self.url:
            server_url(self.url)

    def or_else(self, host: str, port: int) -> tuple[str, int]:
        return self.host or host, port if self.port is None else self.port


async def serve_store(
    invite: Invite,
    config: Config,
    folder: Path,
    store: Store,
    listen: Listen,
    default: tuple[str, int],
    live: Callable[[Node], Awaitable[str]],
    stop: threading.Event,
) -> str:
    """Serves the store to the pool's nodes, joins with the address, and runs `live`. `default`: the config's host, port."""
    host, port = listen.or_else(*default)
    clock = PoolClock()  # dates the passes that readers show, as the pool's nodes date theirs
    guard = Guard(
        audience=invite.run,
        pool_key=None if config.relays.public else invite.key,
        rate_Bps=config.relays.rate_bytes_per_s,
        connections=config.relays.connections,
        clock=clock,
    )
    relays = config.relays
    tls = server_context(_path(relays.tls_cert), _path(relays.tls_key))
    runner, bound = await _bind(app(store, guard=guard), host, port, tls, folder / "port")
    try:
        here = url_of(host, bound, tls=tls is not None)
        url = listen.url or here
        guard.servers = frozenset({url})
        log.info("listening at %s%s", here, f", announced as {url}" if url != here else "")
        node = await asyncio.to_thread(Node.join, invite, folder, url=url, stop=stop, clock=clock)
        with node.heart():
            banning = asyncio.create_task(_ban(node, guard))
            try:
                return await live(node)
            finally:
                banning.cancel()
    finally:
        await runner.cleanup()


async def _ban(node: Node, guard: Guard) -> None:
    """Nodes that the coordinator evicts get no weights after the next heartbeat."""
    while True:
        if node.answer:
            guard.ban(frozenset(node.answer.banned))
        await asyncio.sleep(WATCH_S)


async def _bind(
    application: web.Application, host: str, port: int, tls: ssl.SSLContext | None, last_port: Path
) -> tuple[web.AppRunner, int]:
    """Listens on `port`. Port 0 means the port from before a restart, or a free one."""
    last = last_port.read_text() if port == 0 and last_port.exists() else ""
    port = int(last) if last.isdecimal() else port  # an earlier version may have left an empty file
    runner, bound = await serve(application, host, port, ssl=tls)
    write_file(last_port, str(bound).encode())
    return runner, bound


def _path(text: str) -> Path | None:
    return Path(text) if text else None
