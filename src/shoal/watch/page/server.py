"""The dashboard's server: the page, and the routes that a visible page polls.

Invariant: the server answers only GET and changes nothing. No response contains a key, invite, signature or address.
Responses are computed on request, in the one thread that reads the run. All clients share them. A response is cached
for FRESH_S, or longer if it is slow to compute. Each response, such as that of one span of the timeline, uses at most
SHARE of one core, and so do all earlier parts of the timeline together: requests for many of them do not delay its
newest part. Other parameters are ignored. A client that already has the current response gets a 304.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.errors import ShoalError
from shoal.protocol.history import Status
from shoal.shardcast.connections import LOG, Listener, keep_all_open, started
from shoal.watch.page.files import SHARED, File, Files, secure
from shoal.watch.page.guard import HttpError
from shoal.watch.page.overview import about, accuracy, broadcast, curves, display_name, node_table, overview
from shoal.watch.page.work import count_checks, flow, timeline, validation
from shoal.watch.run import Run

STATIC = Path(__file__).parent / "static"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
REFRESH_S = 1.0  # minimum time between two reads of the run
FRESH_S = 2.0  # time for which a response is cached, if it is quick to compute
SHARE = 0.02  # maximum share of one core for one response, and for all earlier parts of the timeline
CACHE_SIZE = 16  # largest number of cached responses that share a SHARE
MAX_WAITING = 16  # largest number of different responses that wait for such a share
PER_ADDRESS, CONNECTIONS = 256, 2000
TIMELINE = "/api/timeline"
SPANS_S = (30, 60, 120, 300, 900, 3600)  # the spans of timeline.js
NEEDS_FOLDER = "this view needs the folder of a run: shoal dashboard FOLDER"
Body = dict[str, Any]
Query = Mapping[str, float]  # the checked parameters of a request


class Responses:
    """Cached responses, by their parameters. Together they use at most SHARE of one core, in the run's thread."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._cache: dict[str, tuple[float, File]] = {}  # when a response expires, and the response
        self._pending: dict[str, asyncio.Task[File]] = {}
        self._turn = asyncio.Lock()
        self._free_s = 0.0  # when the next computation may begin

    async def get(self, name: str, compute: Callable[[], Body]) -> File:
        """Return a response. Concurrent requests for it share one computation. Raise HttpError or ShoalError."""
        until_s, file = self._cache.get(name, (0.0, None))
        if file is not None and time.monotonic() < until_s:
            return file
        if name not in self._pending:
            if len(self._pending) >= MAX_WAITING:
                raise HttpError(503, "too many requests are waiting; try again in a moment", retry_s=2)
            self._pending[name] = asyncio.create_task(self._compute(name, compute))
            self._pending[name].add_done_callback(lambda _: self._pending.pop(name))
        return await asyncio.shield(self._pending[name])

    async def _compute(self, name: str, compute: Callable[[], Body]) -> File:
        def make() -> File:
            started_s = time.thread_time()  # excludes waiting for the network
            try:
                return File.of(json.dumps(compute(), allow_nan=False).encode(), ".json")
            finally:
                self._free_s = time.monotonic() + (time.thread_time() - started_s) / SHARE

        async with self._turn:
            await asyncio.sleep(self._free_s - time.monotonic())
            file = await asyncio.get_running_loop().run_in_executor(self._thread, make)
        self._cache.pop(name, None)
        while len(self._cache) >= CACHE_SIZE:
            del self._cache[next(iter(self._cache))]
        self._cache[name] = (max(time.monotonic() + FRESH_S, self._free_s), file)
        return file

    def close(self) -> None:
        for task in self._pending.values():
            task.cancel()


class Dashboard:
    def __init__(self, run: Run, others: Sequence[Run] = ()) -> None:
        """`others`: runs to compare with, which are read only once."""
        self.run, self.others = run, others
        self.problem = ""  # why the run could not be read
        self.files = Files([SHARED, STATIC])
        self._status: Status | None = None
        self._refreshed_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run")
        self._responses: list[Responses] = []

    def app(self, hosts: tuple[str, ...] = LOOPBACK) -> web.Application:
        """Build the application. It accepts only the Host headers in `hosts`, or any if `hosts` is empty."""
        application = web.Application(client_max_size=1024)
        secure(application, hosts)
        application.middlewares.append(keep_all_open)
        application.router.add_get("/", self._page)
        application.router.add_get("/assets/{name}", self._asset)
        for path, compute in self.routes().items():
            application.router.add_get(path, self._handler(path, compute))
        application.on_shutdown.append(self._closed)
        return application

    async def _page(self, request: web.Request) -> web.Response:
        return self.files.respond(request, "dashboard.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return self.files.respond(request, request.match_info["name"])

    async def _closed(self, _: web.Application) -> None:
        for responses in self._responses:
            responses.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- responses, computed in the run's thread ------------------------------------------------------------------------

    def routes(self) -> dict[str, Callable[[Query], Body]]:
        """Return the function that computes each response, by path."""
        return {
            "/api/overview": lambda _: self.overview(),
            "/api/curves": lambda _: self.curves(),
            "/api/flow": lambda _: flow(self._details().work()),
            "/api/nodes": lambda _: self.nodes(),
            TIMELINE: self.timeline,
            "/api/validation": lambda _: validation(self._details()),
            "/api/about": lambda _: about(self._details()),
        }

    def status(self) -> Status:
        """Return the current status, or the last known one after an error. Raise ShoalError if there is none."""
        if self._status is None or time.monotonic() - self._refreshed_s >= REFRESH_S:
            try:
                self._status, self.problem = self.run.refresh(), ""
            except ShoalError as error:
                self.problem = str(error)
                if self._status is None:
                    raise
            self._refreshed_s = time.monotonic()
        return self._status

    def overview(self) -> Body:
        """Return the overview. `revision` changes when there are new curves."""
        fields = overview(self.run, self.status(), reachable=not self.problem)
        revision = f"{len(self.run.history.metrics)}.{len(self.run.history.evaluations)}"
        return {"overview": fields, "revision": revision, "details": self.run.folder is not None}

    def curves(self) -> Body:
        self.status()
        others = []
        for other in self.others:
            full = curves(other.history.metrics)
            reward = {"x": full["x"], "values": {"reward": full["values"].get("reward", [])}}
            evaluations = [accuracy(evaluation) for evaluation in other.history.evaluations]
            others.append({"name": display_name(other.name), "curves": reward, "evaluations": evaluations})
        history = self.run.history
        return {
            "curves": curves(history.metrics),
            "evaluations": [accuracy(evaluation) for evaluation in history.evaluations],
            "others": others,
        }

    def nodes(self) -> Body:
        status = self.status()
        rows = node_table(self.run, status, count_checks(self.run.work()))
        return {"nodes": rows, "broadcast": broadcast(status)}

    def timeline(self, query: Query) -> Body:
        """Return the timeline of the `last` seconds before `to`, or before now."""
        run, status = self._details(), self.status()
        to_s = query.get("to", status.now_s)
        return timeline(run, to_s - query.get("last", 120.0), to_s) | {
            "started_s": status.started_s,
            "now_s": status.now_s,
        }

    def _details(self) -> Run:
        if self.run.folder is None:
            raise HttpError(404, NEEDS_FOLDER)
        self.status()
        return self.run

    # --- HTTP ----------------------------------------------------------------------------------------------------------

    def _handler(
        self, path: str, compute: Callable[[Query], Body]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a route that computes in the run's thread. Parameters that the path does not have are ignored."""
        shares: dict[str, Responses] = {}  # one for each newest response, and one for earlier parts of the timeline

        async def respond(request: web.Request) -> web.Response:
            try:
                query = _window(request.query) if path == TIMELINE else {}
                share = "earlier" if "to" in query else str(query)
                if share not in shares:
                    shares[share] = Responses(self._thread)
                    self._responses.append(shares[share])
                file = await shares[share].get(str(query), lambda: compute(query))
            except HttpError as error:
                headers = {"Retry-After": str(error.retry_s)} if error.retry_s else {}
                return web.json_response({"error": str(error)}, status=error.status, headers=headers)
            except ShoalError as error:
                return web.json_response({"error": str(error)}, status=404)
            return file.respond(request)

        return respond


async def serve(dashboard: Dashboard, listener: Listener, hosts: tuple[str, ...], stop: Callable[[], bool]) -> None:
    """Serve on a bound socket until `stop()`."""
    runner = await started(dashboard.app(hosts), listener, shutdown_s=0.5, logger=LOG, handler_cancellation=True)
    try:
        while not stop():
            await asyncio.sleep(0.2)
    finally:
        await runner.cleanup()


def _window(query: Mapping[str, str]) -> Query:
    """Return the timeline's parameters; `to` is rounded down to a quarter of the span. Raise HttpError."""
    last_s = _parse_float(query.get("last", "120"), "last")
    if last_s not in SPANS_S:
        raise HttpError(400, f"`last` is one of {', '.join(map(str, SPANS_S))}")
    if "to" not in query:
        return {"last": last_s}
    return {"last": last_s, "to": _parse_float(query["to"], "to") // (last_s / 4) * (last_s / 4)}


def _parse_float(text: str, name: str) -> float:
    """Raise HttpError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HttpError(400, f"`{name}` is not a number")
    return value
