"""Tools, as far as the model's chat template has them: how it writes a call is read from the template itself.

    form_of    a conversation of sentinels that the template renders -> what stands around a call, and its JSON keys
    Reading    the text of a reply, piece by piece -> text and calls

Invariant: nothing that the model wrote is lost. Text that is not a complete call of an offered function stays text.
A streamed reply gives the same result as one that is not streamed. Of a call, each
character is read once.
Called by `routes` (form_of) and `answering` (Reading). Left out: choosing for the model (`required`, or one function), which
would not be the full distribution; templates that write calls as anything but JSON, or mark them with control tokens.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.serve.asking import written
from shoal.serve.openai.requests import ChatRequest, RequestError

SPACES = 1000  # that are held because a call may follow
NAME, ARGUMENTS = "probefunction", {"probekey": "probevalue"}
ASKED, SAID = {"role": "user", "content": "probequestion"}, "probeanswer"
PROBE = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probekey": {"type": "string"}}},
    },
}
CALLED = {"type": "function", "id": "probe0000", "function": {"name": NAME, "arguments": ARGUMENTS}}


@dataclass(frozen=True)
class Form:
    """How a template writes a call: `before`, a JSON object with these two keys, `after`. Spaces around it do not count."""

    before: str
    after: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


def offered(asked: ChatRequest) -> list[dict[str, Any]]:
    """The tools as the template gets them; none if the model is not to call any. Raises RequestError."""
    if not asked.tools:
        if asked.tool_choice not in (None, "none"):
            raise RequestError("tool_choice goes with tools", param="tool_choice")
        return []
    if asked.tool_choice not in (None, "auto", "none"):
        raise RequestError(
            "tool_choice is auto or none here: replies are sampled from the full distribution, so no call can be forced",
            param="tool_choice",
        )
    if asked.parallel_tool_calls is False:
        raise RequestError(
            "parallel_tool_calls: the model decides how many calls it writes; leave it out", param="parallel_tool_calls"
        )
    if asked.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in asked.tools]


def form_of(tokenizer: Any) -> Form:
    """Raises RequestError for a template without tools, PromptError for one that refuses such a conversation."""
    if written(tokenizer, [ASKED]) == written(tokenizer, [ASKED], [PROBE]):
        raise RequestError("tools: this model's chat template has none", param="tools")
    said = written(tokenizer, [ASKED, {"role": "assistant", "content": SAID}], [PROBE])
    called = written(tokenizer, [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}], [PROBE])
    start, _, end = said.rpartition(SAID)
    form = _found(called[len(start) : len(called) - len(end)])
    if not (called.startswith(start) and called.endswith(end)) or form is None:
        raise RequestError("tools: this model's template writes calls in a form that is not read here", param="tools")
    marks = form.before + form.after
    if "".join(_shown(tokenizer, marks).split()) != "".join(marks.split()):
        raise RequestError(
            "tools: this model marks its calls with control tokens, which are not read here", param="tools"
        )
    return form


def _found(text: str) -> Form | None:
    for brace in re.finditer("{", text):
        at = brace.start()
        value, end = _decoded(text[at:])
        if isinstance(value, dict):
            names = [key for key, one in value.items() if one == NAME]
            arguments = [key for key, one in value.items() if one == ARGUMENTS]
            if names and arguments:
                before, after = text[:at].strip(), text[at + end :].strip()
                if before.endswith("[") and after.startswith("]"):  # a list, which `Reading` takes as well
                    before, after = before[:-1].rstrip(), after[1:].lstrip()
                return Form(before, after, names[0], arguments[0])
    return None


def _shown(tokenizer: Any, text: str) -> str:
    shown: str = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True)
    return shown


class Reading:
    """One reply. Everything that `add` and `end` give, in order, is the reply's text and its calls."""

    def __init__(self, form: Form, tools: Sequence[Mapping[str, Any]]) -> None:
        self.form = form
        self.names: Collection[str] = {tool["function"]["name"] for tool in tools}
        self.calls: list[Call] = []
        self._rest = ""  # not read yet
        self._bounds = Bounds()  # of the call that `_rest` begins with
        self._value: tuple[Any, int] | None = None  # that call and where it ends, once it is whole
        self._inside = False  # behind `form.before`
        self._begun = False  # something was given

    def add(self, text: str) -> list[str | Call]:
        """What is certain now."""
        self._rest += text
        return list(self._read(last=False))

    def end(self) -> list[str | Call]:
        """What is left, when no text follows."""
        return list(self._read(last=True))

    def _read(self, *, last: bool) -> Iterator[str | Call]:
        while True:
            if not self._inside:
                text, self._inside = self._text(last)
                if text:
                    self._begun = True
                    yield text
                if not self._inside:
                    return
            found = self._call(last)
            if found is None:
                return
            self._inside, self._begun = False, True
            self._bounds, self._value = Bounds(), None
            if isinstance(found, str) and found:
                yield found
            elif not isinstance(found, str):
                self.calls += found
                yield from found

    def _text(self, last: bool) -> tuple[str, bool]:
        """The text up to where a call may begin, and whether one does. Spaces before a call are not text."""
        mark, rest = self.form.before, self._rest
        if mark:
            at, begins = rest.find(mark), mark in rest
        else:  # such a template has calls only in place of text
            at, begins = 0, not self._begun and rest.lstrip()[:1] in ("{", "[")
        if begins:
            self._rest = rest[at + len(mark) :]
            return rest[:at].rstrip(), True
        if last:
            self._rest = ""
            return ("" if self.calls and not rest.strip() else rest), False
        held = overlap(rest, mark)
        sure = rest[: len(rest) - held].rstrip()
        if len(rest) - held - len(sure) > SPACES:
            sure = rest[: len(rest) - held]
        self._rest = rest[len(sure) :]
        return sure, False

    def _call(self, last: bool) -> list[Call] | str | None:
        """The calls behind the mark, the mark itself as text if there are none, None if more has to come."""
        if self._value is None:
            if not last and not self._bounds.whole(self._rest):
                return None
            self._value = _decoded(self._rest)
        value, end = self._value
        if value is None:
            return self.form.before
        tail = self._rest[end:].lstrip()
        closed = tail.startswith(self.form.after)
        if not closed and not last and self.form.after.startswith(tail):
            return None
        calls = self._made(value)
        if calls is None or not (closed or self.form.after.startswith(tail)):
            return self.form.before
        self._rest = tail[len(self.form.after) :] if closed else ""
        return calls

    def _made(self, value: Any) -> list[Call] | None:
        """None if anything in it is not a call of an offered function."""
        found = []
        for one in value if isinstance(value, list) else [value]:
            name = one.get(self.form.name) if isinstance(one, dict) else None
            arguments = one.get(self.form.arguments) if isinstance(one, dict) else None
            if not isinstance(name, str) or name not in self.names or not isinstance(arguments, dict):
                return None
            found.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
        return found or None


class Bounds:
    """Where a JSON list or object ends, in a text that grows."""

    def __init__(self) -> None:
        self._depth = self._at = 0
        self._in_string = self._escaped = False

    def whole(self, text: str) -> bool:
        """Whether the text holds all of it, or begins with neither. `text`: the one of before, and more."""
        for character in text[self._at :]:
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = self._in_string
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += (character in "[{") - (character in "]}")
            if self._depth <= 0 and not character.isspace():
                return True
        return False


def overlap(text: str, mark: str) -> int:
    """The longest end of `text` that begins `mark`, which is short.

    >>> overlap("one <to", "<tool>"), overlap("one", "<tool>")
    (3, 0)
    """
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_number)


def _decoded(text: str) -> tuple[Any, int]:
    """The JSON value that the text begins with and where it ends; (None, 0) if it begins with no whole one."""
    begin = len(text) - len(text.lstrip())
    try:
        value, end = DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, 0
    return value, end
