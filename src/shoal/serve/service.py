"""The server: listens, loads in the background, follows the run, and ends with what failed.

    /health  /metrics  /v1/...  and, unless it is left out, the chat page

Invariant: it listens before the model is loaded and answers 503 until then. If the scheduler or the loader fails, the
process ends with that error; it never answers from a broken state.
Called by `cli`. Left out: TLS (put a proxy in front, see docs/deploy.md), several processes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from argon2 import PasswordHasher

from shoal.engine.torch_engine import TorchEngine
from shoal.model import dtype, numerics
from shoal.serve.chat.accounts import Accounts
from shoal.serve.chat.conversations import Conversations, Stored
from shoal.serve.chat.database import connect
from shoal.serve.chat.replies import Replies
from shoal.serve.chat.routes import Chat
from shoal.serve.decoding.scheduler import Limits, Scheduler
from shoal.serve.keys import Keys
from shoal.serve.metrics import Metrics
from shoal.serve.openai.routes import OpenAI, unknown
from shoal.serve.sources import Source
from shoal.serve.threads import Places, Threads
from shoal.serve.versions import Versions
from shoal.shardcast.connections import LISTENER, Listener, Patience, started
from shoal.web.headers import secure

PATIENCE = Patience(slowest_Bps=1.0)  # a reply is slow text: only a reader who takes nothing is cut
PER_ADDRESS, CONNECTIONS = 256, 2000
POLL_S = 0.2
THREADS_S = 1.0  # for threads to end in
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})

log = logging.getLogger("serve")


@dataclass(frozen=True)
class Settings:
    folder: Path  # of keys and conversations
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None  # the API's; None: folder/api.keys, made if missing
    open: bool = False  # one local user: no login, no keys
    chat: bool = True
    registration: bool = True
    secure_cookies: bool = False  # the page is reached over HTTPS
    hosts: Collection[str] = ()  # names for this server; empty: any
    versions: int = 3  # in memory
    limits: Limits = field(default_factory=Limits)
    hasher: PasswordHasher | None = None  # of passwords; None: argon2's recommended cost


def engine_of(source: Source) -> Callable[[], TorchEngine]:
    """Makes engines as the run computes, or as is best on this machine. Raises DeviceError, NumericsError."""
    section = source.config.model if source.config else None
    device = section.device if section else "cpu"
    picked, _ = dtype.pick(section.dtype if section else "auto", device)
    kind = numerics.pick(section.numerics if section else "auto", picked, device)
    return lambda: TorchEngine(picked, device, kind)


class Service:
    """Everything behind the routes; `app` has them."""

    def __init__(self, source: Source, settings: Settings, new_engine: Callable[[], TorchEngine]) -> None:
        self.source, self.settings = source, settings
        self.metrics = Metrics()
        self.versions = Versions(source, new_engine, settings.versions)
        self.scheduler = Scheduler(settings.limits, self.metrics.timings.observe)
        self.metrics.watch(self.scheduler, self.versions)
        self.threads = Threads("prepare", 2)  # what tokenizes, renders and makes proofs
        self.bodies = Places(16, per_caller=2)  # large ones, at most 4 MiB or, of a reply file, 16
        self.replies: Replies | None = None
        self._closing: list[Callable[[], None]] = [self.threads.close]
        self._following: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        """Raises KeyFileError."""
        settings = self.settings
        application = web.Application(client_max_size=1)  # bodies are read by `guard.json_body` alone
        secure(application, LOOPBACK if settings.open else settings.hosts)
        application.middlewares.extend([_asked, unknown])
        application.cleanup_ctx.append(self._running)
        application.router.add_get("/health", self.health)
        application.router.add_get("/metrics", self.metrics.respond)
        keys = Keys(None) if settings.open else self._keys()
        api = OpenAI(self.versions, self.scheduler, keys, self.source.config, self.threads, self.bodies)
        api.attach(application)
        if settings.chat:
            self._chat().attach(application)
        return application

    def check(self) -> None:
        """Raises what ended the scheduler or the loader."""
        if self.scheduler.error:
            raise self.scheduler.error
        if self._following and self._following.done() and not self._following.cancelled():
            self._following.result()

    async def health(self, request: web.Request) -> web.Response:
        newest = self.versions.newest
        if newest is None or self.scheduler.error:
            return web.json_response({"status": "loading"}, status=503, headers={"Retry-After": "2"})
        body = {"status": "ok", "model": newest.id, "weights": newest.digest}
        return web.json_response(body | ({"behind": self.versions.failure} if self.versions.failure else {}))

    async def _running(self, application: web.Application) -> Any:
        self.scheduler.start()
        self._following = asyncio.create_task(self.versions.follow())
        yield
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await asyncio.to_thread(self.scheduler.stop)
        if self.replies:
            await self.replies.close()
        for close in self._closing:
            close()
        self.versions.close()

    def _chat(self) -> Chat:
        settings = self.settings
        path = settings.folder / "chat.sqlite"
        db = connect(path)
        conversations, stored = Conversations(db), Stored(connect(path))
        accounts = Accounts(db, hasher=settings.hasher)
        self.replies = Replies(self.versions, self.scheduler, conversations, stored, self.source.config, self.threads)
        chat = Chat(
            accounts,
            conversations,
            stored,
            self.replies,
            self.versions,
            self.bodies,
            is_open=settings.open,
            registration=settings.registration,
            secure_cookies=settings.secure_cookies,
        )
        self._closing += [stored.close, accounts.hashing.close, chat.verifying.close]
        return chat

    def _keys(self) -> Keys:
        given = self.settings.keys
        return Keys.read(given) if given else Keys.read_or_make(self.settings.folder / "api.keys")


@web.middleware
async def _asked(request: web.Request, handler: Any) -> web.StreamResponse:
    """Note that this connection asked something, so that it may stay open."""
    if (listener := request.app.get(LISTENER)) and request.transport:
        listener.asked(request.transport.get_extra_info("peername"))
    response: web.StreamResponse = await handler(request)
    return response


def serve_forever(source: Source, settings: Settings, stop: threading.Event, say: Callable[[str], None]) -> bool:
    """Serve until `stop` is set. Raises what failed; OSError if the port is taken.

    Returns whether all its threads have ended. A forward pass cannot be interrupted; all that must last is stored then.
    """
    before = set(threading.enumerate())
    service = Service(source, settings, engine_of(source))
    asyncio.run(_serve(service, stop, say))
    deadline_s = time.monotonic() + THREADS_S
    own = [thread for thread in threading.enumerate() if thread not in before]
    for thread in own:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in own)


async def _serve(service: Service, stop: threading.Event, say: Callable[[str], None]) -> None:
    settings = service.settings
    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    listener = Listener(settings.host, settings.port, PATIENCE, per_address=PER_ADDRESS, total=CONNECTIONS)
    runner = await started(service.app(), listener, logger=log, handler_cancellation=True)  # who leaves frees its rows
    try:
        url = f"http://{settings.host}:{listener.getsockname()[1]}"
        say(f"{service.source.name} at {url}{' (the page)' if settings.chat else ''} and {url}/v1 (the API)")
        was_ready = False
        while not stop.is_set():
            await asyncio.sleep(POLL_S)
            service.check()
            if service.versions.newest and not was_ready:
                was_ready = True
                say(f"ready: {service.versions.newest.id}")
    finally:
        await runner.cleanup()
