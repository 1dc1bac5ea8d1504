"""Turn one completion's tokens into text as they arrive, find stop strings, and decide why the completion ends.

Invariant: the pieces, joined, are the text up to the first complete stop string, even if a token boundary splits that
string. Text and finish reason depend only on the tokens and the request. Only whole characters are returned. Time is
linear in the number of tokens.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

Finish = Literal["stop", "length", "cancelled"]
MAX_STOPS, MAX_STOP_CHARACTERS = 8, 400  # of one request
INCOMPLETE = "\ufffd"  # how tokenizers decode an incomplete character
MAX_CHARACTER_TOKENS = 16  # after this many tokens without a whole character, return the incomplete one
NO_LIMIT = 1 << 62


class StopMatcher:
    """Incremental search for one stop string (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of the longest prefix of the stop string that the input ends with
        # For each matched length (from 1), the length of the next shorter prefix that also matches.
        self._fallback = [0]
        for character in text[1:]:
            self._fallback.append(self._extend(self._fallback[-1], character))

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)

    def add(self, character: str) -> bool:
        """Add a character; return whether the stop string is complete. Do not call again after that."""
        self.matched = self._extend(self.matched, character)
        return self.matched == len(self.text)


class Detokenizer:
    """The text of one completion. `finish` is set at an end token, a stop string, or the token limit."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        eos_ids: Collection[int] = (),
        max_tokens: int = NO_LIMIT,
    ) -> None:
        self.tokenizer, self.eos_ids, self.max_tokens = tokenizer, eos_ids, max_tokens
        self.stops = [StopMatcher(stop) for stop in stops if stop]
        self.finish: Finish | None = None
        self.count = 0  # tokens added so far
        self.stopped: str | None = None  # the stop string that ended the text
        self._tokens: list[int] = []  # a window of tokens; tokenizers need the preceding tokens to place spaces
        self._returned = 0  # tokens of the window whose text was returned
        self._pending = ""  # text that may be the start of a stop string

    def add(self, token: int) -> str:
        """Add a token; return the text that no later token can change."""
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
        before = self._decode(self._tokens[: self._returned])
        now = self._decode(self._tokens)
        whole = len(now) > len(before) and not now.endswith(INCOMPLETE)
        if not whole and len(self._tokens) - self._returned < MAX_CHARACTER_TOKENS:
            return ""
        self._tokens, self._returned = self._tokens[self._returned :], len(self._tokens) - self._returned
        return self._release(now[len(before) :])

    def end(self) -> str:
        """Return the remaining text. Call this after the last token."""
        rest = self._decode(self._tokens)[len(self._decode(self._tokens[: self._returned])) :]
        self._tokens, self._returned = [], 0
        released = self._release(rest)
        pending, self._pending = self._pending, ""
        return released + pending

    def _release(self, text: str) -> str:
        """Append to the pending text. Return it up to where a stop string may have started."""
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
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True) if tokens else ""
        return text


def detokenize(detokenizer: Detokenizer, tokens: Sequence[int], check: Callable[[], None] = lambda: None) -> str:
    """Return the text of these tokens, up to the end of the completion. `check` is called per token and may raise."""
    parts = []
    for token in tokens:
        check()
        parts.append(detokenizer.add(token))
        if detokenizer.finish:
            return "".join(parts)
    return "".join([*parts, detokenizer.end()])
