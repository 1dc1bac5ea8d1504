"""Tools, as far as the model's chat template has them: how it writes a call is read from what it renders.

    form_of    a conversation of sentinels that the template renders -> the form that reads its call back
    Reading    the text of a reply, piece by piece -> text and calls

A call is a JSON object with name and arguments between two marks, as Qwen, Llama 3, Hermes and most templates write it; a
template that writes calls in another way is refused, unless the reply's form is forced.
Invariant: nothing that the model wrote is lost. Text that is not a complete call of an offered function stays text.
A streamed reply gives the same result as one that is not streamed. Each character of a call is read once.
Left out: calls in notations of single families; reasoning apart from the text.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.serve.errors import RequestError
from shoal.serve.openai.requests import ChatRequest, NamedTool
from shoal.serve.prompt import written

SPACES = 1000  # that are held because a call may follow
SPACED = re.compile(r"\s*")


@dataclass(frozen=True)
class Form:
    """How a call is written: `before`, a JSON object or a list of them, `after`. Spaces around it do not count."""

    before: str  # "": calls stand only at a reply's beginning
    after: str  # the reply's end ends a call, too
    name: str = "name"  # keys of the object
    arguments: str = "arguments"
    shown: frozenset[int] = frozenset()  # control tokens that the marks are made of


FORCED = Form("", "")  # how calls are written that the reply has to be
NAME, ARGUMENTS = "probefunction", {"probekey": "probevalue"}
ASKED, SAID = {"role": "user", "content": "probequestion"}, "answerprobed"
PROBE = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"probekey": {"type": "string", "description": "probe"}},
            "required": ["probekey"],
        },
    },
}
CALLED = {"type": "function", "id": "probe0000", "function": {"name": NAME, "arguments": ARGUMENTS}}


@dataclass(frozen=True)
class WrittenCall:
    name: str
    arguments: str  # JSON
    id: str = field(
        default_factory=lambda: secrets.token_hex(5)[:9]
    )  # nine characters, which Mistral's templates demand


def offered(asked: ChatRequest) -> list[dict[str, Any]]:
    """The tools as the template gets them; none if the model is not to call any. Raises RequestError."""
    if not asked.tools:
        if asked.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice goes with tools", param="tool_choice")
        return []
    if asked.tool_choice == "none":
        return []
    if asked.tool_choice in (None, "auto") and any(tool.function.strict for tool in asked.tools):
        raise RequestError(
            "tools: strict goes with a tool_choice that forces a call; leave it out where the model chooses",
            param="tools",
        )
    return [tool.model_dump(exclude_none=True) for tool in asked.tools]


def forced(asked: ChatRequest) -> dict[str, Any] | None:
    """The schema of the calls that the reply has to be, as a list in JSON (`FORCED`). Raises RequestError."""
    if not asked.tools or asked.tool_choice in (None, "auto", "none"):
        return None
    named = asked.tool_choice.function.name if isinstance(asked.tool_choice, NamedTool) else None
    functions = [tool.function for tool in asked.tools if named in (None, tool.function.name)]
    if not functions:
        raise RequestError(f"tool_choice: no tool is called {named!r}", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one.name}, "arguments": one.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    many = {} if named is None and asked.parallel_tool_calls is not False else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **many}


def form_of(tokenizer: Any, *, is_forced: bool = False) -> Form:
    """Raises RequestError for a template without tools, PromptError for one that refuses such a conversation."""
    if written(tokenizer, [ASKED]) == written(tokenizer, [ASKED], [PROBE]):
        raise RequestError("tools: this model's chat template has none", param="tools")
    if is_forced:
        return FORCED
    said = written(tokenizer, [ASKED, {"role": "assistant", "content": SAID}], [PROBE])
    called = written(tokenizer, [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}], [PROBE])
    call = called[len(os.path.commonprefix([said, called])) :].removesuffix(said.rpartition(SAID)[2])
    form = _in_json(call)
    if form is None or not _reads(form, call):
        raise RequestError(
            "tools: this model's template does not write calls as JSON objects; a tool_choice that forces a call works",
            param="tools",
        )
    marks = call[: call.rfind(form.after) + len(form.after)] + form.before + form.after
    control = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return replace(form, shown=frozenset(id for id, text in control.items() if text in marks))


def shown_with(tokenizer: Any, tools: Sequence[Any]) -> frozenset[int]:
    """The control tokens that are part of a reply's text where these tools were offered."""
    try:
        return form_of(tokenizer).shown if tools else frozenset()
    except RequestError:  # they cannot have been
        return frozenset()


def _reads(form: Form, call: str) -> bool:
    reading = CallReader(form, [PROBE])
    reading.add(call)
    reading.end()
    return [(one.name, json.loads(one.arguments)) for one in reading.calls] == [(NAME, ARGUMENTS)]


def _in_json(text: str) -> Form | None:
    """The form of a JSON object that has name and arguments, whatever stands around it."""
    for brace in re.finditer("{", text):
        at = brace.start()
        value, end = _decoded(text[at:])
        if isinstance(value, dict):
            names = [key for key, one in value.items() if one == NAME]
            arguments = [key for key, one in value.items() if one == ARGUMENTS]
            if names and arguments:
                before, after = text[:at].strip(), text[at + end :].strip()
                if before.endswith("[") and after.startswith("]"):  # a list, which `CallReader` takes as well
                    before, after = before[:-1].rstrip(), after[1:].lstrip()
                return Form(before, after, names[0], arguments[0])
    return None


class CallReader:
    """One reply. Everything that `add` and `end` give, in order, is the reply's text and its calls."""

    def __init__(self, form: Form, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> None:
        """`parallel`: more than one call; otherwise those behind the first are left out."""
        self.form, self.parallel = form, parallel
        self.names = {tool["function"]["name"] for tool in tools}
        self.calls: list[WrittenCall] = []
        self._rest = ""  # not read yet
        self._inside = False  # behind `form.before`
        self._begun = False  # something was given
        self._forget()

    def _forget(self) -> None:
        """What is known of the call that `_rest` begins with."""
        self._bounds = Bounds()
        self._value: tuple[Any, int] | None = None  # the JSON and where it ends, once it is whole

    def add(self, text: str) -> list[str | WrittenCall]:
        """What is certain now."""
        self._rest += text
        return list(self._read(last=False))

    def end(self) -> list[str | WrittenCall]:
        """What is left, when no text follows."""
        return list(self._read(last=True))

    def _read(self, *, last: bool) -> Iterator[str | WrittenCall]:
        while True:
            if not self._inside:
                text, self._inside = self._text(last)
                if text:
                    self._begun = True
                    yield text
                if not self._inside:
                    return
            found = self._calls(last)
            if found is None:
                return
            self._inside, self._begun = False, True
            self._forget()
            if isinstance(found, str) and found:
                yield found
            elif not isinstance(found, str):
                found = found if self.parallel else found[: 1 - len(self.calls)]
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

    def _calls(self, last: bool) -> list[WrittenCall] | str | None:
        """The calls behind the mark, the mark itself as text if there are none, None if more has to come."""
        rest, mark, after = self._rest, self.form.before, self.form.after
        begin = SPACED.match(rest).end()  # type: ignore[union-attr]
        if begin == len(rest) <= SPACES and not last:
            return None
        if rest[begin : begin + 1] not in ("{", "["):
            return mark
        if self._value is None:
            if not last and not self._bounds.whole(rest):
                return None
            self._value = _decoded(rest)
        value, end = self._value
        if value is None:
            return mark
        tail = rest[end:].lstrip()
        closed = tail.startswith(after)
        if not closed and not last and after.startswith(tail):
            return None
        calls = self._made(value)
        if calls is None or not (closed or after.startswith(tail)):
            return mark
        self._rest = tail[len(after) :] if closed else ""
        return calls

    def _made(self, value: Any) -> list[WrittenCall] | None:
        """The calls in a JSON value; None if anything of it is not a call of an offered function."""
        found = []
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                return None
            name, arguments = one.get(self.form.name), one.get(self.form.arguments)
            if not isinstance(name, str) or name not in self.names or not isinstance(arguments, dict):
                return None
            try:
                found.append(WrittenCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
            except ValueError:  # numbers that JSON lacks
                return None
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
