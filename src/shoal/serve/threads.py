"""Threads for work that would block the event loop, shared fairly among callers.

    Places     a semaphore that serves callers in turn; each holds at most `per_caller` slots
    Threads    a thread pool; the calls of one caller run one after another
    received   reads a request's body; bounds the large bodies in memory

Invariant: a call's slot is released when its thread ends, even if its client has left. A call whose client left before its
turn never runs.
Left out: interrupting a running call. A long call polls whether it should stop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from shoal.serve.errors import BusyError
from shoal.serve.versions import LoadedModel
from shoal.watch.page.guard import json_body

WAIT_S = 30.0  # for a slot
WAITING = 256  # calls of one caller
RETRY_S = 5
SMALL_BYTES = 64 << 10  # smaller bodies need no slot: the connection limit bounds their memory

Result = TypeVar("Result")


class Places:
    def __init__(self, count: int, per_caller: int = 1, wait_s: float = WAIT_S) -> None:
        self.count, self.per_caller, self.wait_s = count, per_caller, wait_s
        self._held: Counter[str] = Counter()
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; the first caller is next

    async def take(self, caller: str) -> None:
        """Wait for a slot; release it with `leave`. Raise BusyError."""
        line = self._lines.setdefault(caller, deque())
        if len(line) >= WAITING:
            raise BusyError(f"{WAITING} requests of one caller are waiting already", RETRY_S)
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._grant()
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
        except TimeoutError:
            self._withdraw(caller, turn)
            raise BusyError(f"no slot became free within {self.wait_s:g} s", RETRY_S) from None
        except asyncio.CancelledError:
            self._withdraw(caller, turn)
            raise

    def leave(self, caller: str) -> None:
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._grant()

    def _withdraw(self, caller: str, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # granted at the same moment
            self.leave(caller)
        elif turn in (line := self._lines.get(caller, deque())):
            line.remove(turn)
            if not line:
                del self._lines[caller]

    def _grant(self) -> None:
        while self._held.total() < self.count:
            caller = next((name for name in self._lines if self._held[name] < self.per_caller), None)
            if caller is None:
                return
            line = self._lines.pop(caller)
            turn = line.popleft()
            if line:
                self._lines[caller] = line  # after all other callers
            if not turn.done():
                self._held[caller] += 1
                turn.set_result(None)


class Threads:
    def __init__(self, name: str, count: int) -> None:
        self.places = Places(count)
        self._pool = ThreadPoolExecutor(count, name)

    async def run(self, caller: str, call: Callable[[], Result], loaded: LoadedModel | None = None) -> Result:
        """Run `call` in a thread and return its result. `loaded` stays in memory until the call ends. Raise BusyError."""
        await self.places.take(caller)
        future = asyncio.get_running_loop().run_in_executor(self._pool, call)
        if loaded:
            loaded.users += 1

        def ended(_: object) -> None:
            self.places.leave(caller)
            if loaded:
                loaded.users -= 1

        future.add_done_callback(ended)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Drop queued calls; do not wait for running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def received(places: Places, request: web.Request, caller: str, max_bytes: int) -> AsyncIterator[bytes]:
    """Read a request's JSON body; a large one holds a slot until the block ends. Raise HttpError or BusyError."""
    size_bytes = request.content_length
    if size_bytes is not None and (size_bytes <= SMALL_BYTES or size_bytes > max_bytes):
        yield await json_body(request, max_bytes)  # small, or refused as too large
        return
    await places.take(caller)
    try:
        yield await json_body(request, max_bytes)
    finally:
        places.leave(caller)
