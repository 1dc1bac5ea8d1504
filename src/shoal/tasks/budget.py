"""Length budgets: a group's target length, how the prompt states it, and what missing it costs.

    target   reward = score - alpha * |target - length|          the prompt asks for `target` tokens
    max      reward = score - alpha * max(0, length - target)    the prompt asks for at most `target` tokens
    off      reward = score

`target` is INTELLECT-2's (arXiv 2505.07291, section 4.1; after L1, arXiv 2503.04697), prompt text included; `max` is L1's
second form without its clipping. A group without a target (0) has no penalty.
Invariant: worker, validator and the tools get rewards and prompts from here.
"""

from collections.abc import Sequence

from shoal.config.tasks import TaskSection

EPSILON = 1e-6  # rewards that differ by less count as equal


def instruction(section: TaskSection, target_length: int) -> str:
    """Return what the prompt says of a group's target length; "" without one."""
    if not target_length or section.length_mode == "off":
        return ""
    at_most = "at most " if section.length_mode == "max" else ""
    return f"Think for {at_most}{target_length} tokens before giving the answer."


def in_turn(section: TaskSection, number: int) -> int:
    """Return the target of a task by its number where none is drawn (evaluation, filter); 0: there are no targets."""
    return section.targets[number % len(section.targets)] if section.targets else 0


def penalty(length: int, target_length: int, section: TaskSection) -> float:
    """Return what a completion of `length` tokens loses."""
    if not target_length or section.length_mode == "off":
        return 0.0
    over = length - target_length
    return section.length_penalty * (max(0, over) if section.length_mode == "max" else abs(over))


def reward(score: float, length: int, target_length: int, section: TaskSection) -> float:
    """Return the reward of a completion of `length` tokens with this score."""
    return score - penalty(length, target_length, section)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return whether a group with these rewards has advantages that are not all zero."""
    return max(rewards) - min(rewards) > EPSILON
