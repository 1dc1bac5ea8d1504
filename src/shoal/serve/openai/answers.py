"""One request's completions on their way out: as JSON at the end, or as server-sent events while they come.

    Answer   sends one request's completions     Frame, choice   OpenAI's shapes, as dictionaries

Invariant: a client that leaves early frees its rows, and the streamed pieces add up to the whole answer.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from shoal.serve import proof
from shoal.serve.generation import Generation, Likely, Piece
from shoal.serve.openai.requests import ChatRequest, Common, CompletionRequest
from shoal.serve.openai.tools import CallReader, Form, WrittenCall
from shoal.serve.scheduler import ServeScheduler
from shoal.serve.threads import Threads
from shoal.serve.versions import LoadedModel

TextOf = Callable[[int], str]  # of one token


@dataclass(frozen=True)
class AnswerFrame:
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


def choice(
    chat: bool,
    index: int,
    text: str | None,
    finish: str | None,
    logprobs: Any,
    *,
    calls: Sequence[WrittenCall] = (),
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


def tool_call(call: WrittenCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_chunk(index: int, number: int, call: WrittenCall) -> dict[str, Any]:
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


@dataclass
class Answer:
    """One request's completions, on their way out."""

    asked: Common
    held: LoadedModel
    generations: list[Generation]
    chat: bool
    messages: Sequence[Any] = ()
    tools: Sequence[Any] = ()
    form: Form | None = None  # how the model writes calls of these
    _echoes: dict[tuple[int, ...], str] = field(default_factory=dict)  # the texts of prompts

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.frame = AnswerFrame(f"{prefix}-{secrets.token_hex(12)}", self.held.id, self.chat)

    async def respond(self, request: web.Request, scheduler: ServeScheduler, threads: Threads) -> web.StreamResponse:
        if self.asked.stream:
            for one in self.generations:
                one.queue = self.generations[0].queue
        async with submitted(scheduler, self.generations):
            if self.asked.stream:
                return await self._stream(request, threads)
            pieces = await asyncio.gather(*(_all(generation) for generation in self.generations))
        caller = self.generations[0].ask.caller
        text = await threads.run(caller, lambda: json.dumps(self._whole(pieces)))
        return web.Response(text=text, content_type="application/json")

    def _whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        choices, replies = [], []
        for index, (generation, own) in enumerate(zip(self.generations, pieces, strict=True)):
            text, finish = "".join(piece.text for piece in own), own[-1].finish
            likely = [token for piece in own for token in piece.tokens]
            reading = self._reading()
            parts = [part for piece in own for part in _parts(reading, piece)]
            shown = self._prompt_text(generation) + "".join(part for part in parts if isinstance(part, str))
            calls = [part for part in parts if isinstance(part, WrittenCall)]
            reason = _reason(reading, own[-1])
            logprobs = self._logprobs(generation, likely)
            choices.append(choice(self.chat, index, shown, reason, logprobs, calls=calls))
            if generation.ask.proof:
                made = proof.build(generation, finish or "", text, self.messages, self.tools)
                replies.append(made.model_dump(mode="json"))
        more: dict[str, Any] = {"seeds": [str(one.ask.seed) for one in self.generations], "weights": self.held.digest}
        if replies:
            more["replies"] = replies
        return self.frame.body(choices, chunk=False, usage=self._usage(), shoal=more)

    async def _stream(self, request: web.Request, threads: Threads) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        if self.chat:
            for index in range(len(self.generations)):
                opening = choice(True, index, "", None, None, first=True, chunk=True)
                await response.write(event(self.frame.body([opening], chunk=True)))
        offsets, readings = [0] * len(self.generations), [self._reading() for _ in self.generations]
        async for index, piece in _merged(self.generations):
            generation, reading = self.generations[index], readings[index]
            parts = _parts(reading, piece)
            text = "".join(part for part in parts if isinstance(part, str))
            if not self.chat and not offsets[index]:
                text = self._prompt_text(generation) + text
            logprobs = None
            if generation.ask.echo and not offsets[index]:  # of the whole prompt
                logprobs = await threads.run(
                    generation.ask.caller, partial(self._logprobs, generation, piece.tokens), generation.held
                )
            elif piece.tokens:
                logprobs = self._logprobs(generation, piece.tokens, offset=offsets[index])
            offsets[index] += len(text)
            for change in self._chunks(index, text, parts, _reason(reading, piece), logprobs, reading):
                await response.write(event(self.frame.body([change], chunk=True)))
        if self.asked.stream_options and self.asked.stream_options.include_usage:
            await response.write(event(self.frame.body([], chunk=True, usage=self._usage())))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunks(
        self,
        index: int,
        text: str,
        parts: Sequence[str | WrittenCall],
        finish: str | None,
        logprobs: Any,
        reading: CallReader | None,
    ) -> Iterator[dict[str, Any]]:
        """What a piece adds to a stream: its text, then its calls, then why the reply ends."""
        calls = [part for part in parts if isinstance(part, WrittenCall)]
        if text or logprobs is not None or (finish and not calls):
            yield choice(self.chat, index, text, None if calls else finish, logprobs, chunk=True)
        for number, call in enumerate(calls, len(reading.calls) - len(calls) if reading else 0):
            yield call_chunk(index, number, call)
        if calls and finish:
            yield choice(self.chat, index, None, finish, None, chunk=True)

    def _reading(self) -> CallReader | None:
        if not self.form:
            return None
        parallel = not (isinstance(self.asked, ChatRequest) and self.asked.parallel_tool_calls is False)
        return CallReader(self.form, self.tools, parallel=parallel)

    def _prompt_text(self, generation: Generation) -> str:
        echoes = isinstance(self.asked, CompletionRequest) and self.asked.echo
        if not echoes:
            return ""
        prompt = generation.ask.prompt
        if prompt not in self._echoes:
            self._echoes[prompt] = str(self.held.tokenizer.decode(list(prompt)))
        return self._echoes[prompt]

    def _logprobs(self, generation: Generation, likely: Sequence[Any], offset: int = 0) -> dict[str, Any] | None:
        if generation.ask.top is None:
            return None
        if self.chat:
            return chat_logprobs(self.held.text, likely)
        if generation.ask.echo and not offset:
            tokens = [*generation.echoed, *likely]
            return text_logprobs(self.held.text, tokens, first=generation.ask.prompt[0])
        return text_logprobs(self.held.text, likely, offset=offset)

    def _usage(self) -> dict[str, int]:
        prompts = {id(one.ask.prompt): len(one.ask.prompt) for one in self.generations}
        asked, made = sum(prompts.values()), sum(len(one.tokens) for one in self.generations)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


@asynccontextmanager
async def submitted(scheduler: ServeScheduler, generations: Sequence[Generation]) -> AsyncIterator[None]:
    """No row is left behind, however it ends. Raises BusyError, TooLargeError."""
    scheduler.submit(generations)
    try:
        yield
    finally:
        for generation in generations:
            generation.cancel()


def _parts(reading: CallReader | None, piece: Piece) -> Sequence[str | WrittenCall]:
    """The text and the calls that became certain with this piece."""
    if reading is None:
        return [piece.text]
    return reading.add(piece.text) + (reading.end() if piece.finish else [])


def _reason(reading: CallReader | None, piece: Piece) -> str | None:
    return "tool_calls" if reading and reading.calls and piece.finish == "stop" else piece.finish


async def _all(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation.pieces()]


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all, as they come, with the index of their generation. They share a queue."""
    index, left = {id(one): index for index, one in enumerate(generations)}, len(generations)
    while left:
        generation, piece = await generations[0].queue.get()
        left -= piece.finish is not None
        yield index[id(generation)], piece
