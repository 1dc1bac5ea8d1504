"""What origin and relay share: listen, join the pool with that address, serve the run's nodes, shut out the evicted.

Called by the roles `origin` and `relay`.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from shoal.config import Config
from shoal.protocol.invite import Invite
from shoal.protocol.node import Node
from shoal.shardcast import Guard, Store, app, serve
from shoal.shardcast.serve.tls import serving

WATCH_S = 0.1

log = logging.getLogger(__name__)


async def serve_store(
    invite: Invite,
    config: Config,
    folder: Path,
    store: Store,
    host: str,
    port: int,
    live: Callable[[Node], Awaitable[str]],
    stop: threading.Event,
) -> str:
    """Serve the store to the pool's nodes and join with the address, then do `live` until it returns."""
    readers = Guard(
        None,
        audience=invite.run,
        pool_key=None if config.relays.public else invite.key,
        rate_Bps=config.relays.rate_bytes_per_s,
        connections=config.relays.connections,
    )
    relays = config.relays
    tls = serving(_path(relays.tls_cert), _path(relays.tls_key))
    runner, bound = await _bind(app(store, guard=readers), host, port, tls, folder / "port")
    try:
        url = f"{'https' if tls else 'http'}://{host}:{bound}"
        log.info("listening at %s", url)
        node = await asyncio.to_thread(Node.join, invite, folder, url=url, stop=stop)
        with node.heart():
            banning = asyncio.create_task(_ban(node, readers))
            try:
                return await live(node)
            finally:
                banning.cancel()
    finally:
        await runner.cleanup()


async def _ban(node: Node, readers: Guard) -> None:
    """Whom the coordinator evicts gets no weights from the next heartbeat on."""
    while True:
        if node.answer:
            readers.update(allowed=None, banned=frozenset(node.answer.banned))
        await asyncio.sleep(WATCH_S)


async def _bind(
    application: web.Application, host: str, port: int, tls: ssl.SSLContext | None, memory: Path
) -> tuple[web.AppRunner, int]:
    """Listen on `port`, or on the port this node had before its restart, or on a free one."""
    text = memory.read_text() if port == 0 and memory.exists() else ""
    remembered = int(text) if text.isdecimal() else port  # empty where it was killed while it wrote
    runner, bound = await serve(application, host, remembered, ssl=tls)
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(str(bound))
    return runner, bound


def _path(text: str) -> Path | None:
    return Path(text) if text else None
