"""Prompts and seeds for an engine, and a scheduler's sequence that records what it receives."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.engine.protocol import Completion
from shoal.engine.scheduler import DecodeRequest

# The groups differ in size, the prompts differ in length, and no two seeds are equal.
PROMPTS = [[5, 9, 33, 7], [12], list(range(2, 64)), [40, 41] * 33]
SEEDS = [[101, 102, 103], [201], [301, 302], [401, 402, 403, 404]]
Groups = list[list[Completion]]


def with_prompts(groups: Groups) -> list[tuple[list[int], Completion]]:
    """Return every completion with its prompt."""
    return [(prompt, completion) for prompt, group in zip(PROMPTS, groups, strict=True) for completion in group]


@dataclass(eq=False)
class Recorder:
    """A `DecodeSequence` that records what it receives and ends at an end token or at `max_tokens`."""

    model: Any
    request: DecodeRequest
    ends: tuple[int, ...] = ()
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    echoed: list[int] = field(default_factory=list)  # lengths of the prompts received
    ended: bool = False

    def on_prefill(self, hidden_LH: Tensor) -> None:
        self.echoed.append(len(hidden_LH))

    def position(self) -> int:
        return len(self.tokens)

    def on_token(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        assert not self.ended and logits_1V.shape[0] == 1
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.states.append(state_H.clone())
        self.ended = token in self.ends or len(self.tokens) == self.request.max_tokens
        return None if self.ended else token
