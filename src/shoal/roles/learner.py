"""`shoal learner`: joins as the learner, loads the policy and trains until the run ends. Under torchrun, on every rank."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import config as config_module
from shoal.config import Config
from shoal.protocol.invite import Invite
from shoal.protocol.node import Node
from shoal.roles.joining import join

if TYPE_CHECKING:
    from shoal.learner.ranks import Ranks
    from shoal.model.dtype import DtypeName

LEADER_TIMEOUT_S = 7 * 86_400.0  # a rank waits for the leader's next batch as long as a pool may be idle
RANKS_TIMEOUT_S = 1800.0  # and for another rank in a collective: longer than any row, load or file takes


def run_learner(invite: Invite, folder: Path, threads: int, stop: threading.Event) -> str:
    """Returns how the run ended. Raises NodeError, DivergedError, OutOfMemoryError."""
    import torch

    from shoal.learner.loop import Learner
    from shoal.learner.policy import Policy
    from shoal.learner.ranks import Ranks
    from shoal.model import numerics
    from shoal.model.sources import resolve

    ranks = Ranks.start(RANKS_TIMEOUT_S, LEADER_TIMEOUT_S)
    with _leading(invite, folder, threads, ranks, stop) as (node, config, dtype):
        torch.manual_seed(config.run.seed)
        model = resolve(config.model.name)
        device = config.model.device
        picked = numerics.pick(config.model.numerics, dtype, device)
        policy = Policy(model, config.learner, dtype, device, config.sampling.temperature, ranks, picked)
        ended = Learner(node, config, policy, folder).run(stop)
    ranks.stop()
    return ended


@contextmanager
def _leading(
    invite: Invite, folder: Path, threads: int, ranks: Ranks, stop: threading.Event
) -> Iterator[tuple[Node | None, Config, DtypeName]]:
    """The leader joins the pool and broadcasts config and dtype to the other ranks, which have no node."""
    from shoal.model.threads import compute_on

    if not ranks.leads:
        compute_on(threads)
        received = json.loads(ranks.broadcast(None))
        yield None, config_module.parse(received["config"]), received["dtype"]
        return
    node, config, dtype = join(invite, folder, threads, stop)
    with node.heart():
        node.doing("loading the model")
        ranks.broadcast(json.dumps({"config": config.model_dump(exclude_none=True), "dtype": dtype}).encode())
        yield node, config, dtype
