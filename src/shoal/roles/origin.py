"""`shoal origin --join`: SHARDCAST's origin as a member of the pool. It publishes the versions that the learner writes.

Invariant: a version is announced to the coordinator once the origin can serve all of it.
"""

import asyncio
import logging
import threading
from pathlib import Path

from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite
from shoal.protocol.messages import Ok, Policy
from shoal.protocol.node import Node
from shoal.roles.serving import WATCH_S, Listen, serve_store
from shoal.shardcast import Manifest, Origin, Store
from shoal.shardcast.contents import check_apart
from shoal.shardcast.origin import Handover

HERE = Listen()

log = logging.getLogger(__name__)


def run_origin(invite: Invite, folder: Path, watched: Path, stop: threading.Event, listen: Listen = HERE) -> str:
    """Publishes what the learner writes under `watched`, until the run ends."""
    check_apart(watched, folder)
    config = Node.read_config(invite, stop)
    identity = Identity.load_or_create(folder / "identity.pem")
    store = Store(
        folder / "store",
        keep=config.origin.keep,
        quota_bytes=config.origin.quota_bytes,
        public=config.relays.public,
    )
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
            origin.state()
            newest = max(watched.glob("v*"), default=None)  # skip versions that the learner has overtaken
            manifest = None
            if newest is not None and int(newest.name[1:]) != node.policy_version:
                node.doing(f"publishing {newest.name}")
                manifest = await asyncio.to_thread(origin.publish, newest, int(newest.name[1:]))
            elif (growing := writer.begun()) is not None:
                node.doing(f"publishing version {growing.version} while it is written")
                manifest = await asyncio.to_thread(writer.follow, growing)
            if manifest is not None:
                await asyncio.to_thread(_announce, node, manifest)
                node.policy_version = manifest.version
                log.info("version %d is published: %d bytes", manifest.version, manifest.size_bytes)
            node.doing(writer.given_up or "the learner", waiting=True)
            await asyncio.sleep(WATCH_S)
        return "stopped"

    return asyncio.run(
        serve_store(invite, config, folder, store, listen, (config.origin.host, config.origin.port), watch, stop)
    )


def _announce(node: Node, manifest: Manifest) -> None:
    policy = Policy(version=manifest.version, digest=manifest.digest, size_bytes=manifest.size_bytes)
    node.post("/v1/policies", policy, Ok)
