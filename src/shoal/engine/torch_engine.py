"""The default engine: continuous batching in plain torch. A group's prompt is prefilled once.

    generate: queue a completion for each seed -> step the scheduler until all of them are written

Calls from several threads share one batch: whoever waits steps for all, and the places of finished completions go to the
next ones, of whichever call. Tokens that an environment gives take the place of sampled ones, one a step.

With exact numerics a completion depends on its prompt, its seed and the weights alone; with fast ones it depends on the
other rows of its batch through rounding. The noise is seeded in both.
Invariant: weights never change while a completion is written. Called by the worker and by evaluation.
Left out: reuse of keys and values from one call to the next.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.engine.batch import Ask
from shoal.engine.one_thread import Compute, here
from shoal.engine.protocol import Completion, Respond, Sampling
from shoal.engine.scheduler import Limits, Scheduler
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, load_weights_
from shoal.model.numerics import Numerics
from shoal.shardcast.fetch.inplace import advance_

IDLE_S = 1.0


class TorchEngine:
    """Holds one model. `load` replaces its weights in place."""

    def __init__(
        self,
        dtype: DtypeName,
        device: str = "cpu",
        numerics: Numerics = "fast",
        limits: Limits | None = None,
        compute: Compute = here,
    ) -> None:
        """`compute`: runs a step; with `OneThread`, all steps run in one thread, whoever waits."""
        self.dtype = dtype
        self.compute = compute
        self.device = device
        self.numerics = numerics
        self.model: Any = None
        self.folder: Path | None = None  # the source of the weights; None if they were changed since
        self._scheduler = Scheduler(limits or Limits())
        self._changed = threading.Condition()  # guards what follows
        self._new: list[_Draft] = []  # not in the scheduler yet
        self._calls = 0  # of `generate` that have not returned
        self._stepping = False  # a thread steps the scheduler

    def load(self, folder: Path) -> None:
        """Raises RuntimeError while something is generated: its weights must not change."""
        with self._changed:
            if self._calls:
                raise RuntimeError(
                    "load() while completions are written would change their weights: wait for generate()"
                )
            if self.model is None:
                self.model = load_model(folder, self.dtype, self.device, self.numerics)
            elif self.folder is None or not advance_(self.model.state_dict(), self.folder, folder):
                load_weights_(self.model, folder)
            self.folder = folder

    def forget(self) -> None:
        self.folder = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        """As `Engine` says. Raises ValueError for what the model cannot take, before anything of it is queued."""
        if self.model is None:
            raise RuntimeError("the engine has no weights yet: call load() first")
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if not all(0 <= token < vocabulary for prompt in prompts for token in prompt):
            raise ValueError(f"a prompt has a token that is not below {vocabulary}, the model's vocabulary")
        drafts = [
            [
                _Draft(
                    self.model,
                    Ask(prompt, seed, sampling.temperature, sampling.max_tokens, noise=sampling.noise),
                    g,
                    number,
                    sampling,
                    respond,
                )
                for number, seed in enumerate(group)
            ]
            for g, (prompt, group) in enumerate(zip(map(tuple, prompts), seeds, strict=True))
        ]
        own = [draft for group in drafts for draft in group]
        with self._called(own):
            while not all(draft.done for draft in own):
                self._step_or_wait()
        for draft in own:
            if draft.error:
                raise draft.error
        found: list[list[Completion]] = self.compute(
            lambda: [[draft.completion() for draft in group] for group in drafts]
        )
        return found

    @contextmanager
    def _called(self, own: Sequence["_Draft"]) -> Iterator[None]:
        with self._changed:
            self._calls += 1
            self._new += own
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                for draft in own:
                    draft.cancelled = True  # what is left of an interrupted call

    def _step_or_wait(self) -> None:
        """One step of everybody's completions, or another thread's. A failure of the model ends them all."""
        with self._changed:
            if self._stepping:
                self._changed.wait(IDLE_S)
                return
            self._stepping = True
            self._scheduler.add(self._new)
            self._new = []
        try:
            self.compute(self._scheduler.step)
        except BaseException as error:
            for draft in self._scheduler.everyone():
                assert isinstance(draft, _Draft)
                draft.end(error)
            self._scheduler = Scheduler(self._scheduler.limits)
            raise
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()


@dataclass(eq=False)
class _Draft:
    """A completion while it is written."""

    model: Any
    ask: Ask
    group: int
    number: int  # within the group
    sampling: Sampling
    respond: Respond | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    given: deque[int] = field(default_factory=deque)  # what an environment wrote and is not in `tokens` yet
    done: bool = False
    error: BaseException | None = None
    cancelled: bool = False

    def began(self, hidden_LH: Tensor) -> None:
        """Nobody asks for the prompt's states."""

    def position(self) -> int:
        return len(self.tokens)

    def allowed(self) -> None:
        """Nothing is ruled out."""

    def take(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        if self.given:
            self.tokens.append(self.given.popleft())
        else:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.states.append(state_H)
            if token in self.sampling.eos_ids and not self._continues():
                self.done = True
        if len(self.tokens) == self.ask.max_tokens:
            self.done = True
        return None if self.done else self.tokens[-1]

    def end(self, error: BaseException) -> None:
        self.error, self.done = error, True

    def _continues(self) -> bool:
        """Whether another turn follows the one that ended, because an environment answers."""
        try:
            reply = self.respond(self.group, self.number, self.tokens, self.turns) if self.respond else None
            if not reply:
                return False
            if len(self.tokens) + len(reply) >= self.ask.max_tokens:
                raise ValueError(
                    f"{len(reply)} tokens given after {len(self.tokens)} leave no room below {self.ask.max_tokens}"
                )
        except Exception as error:  # noqa: BLE001 - the caller's own: `generate` raises it there, whoever steps
            self.end(error)
            return False
        self.turns += [len(self.tokens) - sum(self.turns), len(reply)]
        self.given.extend(reply)
        return True

    def completion(self) -> Completion:
        return Completion(self.tokens, self.logprobs, torch.stack(self.states), self.turns)
