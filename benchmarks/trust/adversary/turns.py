"""Lies about an environment's answers. The model's own tokens, their proofs and logprobs are honest.

An environment's tokens are neither sampled nor proven. A worker that forges them chooses what the model reads.
"""

from collections.abc import Sequence

from shoal.tasks.derive import GroupPlan

from .cheats import ForgedTool, hint
from .lab import Attack


class ForgedAnswer(ForgedTool, Attack):
    """Makes the environment state the task's answer, which the model then only has to repeat."""


class SkippedAnswer(Attack):
    """Ends the conversation where the environment would answer."""

    def reply(self, plan: GroupPlan, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return None


class InventedAnswer(Attack):
    """States the task's answer where the environment would be silent, so that the model may answer again."""

    def reply(self, plan: GroupPlan, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        honest = super().reply(plan, seed, tokens, turns)
        assert self.conversation is not None
        last = len(turns) // 2 + 1 == self.config.sampling.max_turns
        if honest is not None or last or self.conversation.frame is None:
            return honest
        invented = self.conversation.frame.tokens(hint(self.tasks.train[plan.task_index]))
        return invented if len(tokens) + len(invented) < self.sampling.max_tokens else None
