"""SHARDCAST's origin and relay as members of the pool: the library serves and mirrors, this joins, beats and announces.

Invariant: a version is announced to the coordinator after the origin can serve all of it.
Called by `shoal origin` and `shoal relay`.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from shoal.messages import Ok, Policy, Status
from shoal.node import Node
from shoal.pool.identity import Identity
from shoal.pool.invite import Invite
from shoal.shardcast import Manifest, Origin, Relay, app, serve

WATCH_S = 0.1


def run_origin(invite: Invite, folder: Path, watched: Path, stop: threading.Event) -> str:
    """Serve what the learner writes under `watched` until the run ends."""
    config = Node.read_config(invite)
    identity = Identity.load_or_create(folder / "identity.pem")
    origin = Origin(
        folder / "store",
        identity.private_key,
        run=invite.run,
        shard_size_bytes=config.origin.shard_bytes,
        keep=config.origin.keep,
    )

    async def watch(node: Node) -> str:
        while not stop.is_set():
            if node.answer and node.answer.state != "running":
                return node.answer.state
            newest = max(watched.glob("v*"), default=None)  # if the learner ran ahead, nobody needs those between
            if newest is not None and int(newest.name[1:]) != node.policy_version:
                node.doing(f"cutting {newest.name}")
                manifest = await asyncio.to_thread(origin.publish, newest, int(newest.name[1:]))
                await asyncio.to_thread(_announce, node, manifest)
                node.policy_version = manifest.version
                node.doing("the learner", waiting=True)
            await asyncio.sleep(WATCH_S)
        return "stopped"

    return asyncio.run(_serve(invite, folder, config.origin.host, config.origin.port, watch))


def run_relay(invite: Invite, folder: Path, stop: threading.Event) -> str:
    """Mirror the origin and serve it on, until the run ends."""
    config = Node.read_config(invite)

    async def mirror(node: Node) -> str:
        publisher = await asyncio.to_thread(node.wait_for_key, "origin", stop)
        status = await asyncio.to_thread(node.get, "/v1/status", Status)
        upstream = [member.url for member in status.nodes if member.role == "origin" and member.url]
        relay = Relay(
            upstream, folder / "store", public_key=publisher, run=invite.run, keep=config.relays.keep, poll_s=0.2
        )
        task = asyncio.create_task(relay.mirror())
        try:
            while not stop.is_set() and not task.done():
                if node.answer and node.answer.state != "running":
                    return node.answer.state
                held = relay.status.versions
                node.policy_version = max(held) if held else None
                node.doing(relay.status.last_error or "the origin", waiting=True)
                await asyncio.sleep(WATCH_S)
            if task.done():
                await task  # raises what stopped the mirror
            return "stopped"
        finally:
            task.cancel()

    return asyncio.run(_serve(invite, folder, config.relays.host, config.relays.port, mirror))


async def _serve(invite: Invite, folder: Path, host: str, port: int, live: Callable[[Node], Awaitable[str]]) -> str:
    """Serve the store in `folder` and join the pool with the address, then do `live` until it returns."""
    runner, bound = await _bind(app(folder / "store"), host, port, folder / "port")
    try:
        node = await asyncio.to_thread(Node.join, invite, folder, url=f"http://{host}:{bound}")
        with node.heart():
            return await live(node)
    finally:
        await runner.cleanup()


async def _bind(application: web.Application, host: str, port: int, memory: Path) -> tuple[web.AppRunner, int]:
    """Listen on `port`, or on the port this node had before its restart, or on a free one."""
    text = memory.read_text() if port == 0 and memory.exists() else ""
    remembered = int(text) if text.isdecimal() else port  # empty where it was killed while it wrote
    runner, bound = await serve(application, host, remembered)
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(str(bound))
    return runner, bound


def _announce(node: Node, manifest: Manifest) -> None:
    policy = Policy(version=manifest.version, digest=manifest.digest, size_bytes=manifest.size_bytes)
    node.post("/v1/policies", policy, Ok)
