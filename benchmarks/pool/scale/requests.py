"""Send signed requests, prepared as bytes before timing starts, over plain sockets.

Invariant: the client parses only the status and length of a response, so that the coordinator, not the client, is measured.
Both run on this machine. `client_cpu_s` is the client's CPU time.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.protocol.identity import Identity

TIMEOUT_S = 30.0
HEAD_END = b"\r\n\r\n"


def identities(count: int) -> list[Identity]:
    return [Identity(Ed25519PrivateKey.generate()) for _ in range(count)]


@dataclass
class Sent:
    """The outcome of requests: seconds from due time to response, and the count of each status."""

    wall_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, object]:
        ordered = sorted(self.seconds) or [0.0]
        at = {f"p{share}_ms": round(1000 * ordered[int(share / 100 * (len(ordered) - 1))], 1) for share in (50, 99)}
        rate = round(len(self.seconds) / self.wall_s, 1) if self.wall_s else 0.0
        return {"answered": len(self.seconds), "per_s": rate, **at, "statuses": dict(self.statuses)}


async def send(
    url: str, prepared: Iterable[bytes], *, connections: int, per_s: float | None, reuse: bool = True
) -> Sent:
    """Send the requests in order. `per_s` is the rate at which requests are due, even while earlier ones are unanswered.
    If it is None, each connection sends its next request when it has a response. With `reuse`, connections stay open;
    without it, each request opens its own."""
    parts, sent = urlsplit(url), Sent()
    begun_s, remaining = time.perf_counter(), iter(enumerate(prepared))

    async def one(number: int, data: bytes, line: "Line") -> None:
        due_s = begun_s + number / per_s if per_s else time.perf_counter()
        await asyncio.sleep(max(due_s - time.perf_counter(), 0))
        try:
            status = await asyncio.wait_for(line.ask(data), TIMEOUT_S)
        except (OSError, EOFError, TimeoutError) as error:
            line.close()
            sent.statuses[type(error).__name__] += 1
            return
        sent.seconds.append(time.perf_counter() - due_s)
        sent.statuses[status] += 1
        if not reuse:
            line.close()

    async def work(which: int) -> None:
        line = Line(parts.hostname or "", parts.port or 80, f"127.0.{which // 200}.{which % 200 + 1}")
        for number, data in remaining:
            await one(number, data, line)
        line.close()

    await asyncio.gather(*(work(which) for which in range(connections)))
    sent.wall_s = time.perf_counter() - begun_s
    return sent


class Line:
    """One connection from its own source address, opened on first use."""

    def __init__(self, host: str, port: int, source: str) -> None:
        self.host, self.port, self.source = host, port, source
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, data: bytes) -> str:
        """Send a request and return the answer's status."""
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                self.host, self.port, local_addr=(self.source, 0), limit=1 << 24
            )
        self.writer.write(data)
        head = await self.reader.readuntil(HEAD_END)
        lower = head.lower()
        start = lower.index(b"content-length:") + 15
        await self.reader.readexactly(int(lower[start : lower.index(b"\r", start)]))
        if b"\r\nconnection: close" in lower:
            self.close()
        return head[9:12].decode()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


def body_of(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode()
