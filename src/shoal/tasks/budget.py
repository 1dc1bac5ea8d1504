"""Length budgets: a group's target length, and what a completion's distance from it costs.

Reward = score - alpha * |target length - length| if the group has a target. The prompt states the target, as in
INTELLECT-2 (arXiv 2505.07291, section 4.1; after L1, arXiv 2503.04697).
"""

from collections.abc import Sequence

EPSILON = 1e-6  # rewards that differ by less count as equal


def reward(score: float, length: int, target_length: int, alpha: float) -> float:
    """The reward of a completion of `length` tokens with this score."""
    return score - (alpha * abs(target_length - length) if target_length else 0.0)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether a group with these rewards has advantages that are not all zero."""
    return max(rewards) - min(rewards) > EPSILON
