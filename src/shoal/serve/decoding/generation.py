"""One completion that somebody waits for: what was asked, what has been generated, and how it is handed over.

Invariant: the scheduler's thread alone writes it, except for `cancelled`; whoever asked gets its pieces in order, and one
with `finish` set as the last, whatever happens.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from shoal.serve.decoding.text import Text
from shoal.serve.versions import Held

Finish = Literal["stop", "length", "cancelled"]


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
class Ask:
    """What is asked of a version. `top`: how many of the likeliest tokens are wanted; None: no logprobs at all."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    stops: tuple[str, ...] = ()
    top: int | None = None
    echo: bool = False  # the prompt's own logprobs are wanted
    proof: bool = False  # hidden states are kept
    caller: str = ""  # whose places it takes


@dataclass
class Generation:
    ask: Ask
    held: Held
    text: Text
    loop: asyncio.AbstractEventLoop
    cancelled: bool = False
    asked_s: float = field(default_factory=time.monotonic)
    last_s: float = 0.0  # when the newest piece was made; 0: none yet
    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # bfloat16: the hidden state that each token was sampled from
    echoed: list[Likely] = field(default_factory=list)  # the prompt's tokens from the second on
    _pieces: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)

    def hand_over(self, piece: Piece) -> None:
        """In the event loop's thread."""
        self._pieces.put_nowait(piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece, as they come. One that leaves early must `cancel`."""
        while True:
            piece = await self._pieces.get()
            yield piece
            if piece.finish:
                return

    def cancel(self) -> None:
        """Its row is given up at the next step."""
        self.cancelled = True
