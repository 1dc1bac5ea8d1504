"""How the processes of a run share the cores of one machine.

Invariant: every role that computes gets at least one thread; together they get at most the core count, when possible.
Called by `members`, `swarm` and `estimate`.
"""

import os

from shoal.config import Config


def available_cores(wanted: int) -> int:
    """The number of cores to share: `wanted`, or all that this process may use if it is 0."""
    if wanted or not hasattr(os, "sched_getaffinity"):  # macOS has no such call
        return wanted or os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def share_threads(config: Config, cores: int) -> dict[str, int]:
    """Threads for each role that computes: at least one, and together at most `cores`, when possible.

    With async level 0, generating, checking and learning take turns, so each gets all cores. Sites share the learner's.
    The last evaluation has the machine to itself.
    """
    sites = max(1, config.learner.sites)
    if config.coordinator.async_level == 0:
        return {
            "learner": max(1, cores // sites),
            "validator": max(1, cores // config.validator.count),
            "worker": max(1, cores // max(1, config.workers.count)),
            "evaluator": cores,
        }
    learner = max(1, cores // 2)
    each_worker = max(1, (cores - learner) // (config.workers.count + 1))
    return {"learner": max(1, learner // sites), "validator": each_worker, "worker": each_worker, "evaluator": cores}


def shares(config: Config, cores: int) -> dict[str, float]:
    """The part of the cores that the processes of a role may use together, by what they do; it can be more than 1."""
    threads = share_threads(config, cores)
    found = {
        "learner": threads["learner"],
        "rollouts": threads["worker"] * config.workers.count,
        "validation": threads["validator"] * config.validator.count,
    }
    return {role: count / cores for role, count in found.items()}
