"""The base of every attack in the matrix: an honest producer with an attacker's knowledge.

Invariant: an `Attack` without overrides is honest. Each subclass tells the lie that its docstring states, and keeps all
other fields as consistent as an attacker can cheaply make them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config import Config
from shoal.engine.protocol import Completion
from shoal.engine.torch_engine import TorchEngine
from shoal.model.logprobs import logits, token_logprobs
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.model.turns import last_turn, model_positions, model_tokens
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment
from shoal.tasks import Graders
from shoal.tasks.budget import reward
from shoal.tasks.derive import GroupPlan
from shoal.tasks.prompt import completion_text
from shoal.worker.produce import Producer


@dataclass(frozen=True)
class Lab:
    versions: list[Path]  # folders of consecutive policy versions; assignments name the last one
    neighbour: Identity = field(default_factory=Identity.generate)  # an honest worker whose files the attacker sees

    def behind(self, steps: int) -> Path:
        """Return the version from `steps` steps ago. Raise ValueError if the lab has no such version."""
        if steps >= len(self.versions):
            raise ValueError(f"{len(self.versions)} versions are too few to go back {steps} steps")
        return self.versions[-1 - steps]


class Attack(Producer):
    """An honest worker, the base of the lying ones."""

    def __init__(self, config: Config, run: str, identity: Identity, engine: TorchEngine, lab: Lab) -> None:
        super().__init__(config, run, identity, engine)
        self.graders = Graders(config.tasks, files=self.tasks.files)
        self.lab = lab
        self.torch_engine = engine
        self.plans: list[GroupPlan] = []  # groups of the current submission

    @property
    def model(self) -> Any:
        return self.torch_engine.model

    def plan(self, assignment: Assignment) -> list[GroupPlan]:
        self.plans = super().plan(assignment)
        return self.plans

    def rewards(self, pairs: Sequence[tuple[GroupPlan, Completion]]) -> list[float]:
        """Return each completion's reward. A pool's worker has no answers, but may know them or work them out."""
        texts = [completion_text(self.tokenizer, last_turn(done.turns, done.tokens)) for _, done in pairs]
        grades = self.graders.grade([self.tasks.train[plan.task_index] for plan, _ in pairs], texts)
        return [
            reward(grade.score, model_tokens(done.turns, len(done.tokens)), plan.target_length, self.config.tasks)
            for grade, (plan, done) in zip(grades, pairs, strict=True)
        ]

    def close(self) -> None:
        self.graders.close()
        super().close()

    @torch.inference_mode()
    def scored(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]
    ) -> list[list[Completion]]:
        """Return these tokens as completions of the prompts, with the model's hidden states and logprobs."""
        completions = []
        for prompt, group in zip(prompts, groups, strict=True):
            tree = Tree(prompt, [c.tokens for c in group], [c.turns for c in group])
            packed = pack([tree]).to(self.model.device)
            hidden_NH = forward_hidden(self.model, packed)
            logits_NV = logits(self.model, hidden_NH).float() / self.sampling.temperature
            logprobs_N = token_logprobs(logits_NV, packed.target_N)
            lengths = [model_tokens(c.turns, len(c.tokens)) for c in group]
            completions.append(
                [
                    replace(c, logprobs=logprobs.tolist(), hidden_TH=hidden.to("cpu", torch.bfloat16))
                    for c, logprobs, hidden in zip(
                        group, torch.split(logprobs_N, lengths), torch.split(hidden_NH, lengths), strict=True
                    )
                ]
            )
        return completions

    @torch.inference_mode()
    def restated(self, completion: Completion) -> Completion:
        """Return the completion with logprobs at the stated temperature, from its hidden states, without a new forward."""
        hidden_TH = completion.hidden_TH.to(self.model.device, self.model.dtype)
        sampled = model_positions(completion.turns, len(completion.tokens))
        tokens_T = torch.tensor([completion.tokens[at] for at in sampled], device=hidden_TH.device)
        logprobs_T = token_logprobs(logits(self.model, hidden_TH).float() / self.sampling.temperature, tokens_T)
        return replace(completion, logprobs=logprobs_T.clamp(max=0.0).tolist())


@contextmanager
def outputs_changed(module: torch.nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make `module` return `change(output)` within the context."""
    hook = module.register_forward_hook(lambda _, __, output: change(output))
    try:
        yield
    finally:
        hook.remove()
