"""OpenAI's shapes: completions and chunks of both routes, logprobs, usage, errors. Pure functions to dictionaries.

Called by `routes`.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.serve.decoding.generation import Likely
from shoal.serve.openai.tools import Call

TextOf = Callable[[int], str]  # of one token


@dataclass(frozen=True)
class Frame:
    """What all chunks of an answer share."""

    id: str
    model: str
    chat: bool
    created_s: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[dict[str, Any]], *, chunk: bool, **more: Any) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        if chunk and self.chat:
            kind += ".chunk"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def error(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def choice(
    chat: bool,
    index: int,
    text: str | None,
    finish: str | None,
    logprobs: Any,
    *,
    calls: Sequence[Call] = (),
    first: bool = False,
    chunk: bool = False,
) -> dict[str, Any]:
    """One choice; in a chunk, what is new of it. `first`: the chunk that names the role."""
    reason = "stop" if finish == "cancelled" else finish
    body: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
    if not chat:
        return body | {"text": text or ""}
    said: dict[str, Any] = {"role": "assistant"} if first or not chunk else {}
    if text is not None:
        said["content"] = text
    if calls:
        said["tool_calls"] = [tool_call(call) for call in calls]
        if not chunk:
            said["content"] = text or None
    return body | {"delta" if chunk else "message": said}


def tool_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_chunk(index: int, number: int, call: Call) -> dict[str, Any]:
    """A chunk of choice `index` with its call `number`, whole."""
    delta = {"tool_calls": [{"index": number, **tool_call(call)}]}
    return {"index": index, "finish_reason": None, "logprobs": None, "delta": delta}


def chat_logprobs(text_of: TextOf, tokens: Sequence[Likely]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(token, value) for token, value in one.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    text_of: TextOf, tokens: Sequence[Likely], *, offset: int = 0, first: int | None = None
) -> dict[str, Any]:
    """`first`: an echoed prompt's first token, which has no logprob."""
    words = [text_of(one.token) for one in tokens]
    values: list[float | None] = [one.logprob for one in tokens]
    tops = [_by_text(text_of, one) if one.top else None for one in tokens]
    if first is not None:
        words, values, tops = [text_of(first), *words], [None, *values], [None, *tops]
    offsets = []
    for word in words:
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": words,
        "token_logprobs": values,
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def _by_text(text_of: TextOf, one: Likely) -> dict[str, float]:
    """The likeliest tokens and the one that stands there. Of tokens with the same text, the likeliest counts."""
    found: dict[str, float] = {}
    for token, value in (*one.top, (one.token, one.logprob)):
        found.setdefault(text_of(token), value)
    return found


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
