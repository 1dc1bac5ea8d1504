"""The default engine: continuous batching in plain torch.

    generate: queue a completion for each seed -> step the scheduler until all are finished

Calls from several threads share one batch (`Calls`). An environment's tokens replace sampled tokens, one per step.
With exact numerics a completion depends on its prompt, its seed and the weights alone; with fast numerics rounding also
depends on the other rows of the batch. The sampling noise is seeded in both cases.
Invariant: weights never change during generation. Left out: prefix caching between calls.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.engine.protocol import Calls, Completion, Compute, Draft, Respond, Sampling, run_inline
from shoal.engine.scheduler import DecodeRequest, Scheduler, SchedulerLimits
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, load_weights_
from shoal.model.numerics import Numerics


class TorchEngine:
    """An engine with one model. `load` replaces its weights in place."""

    def __init__(
        self,
        dtype: DtypeName,
        device: str = "cpu",
        numerics: Numerics = "fast",
        limits: SchedulerLimits | None = None,
        compute: Compute = run_inline,
    ) -> None:
        """`compute` runs each step. With `OneThread`, all steps run in one thread, whichever thread calls `generate`."""
        self.dtype = dtype
        self.compute = compute
        self.device = device
        self.numerics = numerics
        self.model: Any = None
        self._scheduler = Scheduler(limits or SchedulerLimits())
        self._calls = Calls()
        self._new: list[_Draft] = []  # queued, not in the scheduler yet

    def load(self, folder: Path) -> None:
        """Load or replace the weights. Raise RuntimeError during a `generate` call."""
        with self._calls.changed:
            if self._calls.open:
                raise RuntimeError("load() would change the weights during generate(): wait for it to return")
            if self.model is None:
                self.model = load_model(folder, self.dtype, self.device, self.numerics)
            else:
                load_weights_(self.model, folder)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        """See `Engine`. Raise ValueError for invalid prompts before queueing anything."""
        if self.model is None:
            raise RuntimeError("the engine has no weights yet: call load() first")
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if not all(0 <= token < vocabulary for prompt in prompts for token in prompt):
            raise ValueError(f"a prompt has a token that is not below {vocabulary}, the model's vocabulary")
        drafts = [
            [_Draft(prompt, g, number, seed, sampling, respond, model=self.model) for number, seed in enumerate(group)]
            for g, (prompt, group) in enumerate(zip(map(tuple, prompts), seeds, strict=True))
        ]
        own = [draft for group in drafts for draft in group]
        with self._calls.changed:
            self._new += own
        self._calls.wait(own, self._step)
        completions: list[list[Completion]] = self.compute(
            lambda: [[draft.completion() for draft in group] for group in drafts]
        )
        return completions

    def _step(self) -> None:
        """Run one step of all calls' completions. An error in the model ends them all."""
        with self._calls.changed:
            self._scheduler.add(self._new)
            self._new = []
        try:
            self.compute(self._scheduler.step)
        except BaseException as error:
            for draft in self._scheduler.unfinished():
                assert isinstance(draft, _Draft)
                draft.finish(error)
            self._scheduler = Scheduler(self._scheduler.limits)
            raise


@dataclass(eq=False)
class _Draft(Draft):
    """A draft as the scheduler's `DecodeSequence`."""

    model: Any = None
    reply_left: deque[int] = field(default_factory=deque)  # the environment's tokens that are not in `tokens` yet
    request: DecodeRequest = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.request = DecodeRequest(self.prompt, self.seed, sampling.temperature, sampling.max_tokens)

    def on_prefill(self, hidden_LH: Tensor) -> None:
        """Do nothing: no prompt is echoed."""

    def position(self) -> int:
        return len(self.tokens)

    def on_token(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        if self.reply_left:
            self.tokens.append(self.reply_left.popleft())
        else:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.states.append(state_H[None])
            if token in self.sampling.eos_ids:
                self.reply_left.extend(self.reply())
                if not self.reply_left:
                    self.finish()
        if len(self.tokens) == self.request.max_tokens:
            self.finish()
        return None if self.done else self.tokens[-1]
