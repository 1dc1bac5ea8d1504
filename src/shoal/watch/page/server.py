"""The dashboard's server: the page, and the routes that a visible page polls.

Invariant: the server answers only GET and changes nothing. No response contains a key, invite, signature or address.
Responses are computed on request, in the one thread that reads the run. All clients share them. A response is cached
for FRESH_S. A response that is slow to compute is cached for longer, so that it uses at most SHARE of one core. A
client that already has the current response gets a 304.
"""

import asyncio
import json
import math
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.errors import ShoalError
from shoal.protocol.history import Status
from shoal.watch.page.files import SHARED, File, Files, secure
from shoal.watch.page.guard import HttpError
from shoal.watch.page.overview import about, accuracy, broadcast, curves, display_name, node_table, overview
from shoal.watch.page.work import count_checks, flow, timeline, validation
from shoal.watch.run import Run

STATIC = Path(__file__).parent / "static"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
REFRESH_S = 1.0  # minimum time between two reads of the run
FRESH_S = 2.0  # time for which a response is cached, if it is quick to compute
SHARE = 0.02  # maximum share of one core per kind of response
CACHE_SIZE = 64  # largest number of cached responses
MAX_WAITING = 64  # largest number of requests that wait for the run's thread
MAX_TIMELINE_S = 86_400.0
NEEDS_FOLDER = "this view needs the folder of a run: shoal dashboard FOLDER"
Body = dict[str, Any]
Query = Mapping[str, str]


class Dashboard:
    def __init__(self, run: Run, others: Sequence[Run] = ()) -> None:
        """`others`: runs to compare with, which are read only once."""
        self.run, self.others = run, others
        self.problem = ""  # why the run could not be read
        self.files = Files([SHARED, STATIC])
        self._status: Status | None = None
        self._refreshed_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run")
        self._cache: dict[str, tuple[float, File]] = {}  # when a response expires, and the response
        self._pending: dict[str, asyncio.Task[File]] = {}

    def app(self, hosts: tuple[str, ...] = LOOPBACK) -> web.Application:
        """Build the application. It accepts only the Host headers in `hosts`, or any if `hosts` is empty."""
        application = web.Application(client_max_size=1024)
        secure(application, hosts)
        application.router.add_get("/", self._page)
        application.router.add_get("/assets/{name}", self._asset)
        for path, compute in self.routes().items():
            application.router.add_get(path, self._handler(compute))
        application.on_shutdown.append(self._closed)
        return application

    async def _page(self, request: web.Request) -> web.Response:
        return self.files.respond(request, "dashboard.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return self.files.respond(request, request.match_info["name"])

    async def _closed(self, _: web.Application) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- responses, computed in the run's thread ------------------------------------------------------------------------

    def routes(self) -> dict[str, Callable[[Query], Body]]:
        """Return the function that computes each response, by path."""
        return {
            "/api/overview": lambda _: self.overview(),
            "/api/curves": lambda _: self.curves(),
            "/api/flow": lambda _: flow(self._details().work()),
            "/api/nodes": lambda _: self.nodes(),
            "/api/timeline": self.timeline,
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
        """Return the timeline of the `last` seconds before `to`."""
        run, status = self._details(), self.status()
        to_s = _parse_float(query, "to", status.now_s)
        from_s = to_s - min(max(_parse_float(query, "last", 120.0), 1.0), MAX_TIMELINE_S)
        return timeline(run, from_s, to_s) | {"started_s": status.started_s, "now_s": status.now_s}

    def _details(self) -> Run:
        if self.run.folder is None:
            raise HttpError(404, NEEDS_FOLDER)
        self.status()
        return self.run

    # --- HTTP ----------------------------------------------------------------------------------------------------------

    def _handler(self, compute: Callable[[Query], Body]) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return a route that computes in the run's thread. Concurrent requests of one path share one computation."""

        async def respond(request: web.Request) -> web.Response:
            name = request.path_qs
            until_s, file = self._cache.get(name, (0.0, None))
            try:
                if file is None or time.monotonic() >= until_s:
                    file = await self._once(name, lambda: compute(request.query))
            except HttpError as error:
                headers = {"Retry-After": str(error.retry_s)} if error.retry_s else {}
                return web.json_response({"error": str(error)}, status=error.status, headers=headers)
            except ShoalError as error:
                return web.json_response({"error": str(error)}, status=404)
            return file.respond(request)

        return respond

    async def _once(self, name: str, compute: Callable[[], Body]) -> File:
        if name not in self._pending:
            if len(self._pending) >= MAX_WAITING:
                raise HttpError(503, "too many requests are waiting; try again in a moment", retry_s=2)
            self._pending[name] = asyncio.create_task(self._compute(name, compute))
            self._pending[name].add_done_callback(lambda _: self._pending.pop(name))
        return await asyncio.shield(self._pending[name])

    async def _compute(self, name: str, compute: Callable[[], Body]) -> File:
        def make() -> tuple[File, float]:
            used_s = time.thread_time()  # excludes waiting for the network
            file = File.of(json.dumps(compute(), allow_nan=False).encode(), ".json")
            return file, time.thread_time() - used_s

        file, used_s = await asyncio.get_running_loop().run_in_executor(self._thread, make)
        self._cache.pop(name, None)
        while len(self._cache) >= CACHE_SIZE:
            del self._cache[next(iter(self._cache))]
        self._cache[name] = (time.monotonic() + max(FRESH_S, used_s / SHARE), file)
        return file


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


def _parse_float(query: Query, name: str, default: float) -> float:
    text = query.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HttpError(400, f"`{name}` is not a number")
    return value
