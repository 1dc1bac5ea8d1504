"""The interface of an inference engine, and what all engines share: drafts of completions, and calls that share a batch.

A completion may have several turns: when the model ends a turn, `Respond` may append an environment's tokens, and the model
continues. Prompts and completions are token ids: the model's output is never tokenised again.
The torch engine (`torch_engine`) is the default, and tests use it; `vllm.client` is the alternative.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
IDLE_S = 1.0

# (group, number within the group, tokens so far, lengths of the turns before the last) -> tokens that an environment appends
# to a completion whose last token ends a turn. None or empty: the completion ends. A reply must leave room for one token.
Respond = Callable[[int, int, Sequence[int], Sequence[int]], Sequence[int] | None]
Compute = Callable[[Callable[[], Any]], Any]  # runs a job, perhaps in another thread, and returns its result


def run_inline(job: Callable[[], T]) -> T:
    """Run a job in the calling thread."""
    return job()


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled: greedily at temperature 0, otherwise from the full distribution."""

    temperature: float
    max_tokens: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One completion, including its end token if there is one.

    The model sampled T of its tokens; an environment wrote the others.
    """

    tokens: list[int]
    logprobs: list[float]  # of each sampled token, at the sampling temperature
    hidden_TH: Tensor  # bfloat16: the final hidden state from which each token was sampled
    turns: list[int] = field(default_factory=list)  # see `model/turns`; []: the model wrote all tokens


class Engine(Protocol):
    def load(self, folder: Path) -> None:
        """Load the weights of a published version: a verified Hugging Face folder."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        """Return one completion per seed, for each prompt. A prompt is computed once for all its completions.

        `max_tokens`, and the positions that seed the noise, count the environment's tokens too.
        """
        ...


@dataclass(eq=False)
class Draft:
    """An unfinished completion."""

    prompt: tuple[int, ...]
    group: int
    number: int  # within the group
    seed: int
    sampling: Sampling
    respond: Respond | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # parts of hidden_TH, in order
    turns: list[int] = field(default_factory=list)
    done: bool = False
    error: BaseException | None = None
    cancelled: bool = False

    def finish(self, error: BaseException | None = None) -> None:
        self.error, self.done = self.error or error, True

    def reply(self) -> Sequence[int]:
        """Return the tokens that the environment appends after the last token, if any.

        An error of the environment finishes only this completion; `generate` raises it in the calling thread.
        """
        if self.respond is None or self.tokens[-1] not in self.sampling.eos_ids:
            return ()
        try:
            reply = self.respond(self.group, self.number, self.tokens, self.turns) or ()
            if reply and len(self.tokens) + len(reply) >= self.sampling.max_tokens:
                raise ValueError(
                    f"the environment's {len(reply)} tokens after {len(self.tokens)} leave no room below "
                    f"max_tokens {self.sampling.max_tokens}"
                )
        except Exception as error:  # noqa: BLE001 - whatever the caller's function raises
            self.finish(error)
            return ()
        if reply:
            self.turns += [len(self.tokens) - sum(self.turns), len(reply)]
        return reply

    def completion(self) -> Completion:
        return Completion(self.tokens, self.logprobs, torch.cat(self.states), self.turns)


class Calls:
    """Concurrent calls of `generate`. One of their threads advances the completions of all calls, while the others wait.

    `changed` guards the engine's queue.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open = 0  # calls that have not returned
        self._advancing = False

    def wait(self, own: Sequence[Draft], advance: Callable[[], None]) -> None:
        """Advance all completions, or wait while another thread does, until `own` are done.

        Raise the error of one of them, or of `advance`.
        """
        with self.changed:
            self.open += 1
        try:
            while not all(draft.done for draft in own):
                self._advance_or_wait(advance)
        finally:
            with self.changed:
                self.open -= 1
                for draft in own:
                    draft.cancelled = True  # matters only if the call was interrupted
        for draft in own:
            if draft.error:
                raise draft.error

    def _advance_or_wait(self, advance: Callable[[], None]) -> None:
        with self.changed:
            if self._advancing:
                self.changed.wait(IDLE_S)
                return
            self._advancing = True
        try:
            advance()
        finally:
            with self.changed:
                self._advancing = False
                self.changed.notify_all()
