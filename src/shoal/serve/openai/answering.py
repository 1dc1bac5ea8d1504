"""One request's completions on their way out: as JSON at the end, or as server-sent events while they come.

Invariant: a client that leaves early frees its rows, and what is streamed adds up to what the whole answer would be.
Called by `routes`.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from shoal.serve import proof
from shoal.serve.decoding.generation import Generation, Piece
from shoal.serve.decoding.scheduler import Scheduler
from shoal.serve.openai import answers
from shoal.serve.openai.forms import Form
from shoal.serve.openai.requests import ChatRequest, Common, CompletionRequest
from shoal.serve.openai.tools import Call, Reading
from shoal.serve.threads import Threads
from shoal.serve.versions import Held


@dataclass
class Answer:
    """One request's completions, on their way out."""

    asked: Common
    held: Held
    generations: list[Generation]
    chat: bool
    messages: Sequence[Any] = ()
    tools: Sequence[Any] = ()
    form: Form | None = None  # how the model writes calls of these
    _echoes: dict[tuple[int, ...], str] = field(default_factory=dict)  # the texts of prompts

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.frame = answers.Frame(f"{prefix}-{secrets.token_hex(12)}", self.held.id, self.chat)

    async def respond(self, request: web.Request, scheduler: Scheduler, threads: Threads) -> web.StreamResponse:
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
            calls = [part for part in parts if isinstance(part, Call)]
            reason = _reason(reading, own[-1])
            logprobs = self._logprobs(generation, likely)
            choices.append(answers.choice(self.chat, index, shown, reason, logprobs, calls=calls))
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
                opening = answers.choice(True, index, "", None, None, first=True, chunk=True)
                await response.write(answers.event(self.frame.body([opening], chunk=True)))
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
            for choice in self._chunks(index, text, parts, _reason(reading, piece), logprobs, reading):
                await response.write(answers.event(self.frame.body([choice], chunk=True)))
        if self.asked.stream_options and self.asked.stream_options.include_usage:
            await response.write(answers.event(self.frame.body([], chunk=True, usage=self._usage())))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunks(
        self,
        index: int,
        text: str,
        parts: Sequence[str | Call],
        finish: str | None,
        logprobs: Any,
        reading: Reading | None,
    ) -> Iterator[dict[str, Any]]:
        """What a piece adds to a stream: its text, then its calls, then why the reply ends."""
        calls = [part for part in parts if isinstance(part, Call)]
        if text or logprobs is not None or (finish and not calls):
            yield answers.choice(self.chat, index, text, None if calls else finish, logprobs, chunk=True)
        for number, call in enumerate(calls, len(reading.calls) - len(calls) if reading else 0):
            yield answers.call_chunk(index, number, call)
        if calls and finish:
            yield answers.choice(self.chat, index, None, finish, None, chunk=True)

    def _reading(self) -> Reading | None:
        if not self.form:
            return None
        parallel = not (isinstance(self.asked, ChatRequest) and self.asked.parallel_tool_calls is False)
        return Reading(self.form, self.tools, parallel=parallel)

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
            return answers.chat_logprobs(self.held.text, likely)
        if generation.ask.echo and not offset:
            tokens = [*generation.echoed, *likely]
            return answers.text_logprobs(self.held.text, tokens, first=generation.ask.prompt[0])
        return answers.text_logprobs(self.held.text, likely, offset=offset)

    def _usage(self) -> dict[str, int]:
        prompts = {id(one.ask.prompt): len(one.ask.prompt) for one in self.generations}
        return answers.usage(sum(prompts.values()), sum(len(one.tokens) for one in self.generations))


@asynccontextmanager
async def submitted(scheduler: Scheduler, generations: Sequence[Generation]) -> AsyncIterator[None]:
    """No row is left behind, however it ends. Raises BusyError, TooLargeError."""
    scheduler.submit(generations)
    try:
        yield
    finally:
        for generation in generations:
            generation.cancel()


def _parts(reading: Reading | None, piece: Piece) -> Sequence[str | Call]:
    """The text and the calls that became certain with this piece."""
    if reading is None:
        return [piece.text]
    return reading.add(piece.text) + (reading.end() if piece.finish else [])


def _reason(reading: Reading | None, piece: Piece) -> str | None:
    return "tool_calls" if reading and reading.calls and piece.finish == "stop" else piece.finish


async def _all(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation.pieces()]


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all, as they come, with the index of their generation."""
    if len(generations) == 1:
        async for piece in generations[0].pieces():
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

    async def relay(index: int) -> None:
        async for piece in generations[index].pieces():
            queue.put_nowait((index, piece))

    tasks = [asyncio.create_task(relay(index)) for index in range(len(generations))]
    try:
        left = len(generations)
        while left:
            index, piece = await queue.get()
            left -= piece.finish is not None
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()
