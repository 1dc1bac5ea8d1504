"""The text of a row while its tokens arrive: whole characters only, and nothing of a stop string.

Invariant: the pieces together are the row's text up to its first stop string, whatever the tokens' borders are.
Called by the scheduler, and by `proof` to read a reply's tokens again.
"""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # how tokenizers decode the first bytes of a character


class Text:
    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self._tokens: list[int] = []  # a window: tokenizers need what stands before to place spaces
        self._shown = 0  # tokens of the window whose text was taken
        self._held = ""  # text that may begin a stop string

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self._tokens.append(token)
        before = self._decode(self._tokens[: self._shown])
        now = self._decode(self._tokens)
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        return self._released(now[len(before) :])

    def end(self) -> str:
        """What is left, when no token follows."""
        rest = self._decode(self._tokens)[len(self._decode(self._tokens[: self._shown])) :]
        self._tokens, self._shown = [], 0
        released = self._released(rest)
        held, self._held = self._held, ""
        return released if self.stopped else released + held

    def _released(self, text: str) -> str:
        """`text` behind what was held, without what may begin a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True) if tokens else ""
        return text


def text_of(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
    """The text that a row with these tokens shows."""
    text = Text(tokenizer, stops)
    return "".join([*(text.add(token) for token in tokens), text.end()])


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`.

    >>> overlap("one STO", "STOP"), overlap("one", "STOP")
    (3, 0)
    """
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
