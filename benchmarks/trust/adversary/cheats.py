"""Workers that lie, each in one way, by overriding one method of the honest producer.

`liar.py` starts such a worker, `byzantine.py` a run with several. Each kind lies in every submission, so all of its
submissions must be rejected. `forged_tool` lies from its first tool call on, so it needs tasks with an environment.
All are slashed except `faked_fingerprint`, which is only removed from the exactness class. Until then it is not paid.
Afterwards its work, which is honest, is judged by the limits.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from shoal.engine.protocol import Completion
from shoal.engine.torch_engine import TorchEngine
from shoal.model.load import WEIGHTS
from shoal.protocol.messages import Assignment
from shoal.store.rollouts import Rollout
from shoal.tasks import Task
from shoal.tasks.derive import GroupPlan
from shoal.worker.produce import Producer

VERSIONS_BEHIND = 4


class OlderWeights(Producer):
    """Generates with the first version that it loaded, and claims the newest one."""

    def load(self, folder: Path, version: int) -> int | None:
        if self.tokenizer is None:
            self.first_version = version
            super().load(folder, version)
        stale = version >= self.first_version + VERSIONS_BEHIND
        return version if stale else None  # None: do not ask for tasks yet


class QuantizedWeights(Producer):
    """Generates with weights rounded to 4 bits (symmetric, one scale per 32 values), to save memory."""

    def load(self, folder: Path, version: int) -> int | None:
        if not isinstance(self.engine, TorchEngine):
            with TemporaryDirectory() as rounded:
                return super().load(rounded_copy(folder, Path(rounded)), version)
        super().load(folder, version)
        round_linears_(self.engine.model, round_to_4_bits_)
        return version


class WrongTemperature(Producer):
    """Samples at half the stated temperature, which gives higher rewards and less exploration."""

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        cooler = replace(self.sampling, temperature=self.sampling.temperature / 2)
        return self.engine.generate(prompts, [plan.seeds for plan in plans], cooler, self.responder(plans))


class ForgedTool(Producer):
    """Makes the environment state the task's answer, which the model then only has to repeat."""

    def reply(self, plan: GroupPlan, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        honest = super().reply(plan, seed, tokens, turns)
        if honest is None or self.conversation is None or self.conversation.frame is None:
            return honest
        forged = self.conversation.frame.tokens(
            hint(self.tasks.train[plan.task_index])
        )  # a pool's worker must guess it
        return forged if len(tokens) + len(forged) < self.sampling.max_tokens else honest


class ReplayedSubmission(Producer):
    """Generates once, for a task that it was not given, and signs these rollouts for every task."""

    rows: list[Rollout] | None = None

    def submission(self, assignment: Assignment) -> bytes:
        if self.rows is None:
            plans = self.plan(assignment.model_copy(update={"number": assignment.number + 999}))
            self.rows = self.rollouts(plans, self.complete([self.prompt(plan) for plan in plans], plans))
        return self.sign(assignment, [self.prompt(plan) for plan in self.plan(assignment)], self.rows)


class FakedFingerprint(Producer):
    """Computes with fast numerics, and reports the fingerprint of exact numerics."""

    fast: TorchEngine | None = None

    def load(self, folder: Path, version: int) -> int | None:
        assert isinstance(self.engine, TorchEngine)
        self.fast = self.fast or TorchEngine(self.engine.dtype, self.engine.device, "fast")
        self.fast.load(folder)
        return super().load(folder, version)

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        assert self.fast is not None
        return self.fast.generate(prompts, [plan.seeds for plan in plans], self.sampling, self.responder(plans))


CHEATS: dict[str, type[Producer]] = {
    "older_weights": OlderWeights,
    "quantized_weights": QuantizedWeights,
    "wrong_temperature": WrongTemperature,
    "replayed_submission": ReplayedSubmission,
    "forged_tool": ForgedTool,
    "faked_fingerprint": FakedFingerprint,
}


def hint(task: Task) -> str:
    """Return a text that no tool writes, so that it is a lie even if the tool would give the right answer."""
    return f"The answer is {task.answer}."


def round_linears_(model: torch.nn.Module, round_: Callable[[torch.Tensor], None]) -> None:
    """Apply `round_` to the weights of every linear layer except the output head."""
    for module in model.base_model.layers.modules():  # type: ignore[union-attr]
        if isinstance(module, torch.nn.Linear):
            round_(module.weight.data)


def round_to_4_bits_(weight_OI: torch.Tensor, block: int = 32) -> None:
    """Round in place to 15 levels per `block` values, as simple 4-bit quantisation does."""
    flat = weight_OI.view(-1, block)
    scale = flat.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 7
    flat.copy_((flat / scale).round() * scale)


def rounded_copy(folder: Path, to: Path) -> Path:
    """Copy the model in `folder` into `to`, with the weights of linear layers rounded to 4 bits. Return `to`."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    weights = load_file(to / WEIGHTS)
    for name, weight in weights.items():
        if ".layers." in name and weight.ndim == 2:
            rounded_OI = weight.float()
            round_to_4_bits_(rounded_OI)
            weight.copy_(rounded_OI)
    save_file(weights, to / WEIGHTS, {"format": "pt"})
    return to
