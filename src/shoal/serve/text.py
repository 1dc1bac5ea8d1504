"""The text of a row while its tokens arrive: whole characters only, nothing of a stop string, and why it ends.

Invariant: the pieces together are the row's text up to the first stop string that is whole in it, whatever the tokens'
borders are. Text and ending follow from the tokens and what was asked. The time is linear in the tokens.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

Finish = Literal["stop", "length", "cancelled"]
STOPS, STOP_CHARACTERS = 8, 400  # of one request
UNFINISHED = "\ufffd"  # how tokenizers decode the first bytes of a character
HELD_TOKENS = 16  # a character has fewer: tokens that make none by then are no character's
NO_LIMIT = 1 << 62


class Stop:
    """A stop string, and how much of it the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of `text` that the text ends with
        self._shorter = [0]  # by characters matched: the next shorter beginning that the text ends with, too
        for character in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)

    def add(self, character: str) -> bool:
        """Whether the stop string is whole now; nothing may be added then."""
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.text)


class Text:
    """`finish` is set when no token may follow: an end token, a stop string, or the limit."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        eos_ids: Collection[int] = (),
        max_tokens: int = NO_LIMIT,
        shown: Collection[int] = (),
    ) -> None:
        """`shown`: control tokens that are text; the others are not."""
        self.tokenizer, self.eos_ids, self.max_tokens = tokenizer, eos_ids, max_tokens
        self._hidden: set[int] | None = None  # control tokens that are not text; None: none is
        if shown:
            self._hidden = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} - set(shown)
        self.stops = [Stop(stop) for stop in stops if stop]
        self.finish: Finish | None = None
        self.count = 0  # tokens
        self.stopped: str | None = None  # the stop string that was met
        self._tokens: list[int] = []  # a window: tokenizers need what stands before to place spaces
        self._shown = 0  # tokens of the window whose text was taken
        self._held = ""  # text that may begin a stop string

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self.count += 1
        if token in self.eos_ids:
            self.finish = "stop"
            return self.end()
        text = self._add(token)
        if self.stopped is not None:
            self.finish = "stop"
        elif self.count >= self.max_tokens:
            self.finish = "length"
            text += self.end()
        return text

    def _add(self, token: int) -> str:
        self._tokens.append(token)
        before = self._decode(self._tokens[: self._shown])
        now = self._decode(self._tokens)
        whole = len(now) > len(before) and not now.endswith(UNFINISHED)
        if not whole and len(self._tokens) - self._shown < HELD_TOKENS:
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        return self._released(now[len(before) :])

    def end(self) -> str:
        """What is left, when no token follows."""
        rest = self._decode(self._tokens)[len(self._decode(self._tokens[: self._shown])) :]
        self._tokens, self._shown = [], 0
        released = self._released(rest)
        held, self._held = self._held, ""
        return released + held

    def _released(self, text: str) -> str:
        """`text` behind what was held, without what may begin a stop string."""
        if self.stopped is not None:
            return ""
        if not self.stops:
            return text
        for at, character in enumerate(text, 1):
            met = [stop.text for stop in self.stops if stop.add(character)]
            if met:
                self.stopped = max(met, key=len)
                text, self._held = self._held + text[:at], ""
                return text[: len(text) - len(self.stopped)]
        text = self._held + text
        sure = len(text) - max(stop.matched for stop in self.stops)
        self._held = text[sure:]
        return text[:sure]

    def _decode(self, tokens: Sequence[int]) -> str:
        hidden = self._hidden
        own = list(tokens) if hidden is None else [token for token in tokens if token not in hidden]
        text: str = self.tokenizer.decode(own, skip_special_tokens=hidden is None) if own else ""
        return text


def replay(text: Text, tokens: Sequence[int], check: Callable[[], None] = lambda: None) -> str:
    """The text that a row with these tokens shows, up to its end or to the last of them. `check` may raise."""
    parts = []
    for token in tokens:
        check()
        parts.append(text.add(token))
        if text.finish:
            return "".join(parts)
    return "".join([*parts, text.end()])
