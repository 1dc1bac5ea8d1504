"""Starts each role that joins with an invite: what `shoal worker` and its siblings do, in one place.

Each function joins, waits for what it depends on, and hands over to the role's own loop. Called by `cli`.
"""

from __future__ import annotations

import json
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import config as config_module
from shoal.config import Config
from shoal.cores import compute_on
from shoal.node import Node
from shoal.pool.invite import Invite

if TYPE_CHECKING:  # torch is imported only by the roles that compute
    from shoal.learner.ranks import Ranks
    from shoal.model.dtype import DtypeName

EVALUATOR_NICENESS = 10  # nobody waits for an evaluation but the last: it takes the cores that training leaves
RANKS_TIMEOUT_S = 7 * 86_400.0  # a rank may wait for the leader's next batch as long as a pool is idle


def origin(arguments: Namespace, stop: threading.Event) -> str:
    from shoal.broadcast import run_origin

    return run_origin(read_invite(arguments.join), arguments.dir, arguments.watch, stop)


def relay(arguments: Namespace, stop: threading.Event) -> str:
    from shoal.broadcast import run_relay

    return run_relay(read_invite(arguments.join), arguments.dir, stop)


def learner(arguments: Namespace, stop: threading.Event) -> str:
    import torch

    from shoal.learner.loop import Learner
    from shoal.learner.policy import Policy
    from shoal.learner.ranks import Ranks
    from shoal.model.sources import resolve

    ranks = Ranks.start(RANKS_TIMEOUT_S)
    with _leading(arguments, ranks) as (node, config, dtype):
        torch.manual_seed(config.run.seed)
        folder = resolve(config.model.name)
        policy = Policy(folder, config.learner, dtype, config.model.device, config.sampling.temperature, ranks)
        ended = Learner(node, config, policy, arguments.dir).run(stop)
    ranks.stop()
    return ended


@contextmanager
def _leading(arguments: Namespace, ranks: Ranks) -> Iterator[tuple[Node | None, Config, DtypeName]]:
    """The leader joins the pool and tells the other ranks the config and the dtype; they have no node."""
    if not ranks.leads:
        compute_on(arguments.threads)
        told = json.loads(ranks.tell(None))
        yield None, config_module.parse(told["config"]), told["dtype"]
        return
    node, config, dtype = _join(arguments)
    with node.heart():
        node.doing("loading the model")
        ranks.tell(json.dumps({"config": config.model_dump(exclude_none=True), "dtype": dtype}).encode())
        yield node, config, dtype


def worker(arguments: Namespace, stop: threading.Event) -> str:
    from shoal.rollout.produce import Producer

    return run_worker(arguments, stop, Producer)


def run_worker(arguments: Namespace, stop: threading.Event, kind: type) -> str:
    """`kind` is the honest `Producer`, or one of `shoal.testing.cheats`."""
    from shoal.rollout.torch_engine import TorchEngine
    from shoal.rollout.worker import Worker, follow

    node, config, dtype = _join(arguments)
    with node.heart():
        publisher = node.wait_for_key("origin", stop)
        engine = TorchEngine(dtype, config.model.device)
        producer = kind(config, node.invite.run, node.identity, engine)
        with follow(node, config, arguments.dir / "weights", publisher) as follower:
            return Worker(node, producer).run(follower, stop)


def validator(arguments: Namespace, stop: threading.Event) -> str:
    from shoal.validator.service import Validator

    node, config, dtype = _join(arguments)
    with node.heart():
        publisher = node.wait_for_key("origin", stop)
        return Validator(node, config, arguments.dir / "weights", publisher, dtype).run(stop)


def evaluator(arguments: Namespace, stop: threading.Event) -> str:
    from shoal.evals.heldout import Evaluator
    from shoal.rollout.torch_engine import TorchEngine

    os.nice(EVALUATOR_NICENESS)
    node, config, dtype = _join(arguments)
    with node.heart():
        publisher = node.wait_for_key("origin", stop)

        def new_engine() -> TorchEngine:
            return TorchEngine(dtype, config.model.device)

        return Evaluator(node, config, new_engine, arguments.dir / "weights", publisher).run(stop)


RUN: dict[str, Callable[[Namespace, threading.Event], str]] = {
    "learner": learner,
    "origin": origin,
    "relay": relay,
    "worker": worker,
    "validator": validator,
    "evaluator": evaluator,
}


def read_invite(text: str) -> Invite:
    """An invite given as itself or as the file that holds it."""
    path = Path(text)
    return Invite.decode(path.read_text() if not text.startswith("shoal1.") and path.is_file() else text)


def _join(arguments: Namespace) -> tuple[Node, Config, DtypeName]:
    """Join the pool; returns the node, the run's config, and the dtype to compute in on this machine."""
    from shoal.model import dtype

    compute_on(arguments.threads)
    node = Node.join(read_invite(arguments.join), arguments.dir)
    config = node.config()
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    return node, config, picked
