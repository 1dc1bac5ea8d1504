"""One completion that somebody waits for: what was asked, what has been generated, and how it is handed over.

Invariant: the scheduler's thread alone writes it, except for `cancelled`; whoever asked gets its pieces in order, and one
with `finish` set as the last, whatever happens. A reply that must fit a JSON schema (`Grammar`) fits it where it ends by
itself; its tokens are the seed's among those allowed, so it is not drawn from the full distribution and has no proof.
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

# No more space than Python writes: a model may write spaces for ever.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """Which tokens may stand next in a reply that must fit a JSON schema (llguidance, an extra)."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Tensor:
        """(V,) bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_))

    def take(self, token: int) -> Finish | None:
        """Why the reply ends with this token, if it does. A matcher that meets one of its limits cuts it."""
        if not self._matcher.consume_token(token):
            return "length"
        return "stop" if self._matcher.is_stopped() else None


def compiled(schema: Mapping[str, Any], held: LoadedModel, count: int) -> list[Grammar]:
    """A grammar for each of `count` completions. Takes up to seconds, the first time. Raises RequestError."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise RequestError(
            "this server cannot force a reply's form: pip install 'shoal[guided]' there, or ask for JSON in the prompt",
            param="response_format",
        ) from error
    vocabulary = held.engine.model.config.get_text_config(decoder=True).vocab_size
    if held.guide is None:
        try:
            held.guide = llguidance.hf.from_tokenizer(held.tokenizer, n_vocab=vocabulary, eos_token=list(held.eos_ids))
        except ValueError as error:
            message = f"no reply's form can be forced with this model's tokenizer: {error}"
            raise RequestError(message, param="response_format") from error
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACES)
    matcher = llguidance.LLMatcher(held.guide, grammar, log_level=0)
    if matcher.is_error():
        message = f"this schema cannot be followed: {matcher.get_error().splitlines()[0][:300]}"
        raise RequestError(message, param="response_format")
    return [Grammar(matcher.deep_copy(), vocabulary) for _ in range(count)]


ECHOED = 256  # positions of a prompt whose logits are in memory at once


@dataclass(frozen=True)
class Likely:
    """A sampled token with its logprob at temperature 1, and the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Text that became certain, and the tokens of this step."""

    text: str
    tokens: tuple[Likely, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True)
class ServeAsk(batch.DecodeRequest):
    """What is asked of a version. `top`: how many of the likeliest tokens are wanted; None: no logprobs at all."""

    stops: tuple[str, ...] = ()
    top: int | None = None
    proof: bool = False  # hidden states are kept
    scored: bool = False  # the prompt's logprobs are all that is wanted
    shown: frozenset[int] = frozenset()  # control tokens that are part of the text
    caller: str = ""  # whose places it takes


@dataclass
class Generation:
    ask: ServeAsk
    held: LoadedModel
    loop: asyncio.AbstractEventLoop
    grammar: Grammar | None = None  # that the reply must fit
    text: Text = field(init=False)
    made: Piece | None = None  # by the last step, until it is handed over
    cancelled: bool = False
    asked_s: float = field(default_factory=time.monotonic)
    last_s: float = 0.0  # when the newest piece was made; 0: none yet
    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # bfloat16: the hidden state that each token was sampled from
    echoed: list[Likely] = field(default_factory=list)  # the prompt's tokens from the second on
    queue: "asyncio.Queue[tuple[Generation, Piece]]" = field(default_factory=asyncio.Queue)  # may be shared

    def __post_init__(self) -> None:
        self.text = Text(self.held.tokenizer, self.ask.stops, self.held.eos_ids, self.ask.max_tokens, self.ask.shown)

    @property
    def model(self) -> Any:
        return self.held.engine.model

    def began(self, hidden_LH: Tensor) -> None:
        """Logprobs of the prompt, some positions at a time: all logits of a long one would fill the memory."""
        tokens = self.ask.prompt[1:]
        for start in range(0, len(tokens), ECHOED):
            logits_LV = logprobs.logits(self.model, hidden_LH[start : start + ECHOED][: len(tokens) - start])
            self.echoed += scored(logits_LV, tokens[start : start + ECHOED], self.ask.top or 0)

    def position(self) -> int:
        return len(self.tokens)

    def allowed(self) -> Tensor | None:
        return self.grammar.allowed() if self.grammar else None

    def take(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        """Make the piece of this step."""
        if self.cancelled:
            return None
        if self.ask.scored:
            self.made = Piece("", finish="length")
            return None
        self.tokens.append(token)
        if self.ask.proof:
            self.states.append(state_H.clone())  # it is a view of the whole batch's
        text, finish = self.text.add(token), self.text.finish
        if self.grammar and not finish and (finish := self.grammar.take(token)):
            text += self.text.end()
        likely = () if self.ask.top is None else tuple(scored(logits_1V, (token,), self.ask.top))
        self.made = Piece(text, likely, finish)
        return None if finish else token

    def piece(self) -> Piece:
        """What the last step made; the end if it was cancelled before."""
        made, self.made = self.made, None
        return made or Piece(self.text.end(), finish="cancelled")

    def cut(self) -> Piece:
        """The last piece, if no step follows: what the last one made and what is left."""
        made, self.made = self.made or Piece(""), None
        return Piece(made.text + self.text.end(), made.tokens, made.finish or "cancelled")

    def hand_over(self, piece: Piece) -> None:
        """In the event loop's thread."""
        self.queue.put_nowait((self, piece))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece, as they come. One that leaves early must `cancel`."""
        while True:
            _, piece = await self.queue.get()
            yield piece
            if piece.finish:
                return

    def cancel(self) -> None:
        """Its row is given up at the next step."""
        self.cancelled = True


def scored(logits_LV: Tensor, tokens: Sequence[int], top: int) -> list[Likely]:
    """Each token with its logprob at temperature 1, and the likeliest tokens in its place.

    A token has the same bits in both places: clients compare them to see whether it is the likeliest.
    """
    scaled_LV = logits_LV.float()
    found = likelihoods(scaled_LV)
    own_L = torch.tensor(tokens, device=logits_LV.device)
    best_LT = scaled_LV.topk(min(top, scaled_LV.shape[-1])).indices
    ids_LC = torch.cat([own_L[:, None], best_LT], -1)
    logprobs_LC = torch.stack([token_logprobs(scaled_LV, ids_L, found) for ids_L in ids_LC.T], -1)
    rows = zip(ids_LC.tolist(), logprobs_LC.tolist(), strict=True)
    return [Likely(ids[0], logprobs[0], tuple(zip(ids[1:], logprobs[1:], strict=True))) for ids, logprobs in rows]
