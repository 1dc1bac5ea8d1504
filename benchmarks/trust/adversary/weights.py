"""Lies about the computation: other weights, a rounded cache, another prompt.

Claimed logprobs and proofs are those of the attacker's own forward.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.engine.protocol import Completion
from shoal.tasks.derive import GroupPlan
from shoal.tasks.prompt import prompt_tokens

from .cheats import round_linears_, round_to_4_bits_
from .lab import Attack, outputs_changed

STALE_STEPS = 5


class PreviousVersion(Attack):
    """Generates with the version before the stated one, so it never waits for a download."""

    def load(self, folder: Path, version: int) -> int | None:
        return super().load(self.lab.behind(1), version)


class StaleVersion(Attack):
    """Generates with the version from five steps ago."""

    def load(self, folder: Path, version: int) -> int | None:
        return super().load(self.lab.behind(STALE_STEPS), version)


class Int8Weights(Attack):
    """Rounds every linear layer to 8 bits, one scale per row, for half the memory."""

    def load(self, folder: Path, version: int) -> int | None:
        super().load(folder, version)
        round_linears_(self.model, round_to_8_bits_)
        return version


class Int4Weights(Attack):
    """Rounds every linear layer to 4 bits, one scale per 32 values."""

    def load(self, folder: Path, version: int) -> int | None:
        super().load(folder, version)
        round_linears_(self.model, round_to_4_bits_)
        return version


class OtherModel(Attack):
    """Runs another model of the same shape: the stated one with its two middle layers swapped."""

    @torch.no_grad()
    def load(self, folder: Path, version: int) -> int | None:
        super().load(folder, version)
        layers = self.model.base_model.layers
        middle = len(layers) // 2
        for one, other in zip(layers[middle - 1].parameters(), layers[middle].parameters(), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        return version


class Fp8Cache(Attack):
    """Keeps keys and values as float8_e4m3fn, for half the memory of a long context."""

    cache = torch.float8_e4m3fn

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        with ExitStack() as hooks:
            for layer in self.model.base_model.layers:
                for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                    hooks.enter_context(outputs_changed(projection, self.cached))
            return super().complete(prompts, plans)

    def cached(self, states: Tensor) -> Tensor:
        return states.to(self.cache).to(states.dtype)


class Fp16Cache(Fp8Cache):
    """Keeps keys and values as float16, which is more precise than the bfloat16 that honest workers may use."""

    cache = torch.float16


class OtherPrompts(Attack):
    """Completes other prompts than those it signs."""

    def other(self, plan: GroupPlan) -> list[int]:
        raise NotImplementedError

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        return super().complete([self.other(plan) for plan in self.plans], plans)


class OtherSystemPrompt(OtherPrompts):
    """Puts a worked example into the system message."""

    def other(self, plan: GroupPlan) -> list[int]:
        section = self.config.tasks.model_copy(update={"system": "2 + 3=5 "})
        return prompt_tokens(self.tokenizer, section, self.tasks.train[plan.task_index], plan.target_length)


class EasierTask(OtherPrompts):
    """Gives the model the task "answer + 0", which has the same answer."""

    def other(self, plan: GroupPlan) -> list[int]:
        task = self.tasks.train[plan.task_index]
        easier = replace(task, question=f"{task.answer} + 0")
        return prompt_tokens(self.tokenizer, self.config.tasks, easier, plan.target_length)


class EasierTaskRetold(EasierTask):
    """Gives the model the easier task, then runs a forward of the stated prompt, so that proofs and logprobs match."""

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        return self.scored(prompts, super().complete(prompts, plans))


def round_to_8_bits_(weight_OI: Tensor) -> None:
    """Round in place to 255 levels per row."""
    scale_O1 = weight_OI.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    weight_OI.copy_((weight_OI / scale_O1).round() * scale_O1)
