"""Work that would stop the event loop: whose turn it is, and the threads that do it.

    Places     a bounded number; callers take turns, and each has at most `per_caller`
    Threads    calls in threads of their own; the calls of one caller run one after the other
    received   a request's body, of which a caller has few in memory at once

Invariant: the place of a call is free when its thread has ended, also when nobody waits for it any more. A call whose
client left before its turn never runs.
Left out: ending a call that runs. A long one asks from time to time whether it should end.
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

WAIT_S = 30.0  # for a place
WAITING = 256  # of one caller
RETRY_S = 5
SMALL_BYTES = 64 << 10  # bodies that take no place: connections are bounded, and so is their memory

Result = TypeVar("Result")


class Places:
    def __init__(self, count: int, per_caller: int = 1, wait_s: float = WAIT_S) -> None:
        self.count, self.per_caller, self.wait_s = count, per_caller, wait_s
        self._held: Counter[str] = Counter()
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # the next caller first

    async def take(self, caller: str) -> None:
        """Wait for a place, which `leave` gives back. Raises BusyError."""
        line = self._lines.setdefault(caller, deque())
        if len(line) >= WAITING:
            raise BusyError(f"{WAITING} requests of one caller are waiting already", RETRY_S)
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._give()
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
        except TimeoutError:
            self._withdraw(caller, turn)
            raise BusyError(f"no place became free within {self.wait_s:g} s", RETRY_S) from None
        except asyncio.CancelledError:
            self._withdraw(caller, turn)
            raise

    def leave(self, caller: str) -> None:
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._give()

    def _withdraw(self, caller: str, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # given at the same moment
            self.leave(caller)
        elif turn in (line := self._lines.get(caller, deque())):
            line.remove(turn)
            if not line:
                del self._lines[caller]

    def _give(self) -> None:
        while self._held.total() < self.count:
            caller = next((one for one in self._lines if self._held[one] < self.per_caller), None)
            if caller is None:
                return
            line = self._lines.pop(caller)
            turn = line.popleft()
            if line:
                self._lines[caller] = line  # behind all others
            if not turn.done():
                self._held[caller] += 1
                turn.set_result(None)


class Threads:
    def __init__(self, name: str, count: int) -> None:
        self.places = Places(count)
        self._pool = ThreadPoolExecutor(count, name)

    async def run(self, caller: str, call: Callable[[], Result], held: LoadedModel | None = None) -> Result:
        """What `call` returns. `held`: a version that stays in memory until the call has ended. Raises BusyError."""
        await self.places.take(caller)
        future = asyncio.get_running_loop().run_in_executor(self._pool, call)
        if held:
            held.users += 1

        def ended(_: object) -> None:
            self.places.leave(caller)
            if held:
                held.users -= 1

        future.add_done_callback(ended)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Calls that run are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def received(places: Places, request: web.Request, caller: str, most_bytes: int) -> AsyncIterator[bytes]:
    """The JSON body of a request; it counts as its caller's until the block ends. Raises HttpError, BusyError."""
    size_bytes = request.content_length
    if size_bytes is not None and (size_bytes <= SMALL_BYTES or size_bytes > most_bytes):
        yield await json_body(request, most_bytes)  # a small one, or refused
        return
    await places.take(caller)
    try:
        yield await json_body(request, most_bytes)
    finally:
        places.leave(caller)
