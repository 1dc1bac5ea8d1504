"""Lies about how tokens were sampled: other sampling, chosen seeds, a smaller model, other endings.

Hidden states and logprobs are those of the stated weights for the submitted tokens, so only the tokens themselves can
reveal these lies.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shoal.engine.protocol import Completion
from shoal.engine.torch_engine import TorchEngine
from shoal.tasks.derive import GroupPlan

from .cheats import round_linears_, round_to_4_bits_
from .lab import Attack, outputs_changed

TOP_K = 5
TOP_P = 0.9
ROLLS = 4
PADDING = 4  # at most this many end tokens are appended


class OtherSampling(Attack):
    """Draws with the derived seeds, from changed logits or at `factor` times the stated temperature."""

    factor = 1.0

    def change(self, logits_BV: Tensor) -> Tensor:
        return logits_BV

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        sampling = replace(self.sampling, temperature=self.sampling.temperature * self.factor)
        with outputs_changed(self.model.lm_head, self.change):
            groups = self.engine.generate(prompts, [plan.seeds for plan in plans], sampling, self.responder(plans))
        return [[self.restated(completion) for completion in group] for group in groups]


class Cooler(OtherSampling):
    """Samples at 0.7 times the stated temperature, which gives higher rewards and less exploration."""

    factor = 0.7


class Hotter(OtherSampling):
    """Samples at 1.3 times the stated temperature."""

    factor = 1.3


class Greedy(OtherSampling):
    """Always takes the most likely token."""

    factor = 0.0


class TopK(OtherSampling):
    """Draws only from the five most likely tokens."""

    def change(self, logits_BV: Tensor) -> Tensor:
        least_B1 = logits_BV.topk(TOP_K).values[:, -1:]
        return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


class TopP(OtherSampling):
    """Draws only from the most likely tokens that together have 90 % of the probability."""

    def change(self, logits_BV: Tensor) -> Tensor:
        sorted_BV, order_BV = logits_BV.float().sort(descending=True)
        p_BV = (sorted_BV / self.sampling.temperature).softmax(-1)
        beyond_BV = p_BV.cumsum(-1) - p_BV >= TOP_P
        return logits_BV.masked_fill(torch.zeros_like(beyond_BV).scatter(-1, order_BV, beyond_BV), -torch.inf)


class EndSuppressed(OtherSampling):
    """Never draws an end token, so every completion runs to the length limit."""

    def change(self, logits_BV: Tensor) -> Tensor:
        return logits_BV.index_fill(-1, torch.tensor(self.sampling.eos_ids, device=logits_BV.device), -torch.inf)


class BestOfFour(Attack):
    """Samples every completion four times. Submits the one with the highest reward as if the derived seed had yielded it.

    A tie goes to the completion that the derived seed yields.
    """

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        self.stated: dict[int, int] = {}  # rolled seed -> derived seed, which an environment gets
        rolls = [super(BestOfFour, self).complete(prompts, self.rolled(plans, roll)) for roll in range(ROLLS)]
        return [
            [max(drawn, key=partial(self.paid, plan)) for drawn in zip(*groups, strict=True)]
            for plan, groups in zip(self.plans, zip(*rolls, strict=True), strict=True)
        ]

    def rolled(self, plans: Sequence[GroupPlan], roll: int) -> Sequence[GroupPlan]:
        if roll == 0:
            return plans
        self.stated |= {rolled(seed, roll): seed for plan in plans for seed in plan.seeds}
        return [replace(plan, seeds=tuple(rolled(seed, roll) for seed in plan.seeds)) for plan in plans]

    def reply(self, plan: GroupPlan, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return super().reply(plan, self.stated.get(seed, seed), tokens, turns)

    def paid(self, plan: GroupPlan, completion: Completion) -> float:
        return self.rewards([(plan, completion)])[0]


def rolled(seed: int, roll: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{roll}".encode()).digest()[:8], "big") >> 1


class DraftTokens(Attack):
    """Decodes with the oldest version at 4 bits, then runs one forward of the stated version over the result."""

    draft: TorchEngine | None = None

    def load(self, folder: Path, version: int) -> int | None:
        if self.draft is None:
            self.draft = TorchEngine(self.torch_engine.dtype, self.torch_engine.device, self.torch_engine.numerics)
            self.draft.load(self.lab.versions[0])
            round_linears_(self.draft.model, round_to_4_bits_)
        return super().load(folder, version)

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        assert self.draft is not None
        seeds = [plan.seeds for plan in plans]
        return self.scored(prompts, self.draft.generate(prompts, seeds, self.sampling, self.responder(plans)))


class OtherEndings(Attack):
    """Changes where completions end. Hidden states and logprobs are those of the changed tokens."""

    def ended(self, tokens: list[int], room: int) -> list[int]:
        """Return the changed tokens of the last turn, at most `room` of them."""
        raise NotImplementedError

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        groups = super().complete(prompts, plans)
        return self.scored(prompts, [[self.changed(completion) for completion in group] for group in groups])

    def changed(self, completion: Completion) -> Completion:
        start = sum(completion.turns)
        last = self.ended(completion.tokens[start:], self.sampling.max_tokens - start)
        return replace(completion, tokens=completion.tokens[:start] + last)


class Truncated(OtherEndings):
    """Submits the first half of every completion."""

    def ended(self, tokens: list[int], room: int) -> list[int]:
        return tokens[: max(1, len(tokens) // 2)]


class Padded(OtherEndings):
    """Appends end tokens if there is room, to be paid for more tokens."""

    def ended(self, tokens: list[int], room: int) -> list[int]:
        return (tokens + [self.sampling.eos_ids[0]] * PADDING)[:room]


class EndForced(OtherEndings):
    """Replaces the second half of every completion with an end token."""

    def ended(self, tokens: list[int], room: int) -> list[int]:
        return [*tokens[: len(tokens) // 2], self.sampling.eos_ids[0]]
