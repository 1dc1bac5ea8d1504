"""How the cores of one machine are shared out among the processes of a run.

Invariant: every role that computes gets a thread, and together they get no more than there are cores, where it goes.
Called by `swarm`.
"""

import os

from shoal.config import Config


def available_cores(wanted: int) -> int:
    """Cores to share out: `wanted`, or all that this process may use."""
    return wanted or len(os.sched_getaffinity(0))


def share_threads(config: Config, cores: int) -> dict[str, int]:
    """Threads for each role that computes: at least one each, and no more together than there are cores, where it goes.

    With async level 0 learning and generating take turns, so each phase gets all cores.
    """
    if config.coordinator.async_level == 0:
        return {"learner": cores, "validator": 1, "worker": max(1, cores // config.workers.count), "evaluator": 1}
    learner = max(1, cores // 2)
    each_worker = max(1, (cores - learner) // (config.workers.count + 1))
    return {"learner": learner, "validator": each_worker, "worker": each_worker, "evaluator": 1}
