"""Run the server: listen, load the model in the background, and follow the run's new versions.

    /health  /metrics  /v1/...  and, if enabled, the chat page

Invariant: the server listens before the model is loaded and answers 503 until then. If the scheduler or the loader
fails, the process exits with that error; the server never answers from a broken state.
Left out: several processes, and TLS, for which docs/operate.md describes a proxy.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from argon2 import PasswordHasher
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shoal.engine.torch_engine import TorchEngine
from shoal.model import dtype, numerics
from shoal.serve.chat.accounts import Accounts, connect
from shoal.serve.chat.conversations import ConversationReader, Conversations
from shoal.serve.chat.replies import Replies
from shoal.serve.chat.routes import SESSION_KEY, Chat
from shoal.serve.generation import Generation, Piece
from shoal.serve.openai.routes import CALLER, Keys, OpenAI, unknown_route
from shoal.serve.scheduler import ServeLimits, ServeScheduler
from shoal.serve.threads import FairSemaphore, FairThreadPool
from shoal.serve.versions import ModelSource, Versions
from shoal.shardcast.connections import Listener, Patience, started
from shoal.shardcast.server import url_of
from shoal.watch.page.files import secure

COUNTERS = {  # fields of `scheduler.Counts`
    "completions": "completions that began",
    "prompt_tokens": "prompt tokens prefilled",
    "tokens": "tokens generated",
    "steps": "decoding steps",
    "cancelled": "completions whose client left",
    "refused": "completions refused for lack of room",
}
FIRST_TOKEN_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """Serve /metrics in Prometheus' text format, without prompts, names or keys."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        first, between = "from request to first token", "between two tokens of a row"
        self._first = Histogram(
            "shoal_serve_first_token_seconds", first, registry=self.registry, buckets=FIRST_TOKEN_BUCKETS_S
        )
        self._between = Histogram("shoal_serve_token_seconds", between, registry=self.registry, buckets=TOKEN_BUCKETS_S)

    def observe(self, generation: Generation, piece: Piece) -> None:
        """Record the latency of a piece. The scheduler's thread calls this."""
        if piece.finish == "cancelled":
            return
        now_s = time.monotonic()
        if generation.last_piece_s:
            self._between.observe(now_s - generation.last_piece_s)
        else:
            self._first.observe(now_s - generation.submitted_s)

    def watch(self, scheduler: ServeScheduler, versions: Versions) -> None:
        """Read the state of the scheduler and the versions at each scrape."""
        self.scheduler, self.versions = scheduler, versions
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        counts, newest = self.scheduler.counts, self.versions.newest
        for name, help, value in (
            ("rows", "completions being decoded", self.scheduler.live),
            ("waiting", "completions waiting for a row", self.scheduler.waiting),
            ("ready", "1 once a version is loaded", newest is not None),
            ("policy_version", "newest loaded version", (newest.offer.version or 0) if newest else -1),
        ):
            yield GaugeMetricFamily(f"shoal_serve_{name}", help, float(value))
        for name, help in COUNTERS.items():
            yield CounterMetricFamily(f"shoal_serve_{name}", help, getattr(counts, name))

    async def respond(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": "text/plain; version=0.0.4"})


PATIENCE = Patience(slowest_Bps=1.0)  # replies stream slowly, so disconnect only clients that read nothing
PER_ADDRESS, CONNECTIONS = 256, 2000
POLL_S = 0.2
KEYS = "api.keys"  # in the server's folder
JOIN_S = 1.0  # how long to wait for threads to end
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})

log = logging.getLogger("serve")


@dataclass(frozen=True)
class Settings:
    folder: Path  # for keys and conversations
    host: str = "127.0.0.1"
    port: int = 8000
    open: bool = False  # if true, there is one local user, and nobody needs a login or key
    chat: bool = True
    registration: bool = True
    secure_cookies: bool = False  # set if the page is reached over HTTPS
    hosts: Collection[str] = ()  # accepted Host headers; if empty, all, but on loopback without HTTPS only loopback's
    limits: ServeLimits = field(default_factory=ServeLimits)
    hasher: PasswordHasher | None = None  # hashes passwords; None gives argon2's recommended cost


def engine_of(source: ModelSource) -> Callable[[], TorchEngine]:
    """Return a factory of engines. Each uses the run's numerics, or without a run the best that this machine has.

    Raise DeviceError or ShoalError.
    """
    section = source.config.model if source.config else None
    device = section.device if section else "cpu"
    compute_dtype, _ = dtype.pick(section.dtype if section else "auto", device)
    kind = numerics.pick(section.numerics if section else "auto", compute_dtype, device)
    return lambda: TorchEngine(compute_dtype, device, kind)


class Service:
    """The state behind the routes. `app` builds the routes."""

    def __init__(self, source: ModelSource, settings: Settings, new_engine: Callable[[], TorchEngine]) -> None:
        self.source, self.settings = source, settings
        metrics = Metrics()
        self.versions = Versions(source, new_engine)
        self.scheduler = ServeScheduler(settings.limits, metrics.observe)
        metrics.watch(self.scheduler, self.versions)
        self.metrics = metrics
        self.threads = FairThreadPool("prepare", 2)  # tokenizing, rendering, building proofs
        self.bodies = FairSemaphore(16, per_caller=2)  # large request bodies in memory, up to 4 MiB each
        self.replies: Replies | None = None
        self._closing: list[Callable[[], None]] = [self.threads.close]
        self._following: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        """Build the application and its routes. Raise UserError."""
        settings = self.settings
        application = web.Application(client_max_size=1)  # only `guard.json_body` reads bodies
        proxied = settings.secure_cookies or settings.host not in LOOPBACK
        secure(application, LOOPBACK if settings.open or not (settings.hosts or proxied) else settings.hosts)
        application.middlewares.extend([_close_strangers, unknown_route])
        application.cleanup_ctx.append(self._running)
        application.router.add_get("/health", self.health)
        application.router.add_get("/metrics", self.metrics.respond)
        keys = Keys(None) if settings.open else Keys.read_or_make(settings.folder / KEYS)
        api = OpenAI(self.versions, self.scheduler, keys, self.source.config, self.threads, self.bodies)
        api.attach(application)
        if settings.chat:
            self._chat().attach(application)
        return application

    def check(self) -> None:
        """Raise the error that ended the scheduler or the loader, if any."""
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
        conversations, reader = Conversations(db), ConversationReader(connect(path))
        accounts = Accounts(db, hasher=settings.hasher)
        if settings.open:
            accounts.local_user()  # fail now if the name is taken
        self.replies = Replies(self.versions, self.scheduler, conversations, reader, self.source.config, self.threads)
        chat = Chat(
            accounts,
            conversations,
            reader,
            self.replies,
            self.versions,
            self.bodies,
            is_open=settings.open,
            registration=settings.registration,
            secure_cookies=settings.secure_cookies,
        )
        self._closing += [reader.close, accounts.hashing.close, chat.verifying.close]
        return chat


@web.middleware
async def _close_strangers(request: web.Request, handler: Any) -> web.StreamResponse:
    """Close the connection after the response unless the request had a key or a session."""
    response: web.StreamResponse = await handler(request)
    if CALLER not in request and SESSION_KEY not in request:
        response.force_close()
    return response


def serve_forever(source: ModelSource, settings: Settings, stop: threading.Event, say: Callable[[str], None]) -> bool:
    """Serve until `stop` is set. Raise the error that ended the server, or OSError if the port is taken.

    Return whether all of the server's threads have ended. Even if one is still in a forward pass, all data is stored.
    """
    before = set(threading.enumerate())
    service = Service(source, settings, engine_of(source))
    asyncio.run(_serve(service, stop, say))
    deadline_s = time.monotonic() + JOIN_S
    threads = [thread for thread in threading.enumerate() if thread not in before]
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


async def _serve(service: Service, stop: threading.Event, say: Callable[[str], None]) -> None:
    settings = service.settings
    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    listener = Listener(settings.host, settings.port, PATIENCE, per_address=PER_ADDRESS, total=CONNECTIONS)
    # `handler_cancellation` frees the rows of a client that disconnects.
    runner = await started(service.app(), listener, logger=log, handler_cancellation=True)
    try:
        url = url_of(settings.host, listener.getsockname()[1])
        say(f"{service.source.name} at {url}{' (the page)' if settings.chat else ''} and {url}/v1 (the API)")
        if not settings.open:
            say(f"keys of the API: {settings.folder / KEYS}")
        was_ready = False
        while not stop.is_set():
            await asyncio.sleep(POLL_S)
            service.check()
            if service.versions.newest and not was_ready:
                was_ready = True
                say(f"ready: {service.versions.newest.id}")
    finally:
        await runner.cleanup()
