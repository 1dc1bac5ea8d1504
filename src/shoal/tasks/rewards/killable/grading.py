"""The grade of a completion whose reward ran in a killable process: one for each way in which a call can end.

Invariant: a call that does not answer is a grader error, and its grade is repeatable only if the call stayed below half of
its limits. Called by the rewards that use `Killable`.
"""

from collections.abc import Callable
from typing import Any

from shoal.tasks.rewards.killable.pool import Killable, Result
from shoal.tasks.task import Grade

NEAR = 0.5  # a call that used more than this share of a limit is not repeatable on a slower machine


def grade_of(result: Result, pool: Killable, answered: Callable[[Any, bool], Grade]) -> Grade:
    """`answered` makes the grade of an answer, from its value and whether it is repeatable."""
    repeatable = result.cpu_s < NEAR * pool.cpu_s and result.memory_bytes < NEAR * pool.memory_bytes
    match result.ending:
        case "answered":
            return answered(result.value, repeatable)
        case "raised":
            return Grade(0.0, "grader_error", result.detail, repeatable=repeatable)
        case "died":
            return Grade(0.0, "grader_error", f"the grader died: {result.detail}", repeatable=False)
        case "cpu":
            detail = f"the limit of {pool.cpu_s:g} s of CPU time passed"
        case "wall":
            detail = f"the limit of {pool.wall_s:g} s passed without an answer"
    return Grade(0.0, "grader_error", detail, repeatable=False)
