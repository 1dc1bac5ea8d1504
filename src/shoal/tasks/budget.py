"""Length budgets: a group's target length, how the prompt states it, and the penalty for missing it.

    reward = score - alpha * |target - length|

The penalty and the prompt's text are those of INTELLECT-2 (arXiv 2505.07291, section 4.1), which follows L1 (arXiv
2503.04697).
A target of 0 means no target and no penalty.
Invariant: validator and the tools all use these functions; a worker only writes the prompt's text.
"""

from collections.abc import Sequence

from shoal.config.tasks import TaskSection

EPSILON = 1e-6  # rewards that differ by at most this count as equal


def instruction(target_length: int) -> str:
    """Return the sentence that states a target length in the prompt; "" without a target."""
    return f"Think for {target_length} tokens before giving the answer." if target_length else ""


def cycled_target(section: TaskSection, number: int) -> int:
    """Return the target length of task `number`, or 0 if there are no targets.

    The tasks of an evaluation or filter cycle through all targets.
    """
    targets = section.length_targets
    return targets[number % len(targets)] if targets else 0


def reward(score: float, length: int, target_length: int, section: TaskSection) -> float:
    """Return the reward of a completion of `length` tokens with this score."""
    return score - section.length_penalty * abs(length - target_length) if target_length else score


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return whether a group with these rewards has an advantage that is not zero."""
    return max(rewards) - min(rewards) > EPSILON
