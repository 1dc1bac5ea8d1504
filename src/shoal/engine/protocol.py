"""What a worker asks of an inference engine, and what it gets back.

The small torch engine (`torch_engine.py`) is the default and the tests' double; others plug in behind this protocol.
Called by the worker and by evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy; the full distribution is sampled otherwise."""

    temperature: float
    max_tokens: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled completion of T tokens, its end token included where it has one."""

    tokens: list[int]
    logprobs: list[float]  # of each token, at the sampling temperature
    hidden_TH: Tensor  # bfloat16: the final hidden state each token was sampled from


class Engine(Protocol):
    def load(self, folder: Path) -> None:
        """Take the weights of a published version: a checked Hugging Face folder."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """For each prompt, one completion a seed. The prompt is computed once for all its completions."""
        ...
