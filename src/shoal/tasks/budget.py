"""Length budgets: a group's target length, how the prompt states it, and what missing it costs.

    reward = score - alpha * |target - length|

INTELLECT-2's (arXiv 2505.07291, section 4.1; after L1, arXiv 2503.04697), prompt text included. A group without a target (0)
has no penalty.
Invariant: worker, validator and the tools get rewards and prompts from here.
"""

from collections.abc import Sequence

from shoal.config.tasks import TaskSection

EPSILON = 1e-6  # rewards that differ by less count as equal


def instruction(target_length: int) -> str:
    """Return what the prompt says of a group's target length; "" without one."""
    return f"Think for {target_length} tokens before giving the answer." if target_length else ""


def in_turn(section: TaskSection, number: int) -> int:
    """Return the target of a task by its number where none is drawn (evaluation, filter); 0: there are no targets."""
    targets = section.length_targets
    return targets[number % len(targets)] if targets else 0


def reward(score: float, length: int, target_length: int, section: TaskSection) -> float:
    """Return the reward of a completion of `length` tokens with this score."""
    return score - section.length_penalty * abs(length - target_length) if target_length else score


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return whether a group with these rewards has advantages that are not all zero."""
    return max(rewards) - min(rewards) > EPSILON
