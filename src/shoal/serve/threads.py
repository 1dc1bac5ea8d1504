"""Threads, shared fairly among callers, for work that would block the event loop.

    FairSemaphore     gives slots to callers in turn; each caller holds at most `per_caller` of them
    FairThreadPool    a thread pool; the calls of one caller run one after another
    read_body         reads a request's body, and limits the number of large bodies in memory

Invariant: a call keeps its slot until it has ended in its thread, even if its client disconnects. A call whose client
disconnects before the call's turn never runs.
Left out: interrupting a running call. A long call must itself poll whether to stop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from aiohttp import web

from shoal.serve.errors import BusyError
from shoal.watch.page.guard import json_body

if TYPE_CHECKING:
    from shoal.serve.versions import LoadedModel

WAIT_S = 30.0  # longest wait for a slot
MAX_WAITING = 256  # waiting calls per caller
RETRY_S = 5
SMALL_BYTES = 64 << 10  # smaller bodies need no slot, because the connection limit bounds their memory

Result = TypeVar("Result")


class FairSemaphore:
    def __init__(self, count: int, per_caller: int = 1, wait_s: float = WAIT_S) -> None:
        self.count, self.per_caller, self.wait_s = count, per_caller, wait_s
        self._held: Counter[str] = Counter()
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; the first caller gets the next slot

    async def acquire(self, caller: str) -> None:
        """Wait for a slot; free it with `release`. Raise BusyError."""
        queue = self._queues.setdefault(caller, deque())
        if len(queue) >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} requests of this caller are waiting already", RETRY_S)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
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

    def release(self, caller: str) -> None:
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._grant()

    def _withdraw(self, caller: str, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # the slot was granted at the same moment
            self.release(caller)
        elif turn in (queue := self._queues.get(caller, deque())):
            queue.remove(turn)
            if not queue:
                del self._queues[caller]

    def _grant(self) -> None:
        while self._held.total() < self.count:
            caller = next((name for name in self._queues if self._held[name] < self.per_caller), None)
            if caller is None:
                return
            queue = self._queues.pop(caller)
            turn = queue.popleft()
            if queue:
                self._queues[caller] = queue  # its next turn comes after all other callers
            if not turn.done():
                self._held[caller] += 1
                turn.set_result(None)


class FairThreadPool:
    def __init__(self, name: str, count: int) -> None:
        self._slots = FairSemaphore(count)
        # PyTorch starts each thread with the count that is set at that moment, and `use_threads` may have changed it.
        self._pool = ThreadPoolExecutor(count, name, torch.set_num_threads, (torch.get_num_threads(),))

    async def run(self, caller: str, call: Callable[[], Result], loaded: "LoadedModel | None" = None) -> Result:
        """Run `call` in a thread and return its result. `loaded` stays in memory until the call ends. Raise BusyError."""
        await self._slots.acquire(caller)
        future = asyncio.get_running_loop().run_in_executor(self._pool, call)
        if loaded:
            loaded.users += 1

        def ended(_: object) -> None:
            self._slots.release(caller)
            if loaded:
                loaded.users -= 1

        future.add_done_callback(ended)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Drop queued calls; do not wait for running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def read_body(slots: FairSemaphore, request: web.Request, caller: str, max_bytes: int) -> AsyncIterator[bytes]:
    """Read a request's JSON body. A large one holds a slot until the `with` block ends. Raise HttpError, BusyError."""
    size_bytes = request.content_length
    if size_bytes is not None and (size_bytes <= SMALL_BYTES or size_bytes > max_bytes):
        yield await json_body(request, max_bytes)  # the body is small, or `json_body` refuses it as too large
        return
    await slots.acquire(caller)
    try:
        yield await json_body(request, max_bytes)
    finally:
        slots.release(caller)
