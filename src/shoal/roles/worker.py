"""`shoal worker`: joins as a worker, follows the newest weights, and generates rollouts until the run ends."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

from shoal.protocol.invite import Invite
from shoal.roles.exactness import fingerprinter
from shoal.roles.joining import join, task_set


def run_worker(
    invite: Invite, folder: Path, threads: int, stop: threading.Event, producer_type: type | None = None
) -> str:
    """Returns how the run ended. `producer_type`: the honest `Producer` if None, or one of `shoal.adversary.cheats`."""
    from shoal.engine.torch_engine import TorchEngine
    from shoal.model import numerics
    from shoal.rollout.produce import Producer
    from shoal.rollout.worker import Worker, follow

    node, config, dtype = join(invite, folder, threads, stop)
    with node.heart():
        publisher = node.wait_for_key("origin", stop)
        picked = numerics.pick(config.model.numerics, dtype, config.model.device)
        engine = TorchEngine(dtype, config.model.device, picked)
        producer = (producer_type or Producer)(
            config,
            node.invite.run,
            node.identity,
            engine,
            task_set(node, config, folder),
            node.curriculum_page,
        )
        with closing(producer), follow(node, config, folder / "weights", publisher) as follower:
            prints = fingerprinter(config, dtype)
            return Worker(node, producer, lambda: prints(engine.model)).run(follower, stop)
