"""The attacks of abuse_shardcast.py on an origin or relay. The module starts at once, because it imports nothing of Shoal.

    python -m benchmarks.trust.shardcast_attacks NAME HOST PORT SECONDS
    python -m benchmarks.trust.shardcast_attacks serve HOST PORT SECONDS

Prints the outcomes of the connections as JSON. `serve` attacks readers: it answers every request with a list of millions of
empty lists, which take far more memory than their bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable

from benchmarks.trust.attacker import HUGE_BYTES, Attack, Attacker, Then, a_byte_a_second, all_of_it

LIST_BYTES = 16 << 20
SHARD = "/v000000/full/00000.shard"


def attacks(host: str, port: int, seconds: float) -> dict[str, Attack]:
    """Return every attack by name."""

    def attack(data: Callable[[], bytes], *, rate: float, at_once: int, then: Then | None = None) -> Attack:
        return lambda: Attacker(host, port, seconds, rate, at_once).run(data, then)

    async def take_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(seconds)

    async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    def asking(line: str, *headers: str) -> Callable[[], bytes]:
        return lambda: "\r\n".join([f"{line} HTTP/1.1", "host: s", *headers, "", ""]).encode()

    body = f"content-length: {HUGE_BYTES}"
    return {
        "connections opened and closed": attack(lambda: b"", rate=500, at_once=500, then=leave),
        "idle connections": attack(lambda: b"", rate=500, at_once=3000),
        "slow-loris headers": attack(lambda: b"GET / HTTP/1.1\r\nx-a: ", rate=200, at_once=1000, then=a_byte_a_second),
        "oversize bodies": attack(asking("POST /versions.json", body), rate=20, at_once=20, then=all_of_it),
        "oversize headers": attack(lambda: b"GET / HTTP/1.1\r\nx-a: ", rate=20, at_once=20, then=all_of_it),
        "garbage": attack(lambda: os.urandom(400) + b"\r\n\r\n", rate=200, at_once=200),
        "what is not there": attack(asking("GET /v000000/full/99999.shard"), rate=200, at_once=200),
        "odd ranges": attack(asking(f"GET {SHARD}", "range: bytes=9-1,5-"), rate=100, at_once=100, then=leave),
        "manifests": attack(asking("GET /v000000/manifest.json"), rate=200, at_once=200),
        "readers who take nothing": attack(asking(f"GET {SHARD}"), rate=100, at_once=300, then=take_nothing),
    }


async def serve(host: str, port: int, seconds: float) -> Counter[str]:
    """Answer every request with a huge list until the time is up. Return the number of requests."""
    body = b'{"versions": [' + b"[]," * (LIST_BYTES // 3) + b"1]}"
    counts: Counter[str] = Counter()

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                counts["requests"] += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(visit, host, port):
        await asyncio.sleep(seconds)
    return counts


if __name__ == "__main__":
    attack_name, attacked_host, attacked_port, for_s = sys.argv[1:]
    address = attacked_host, int(attacked_port), float(for_s)
    ended_as = asyncio.run(serve(*address) if attack_name == "serve" else attacks(*address)[attack_name]())
    sys.stdout.write(json.dumps(dict(ended_as.most_common())))
