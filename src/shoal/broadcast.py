"""SHARDCAST's origin and relay as members of the pool: the library serves and mirrors, this joins, beats and announces.

Invariant: a version is announced to the coordinator after the origin can serve all of it.
Called by `shoal origin` and `shoal relay`.
"""

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from shoal.config import Config
from shoal.messages import Ok, Policy, Status
from shoal.node import Node
from shoal.pool.identity import Identity
from shoal.pool.invite import Invite
from shoal.shardcast import Guard, Manifest, Origin, Relay, Store, app, serve
from shoal.shardcast.handover import Handover
from shoal.shardcast.tls import serving

WATCH_S = 0.1


def run_origin(invite: Invite, folder: Path, watched: Path, stop: threading.Event) -> str:
    """Serve what the learner writes under `watched` until the run ends."""
    config = Node.read_config(invite)
    identity = Identity.load_or_create(folder / "identity.pem")
    store = Store(folder / "store", keep=config.origin.keep, quota_bytes=config.origin.quota_bytes)
    origin = Origin(
        store,
        identity.private_key,
        run=invite.run,
        shard_size_bytes=config.origin.shard_bytes,
        anchor_every=config.origin.anchor_every,
    )

    async def watch(node: Node) -> str:
        writer = Handover(origin, watched, stop.is_set)
        while not stop.is_set():
            if node.answer and node.answer.state != "running":
                return node.answer.state
            newest = max(watched.glob("v*"), default=None)  # if the learner ran ahead, nobody needs those between
            manifest = None
            if newest is not None and int(newest.name[1:]) != node.policy_version:
                node.doing(f"cutting {newest.name}")
                manifest = await asyncio.to_thread(origin.publish, newest, int(newest.name[1:]))
            elif (growing := writer.begun()) is not None:
                node.doing(f"cutting version {growing.version} while it is written")
                manifest = await asyncio.to_thread(writer.follow, growing)
            if manifest is not None:
                await asyncio.to_thread(_announce, node, manifest)
                node.policy_version = manifest.version
            node.doing(writer.given_up or "the learner", waiting=True)
            await asyncio.sleep(WATCH_S)
        return "stopped"

    return asyncio.run(_serve(invite, config, folder, store, config.origin.host, config.origin.port, watch))


def run_relay(invite: Invite, folder: Path, stop: threading.Event) -> str:
    """Mirror the origin and serve it on, until the run ends."""
    config = Node.read_config(invite)
    store = Store(folder / "store", keep=config.relays.keep, quota_bytes=config.relays.quota_bytes)

    async def mirror(node: Node) -> str:
        publisher = await asyncio.to_thread(node.wait_for_key, "origin", stop)
        status = await asyncio.to_thread(node.get, "/v1/status", Status)
        origins = [member.url for member in status.nodes if member.role == "origin" and member.url]

        def upstream() -> list[str]:
            """The origin, and the relays that are up now: among them they find out who is nearer to it."""
            return origins + (node.answer.relays if node.answer else [])

        relay = Relay(upstream, store, node.access(publisher, config))
        task = asyncio.create_task(relay.mirror())
        try:
            while not stop.is_set() and not task.done():
                if node.answer and node.answer.state != "running":
                    return node.answer.state
                held = relay.status.versions
                node.policy_version = max(held) if held else None
                node.came(relay.status.rates_Bps, relay.status.behind_s)
                node.doing(relay.status.last_error or "the origin", waiting=True)
                await asyncio.sleep(WATCH_S)
            if task.done():
                await task  # raises what stopped the mirror
            return "stopped"
        finally:
            task.cancel()

    return asyncio.run(_serve(invite, config, folder, store, config.relays.host, config.relays.port, mirror))


async def _serve(
    invite: Invite,
    config: Config,
    folder: Path,
    store: Store,
    host: str,
    port: int,
    live: Callable[[Node], Awaitable[str]],
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
        node = await asyncio.to_thread(Node.join, invite, folder, url=url)
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


def _announce(node: Node, manifest: Manifest) -> None:
    policy = Policy(version=manifest.version, digest=manifest.digest, size_bytes=manifest.size_bytes)
    node.post("/v1/policies", policy, Ok)
