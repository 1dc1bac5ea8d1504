"""Responses in OpenAI's shape: one JSON body at the end, or server-sent events as tokens arrive.

    Answer   sends one request's completions     AnswerFrame, choice   OpenAI's objects, as dictionaries

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
from shoal.serve.generation import Generation, Piece, TokenLogprobs
from shoal.serve.openai.requests import ChatRequest, Common, CompletionRequest
from shoal.serve.openai.tools import CallFormat, CallReader, WrittenCall
from shoal.serve.scheduler import ServeScheduler
from shoal.serve.threads import Threads
from shoal.serve.versions import LoadedModel

TextOf = Callable[[int], str]  # of one token


@dataclass(frozen=True)
class AnswerFrame:
    """The fields that all chunks of an answer share."""

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
    """Return one choice, or in a chunk its delta. `first`: include the role."""
    reason = "stop" if finish == "cancelled" else finish
    body: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
    if not chat:
        return body | {"text": text or ""}
    message: dict[str, Any] = {"role": "assistant"} if first or not chunk else {}
    if text is not None:
        message["content"] = text
    if calls:
        message["tool_calls"] = [tool_call(call) for call in calls]
        if not chunk:
            message["content"] = text or None
    return body | {"delta" if chunk else "message": message}


def tool_call(call: WrittenCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_chunk(index: int, number: int, call: WrittenCall) -> dict[str, Any]:
    """Return a chunk of choice `index` with the whole call `number`."""
    delta = {"tool_calls": [{"index": number, **tool_call(call)}]}
    return {"index": index, "finish_reason": None, "logprobs": None, "delta": delta}


def chat_logprobs(text_of: TextOf, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(token.token, token.logprob)
        | {"top_logprobs": [entry(alternative, value) for alternative, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    text_of: TextOf, tokens: Sequence[TokenLogprobs], *, offset: int = 0, first: int | None = None
) -> dict[str, Any]:
    """`first`: an prompt_logprobs prompt's first token, which has no logprob."""
    words = [text_of(token.token) for token in tokens]
    values: list[float | None] = [token.logprob for token in tokens]
    tops = [_by_text(text_of, token) if token.top else None for token in tokens]
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


def _by_text(text_of: TextOf, token: TokenLogprobs) -> dict[str, float]:
    """Map texts of the top tokens and the sampled one to logprobs. For equal texts the likeliest wins."""
    by_text: dict[str, float] = {}
    for id, value in (*token.top, (token.token, token.logprob)):
        by_text.setdefault(text_of(id), value)
    return by_text


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@dataclass
class Answer:
    """One request's completions, on their way out."""

    params: Common
    loaded: LoadedModel
    generations: list[Generation]
    chat: bool
    messages: Sequence[Any] = ()
    tools: Sequence[Any] = ()
    form: CallFormat | None = None  # how the model writes tool calls
    _echoes: dict[tuple[int, ...], str] = field(default_factory=dict)  # decoded prompts

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.frame = AnswerFrame(f"{prefix}-{secrets.token_hex(12)}", self.loaded.id, self.chat)

    async def respond(self, request: web.Request, scheduler: ServeScheduler, threads: Threads) -> web.StreamResponse:
        if self.params.stream:
            for generation in self.generations:
                generation.queue = self.generations[0].queue
        async with submitted(scheduler, self.generations):
            if self.params.stream:
                return await self._stream(request, threads)
            pieces = await asyncio.gather(*(_collect(generation) for generation in self.generations))
        caller = self.generations[0].ask.caller
        text = await threads.run(caller, lambda: json.dumps(self._whole(pieces)))
        return web.Response(text=text, content_type="application/json")

    def _whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        choices, replies = [], []
        for index, (generation, its_pieces) in enumerate(zip(self.generations, pieces, strict=True)):
            text, finish = "".join(piece.text for piece in its_pieces), its_pieces[-1].finish
            likely = [token for piece in its_pieces for token in piece.tokens]
            reader = self._new_reader()
            parts = [part for piece in its_pieces for part in _parts(reader, piece)]
            shown = self._prompt_text(generation) + "".join(part for part in parts if isinstance(part, str))
            calls = [part for part in parts if isinstance(part, WrittenCall)]
            reason = _reason(reader, its_pieces[-1])
            logprobs = self._logprobs(generation, likely)
            choices.append(choice(self.chat, index, shown, reason, logprobs, calls=calls))
            if generation.ask.proof:
                reply = proof.build(generation, finish or "", text, self.messages, self.tools)
                replies.append(reply.model_dump(mode="json"))
        more: dict[str, Any] = {
            "seeds": [str(generation.ask.seed) for generation in self.generations],
            "weights": self.loaded.digest,
        }
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
        offsets, readers = [0] * len(self.generations), [self._new_reader() for _ in self.generations]
        async for index, piece in _merged(self.generations):
            generation, reader = self.generations[index], readers[index]
            parts = _parts(reader, piece)
            text = "".join(part for part in parts if isinstance(part, str))
            if not self.chat and not offsets[index]:
                text = self._prompt_text(generation) + text
            logprobs = None
            if generation.ask.echo and not offsets[index]:  # for a whole prompt: slow
                logprobs = await threads.run(
                    generation.ask.caller, partial(self._logprobs, generation, piece.tokens), generation.loaded
                )
            elif piece.tokens:
                logprobs = self._logprobs(generation, piece.tokens, offset=offsets[index])
            offsets[index] += len(text)
            for change in self._chunks(index, text, parts, _reason(reader, piece), logprobs, reader):
                await response.write(event(self.frame.body([change], chunk=True)))
        if self.params.stream_options and self.params.stream_options.include_usage:
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
        reader: CallReader | None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the choices of a piece: its text, its calls, then the finish reason."""
        calls = [part for part in parts if isinstance(part, WrittenCall)]
        if text or logprobs is not None or (finish and not calls):
            yield choice(self.chat, index, text, None if calls else finish, logprobs, chunk=True)
        for number, call in enumerate(calls, len(reader.calls) - len(calls) if reader else 0):
            yield call_chunk(index, number, call)
        if calls and finish:
            yield choice(self.chat, index, None, finish, None, chunk=True)

    def _new_reader(self) -> CallReader | None:
        if not self.form:
            return None
        parallel = not (isinstance(self.params, ChatRequest) and self.params.parallel_tool_calls is False)
        return CallReader(self.form, self.tools, parallel=parallel)

    def _prompt_text(self, generation: Generation) -> str:
        echoes = isinstance(self.params, CompletionRequest) and self.params.echo
        if not echoes:
            return ""
        prompt = generation.ask.prompt
        if prompt not in self._echoes:
            self._echoes[prompt] = str(self.loaded.tokenizer.decode(list(prompt)))
        return self._echoes[prompt]

    def _logprobs(self, generation: Generation, likely: Sequence[Any], offset: int = 0) -> dict[str, Any] | None:
        if generation.ask.top is None:
            return None
        if self.chat:
            return chat_logprobs(self.loaded.text, likely)
        if generation.ask.echo and not offset:
            tokens = [*generation.prompt_logprobs, *likely]
            return text_logprobs(self.loaded.text, tokens, first=generation.ask.prompt[0])
        return text_logprobs(self.loaded.text, likely, offset=offset)

    def _usage(self) -> dict[str, int]:
        prompts = {id(generation.ask.prompt): len(generation.ask.prompt) for generation in self.generations}
        prompt_tokens = sum(prompts.values())
        tokens = sum(len(generation.tokens) for generation in self.generations)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


@asynccontextmanager
async def submitted(scheduler: ServeScheduler, generations: Sequence[Generation]) -> AsyncIterator[None]:
    """Submit completions and cancel them on exit, so no row outlives its request. Raise BusyError or RequestError."""
    scheduler.submit(generations)
    try:
        yield
    finally:
        for generation in generations:
            generation.cancel()


def _parts(reader: CallReader | None, piece: Piece) -> Sequence[str | WrittenCall]:
    """Return the text and calls that this piece completes."""
    if reader is None:
        return [piece.text]
    return reader.add(piece.text) + (reader.end() if piece.finish else [])


def _reason(reader: CallReader | None, piece: Piece) -> str | None:
    return "tool_calls" if reader and reader.calls and piece.finish == "stop" else piece.finish


async def _collect(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation.pieces()]


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield all pieces as they arrive, with their generation's index. The generations share a queue."""
    index, left = {id(generation): index for index, generation in enumerate(generations)}, len(generations)
    while left:
        generation, piece = await generations[0].queue.get()
        left -= piece.finish is not None
        yield index[id(generation)], piece
