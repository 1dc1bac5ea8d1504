"""Runs trusted but unbounded functions: `pool` hands values to processes that `trunk` forks and the kernel stops in time.

`grading` turns what came of a call into a grade.
"""

from shoal.tasks.rewards.killable.pool import Killable

__all__ = ["Killable"]
