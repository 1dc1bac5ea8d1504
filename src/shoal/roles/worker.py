"""`shoal worker`: joins as a worker, follows the newest weights, and generates rollouts until the run ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import Config, EngineName
from shoal.protocol.invite import Invite
from shoal.roles.exactness import fingerprinter
from shoal.roles.joining import join, task_set

if TYPE_CHECKING:
    from shoal.engine.one_thread import Compute
    from shoal.engine.protocol import Engine
    from shoal.model.dtype import DtypeName


def run_worker(
    invite: Invite,
    folder: Path,
    threads: int,
    stop: threading.Event,
    producer_type: type | None = None,
    engine: EngineName = "torch",
) -> str:
    """Returns how the run ended. `producer_type`: the honest `Producer` if None, or one of `shoal.adversary.cheats`."""
    from shoal.engine.one_thread import OneThread
    from shoal.rollout.produce import Producer
    from shoal.rollout.worker import Worker, follow

    node, config, dtype = join(invite, folder, threads, stop, engine)
    compute = OneThread()
    with node.heart(), generator(engine, config, dtype, threads, compute) as (generates, kind, fingerprint):
        publisher = node.wait_for_key("origin", stop)
        producer = (producer_type or Producer)(
            config,
            node.invite.run,
            node.identity,
            generates,
            task_set(node, config, folder),
            node.curriculum_page,
            kind,
            compute,
        )
        with closing(producer), follow(node, config, folder / "weights", publisher) as follower:
            return Worker(node, producer, fingerprint, compute).run(follower, stop)


@contextmanager
def generator(
    name: EngineName,
    config: Config,
    dtype: DtypeName,
    threads: int,
    compute: Compute | None = None,
) -> Iterator[tuple[Engine, str, Callable[[], str]]]:
    """The engine, its kind for the headers of files, and what gives the fingerprint of its weights.

    `compute`: what the torch engine runs its steps with; None: the thread that generates.
    vLLM's results depend on its batches, so it claims no exactness class. Raises VllmMissingError.
    """
    device = config.model.device
    if name == "vllm":
        from shoal.engine.vllm.client import VllmEngine

        with closing(VllmEngine(dtype, threads)) as vllm:
            yield vllm, f"{name}/{device.partition(':')[0]}", lambda: ""
        return
    from shoal.engine.one_thread import here
    from shoal.engine.torch_engine import TorchEngine
    from shoal.model import numerics

    engine = TorchEngine(dtype, device, numerics.pick(config.model.numerics, dtype, device), compute=compute or here)
    prints = fingerprinter(config, dtype)
    yield engine, "", lambda: prints(engine.model)
