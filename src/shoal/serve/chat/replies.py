"""Replies while they are written: each is a task of its own that saves what it has, also when its reader leaves.

    submit -> relay pieces to the reader -> build the proof -> save the message

Invariant: a reply is saved once, whole or up to where it was stopped, with the seed and proof of exactly that text.
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
from shoal.serve import proof
from shoal.serve.chat.conversations import MESSAGE_CHARACTERS, Conversations, StoredConversations
from shoal.serve.errors import BusyError, ReplyError
from shoal.serve.generation import Generation, ServeAsk
from shoal.serve.openai.routes import new_seed, tokens_left
from shoal.serve.prompt import as_trained, encode
from shoal.serve.scheduler import ServeScheduler
from shoal.serve.threads import Threads
from shoal.serve.versions import LoadedModel, Versions
from shoal.watch.page.guard import HttpError


class ReplyForm(BaseModel):
    """What the page asks for: a new message (`content`) or another reply to `parent`; a reply for each of `models`."""

    model_config = ConfigDict(extra="forbid")
    content: Annotated[str, Field(min_length=1, max_length=MESSAGE_CHARACTERS)] | None = None
    parent: Annotated[str, Field(max_length=40)] | None = None
    models: Annotated[list[Annotated[str, Field(max_length=300)]], Field(min_length=1, max_length=2)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    target: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    as_trained: bool = False


@dataclass
class Writing:
    """One reply being written. `news` are the events for the reader; None ends them."""

    lane: int
    generation: Generation
    messages: Sequence[Any]
    news: asyncio.Queue[dict[str, Any] | None]
    pair: str | None = None  # what the replies that stand side by side share
    text: list[str] = field(default_factory=list)
    finish: str = "cancelled"
    took_s: float = 0.0


class Replies:
    def __init__(
        self,
        versions: Versions,
        scheduler: ServeScheduler,
        conversations: Conversations,
        stored: StoredConversations,
        config: Config | None,
        threads: Threads,
    ) -> None:
        self.versions, self.scheduler, self.threads = versions, scheduler, threads
        self.conversations, self.stored, self.config = conversations, stored, config
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, user: int, id: str, parent: str, wanted: ReplyForm) -> AsyncIterator[dict[str, Any]]:
        """Events for the page: `text` and `done` of each lane. Leaving early stops the replies and saves them.

        Raises HttpError before the first one.
        """
        self.conversations.check_space(user)
        said = await self.stored.run(user, lambda stored: stored.path(user, id, parent))
        if not said or said[-1]["role"] != "user":
            raise HttpError(400, "a reply needs a message of the user before it")
        messages = as_trained(self.config, said, wanted.target) if wanted.as_trained and self.config else said
        news: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        pair = secrets.token_hex(6) if len(wanted.models) > 1 else None
        async with AsyncExitStack() as stack:
            writings = []
            for lane, model in enumerate(wanted.models):
                held = await stack.enter_async_context(self.versions.take(model))
                prompt = await self.threads.run(f"user {user}", partial(encode, held, messages), held)
                generation = self._generation(user, held, prompt, wanted)
                writings.append(Writing(lane, generation, messages, news, pair))
            self.scheduler.submit([one.generation for one in writings])
            keep = stack.pop_all()
        task = asyncio.create_task(self._finish(user, id, parent, wanted, writings, keep))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            for one in writings:
                yield {"event": "begin", "lane": one.lane, "model": one.generation.held.id}
            while (event := await news.get()) is not None:
                yield event
            await task
        finally:
            for one in writings:
                one.generation.cancel()

    async def close(self) -> None:
        """Wait until what is being written is saved; the scheduler has cancelled it."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _generation(self, user: int, held: LoadedModel, prompt: tuple[int, ...], wanted: ReplyForm) -> Generation:
        ask = ServeAsk(
            prompt=prompt,
            seed=new_seed(),
            temperature=wanted.temperature,
            max_tokens=tokens_left(held, prompt, wanted.max_tokens),
            proof=True,
            caller=f"user {user}",
        )
        return Generation(ask, held, asyncio.get_running_loop())

    async def _finish(
        self, user: int, id: str, parent: str, wanted: ReplyForm, writings: Sequence[Writing], keep: AsyncExitStack
    ) -> None:
        """Relay all lanes to their ends, then save them in order."""
        news = writings[0].news
        try:
            async with keep:
                await asyncio.gather(*(_relay(one) for one in writings))
                for one in writings:
                    news.put_nowait(await self._save(user, id, parent, wanted, one))
        finally:
            news.put_nowait(None)

    async def _save(self, user: int, id: str, parent: str, wanted: ReplyForm, one: Writing) -> dict[str, Any]:
        generation, text = one.generation, "".join(one.text)
        held, ask = generation.held, generation.ask
        facts: dict[str, Any] = {
            "model": held.id,
            "version": held.offer.version,
            "weights": held.digest,
            "seed": str(ask.seed),
            "temperature": ask.temperature,
            "finish": one.finish,
            "prompt_tokens": len(ask.prompt),
            "tokens": len(generation.tokens),
            "seconds": round(one.took_s, 3),
            "target": wanted.target,
            "as_trained": wanted.as_trained,
            "pair": one.pair,
        }
        file = None
        if generation.tokens:
            try:
                file = await self.threads.run(
                    ask.caller, lambda: proof.build(generation, one.finish, text, one.messages).model_dump_json()
                )
            except (ReplyError, BusyError) as error:
                facts["unproven"] = str(error)
        try:
            try:
                message = self.conversations.add(user, id, parent, "assistant", text, facts, file)
            except HttpError as error:
                if file is None:
                    raise
                file, facts["unproven"] = None, str(error)  # the text may have space without its proof
                message = self.conversations.add(user, id, parent, "assistant", text, facts)
        except HttpError as error:  # no space even for the text, or the conversation was deleted meanwhile
            return {"event": "failed", "lane": one.lane, "error": str(error)}
        return {
            "event": "done",
            "lane": one.lane,
            "message": {
                "id": message,
                "parent": parent,
                "role": "assistant",
                "content": text,
                "facts": facts,
                "proven": file is not None,
            },
        }


async def _relay(one: Writing) -> None:
    begun_s = time.monotonic()
    async for piece in one.generation.pieces():
        one.text.append(piece.text)
        if piece.text or not piece.finish:
            one.news.put_nowait(
                {"event": "text", "lane": one.lane, "text": piece.text, "tokens": len(one.generation.tokens)}
            )
        if piece.finish:
            one.finish = piece.finish
    one.took_s = time.monotonic() - begun_s
