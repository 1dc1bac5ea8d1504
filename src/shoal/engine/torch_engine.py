"""The default engine: batched decoding in plain torch. A group's prompt is prefilled once.

    prefill P prompts -> repeat each prompt's keys and values for its G completions -> decode all rows together
    The last live row takes the place of a finished one, so the batch shrinks without copying the other rows.
    Tokens that an environment gives take the place of sampled ones, one a step.

Three ways of decoding: `exact` (a completion depends on its prompt, its seed and the weights alone), `fast` (it depends
on the other rows of its batch through rounding), and `uncached` for models that need transformers' own attention. The
noise is seeded in all of them.
Called by the worker and by evaluation. Left out: paged caches, continuous batching, prefix reuse across groups.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.engine.exact import ExactDecoding
from shoal.engine.fast import FastDecoding
from shoal.engine.protocol import Completion, Respond, Sampling
from shoal.engine.uncached import UncachedDecoding
from shoal.model import head, numerics, rows
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, load_weights_
from shoal.model.numerics import Numerics
from shoal.model.sampling import choose
from shoal.shardcast.fetch.inplace import advance_


class TorchEngine:
    """Holds one model. `load` replaces its weights in place."""

    def __init__(self, dtype: DtypeName, device: str = "cpu", numerics: Numerics = "fast") -> None:
        self.dtype = dtype
        self.device = device
        self.numerics = numerics
        self.model: Any = None
        self.folder: Path | None = None  # the source of the weights; None if they were changed since

    def load(self, folder: Path) -> None:
        if self.model is None:
            self.model = load_model(folder, self.dtype, self.device, self.numerics)
        elif self.folder is None or not advance_(self.model.state_dict(), self.folder, folder):
            load_weights_(self.model, folder)
        self.folder = folder

    def forget(self) -> None:
        self.folder = None

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        if self.model is None:
            raise RuntimeError("the engine has no weights yet: call load() first")
        drafts = [[_Draft(g, number, seed) for number, seed in enumerate(group)] for g, group in enumerate(seeds)]
        live = [draft for group in drafts for draft in group]  # by batch row

        decoding = self._decoding()(self.model, prompts, [draft.group for draft in live], sampling.max_tokens)
        hidden_BH = decoding.first_BH
        for position in range(sampling.max_tokens):
            logits_BV = head.logits(self.model, hidden_BH)
            tokens_B, logprobs_B = choose(
                logits_BV, [draft.seed for draft in live], [position] * len(live), sampling.temperature
            )
            finished = []
            for row, (draft, token, logprob) in enumerate(
                zip(live, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
            ):
                if draft.given:
                    tokens_B[row] = draft.take()
                    continue
                draft.add(token, logprob, hidden_BH[row].to("cpu", torch.bfloat16))
                if token in sampling.eos_ids and not draft.continues(respond, sampling.max_tokens):
                    finished.append(row)
            keep = _close_gaps(len(live), finished)
            if not keep or position + 1 == sampling.max_tokens:
                break
            if finished:
                decoding.keep(keep)
                live = [live[row] for row in keep]
                tokens_B = tokens_B[torch.tensor(keep)]
            hidden_BH = decoding.step(tokens_B)
        return [[draft.completion() for draft in group] for group in drafts]

    def _decoding(self) -> type[ExactDecoding] | type[FastDecoding] | type[UncachedDecoding]:
        if not rows.packs(self.model):
            return UncachedDecoding
        return ExactDecoding if numerics.of(self.model) == "exact" else FastDecoding


@dataclass
class _Draft:
    """A completion while it is written."""

    group: int
    number: int  # within the group
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    given: deque[int] = field(default_factory=deque)  # what an environment wrote and is not in `tokens` yet

    def add(self, token: int, logprob: float, hidden_H: Tensor) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.states.append(hidden_H)

    def take(self) -> int:
        """Append the next given token, and return it."""
        self.tokens.append(self.given.popleft())
        return self.tokens[-1]

    def continues(self, respond: Respond | None, max_tokens: int) -> bool:
        """Whether another turn follows the one that ended, because an environment answers. Raises ValueError."""
        reply = respond(self.group, self.number, self.tokens, self.turns) if respond else None
        if not reply:
            return False
        if len(self.tokens) + len(reply) >= max_tokens:
            raise ValueError(f"{len(reply)} tokens given after {len(self.tokens)} leave no room below {max_tokens}")
        self.turns += [len(self.tokens) - sum(self.turns), len(reply)]
        self.given.extend(reply)
        return True

    def completion(self) -> Completion:
        return Completion(self.tokens, self.logprobs, torch.stack(self.states), self.turns)


def _close_gaps(n_rows: int, finished: Sequence[int]) -> list[int]:
    """The old row that each remaining row holds after live rows from the end took the finished rows' places.

    >>> _close_gaps(6, [1, 4])
    [0, 5, 2, 3]
    """
    gone = set(finished)
    left = n_rows - len(gone)
    from_the_end = (row for row in reversed(range(n_rows)) if row not in gone)
    return [row if row not in gone else next(from_the_end) for row in range(left)]
