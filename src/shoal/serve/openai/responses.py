"""Responses in OpenAI's shape: one JSON body at the end, or server-sent events as tokens arrive.

    ApiResponse   sends one request's completions     Envelope, choice   OpenAI's objects, as dictionaries

Invariant: when a client disconnects, its rows in the batch are freed. Streamed pieces add up to the whole response.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from shoal.serve import proof
from shoal.serve.generation import Generation, Piece, TokenLogprobs
from shoal.serve.openai.requests import CommonParams, CompletionRequest
from shoal.serve.scheduler import ServeScheduler
from shoal.serve.threads import FairThreadPool
from shoal.serve.versions import LoadedModel

TokenText = Callable[[int], str]  # decodes one token


@dataclass(frozen=True)
class Envelope:
    """The fields that all chunks of a response share."""

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
    text: str,
    finish: str | None,
    logprobs: Any,
    *,
    first: bool = False,
    chunk: bool = False,
) -> dict[str, Any]:
    """Return one choice, or its delta in a chunk. With `first`, include the role."""
    reason = "stop" if finish == "cancelled" else finish
    body: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
    if not chat:
        return body | {"text": text}
    message = ({"role": "assistant"} if first or not chunk else {}) | {"content": text}
    return body | {"delta" if chunk else "message": message}


def chat_logprobs(text_of: TokenText, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
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
    text_of: TokenText, tokens: Sequence[TokenLogprobs], *, offset: int = 0, first: int | None = None
) -> dict[str, Any]:
    """Return the logprobs of a text completion. `first` is the first token of an echoed prompt; it has no logprob."""
    texts = [text_of(token.token) for token in tokens]
    values: list[float | None] = [token.logprob for token in tokens]
    tops = [_top_by_text(text_of, token) if token.top else None for token in tokens]
    if first is not None:
        texts, values, tops = [text_of(first), *texts], [None, *values], [None, *tops]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def _top_by_text(text_of: TokenText, token: TokenLogprobs) -> dict[str, float]:
    """Map the texts of the top tokens and the sampled token to logprobs. Among equal texts the likeliest token wins."""
    by_text: dict[str, float] = {}
    for id, value in (*token.top, (token.token, token.logprob)):
        by_text.setdefault(text_of(id), value)
    return by_text


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@dataclass
class ApiResponse:
    """The response to one request, whole or streamed."""

    params: CommonParams
    loaded: LoadedModel
    generations: list[Generation]
    chat: bool
    messages: Sequence[Any] = ()
    _prompt_texts: dict[tuple[int, ...], str] = field(default_factory=dict)  # decoded prompts, to echo

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.envelope = Envelope(f"{prefix}-{secrets.token_hex(12)}", self.loaded.id, self.chat)

    def submit(self, scheduler: ServeScheduler) -> None:
        """Submit the completions, which `send` releases. Raise BusyError or RequestError."""
        if self.params.stream:
            for generation in self.generations:
                generation.queue = self.generations[0].queue
        scheduler.submit(self.generations)

    async def send(
        self, request: web.Request, scheduler: ServeScheduler, threads: FairThreadPool
    ) -> web.StreamResponse:
        """Send the submitted completions."""
        try:
            if self.params.stream:
                return await self._stream(request, threads)
            pieces = await asyncio.gather(*(_collect(generation) for generation in self.generations))
            caller = self.generations[0].request.caller
            text = await threads.run(caller, lambda: json.dumps(self._whole(pieces)))
            response = web.Response(text=text, content_type="application/json")
            await response.prepare(request)
            await response.write_eof()  # returns once all is sent, except what the connection's buffers hold
            return response
        finally:  # no row outlives its request
            scheduler.release(self.generations)

    def _whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        choices, replies = [], []
        for index, (generation, own_pieces) in enumerate(zip(self.generations, pieces, strict=True)):
            text, finish = "".join(piece.text for piece in own_pieces), own_pieces[-1].finish
            tokens = [token for piece in own_pieces for token in piece.tokens]
            logprobs = self._logprobs(generation, tokens)
            choices.append(choice(self.chat, index, self._echo(generation) + text, finish, logprobs))
            if generation.request.proof:
                reply = proof.build(generation, finish or "", text, self.messages)
                replies.append(reply.model_dump(mode="json"))
        more: dict[str, Any] = {
            "seeds": [str(generation.request.seed) for generation in self.generations],
            "weights": self.loaded.digest,
        }
        if replies:
            more["replies"] = replies
        return self.envelope.body(choices, chunk=False, usage=self._usage(), shoal=more)

    async def _stream(self, request: web.Request, threads: FairThreadPool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        if self.chat:
            for index in range(len(self.generations)):
                opening = choice(True, index, "", None, None, first=True, chunk=True)
                await response.write(event(self.envelope.body([opening], chunk=True)))
        offsets = [0] * len(self.generations)
        async for index, piece in _merged(self.generations):
            generation, text = self.generations[index], piece.text
            if not self.chat and not offsets[index]:
                text = self._echo(generation) + text
            logprobs = None
            if generation.request.echo and not offsets[index]:  # slow, because it covers the whole prompt
                logprobs = await threads.run(
                    generation.request.caller, partial(self._logprobs, generation, piece.tokens), generation.loaded
                )
            elif piece.tokens:
                logprobs = self._logprobs(generation, piece.tokens, offset=offsets[index])
            offsets[index] += len(text)
            if text or logprobs is not None or piece.finish:
                delta = choice(self.chat, index, text, piece.finish, logprobs, chunk=True)
                await response.write(event(self.envelope.body([delta], chunk=True)))
        if self.params.stream_options and self.params.stream_options.include_usage:
            await response.write(event(self.envelope.body([], chunk=True, usage=self._usage())))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _echo(self, generation: Generation) -> str:
        """Return the prompt's text if the request asks for it."""
        if not (isinstance(self.params, CompletionRequest) and self.params.echo):
            return ""
        prompt = generation.request.prompt
        if prompt not in self._prompt_texts:
            self._prompt_texts[prompt] = str(self.loaded.tokenizer.decode(list(prompt)))
        return self._prompt_texts[prompt]

    def _logprobs(
        self, generation: Generation, tokens: Sequence[TokenLogprobs], offset: int = 0
    ) -> dict[str, Any] | None:
        if generation.request.top is None:
            return None
        if self.chat:
            return chat_logprobs(self.loaded.text, tokens)
        if generation.request.echo and not offset:
            tokens = [*generation.prompt_logprobs, *tokens]
            return text_logprobs(self.loaded.text, tokens, first=generation.request.prompt[0])
        return text_logprobs(self.loaded.text, tokens, offset=offset)

    def _usage(self) -> dict[str, int]:
        prompts = {id(generation.request.prompt): len(generation.request.prompt) for generation in self.generations}
        prompt_tokens = sum(prompts.values())
        tokens = sum(len(generation.tokens) for generation in self.generations)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


async def _collect(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation.pieces()]


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield all pieces as they arrive, with their generation's index. The generations share a queue."""
    indexes, unfinished = {id(generation): index for index, generation in enumerate(generations)}, len(generations)
    while unfinished:
        generation, piece = await generations[0].queue.get()
        unfinished -= piece.finish is not None
        yield indexes[id(generation)], piece
