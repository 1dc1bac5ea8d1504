"""One completion in progress: its request, its tokens so far, and the queue its pieces go to.

Invariant: only the scheduler's thread writes it, except for `cancelled`. The client gets the pieces in order, and the last
one has `finish` set, whatever happens. A reply constrained to a JSON schema (`Grammar`) fits it if it ends with `stop`. Its
tokens are sampled among the allowed ones, not from the full distribution, so it has no proof.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engine import batch
from shoal.model import logprobs
from shoal.model.logprobs import likelihoods, token_logprobs
from shoal.serve.errors import RequestError
from shoal.serve.text import Finish, Text
from shoal.serve.versions import LoadedModel

# Whitespace as json.dumps writes it: with free whitespace a model may write spaces forever.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """Mask the tokens that would break a JSON schema (llguidance, an optional extra)."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Tensor:
        """Return the mask of allowed next tokens, (V,) bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_))

    def take(self, token: int) -> Finish | None:
        """Advance by one token; return why the reply ends here, if it does. A matcher at its own limit gives `length`."""
        if not self._matcher.consume_token(token):
            return "length"
        return "stop" if self._matcher.is_stopped() else None


def compile_grammars(schema: Mapping[str, Any], loaded: LoadedModel, count: int) -> list[Grammar]:
    """Compile the schema into one grammar per completion. The first call may take seconds. Raises RequestError."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise RequestError(
            "this server cannot force a reply's form: pip install 'shoal[guided]' there, or ask for JSON in the prompt",
            param="response_format",
        ) from error
    vocabulary = loaded.engine.model.config.get_text_config(decoder=True).vocab_size
    if loaded.guide is None:
        try:
            loaded.guide = llguidance.hf.from_tokenizer(
                loaded.tokenizer, n_vocab=vocabulary, eos_token=list(loaded.eos_ids)
            )
        except ValueError as error:
            message = f"this model's tokenizer does not support structured output: {error}"
            raise RequestError(message, param="response_format") from error
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACES)
    matcher = llguidance.LLMatcher(loaded.guide, grammar, log_level=0)
    if matcher.is_error():
        message = f"this schema cannot be followed: {matcher.get_error().splitlines()[0][:300]}"
        raise RequestError(message, param="response_format")
    return [Grammar(matcher.deep_copy(), vocabulary) for _ in range(count)]


ECHO_CHUNK = 256  # prompt positions whose logits are in memory at once


@dataclass(frozen=True)
class TokenLogprobs:
    """A sampled token with its logprob at temperature 1, and the likeliest alternatives at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """The text released by one step, and that step's tokens."""

    text: str
    tokens: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True)
class ServeRequest(batch.DecodeRequest):
    """One completion's parameters. `top` is the number of top logprobs to return; None returns no logprobs."""

    stops: tuple[str, ...] = ()
    top: int | None = None
    proof: bool = False  # keep hidden states
    prompt_only: bool = False  # return the prompt's logprobs and generate nothing
    shown: frozenset[int] = frozenset()  # control tokens to keep in the text
    caller: str = ""  # whose quota it counts against


@dataclass
class Generation:
    ask: ServeRequest
    loaded: LoadedModel
    loop: asyncio.AbstractEventLoop
    grammar: Grammar | None = None
    text: Text = field(init=False)
    ready: Piece | None = None  # the last step's piece, until it is delivered
    cancelled: bool = False
    submitted_s: float = field(default_factory=time.monotonic)
    last_piece_s: float = 0.0  # when the newest piece was made; 0: none yet
    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # bfloat16; the hidden state each token was sampled from
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the prompt's second token on
    queue: "asyncio.Queue[tuple[Generation, Piece]]" = field(
        default_factory=asyncio.Queue
    )  # n completions of a stream share one

    def __post_init__(self) -> None:
        self.text = Text(
            self.loaded.tokenizer, self.ask.stops, self.loaded.eos_ids, self.ask.max_tokens, self.ask.shown
        )

    @property
    def model(self) -> Any:
        return self.loaded.engine.model

    def began(self, hidden_LH: Tensor) -> None:
        """Compute the prompt's logprobs in chunks: all logits of a long prompt would fill the memory."""
        tokens = self.ask.prompt[1:]
        for start in range(0, len(tokens), ECHO_CHUNK):
            logits_LV = logprobs.logits(self.model, hidden_LH[start : start + ECHO_CHUNK][: len(tokens) - start])
            self.prompt_logprobs += score_tokens(logits_LV, tokens[start : start + ECHO_CHUNK], self.ask.top or 0)

    def position(self) -> int:
        return len(self.tokens)

    def allowed(self) -> Tensor | None:
        return self.grammar.allowed() if self.grammar else None

    def take(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        """Record this step's token and piece; return the token to continue from, or None at the end."""
        if self.cancelled:
            return None
        if self.ask.prompt_only:
            self.ready = Piece("", finish="length")
            return None
        self.tokens.append(token)
        if self.ask.proof:
            self.states.append(state_H.clone())  # a view would keep the whole batch's states alive
        text, finish = self.text.add(token), self.text.finish
        if self.grammar and not finish and (finish := self.grammar.take(token)):
            text += self.text.end()
        likely = () if self.ask.top is None else tuple(score_tokens(logits_1V, (token,), self.ask.top))
        self.ready = Piece(text, likely, finish)
        return None if finish else token

    def piece(self) -> Piece:
        """Return the last step's piece, or the final one if the completion was cancelled."""
        piece, self.ready = self.ready, None
        return piece or Piece(self.text.end(), finish="cancelled")

    def final_piece(self) -> Piece:
        """Return the final piece when no step will follow: undelivered text and the rest."""
        piece, self.ready = self.ready or Piece(""), None
        return Piece(piece.text + self.text.end(), piece.tokens, piece.finish or "cancelled")

    def deliver(self, piece: Piece) -> None:
        """Queue a piece for the client; call from the event loop's thread."""
        self.queue.put_nowait((self, piece))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces as they arrive. A reader that leaves early must call `cancel`."""
        while True:
            _, piece = await self.queue.get()
            yield piece
            if piece.finish:
                return

    def cancel(self) -> None:
        """Free the row at the next step."""
        self.cancelled = True


def score_tokens(logits_LV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return each token's logprob at temperature 1 and its `top` likeliest alternatives.

    A token's logprob has the same bits in both lists: clients compare them to see whether it is the likeliest.
    """
    scaled_LV = logits_LV.float()
    normalizers = likelihoods(scaled_LV)
    own_L = torch.tensor(tokens, device=logits_LV.device)
    best_LT = scaled_LV.topk(min(top, scaled_LV.shape[-1])).indices
    ids_LC = torch.cat([own_L[:, None], best_LT], -1)
    logprobs_LC = torch.stack([token_logprobs(scaled_LV, ids_L, normalizers) for ids_L in ids_LC.T], -1)
    rows = zip(ids_LC.tolist(), logprobs_LC.tolist(), strict=True)
    return [
        TokenLogprobs(ids[0], logprobs[0], tuple(zip(ids[1:], logprobs[1:], strict=True))) for ids, logprobs in rows
    ]
