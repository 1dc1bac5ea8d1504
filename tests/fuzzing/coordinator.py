"""Sends damaged requests (see `requests`) to a coordinator on loopback.

A case ends in its status; see `damage`. Promised: an answer below 500, or 507, within DEADLINE_S; no answer only if the
request was incomplete. It uses routes and messages alone, so the coordinator's internals may change.
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

IDLE_S = 0.02  # without an answer, a request that may be incomplete is ended
A_POOL = 2_000  # cases before a fresh coordinator: valid requests may have ended or filled its run
CONFIG = parse(
    {
        "coordinator": {"prompts_per_step": 4},
        "workers": {"groups_per_submission": 2},
        "learner": {"optimizer_steps_per_step": 1},
    }
)


def fuzz_requests(random: Random, cases: int, note: Note, folder: Path, config: Config = CONFIG) -> None:
    """Serve from new folders in `folder`, one coordinator per A_POOL cases, and note how requests end."""
    for number, start in enumerate(range(0, cases, A_POOL)):
        asyncio.run(_fuzz(random, min(A_POOL, cases - start), note, folder / f"pool-{number}", config))


async def _fuzz(random: Random, cases: int, note: Note, folder: Path, config: Config) -> None:
    log = _Log()
    runner = web.AppRunner(
        _hurried(config, coordinator := Identity.generate(), folder).app(),
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
            request, whole, deep = await site.case()
            ended = await _send(site.port, request, whole)
            if ended == "500" and "surrogates not allowed" in log.last and b"expect:" in request.lower():
                ended = (
                    "500 by aiohttp, for an Expect header that is not text"  # aiohttp 3.14; before our routes see it
                )
            elif ended.startswith(("5", CRASH)) and ended != "507":
                ended = f"{CRASH} {ended} {log.last} from {request!r:.700}"
            note(f"{'signed by its role' if deep else 'request'}: {ended}" if not ended.startswith(CRASH) else ended)
    finally:
        await runner.cleanup()
    for context in log.background:
        note(f"{CRASH} in the background: {context}")


def _hurried(config: Config, identity: Identity, folder: Path) -> Coordinator:
    """Its clock moves an hour at each look, so nobody is over a rate."""
    hours = count(0, 3600.0).__next__
    return Coordinator(config, RUN, identity, folder, Pace(hours), front=Front(Strangers(hours)))


class _Log(logging.Handler):
    """Keeps the last error that aiohttp's server logged, for the report of an answer of 500."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        self.background: list[str] = []
        self.logger = logging.Logger("shoal.fuzz")
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.last = f"{type(error).__name__}: {error!s:.200}" if error else record.getMessage()[:200]


async def _send(port: int, request: bytes, whole: bool) -> str:
    """The status, or how else it ended. An incomplete request may end without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                writer.write(request)
                answer = await _answer(reader, writer, whole)
                return answer if answer or not whole else f"{CRASH} no answer"
        return "cut off"
    except TimeoutError:
        return f"{CRASH} no end within {DEADLINE_S:g} s"
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whole: bool) -> str:
    head = b""
    if not whole:
        with suppress(TimeoutError):
            head = await asyncio.wait_for(reader.readline(), IDLE_S)
        if not head:
            writer.write_eof()
    head = head or await reader.readline()
    body = b""
    while chunk := await reader.read(1 << 16) if whole else b"":
        body += chunk
    if b"100 Continue" in head:
        head = body.lstrip(b"\r\n")
    if b"Traceback" in body or b'File "' in body:
        return f"{CRASH} a traceback in the answer"
    return head[9:12].decode("ascii", "replace") if head.startswith(b"HTTP/1.") else "closed"
