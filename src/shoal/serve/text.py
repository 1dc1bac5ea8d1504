"""Streaming detokenizer: turns a row's tokens into text, finds stop strings, and decides why the row ends.

Invariant: the pieces joined are the row's text up to the first complete stop string, wherever token boundaries fall. Text
and ending depend only on the tokens and the request. Only whole characters are released. Time is linear in the tokens.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

Finish = Literal["stop", "length", "cancelled"]
STOPS, STOP_CHARACTERS = 8, 400  # limits of one request
UNFINISHED = "\ufffd"  # how tokenizers decode an incomplete character
MAX_CHARACTER_TOKENS = 16  # after this many tokens without a whole character, release what there is
NO_LIMIT = 1 << 62


class Stop:
    """Incremental search for one stop string (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of `text` that the text ends with
        self._shorter = [0]  # by characters matched: the next shorter prefix that also matches
        for character in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)

    def add(self, character: str) -> bool:
        """Add a character; return whether the stop string is complete. Add nothing after that."""
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.text)


class Text:
    """The text of one row. `finish` is set at an end token, a stop string, or the token limit."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        eos_ids: Collection[int] = (),
        max_tokens: int = NO_LIMIT,
        shown: Collection[int] = (),
    ) -> None:
        """`shown`: control tokens to keep in the text; all others are dropped."""
        self.tokenizer, self.eos_ids, self.max_tokens = tokenizer, eos_ids, max_tokens
        self._hidden: set[int] | None = None  # control tokens to drop; None: drop all
        if shown:
            self._hidden = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} - set(shown)
        self.stops = [Stop(stop) for stop in stops if stop]
        self.finish: Finish | None = None
        self.count = 0  # tokens
        self.stopped: str | None = None  # the stop string that ended it
        self._tokens: list[int] = []  # a window: tokenizers need the preceding tokens to place spaces
        self._shown = 0  # tokens of the window whose text was released
        self._pending = ""  # text that may be the start of a stop string

    def add(self, token: int) -> str:
        """Add a token; return the text that can be released."""
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
        if not whole and len(self._tokens) - self._shown < MAX_CHARACTER_TOKENS:
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        return self._release(now[len(before) :])

    def end(self) -> str:
        """Return the remaining text; no token follows."""
        rest = self._decode(self._tokens)[len(self._decode(self._tokens[: self._shown])) :]
        self._tokens, self._shown = [], 0
        released = self._release(rest)
        pending, self._pending = self._pending, ""
        return released + pending

    def _release(self, text: str) -> str:
        """Append to the pending text; return it up to a possible start of a stop string."""
        if self.stopped is not None:
            return ""
        if not self.stops:
            return text
        for at, character in enumerate(text, 1):
            matches = [stop.text for stop in self.stops if stop.add(character)]
            if matches:
                self.stopped = max(matches, key=len)
                text, self._pending = self._pending + text[:at], ""
                return text[: len(text) - len(self.stopped)]
        text = self._pending + text
        certain = len(text) - max(stop.matched for stop in self.stops)
        self._pending = text[certain:]
        return text[:certain]

    def _decode(self, tokens: Sequence[int]) -> str:
        hidden = self._hidden
        visible = list(tokens) if hidden is None else [token for token in tokens if token not in hidden]
        text: str = self.tokenizer.decode(visible, skip_special_tokens=hidden is None) if visible else ""
        return text


def replay(text: Text, tokens: Sequence[int], check: Callable[[], None] = lambda: None) -> str:
    """Return the text of a row with these tokens, up to its end. `check` is called per token and may raise."""
    parts = []
    for token in tokens:
        check()
        parts.append(text.add(token))
        if text.finish:
            return "".join(parts)
    return "".join([*parts, text.end()])
