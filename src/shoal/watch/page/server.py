"""The dashboard's server: the page, what it asks for, and the stream of what is new.

Invariant: it answers GET only and changes nothing. No answer holds a key, an invite or a signature; `public` leaves out
addresses, ids and machines as well. Files are served by exact name (`files`).
"""

import asyncio
import json
import math
import re
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.errors import ShoalError
from shoal.watch.figures import clean
from shoal.watch.page.feed import BusyError, Feed, Seen
from shoal.watch.page.files import SHARED, Files, secure
from shoal.watch.page.overview import broadcast, node_table
from shoal.watch.page.report import about
from shoal.watch.page.rollouts import NoRolloutsError, Rollouts
from shoal.watch.page.work import Wanted, group_list, submissions, timeline, trust, validation
from shoal.watch.run import FolderRun, Run

STATIC = Path(__file__).parent / "static"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
FRESH_S = 2.0  # for so long an answer is given again
KEPT = 64  # answers
MOST_STREAMS = 4_000
WRITE_S = 20.0  # a page that takes longer to read one event is gone
PAGE = 60
MOST_NAMES = 2_000  # of workers to choose from
VERDICTS = ("", "accepted", "rejected", "filtered")
WORD = re.compile(r"[\w.:@/ -]{0,120}")
Answer = dict[str, Any]


class AskedError(ShoalError):
    """A question that makes no sense."""


class Dashboard:
    def __init__(self, run: Run, others: list[Run] | None = None, *, public: bool = False) -> None:
        self.run, self.public = run, public
        self.feed = Feed(run, others or [])
        self.files = Files([SHARED, STATIC])
        self.rollouts = Rollouts(run) if isinstance(run, FolderRun) else None
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._asked: dict[str, asyncio.Task[Answer]] = {}
        self._streams = 0

    def app(self, hosts: tuple[str, ...] = LOOPBACK) -> web.Application:
        """`hosts`: names that a browser may use for it; () for any."""
        application = web.Application(client_max_size=1024)
        secure(application, hosts)
        application.router.add_get("/", self._page)
        application.router.add_get("/assets/{name}", self._asset)
        application.router.add_get("/api/events", self._events)
        for path, question in (
            ("/api/open", self._open),
            ("/api/flow", self._flow),
            ("/api/nodes", self._nodes),
            ("/api/timeline", self._timeline),
            ("/api/validation", self._validation),
            ("/api/about", self._about),
            ("/api/groups", self._groups),
            ("/api/submissions/{seq}", self._submission),
            ("/api/submissions/{seq}/groups/{group}", self._group),
        ):
            application.router.add_get(path, self._answering(question))
        application.on_shutdown.append(self._closed)
        return application

    # --- files and the stream ----------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        return self.files.respond(request, "dashboard.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return self.files.respond(request, request.match_info["name"])

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._streams >= MOST_STREAMS:
            return web.json_response({"error": "too many pages are open"}, status=503, headers={"Retry-After": "30"})
        text = request.headers.get("Last-Event-ID") or request.query.get("seen", "")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await stream.prepare(request)
        self._streams += 1
        events = self.feed.events(Seen.read(text))
        try:
            async for piece in events:
                async with asyncio.timeout(WRITE_S):
                    await stream.write(piece)
        except (ConnectionResetError, TimeoutError):
            pass  # the page is gone, or as good as
        finally:
            self._streams -= 1
            await events.aclose()  # type: ignore[attr-defined]
        return stream

    async def _closed(self, _: web.Application) -> None:
        await self.feed.close()

    # --- answers, each in the run's thread -----------------------------------------------------------------------------

    def _open(self, _: web.Request) -> Answer:
        return self.feed.open() | {"public": self.public}

    def _flow(self, _: web.Request) -> Answer:
        return self.feed.flow()

    def _nodes(self, _: web.Request) -> Answer:
        if self.feed.status is None:
            self.feed.refresh()
        status = self.feed.status
        assert status is not None
        rows = node_table(self.run, status, self.feed.pace, trust(self.run.work()), public=self.public)
        return {"nodes": rows, "broadcast": broadcast(status)}

    def _timeline(self, request: web.Request) -> Answer:
        status = self.feed.status or self._details().look()
        to_s = _real(request, "to", status.now_s)
        from_s = _real(request, "from", to_s - min(_real(request, "last", 120.0), 86_400.0))
        if from_s >= to_s:
            raise AskedError("`from` must be before `to`")
        return timeline(self._details(), from_s, to_s) | {"begun_s": status.started_s, "now_s": status.now_s}

    def _validation(self, _: web.Request) -> Answer:
        return validation(self._details())

    def _about(self, _: web.Request) -> Answer:
        return about(self._details())

    def _groups(self, request: web.Request) -> Answer:
        verdict = _word(request, "verdict")
        if verdict not in VERDICTS:
            raise AskedError(f"`verdict` is one of {', '.join(VERDICTS[1:])}")
        place = Seen.read(request.query.get("before", "").replace(".-1", ".0"))
        wanted = Wanted(
            verdict=verdict,
            worker=_word(request, "worker"),
            source=_word(request, "source"),
            task=_whole(request, "task"),
            version=_whole(request, "version"),
            reward_min=_real(request, "reward_min", None),
            reward_max=_real(request, "reward_max", None),
            before=(place.steps, place.evaluations) if place else None,
        )
        run = self._details()
        settled = submissions(run.work())
        found = group_list(settled, run.history.samples, wanted, PAGE)
        sources = {group["source"] for line in settled for group in line.get("group_list", [])}
        workers = {clean(line["worker"]) for line in settled}
        return found | {"sources": sorted(map(clean, sources)), "workers": sorted(workers)[:MOST_NAMES]}

    def _submission(self, request: web.Request) -> Answer:
        return self._stored().submission(_path(request, "seq"))

    def _group(self, request: web.Request) -> Answer:
        return self._stored().group(_path(request, "seq"), _path(request, "group"))

    def _details(self) -> Run:
        if self.run.folder is None:
            raise NoRolloutsError("only the folder of a run tells this: shoal dashboard FOLDER")
        return self.run

    def _stored(self) -> Rollouts:
        if self.rollouts is None:
            raise NoRolloutsError("only the folder of a run holds rollouts: shoal dashboard FOLDER")
        return self.rollouts

    def _answering(self, question: Callable[[web.Request], Answer]) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Ask in the run's thread, once for all who ask the same; give the same answer again for FRESH_S."""

        async def answer(request: web.Request) -> web.Response:
            name, now_s = request.path_qs, time.monotonic()
            kept_s, body = self._kept.get(name, (-FRESH_S, b""))
            if now_s - kept_s >= FRESH_S:
                try:
                    found = await self._once(name, lambda: question(request))
                except AskedError as error:
                    return web.json_response({"error": str(error)}, status=400)
                except BusyError as error:
                    return web.json_response({"error": str(error)}, status=503, headers={"Retry-After": "2"})
                except ShoalError as error:
                    return web.json_response({"error": str(error)}, status=404)
                body = json.dumps(found, allow_nan=False).encode()
                self._keep(name, body)
            response = web.Response(body=body, content_type="application/json")
            if len(body) > 2_000:
                response.enable_compression()
            return response

        return answer

    async def _once(self, name: str, question: Callable[[], Answer]) -> Answer:
        if name not in self._asked:
            self._asked[name] = asyncio.create_task(self.feed.ask(question))
            self._asked[name].add_done_callback(lambda _: self._asked.pop(name))
        return await asyncio.shield(self._asked[name])

    def _keep(self, name: str, body: bytes) -> None:
        while len(self._kept) >= KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[name] = (time.monotonic(), body)


async def serve(
    dashboard: Dashboard, listener: socket.socket, hosts: tuple[str, ...], stop: Callable[[], bool]
) -> None:
    """Serve on a bound socket until `stop()`."""
    runner = web.AppRunner(dashboard.app(hosts), access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        while not stop():
            await asyncio.sleep(0.2)
    finally:
        await runner.cleanup()


def _real(request: web.Request, name: str, default: Any) -> Any:
    text = request.query.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise AskedError(f"`{name}` is not a number")
    return value


def _whole(request: web.Request, name: str) -> int | None:
    text = request.query.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise AskedError(f"`{name}` is not a whole number")
    return int(text)


def _word(request: web.Request, name: str) -> str:
    text = request.query.get(name, "")
    if not WORD.fullmatch(text):
        raise AskedError(f"`{name}` is not a name")
    return text


def _path(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if not text.isdecimal() or len(text) > 15:
        raise AskedError(f"{text[:40]!r} is not a number")
    return int(text)
