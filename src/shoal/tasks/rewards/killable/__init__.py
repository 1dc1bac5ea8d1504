"""Runs trusted but unbounded functions: `pool` hands values to processes that `trunk` forks and the kernel stops in time."""

from shoal.tasks.rewards.killable.pool import Killable

__all__ = ["Killable"]
