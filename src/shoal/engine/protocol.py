"""The interface of an inference engine: its inputs and results.

A completion may have several turns: when the model ends one, `Respond` may append tokens of an environment, after which
the model goes on. Tokens in, tokens out: what the model wrote is never tokenised again.
The small torch engine (`torch_engine.py`) is the default and the tests' double. Other engines implement this protocol.
Used by the worker and by evaluation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shoal.model.sampling import NoiseName

# (group, number within the group, tokens so far, lengths of the turns before the last) -> what an environment appends to a
# completion whose last token ends a turn; None or nothing: the completion ends. Room for one more token must be left.
Respond = Callable[[int, int, Sequence[int], Sequence[int]], Sequence[int] | None]


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled: greedily at temperature 0, otherwise from the full distribution."""

    temperature: float
    max_tokens: int
    eos_ids: tuple[int, ...]
    noise: NoiseName = "shoal"


@dataclass(frozen=True)
class Completion:
    """One completion, including its end token if there is one. The model sampled T of its tokens; the rest are given."""

    tokens: list[int]
    logprobs: list[float]  # of each sampled token, at the sampling temperature
    hidden_TH: Tensor  # bfloat16: the final hidden state that each sampled token was sampled from
    turns: list[int] = field(default_factory=list)  # see `model/turns`; []: the model wrote all of it


class Engine(Protocol):
    def load(self, folder: Path) -> None:
        """Load the weights of a published version: a verified Hugging Face folder."""
        ...

    def forget(self) -> None:
        """Read all weights from their files at the next `load`, not only what changed since the last one."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        """One completion per seed, for each prompt. A prompt is computed once for all its completions.

        `max_tokens` bounds a whole completion, and seeds count positions of the whole: given tokens are included.
        """
        ...
