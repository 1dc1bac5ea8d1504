"""Run the origin or a relay in a pool: listen, join with that address, serve the run's nodes, and refuse evicted ones.

Invariant: the origin announces a version to the coordinator only once it can serve the whole version.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.errors import UserError
from shoal.protocol.history import Status
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite
from shoal.protocol.messages import Ok, PolicyVersion
from shoal.protocol.node import Node
from shoal.protocol.server import on_last_port
from shoal.shardcast import Guard, Manifest, Origin, Relay, ShardStore, app, serve
from shoal.shardcast.manifest import parse_version, version_name
from shoal.shardcast.origin import check_apart
from shoal.shardcast.server import url_of

Listen = tuple[str, int]  # host and port

WATCH_S = 0.1
LOOKUP_S = 2.0  # between two lookups of the origin's address, while the origin is unreachable

log = logging.getLogger(__name__)


def run_origin(
    invite: Invite, folder: Path, watched: Path, stop: threading.Event, listen: Listen | None = None, url: str = ""
) -> str:
    """Publish the versions that the learner writes to `watched`, until the run ends."""
    check_apart(watched, folder)
    if not watched.exists():
        log.info("%s does not exist yet: waiting for it", watched)
    _newest(watched)  # refuses a wrong folder before the node joins
    config = Node.read_config(invite, stop)
    identity = Identity.load_or_create(folder / "identity.pem")
    store = ShardStore(folder / "store", public=False)
    origin = Origin(store, identity.private_key, run=invite.run)

    async def watch(node: Node) -> str:
        while not stop.is_set():
            if node.answer and node.answer.state != "running":
                return node.answer.state
            origin.state()
            newest = _newest(watched)  # older versions that were not published yet are skipped
            if newest is not None and newest != node.policy_version:
                name = version_name(newest)
                node.doing(f"publishing {name}")
                try:
                    manifest = await asyncio.to_thread(origin.publish, watched / name, newest)
                except FileNotFoundError:
                    if (_newest(watched) or 0) <= newest:
                        raise
                    log.info("the learner removed %s while it was published, because it has newer ones", name)
                    continue
                await asyncio.to_thread(_announce, node, manifest)
                node.policy_version = manifest.version
                log.info("version %d is published: %d bytes", manifest.version, manifest.size_bytes)
            node.doing("the learner", waiting=True)
            await asyncio.sleep(WATCH_S)
        return "stopped"

    section = config.origin
    listen, url = listen or (section.host, section.port), url or section.url
    return asyncio.run(serve_store(invite, config, folder, store, listen, url, watch, stop))


def _newest(watched: Path) -> int | None:
    """Return the newest version in a folder; None if there is none. Raise UserError if a folder in it has the versions."""
    names = [path.name for path in watched.glob("v*")]
    newest = max((version for name in names if (version := parse_version(name)) is not None), default=None)
    if newest is None and "versions" in names:
        raise UserError(f"{watched} holds no versions; watch {watched / 'versions'}")
    return newest


def _announce(node: Node, manifest: Manifest) -> None:
    policy = PolicyVersion(version=manifest.version, digest=manifest.digest, size_bytes=manifest.size_bytes)
    node.post("/v1/policies", policy, Ok)


def run_relay(invite: Invite, folder: Path, stop: threading.Event, listen: Listen | None = None, url: str = "") -> str:
    """Mirror the origin and serve the run's nodes, until the run ends."""
    config = Node.read_config(invite, stop)
    store = ShardStore(folder / "store", public=False)

    async def mirror(node: Node) -> str:
        publisher = await asyncio.to_thread(node.wait_for_key, "origin", stop)
        origins = await asyncio.to_thread(_origins, node)
        lookup_s = time.monotonic()  # time of the last lookup
        logged = ""  # the last error in the log

        def upstream() -> list[str]:
            """Return the URLs of the origin and the live relays, in any order. The relay itself picks its parents."""
            return origins + (node.answer.relays if node.answer else [])

        relay = Relay(upstream, store, node.access(publisher, config))
        task = asyncio.create_task(relay.mirror())
        try:
            while not stop.is_set() and not task.done():
                if node.answer and node.answer.state != "running":
                    return node.answer.state
                if (relay.status.last_error or not origins) and time.monotonic() - lookup_s >= LOOKUP_S:
                    origins[:] = await asyncio.to_thread(_origins, node)
                    lookup_s = time.monotonic()
                mirrored = relay.status.versions
                if mirrored and node.policy_version != max(mirrored):
                    log.info("version %d is mirrored", max(mirrored))
                node.policy_version = max(mirrored) if mirrored else None
                if relay.status.arrival:
                    node.note_arrival(relay.status.arrival)
                error = relay.status.last_error  # may be old, so it is shown only while the newest version is missing
                is_behind = node.answer is not None and node.policy_version != node.answer.newest_version
                if error and is_behind and error != logged:
                    log.warning("cannot mirror the newest version yet: %s", error)
                    logged = error
                node.doing(f"the origin: {error}" if error and is_behind else "the origin", waiting=True)
                await asyncio.sleep(WATCH_S)
            if task.done():
                await task  # raises the exception that ended it
            return "stopped"
        finally:
            task.cancel()

    return asyncio.run(
        serve_store(
            invite, config, folder, store, listen or (config.relays.host, config.relays.port), url, mirror, stop
        )
    )


def _origins(node: Node) -> list[str]:
    """Return the origin's URLs. The status may lag, so an origin that just joined or moved may be missing."""
    status = node.get("/v1/status", Status)
    return [member.url for member in status.nodes if member.role == "origin" and member.url]


async def serve_store(
    invite: Invite,
    config: Config,
    folder: Path,
    store: ShardStore,
    listen: Listen,
    url: str,
    live: Callable[[Node], Awaitable[str]],
    stop: threading.Event,
) -> str:
    """Serve the store to the pool's nodes, join the pool, and run `live`.

    `url`: the address to announce if a proxy stands in front; "": announce the address that this process listens on.
    """
    guard = Guard(audience=invite.run, pool_key=invite.key)
    runner, bound = await on_last_port(partial(serve, app(store, guard=guard), listen[0]), listen[1], folder / "port")
    try:
        here = url_of(listen[0], bound)
        url = url or here
        guard.servers = frozenset({url})
        log.info("listening at %s%s", here, f", announced as {url}" if url != here else "")
        node = await asyncio.to_thread(Node.join, invite, folder, url=url, stop=stop)
        with node.heartbeats():
            banning = asyncio.create_task(_obey(node, guard, store))
            try:
                return await live(node)
            finally:
                banning.cancel()
    finally:
        await runner.cleanup()


async def _obey(node: Node, guard: Guard, store: ShardStore) -> None:
    """From the next heartbeat on, stop serving nodes that the coordinator evicts, and keep the versions that it names."""
    while True:
        if node.answer:
            guard.ban(frozenset(node.answer.banned))
            store.pinned = frozenset(node.answer.keep)
        await asyncio.sleep(WATCH_S)
