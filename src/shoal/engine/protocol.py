"""The interface of an inference engine: its inputs and results.

The small torch engine (`torch_engine.py`) is the default and the tests' double. Other engines implement this protocol.
Used by the worker and by evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled: greedily at temperature 0, otherwise from the full distribution."""

    temperature: float
    max_tokens: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled completion of T tokens, including its end token if there is one."""

    tokens: list[int]
    logprobs: list[float]  # of each token, at the sampling temperature
    hidden_TH: Tensor  # bfloat16: the final hidden state that each token was sampled from


class Engine(Protocol):
    def load(self, folder: Path) -> None:
        """Load the weights of a published version: a verified Hugging Face folder."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """One completion per seed, for each prompt. A prompt is computed once for all its completions."""
        ...
