"""Tool calls: infer the model's call format from its chat template, and parse calls out of replies.

    detect_call_format   render a conversation of sentinels with the template -> the format of its calls
    CallReader           the text of a reply, piece by piece -> text and calls

A call is a JSON object with name and arguments between two marks, as Qwen, Llama 3, Hermes and many other templates write
it. A template with another notation is refused unless a call is forced.
Invariant: nothing that the model wrote is lost. Text that is not a complete call of an offered function stays text. A
streamed reply gives the same result as one that is not streamed. Each character of a call is read once.
Left out: notations of single model families; separating reasoning from text.
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
from shoal.serve.prompt import render

MAX_SPACES = 1000  # held back because a call may follow
SPACED = re.compile(r"\s*")


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: `before`, a JSON object or a list of them, `after`. Surrounding spaces are ignored."""

    before: str  # "": calls only at the start of a reply
    after: str  # the end of the reply also ends a call
    name: str = "name"  # key of the function's name
    arguments: str = "arguments"
    shown: frozenset[int] = frozenset()  # control tokens in the marks


FORCED_FORMAT = CallFormat("", "")  # the format of calls that a schema forces
NAME, ARGUMENTS = "probefunction", {"probekey": "probevalue"}
QUESTION, ANSWER = {"role": "user", "content": "probequestion"}, "answerprobed"
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
TOOL_CALL = {"type": "function", "id": "probe0000", "function": {"name": NAME, "arguments": ARGUMENTS}}


@dataclass(frozen=True)
class WrittenCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])  # Mistral's templates demand nine characters


def offered_tools(params: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools for the template; none if tool_choice rules them out. Raise RequestError."""
    if not params.tools:
        if params.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice goes with tools", param="tool_choice")
        return []
    if params.tool_choice == "none":
        return []
    if params.tool_choice in (None, "auto") and any(tool.function.strict for tool in params.tools):
        raise RequestError(
            "tools: strict goes with a tool_choice that forces a call; leave it out where the model chooses",
            param="tools",
        )
    return [tool.model_dump(exclude_none=True) for tool in params.tools]


def forced_schema(params: ChatRequest) -> dict[str, Any] | None:
    """Return the JSON schema of the calls that tool_choice forces, if it does. Raise RequestError."""
    if not params.tools or params.tool_choice in (None, "auto", "none"):
        return None
    named = params.tool_choice.function.name if isinstance(params.tool_choice, NamedTool) else None
    functions = [tool.function for tool in params.tools if named in (None, tool.function.name)]
    if not functions:
        raise RequestError(f"tool_choice: no tool is called {named!r}", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": function.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    limit = {} if named is None and params.parallel_tool_calls is not False else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit}


def detect_call_format(tokenizer: Any, *, is_forced: bool = False) -> CallFormat:
    """Return the template's call format. Raise RequestError if it has no tools; PromptError if it refuses the probe."""
    if render(tokenizer, [QUESTION]) == render(tokenizer, [QUESTION], [PROBE]):
        raise RequestError("tools: this model's chat template has none", param="tools")
    if is_forced:
        return FORCED_FORMAT
    plain = render(tokenizer, [QUESTION, {"role": "assistant", "content": ANSWER}], [PROBE])
    called = render(tokenizer, [QUESTION, {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}], [PROBE])
    call = called[len(os.path.commonprefix([plain, called])) :].removesuffix(plain.rpartition(ANSWER)[2])
    form = _find_json_call(call)
    if form is None or not _round_trips(form, call):
        raise RequestError(
            "tools: this model's template does not write calls as JSON objects; a tool_choice that forces a call works",
            param="tools",
        )
    marks = call[: call.rfind(form.after) + len(form.after)] + form.before + form.after
    control = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return replace(form, shown=frozenset(id for id, text in control.items() if text in marks))


def shown_tokens(tokenizer: Any, tools: Sequence[Any]) -> frozenset[int]:
    """Return the control tokens to keep in a reply's text when these tools were offered."""
    try:
        return detect_call_format(tokenizer).shown if tools else frozenset()
    except RequestError:  # such tools cannot have been offered
        return frozenset()


def _round_trips(form: CallFormat, call: str) -> bool:
    reader = CallReader(form, [PROBE])
    reader.add(call)
    reader.end()
    return [(call.name, json.loads(call.arguments)) for call in reader.calls] == [(NAME, ARGUMENTS)]


def _find_json_call(text: str) -> CallFormat | None:
    """Find the JSON object with the probe's name and arguments; the text around it gives the marks."""
    for brace in re.finditer("{", text):
        at = brace.start()
        value, end = _decoded(text[at:])
        if isinstance(value, dict):
            names = [key for key, item in value.items() if item == NAME]
            arguments = [key for key, item in value.items() if item == ARGUMENTS]
            if names and arguments:
                before, after = text[:at].strip(), text[at + end :].strip()
                if before.endswith("[") and after.startswith("]"):  # `CallReader` reads lists too
                    before, after = before[:-1].rstrip(), after[1:].lstrip()
                return CallFormat(before, after, names[0], arguments[0])
    return None


class CallReader:
    """Split one reply into text and calls. The results of `add` and `end`, in order, are the whole reply."""

    def __init__(self, form: CallFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> None:
        """`parallel`: allow several calls; otherwise drop all after the first."""
        self.form, self.parallel = form, parallel
        self.names = {tool["function"]["name"] for tool in tools}
        self.calls: list[WrittenCall] = []
        self._rest = ""  # not parsed yet
        self._inside = False  # after `form.before`
        self._started = False  # some text or call was returned
        self._reset()

    def _reset(self) -> None:
        """Reset the state of the call at the start of `_rest`."""
        self._bounds = Bounds()
        self._parsed: tuple[Any, int] | None = None  # the JSON value and where it ends, once complete

    def add(self, text: str) -> list[str | WrittenCall]:
        """Add text; return the text and calls that are complete."""
        self._rest += text
        return list(self._read(last=False))

    def end(self) -> list[str | WrittenCall]:
        """Return the remaining text and calls; no text follows."""
        return list(self._read(last=True))

    def _read(self, *, last: bool) -> Iterator[str | WrittenCall]:
        while True:
            if not self._inside:
                text, self._inside = self._text(last)
                if text:
                    self._started = True
                    yield text
                if not self._inside:
                    return
            result = self._calls(last)
            if result is None:
                return
            self._inside, self._started = False, True
            self._reset()
            if isinstance(result, str) and result:
                yield result
            elif not isinstance(result, str):
                calls = result if self.parallel else result[: 1 - len(self.calls)]
                self.calls += calls
                yield from calls

    def _text(self, last: bool) -> tuple[str, bool]:
        """Return the text before the next possible call, and whether a call begins. Spaces before a call are dropped."""
        mark, rest = self.form.before, self._rest
        if mark:
            at, begins = rest.find(mark), mark in rest
        else:  # without a mark, calls are the whole reply
            at, begins = 0, not self._started and rest.lstrip()[:1] in ("{", "[")
        if begins:
            self._rest = rest[at + len(mark) :]
            return rest[:at].rstrip(), True
        if last:
            self._rest = ""
            return ("" if self.calls and not rest.strip() else rest), False
        pending = overlap(rest, mark)
        certain = rest[: len(rest) - pending].rstrip()
        if len(rest) - pending - len(certain) > MAX_SPACES:
            certain = rest[: len(rest) - pending]
        self._rest = rest[len(certain) :]
        return certain, False

    def _calls(self, last: bool) -> list[WrittenCall] | str | None:
        """Return the calls after the mark, the mark as text if there are none, or None if more text is needed."""
        rest, mark, after = self._rest, self.form.before, self.form.after
        begin = SPACED.match(rest).end()  # type: ignore[union-attr]
        if begin == len(rest) <= MAX_SPACES and not last:
            return None
        if rest[begin : begin + 1] not in ("{", "["):
            return mark
        if self._parsed is None:
            if not last and not self._bounds.whole(rest):
                return None
            self._parsed = _decoded(rest)
        value, end = self._parsed
        if value is None:
            return mark
        tail = rest[end:].lstrip()
        closed = tail.startswith(after)
        if not closed and not last and after.startswith(tail):
            return None
        calls = self._parse_calls(value)
        if calls is None or not (closed or after.startswith(tail)):
            return mark
        self._rest = tail[len(after) :] if closed else ""
        return calls

    def _parse_calls(self, value: Any) -> list[WrittenCall] | None:
        """Return the calls in a JSON value; None if any item is not a call of an offered function."""
        calls = []
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                return None
            name, arguments = item.get(self.form.name), item.get(self.form.arguments)
            if not isinstance(name, str) or name not in self.names or not isinstance(arguments, dict):
                return None
            try:
                calls.append(WrittenCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
            except ValueError:  # NaN or infinity
                return None
        return calls or None


class Bounds:
    """Find the end of a JSON list or object in a growing text."""

    def __init__(self) -> None:
        self._depth = self._at = 0
        self._in_string = self._escaped = False

    def whole(self, text: str) -> bool:
        """Return whether the value is complete, or is no list or object. `text` extends the previous call's text."""
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
    """Return the length of the longest suffix of `text` that is a prefix of `mark`.

    >>> overlap("one <to", "<tool>"), overlap("one", "<tool>")
    (3, 0)
    """
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _decoded(text: str) -> tuple[Any, int]:
    """Decode the JSON value at the start of a text; return it and its end, or (None, 0) if it is incomplete."""
    begin = len(text) - len(text.lstrip())
    try:
        value, end = DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, 0
    return value, end
