"""How many groups a worker's next task holds: as many as it finishes in the time that most workers take for theirs.

    newcomer                           base, which is `workers.groups_per_submission`
    slower than ABOUT times the median size * median / own time
    about as fast, below base          twice as many, at most base
    faster                             size * median / own time, at most twice as many and at most `workers.most_groups`

The time is the coordinator's own, from task to upload. What a worker says about its speed counts for nothing, and the size
changes neither what is drawn (a larger task begins with the groups of a smaller one) nor what a group earns. Large tasks of
a worker that little is held of in escrow are always checked whole (`trust`).

Invariant: between 1 and `workers.most_groups`; a worker as fast as most keeps its size.
Called by `arrivals` when a task came, by `assignments` and `fitness`.
Left out: what the open batch still needs (`assignments`).
"""

from shoal.config import Config
from shoal.coordinator.tables.nodes import Node

ABOUT = 4 / 3
TOKEN_BYTES, ROLLOUT_BYTES = (
    18,
    512,
)  # in a submission: id, logprob and share of a proof of 32; everything else of a row


def usual(node: Node | None, config: Config) -> int:
    """Groups in a worker's next task, if the open batch needs as many."""
    base = config.workers.groups_per_submission
    return min(node.size, largest(config)) if node is not None and node.size else base


def largest(config: Config) -> int:
    """Groups in the largest task: its file fits into `coordinator.max_submission_bytes` whatever is generated."""
    group_bytes = config.sampling.group_size * (config.sampling.max_tokens * TOKEN_BYTES + ROLLOUT_BYTES)
    fit = config.coordinator.max_submission_bytes // group_bytes
    return max(min(fit, config.workers.largest), config.workers.groups_per_submission)


def fitting(size: int, took_s: float, median_s: float, config: Config) -> int:
    """The size after tasks of this one took so long, and the pool's median worker so long for its own."""
    base = config.workers.groups_per_submission
    pace = median_s / took_s
    if pace < 1 / ABOUT:
        return max(round(size * pace), 1)
    if size < base:
        return min(2 * size, base)
    if pace > ABOUT:
        return min(round(size * min(pace, 2.0)), largest(config))
    return size
