"""One completion in progress: its request, its tokens so far, and the queue of its pieces.

Invariant: only the scheduler's thread changes a generation, except for `cancelled`. The client gets the pieces in
order, and only the last one has `finish` set.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.engine.scheduler import DecodeRequest
from shoal.model import logprobs
from shoal.model.logprobs import likelihoods, token_logprobs
from shoal.serve.detokenizer import Detokenizer, Finish
from shoal.serve.versions import LoadedModel

ECHO_CHUNK = 256  # prompt positions whose logits are in memory at once


@dataclass(frozen=True)
class TokenLogprobs:
    """A sampled token with its logprob at temperature 1, and the likeliest alternatives at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """The text and tokens that one step adds."""

    text: str
    tokens: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True)
class ServeRequest(DecodeRequest):
    """One completion's parameters. `top` is the number of top logprobs to return; None returns no logprobs."""

    stops: tuple[str, ...] = ()
    top: int | None = None
    proof: bool = False  # keep the hidden states, from which the proof is made
    prompt_only: bool = False  # return the prompt's logprobs and generate nothing
    caller: str = ""  # the caller whose quota is charged


@dataclass
class Generation:
    request: ServeRequest
    loaded: LoadedModel
    loop: asyncio.AbstractEventLoop
    text: Detokenizer = field(init=False)
    ready: Piece | None = None  # the last step's piece, until it is delivered
    cancelled: bool = False
    submitted_s: float = field(default_factory=time.monotonic)
    last_piece_s: float = 0.0  # when the newest piece was made; 0 if there is none yet
    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # for each token, the hidden state that it was sampled from
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the prompt's second token on
    # The completions of one streamed request share a queue.
    queue: "asyncio.Queue[tuple[Generation, Piece]]" = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        request, loaded = self.request, self.loaded
        self.text = Detokenizer(loaded.tokenizer, request.stops, loaded.eos_ids, request.max_tokens)

    @property
    def model(self) -> Any:
        return self.loaded.engine.model

    def on_prefill(self, hidden_LH: Tensor) -> None:
        """Compute the prompt's logprobs in chunks, because all logits of a long prompt would fill the memory."""
        tokens = self.request.prompt[1:]
        for start in range(0, len(tokens), ECHO_CHUNK):
            logits_LV = logprobs.logits(self.model, hidden_LH[start : start + ECHO_CHUNK][: len(tokens) - start])
            self.prompt_logprobs += score_tokens(logits_LV, tokens[start : start + ECHO_CHUNK], self.request.top or 0)

    def position(self) -> int:
        return len(self.tokens)

    def on_token(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        """Record this step's token and piece; return the token to continue from, or None at the end."""
        if self.cancelled:
            return None
        if self.request.prompt_only:
            self.ready = Piece("", finish="length")
            return None
        self.tokens.append(token)
        if self.request.proof:
            self.states.append(state_H.clone())  # a view would keep the whole batch's states in memory
        text, finish = self.text.add(token), self.text.finish
        scores = () if self.request.top is None else tuple(score_tokens(logits_1V, (token,), self.request.top))
        self.ready = Piece(text, scores, finish)
        return None if finish else token

    def piece(self) -> Piece:
        """Return the last step's piece, or a final piece if the completion was cancelled."""
        piece, self.ready = self.ready, None
        return piece or Piece(self.text.end(), finish="cancelled")

    def final_piece(self) -> Piece:
        """Return all undelivered text as the final piece. Call this if no step will follow."""
        piece, self.ready = self.ready or Piece(""), None
        return Piece(piece.text + self.text.end(), piece.tokens, piece.finish or "cancelled")

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces as they arrive. A reader that stops early must call `cancel`."""
        while True:
            _, piece = await self.queue.get()
            yield piece
            if piece.finish:
                return

    def cancel(self) -> None:
        """End the completion at the next step, which frees its row."""
        self.cancelled = True


def score_tokens(logits_LV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return each token's logprob at temperature 1 and its `top` likeliest alternatives.

    If a token is also one of its alternatives, both of its logprobs have the same bits, because clients compare them to
    see whether the token is the likeliest.
    """
    scaled_LV = logits_LV.float()
    normalizers = likelihoods(scaled_LV)
    own_L = torch.tensor(tokens, device=logits_LV.device)
    best_LT = scaled_LV.topk(min(top, scaled_LV.shape[-1])).indices
    ids_LC = torch.cat([own_L[:, None], best_LT], -1)
    logprobs_LC = torch.stack([token_logprobs(scaled_LV, ids_L, normalizers) for ids_L in ids_LC.T], -1)
    rows = zip(ids_LC.tolist(), logprobs_LC.tolist(), strict=True)
    return [TokenLogprobs(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True))) for ids, values in rows]
