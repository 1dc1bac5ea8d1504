"""Replies in progress: each request runs as a task that saves its replies even if the client disconnects.

    submit -> relay pieces to the client -> build the proof -> save the message

Invariant: each reply is saved once, even if it was stopped. The saved seed and proof belong to exactly the saved text.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.config import Config
from shoal.config.section import GreedyOrWarm
from shoal.serve import proof
from shoal.serve.chat.conversations import MESSAGE_CHARACTERS, ConversationReader, Conversations
from shoal.serve.errors import BusyError, ReplyError
from shoal.serve.generation import Generation, ServeRequest
from shoal.serve.openai.routes import new_seed, resolve_max_tokens
from shoal.serve.prompt import as_trained, encode
from shoal.serve.scheduler import ServeScheduler
from shoal.serve.threads import FairThreadPool
from shoal.serve.versions import LoadedModel, Versions
from shoal.watch.page.guard import HttpError


class ReplyForm(BaseModel):
    """The page's request: a new message (`content`), or another reply to `parent`. Each of `models` replies once."""

    model_config = ConfigDict(extra="forbid")
    content: Annotated[str, Field(min_length=1, max_length=MESSAGE_CHARACTERS)] | None = None
    parent: Annotated[str, Field(max_length=40)] | None = None
    models: Annotated[list[Annotated[str, Field(max_length=300)]], Field(min_length=1, max_length=2)]
    temperature: Annotated[float, GreedyOrWarm, Field(ge=0, le=2)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    target: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    as_trained: bool = False


@dataclass
class ReplyInProgress:
    """One reply in progress. The client receives what is put in `events`; None marks the end."""

    lane: int  # column on the page
    generation: Generation
    messages: Sequence[Any]
    events: asyncio.Queue[dict[str, Any] | None]
    pair: str | None = None  # shared id of replies shown side by side
    text: list[str] = field(default_factory=list)
    finish: str = "cancelled"
    duration_s: float = 0.0


class Replies:
    def __init__(
        self,
        versions: Versions,
        scheduler: ServeScheduler,
        conversations: Conversations,
        reader: ConversationReader,
        config: Config | None,
        threads: FairThreadPool,
    ) -> None:
        self.versions, self.scheduler, self.threads = versions, scheduler, threads
        self.conversations, self.reader, self.config = conversations, reader, config
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, user: int, id: str, parent: str, form: ReplyForm) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of each reply. If the iterator is closed, the replies stop and are saved.

        Raise HttpError only before the first event.
        """
        self.conversations.check_quota(user)
        path = await self.reader.run(user, lambda stored: stored.path(user, id, parent))
        if not path or path[-1]["role"] != "user":
            raise HttpError(400, "the message to reply to is not from the user")
        messages = as_trained(self.config, path, form.target) if form.as_trained and self.config else path
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        pair = secrets.token_hex(6) if len(form.models) > 1 else None
        async with AsyncExitStack() as stack:
            replies = []
            for lane, model in enumerate(form.models):
                loaded = await stack.enter_async_context(self.versions.borrow(model, f"user {user}", page=True))
                prompt = await self.threads.run(f"user {user}", partial(encode, loaded, messages), loaded)
                generation = self._generation(user, loaded, prompt, form)
                replies.append(ReplyInProgress(lane, generation, messages, events, pair))
            self.scheduler.submit([reply.generation for reply in replies], self.scheduler.limits.page_share)
            borrowed = stack.pop_all()
        task = asyncio.create_task(self._finish(user, id, parent, form, replies, borrowed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            for reply in replies:
                yield {"event": "begin", "lane": reply.lane, "model": reply.generation.loaded.id}
            while (event := await events.get()) is not None:
                yield event
            await task
        finally:
            self.scheduler.release([reply.generation for reply in replies])

    async def close(self) -> None:
        """Wait until the replies in progress, which the scheduler has already cancelled, are saved."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _generation(self, user: int, loaded: LoadedModel, prompt: tuple[int, ...], form: ReplyForm) -> Generation:
        request = ServeRequest(
            prompt=prompt,
            seed=new_seed(),
            temperature=form.temperature,
            max_tokens=resolve_max_tokens(loaded, prompt, form.max_tokens),
            proof=True,
            caller=f"user {user}",
        )
        return Generation(request, loaded, asyncio.get_running_loop())

    async def _finish(
        self,
        user: int,
        id: str,
        parent: str,
        form: ReplyForm,
        replies: Sequence[ReplyInProgress],
        versions: AsyncExitStack,
    ) -> None:
        """Relay all replies until they end, then save them in order."""
        events = replies[0].events
        try:
            async with versions:
                await asyncio.gather(*(_relay(reply) for reply in replies))
                for reply in replies:
                    events.put_nowait(await self._save(user, id, parent, form, reply))
        finally:
            events.put_nowait(None)

    async def _save(self, user: int, id: str, parent: str, form: ReplyForm, reply: ReplyInProgress) -> dict[str, Any]:
        generation, text = reply.generation, "".join(reply.text)
        loaded, request = generation.loaded, generation.request
        facts: dict[str, Any] = {
            "model": loaded.id,
            "version": loaded.offer.version,
            "weights": loaded.digest,
            "seed": str(request.seed),
            "temperature": request.temperature,
            "finish": reply.finish,
            "prompt_tokens": len(request.prompt),
            "tokens": len(generation.tokens),
            "seconds": round(reply.duration_s, 3),
            "target": form.target,
            "as_trained": form.as_trained,
            "pair": reply.pair,
        }
        file = None
        if generation.tokens:
            try:
                file = await self.threads.run(
                    request.caller,
                    lambda: proof.build(generation, reply.finish, text, reply.messages).model_dump_json(),
                )
            except (ReplyError, BusyError) as error:
                facts["unproven"] = str(error)
        try:
            try:
                message = self.conversations.add(user, id, parent, "assistant", text, facts, file)
            except HttpError as error:
                if file is None:
                    raise
                file, facts["unproven"] = None, str(error)  # the text may fit without its proof
                message = self.conversations.add(user, id, parent, "assistant", text, facts)
        except HttpError as error:  # even the text does not fit, or the conversation was deleted
            return {"event": "failed", "lane": reply.lane, "error": str(error)}
        return {
            "event": "done",
            "lane": reply.lane,
            "message": {
                "id": message,
                "parent": parent,
                "role": "assistant",
                "content": text,
                "facts": facts,
                "proven": file is not None,
            },
        }


async def _relay(reply: ReplyInProgress) -> None:
    start_s = time.monotonic()
    async for piece in reply.generation.pieces():
        reply.text.append(piece.text)
        if piece.text or not piece.finish:
            reply.events.put_nowait(
                {"event": "text", "lane": reply.lane, "text": piece.text, "tokens": len(reply.generation.tokens)}
            )
        if piece.finish:
            reply.finish = piece.finish
    reply.duration_s = time.monotonic() - start_s
