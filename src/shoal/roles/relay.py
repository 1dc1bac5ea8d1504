"""`shoal relay --join`: SHARDCAST's relay as a member of the pool. It mirrors the origin and serves the run's nodes."""

import asyncio
import logging
import threading
import time
from pathlib import Path

from shoal.protocol.invite import Invite
from shoal.protocol.messages import Status
from shoal.protocol.node import Node
from shoal.roles.serving import WATCH_S, Listen, serve_store
from shoal.shardcast import Relay, Store

HERE = Listen()
LOOK_S = 2.0  # between two looks at where the origin is, while it is not reached

log = logging.getLogger(__name__)


def run_relay(invite: Invite, folder: Path, stop: threading.Event, listen: Listen = HERE) -> str:
    """Mirrors the origin and serves the run's nodes, until the run ends."""
    config = Node.read_config(invite, stop)
    store = Store(
        folder / "store",
        keep=config.relays.keep,
        quota_bytes=config.relays.quota_bytes,
        public=config.relays.public,
    )

    async def mirror(node: Node) -> str:
        publisher = await asyncio.to_thread(node.wait_for_key, "origin", stop)
        origins = await asyncio.to_thread(_origins, node)
        looked_s = time.monotonic()

        def upstream() -> list[str]:
            """The origin and the relays that are up now, in any order: the relay finds its own place among them."""
            return origins + (node.answer.relays if node.answer else [])

        relay = Relay(upstream, store, node.access(publisher, config))
        task = asyncio.create_task(relay.mirror())
        try:
            while not stop.is_set() and not task.done():
                if node.answer and node.answer.state != "running":
                    return node.answer.state
                if (relay.status.last_error or not origins) and time.monotonic() - looked_s >= LOOK_S:
                    origins[:] = await asyncio.to_thread(_origins, node)
                    looked_s = time.monotonic()
                held = relay.status.versions
                if held and node.policy_version != max(held):
                    log.info("version %d is mirrored", max(held))
                node.policy_version = max(held) if held else None
                if relay.status.arrival:
                    node.came(relay.status.arrival)
                node.doing(relay.status.last_error or "the origin", waiting=True)
                await asyncio.sleep(WATCH_S)
            if task.done():
                await task  # raises the exception that ended it
            return "stopped"
        finally:
            task.cancel()

    return asyncio.run(
        serve_store(invite, config, folder, store, listen, (config.relays.host, config.relays.port), mirror, stop)
    )


def _origins(node: Node) -> list[str]:
    """Where the origin is. A status may be a moment old: without an origin that has just joined, or its new address."""
    status = node.get("/v1/status", Status)
    return [member.url for member in status.nodes if member.role == "origin" and member.url]
