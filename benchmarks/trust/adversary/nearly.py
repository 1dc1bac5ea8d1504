"""Lies so small that they stay within a limit, for the limits that `tolerance` does not use up.

    NearTemperature   uses up the limits on tokens: the distribution's evidence and the mean margin
    NearWeights       uses up the limits on hidden states: the proofs' exponents and mantissas
    NearLogprobs      uses up the limit on claimed logprobs

`lean` sets the direction and strength of each lie. An attacker who can run the validator finds the strongest that passes.
Invariant: a strength of 0 is honest.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shoal.engine.protocol import Completion
from shoal.model.load import load_model
from shoal.tasks.derive import GroupPlan

from .lab import Attack
from .tokens import OtherSampling


class NearTemperature(OtherSampling):
    """Draws with the derived seeds at a slightly lower temperature (which raises the reward) or a slightly higher one."""

    def lean(self, direction: float, strength: float) -> None:
        self.factor = 1.0 - direction * strength


class NearWeights(Attack):
    """Runs weights moved slightly towards those of `better`, or away from them, and proves the resulting hidden states."""

    folder: Path
    better: Path

    def load(self, folder: Path, version: int) -> int | None:
        self.folder = folder
        return super().load(folder, version)

    @torch.no_grad()
    def lean(self, direction: float, strength: float) -> None:
        self.torch_engine.load(self.folder)
        better = load_model(self.better, self.torch_engine.dtype, self.torch_engine.device)
        others = dict(better.named_parameters())
        for name, own in self.model.named_parameters():
            own.lerp_(others[name], direction * strength)


class NearLogprobs(Attack):
    """Claims that every token was slightly less (or more) likely than it was."""

    offset = 0.0  # nats

    def lean(self, direction: float, strength: float) -> None:
        self.offset = direction * strength

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        return [
            [replace(c, logprobs=[min(logprob - self.offset, 0.0) for logprob in c.logprobs]) for c in group]
            for group in super().complete(prompts, plans)
        ]
