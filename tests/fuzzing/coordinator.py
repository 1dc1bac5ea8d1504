"""Sends damaged requests (see `requests`) to a coordinator on loopback.

The outcome of a case (see `damage`) is the answer's HTTP status. The coordinator promises to answer within DEADLINE_S,
with a status below 500 or with 507. Only an incomplete request may get no answer.
This module uses only routes and messages, not the coordinator's internals.
"""

import asyncio
import logging
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

from aiohttp import web

from shoal.config import Config, parse
from shoal.coordinator.http.routes import Coordinator
from shoal.protocol.identity import Identity
from shoal.protocol.pace import Pace, Strangers
from shoal.protocol.server import Front

from .damage import CRASH, Note
from .requests import DEADLINE_S, RUN, Site

IDLE_S = 0.02  # how long to wait for an answer before ending a request that may be incomplete
# After this many cases a new coordinator is started, because valid requests may have ended the run or filled the store.
CASES_PER_POOL = 2_000
CONFIG = parse(
    {
        "coordinator": {"prompts_per_step": 4},
        "workers": {"groups_per_submission": 2},
        "learner": {"optimizer_steps_per_step": 1},
    }
)


def fuzz_requests(random: Random, cases: int, note: Note, folder: Path, config: Config = CONFIG) -> None:
    """Start a new coordinator for every CASES_PER_POOL cases, in a new folder. Report the outcome of each request."""
    for number, start in enumerate(range(0, cases, CASES_PER_POOL)):
        asyncio.run(_fuzz(random, min(CASES_PER_POOL, cases - start), note, folder / f"pool-{number}", config))


async def _fuzz(random: Random, cases: int, note: Note, folder: Path, config: Config) -> None:
    log = _Log()
    runner = web.AppRunner(
        _without_rate_limits(config, coordinator := Identity.generate(), folder).app(),
        access_log=None,
        shutdown_timeout=1.0,
        logger=log.logger,
    )
    asyncio.get_running_loop().set_exception_handler(lambda _, context: log.background.append(str(context)[:600]))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        site = Site(random, int(runner.addresses[0][1]), coordinator)
        await site.join()
        for _ in range(cases):
            log.last = ""
            request, complete, by_role = await site.case()
            outcome = await _send(site.port, request, complete)
            if outcome == "500" and "surrogates not allowed" in log.last and b"expect:" in request.lower():
                # aiohttp 3.14 answers this before it calls a route.
                outcome = "500 by aiohttp, for an Expect header that is not text"
            elif outcome.startswith(("5", CRASH)) and outcome != "507":
                outcome = f"{CRASH} {outcome} {log.last} from {request!r:.700}"
            kind = "signed by a node of the required role" if by_role else "request"
            note(outcome if outcome.startswith(CRASH) else f"{kind}: {outcome}")
    finally:
        await runner.cleanup()
    for context in log.background:
        note(f"{CRASH} in the background: {context}")


def _without_rate_limits(config: Config, identity: Identity, folder: Path) -> Coordinator:
    """Return a coordinator whose clock for rate limits advances by an hour at each reading."""
    hours = count(0, 3600.0).__next__
    return Coordinator(config, RUN, identity, folder, Pace(hours), front=Front(Strangers(hours)))


class _Log(logging.Handler):
    """Keeps the last error that aiohttp's server logged, to report it with a status of 500."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        self.background: list[str] = []
        self.logger = logging.Logger("shoal.fuzz")
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.last = f"{type(error).__name__}: {error!s:.200}" if error else record.getMessage()[:200]


async def _send(port: int, request: bytes, complete: bool) -> str:
    """Return the status or another outcome. An incomplete request may get no status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                writer.write(request)
                answer = await _answer(reader, writer, complete)
                return answer if answer or not complete else f"{CRASH} no answer"
        return "cut off"
    except TimeoutError:
        return f"{CRASH} no complete answer within {DEADLINE_S:g} s"
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, complete: bool) -> str:
    head = b""
    if not complete:
        with suppress(TimeoutError):
            head = await asyncio.wait_for(reader.readline(), IDLE_S)
        if not head:
            writer.write_eof()
    head = head or await reader.readline()
    body = b""
    while chunk := await reader.read(1 << 16) if complete else b"":
        body += chunk
    if b"100 Continue" in head:
        head = body.lstrip(b"\r\n")
    if b"Traceback" in body or b'File "' in body:
        return f"{CRASH} a traceback in the answer"
    return head[9:12].decode("ascii", "replace") if head.startswith(b"HTTP/1.") else "closed"
