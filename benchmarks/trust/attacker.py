"""Open connections that abuse a server, at a bounded rate, until the time is up.

abuse.py (coordinator) and shardcast_attacks.py (origin, relay) use this.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Then = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Attack = Callable[[], Awaitable[Counter[str]]]
SOURCES = 8  # strangers' addresses
HUGE_BYTES = 64 << 20


@dataclass
class Attacker:
    """Open `rate` connections per second, at most `at_once` at the same time, for `seconds`."""

    host: str
    port: int
    seconds: float
    rate: float
    at_once: int
    from_outside: bool = True  # connect from 127.0.0.2 and up
    reads: bool = False  # read the whole response, not only its first line
    holds: bool = False  # keep the connection open to the end, with a small window, without reading the response
    ended: Counter[str] = field(default_factory=Counter)  # requests by outcome: a status or an error
    number: int = 0

    async def run(self, data: Callable[[], bytes], then: Then | None = None) -> Counter[str]:
        """Send `data()` over each connection, then do what `then` does. Return the outcomes."""
        deadline_s, room, tasks = time.monotonic() + self.seconds, asyncio.Semaphore(self.at_once), set()
        started_s = time.monotonic()
        while time.monotonic() < deadline_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(room.acquire(), max(deadline_s - time.monotonic(), 0.01))
                task = asyncio.create_task(self._visit(data, then, deadline_s))
                tasks.add(task)
                task.add_done_callback(lambda done: (tasks.discard(done), room.release()))
            self.number += 1
            await asyncio.sleep(max(started_s + self.number / self.rate - time.monotonic(), 0))
        await asyncio.gather(*tasks, return_exceptions=True)  # each ends at the deadline
        return self.ended

    async def _connected(self, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        if self.holds:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(connection, (self.host, self.port))
        return await asyncio.open_connection(sock=connection, limit=4096 if self.holds else 1 << 16)

    async def _visit(self, data: Callable[[], bytes], then: Then | None, deadline_s: float) -> None:
        source = f"127.0.0.{2 + self.number % SOURCES}" if self.from_outside else "127.0.0.1"
        writer = None
        try:
            async with asyncio.timeout(max(deadline_s - time.monotonic(), 0.01)):
                reader, writer = await self._connected(source)
                writer.write(data())
                await writer.drain()
                if then is not None:
                    await then(reader, writer)
                line = await reader.readline()
                self.ended[line.split(b" ")[1].decode() if line.startswith(b"HTTP") else "closed"] += 1
                while self.reads and await reader.read(1 << 20):
                    pass
                if self.holds and b" 200 " in line:
                    await asyncio.sleep(self.seconds)
        except TimeoutError:
            self.ended["held to the end"] += 1
        except OSError as error:
            self.ended[type(error).__name__] += 1
        finally:
            if writer is not None:
                writer.transport.abort()


async def a_byte_a_second(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(1.0)
        writer.write(b"x")
        await writer.drain()


async def all_of_it(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _number in range(HUGE_BYTES >> 16):
        writer.write(bytes(1 << 16))
        await writer.drain()
