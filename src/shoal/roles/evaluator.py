"""`shoal evaluator`: joins as an evaluator and measures the held-out accuracy of published versions."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

from shoal.protocol.invite import Invite
from shoal.roles.joining import join, task_set


def run_evaluator(invite: Invite, folder: Path, threads: int, stop: threading.Event) -> str:
    """Returns how the run ended."""
    from shoal.engine.torch_engine import TorchEngine
    from shoal.evals.heldout import Evaluator
    from shoal.model import numerics

    node, config, dtype = join(invite, folder, threads, stop)
    with node.heart():
        publisher = node.wait_for_key("origin", stop)

        def new_engine() -> TorchEngine:
            picked = numerics.pick(config.model.numerics, dtype, config.model.device)
            return TorchEngine(dtype, config.model.device, picked)

        tasks = task_set(node, config, folder)
        with closing(Evaluator(node, config, new_engine, folder / "weights", publisher, tasks)) as evaluator:
            return evaluator.run(stop)
