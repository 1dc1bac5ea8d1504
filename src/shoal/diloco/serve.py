"""The meeting over HTTP: `shoal meet`. Every connection is made by a site, so sites open no port.

    POST /v1/join                    an invite, and what must be equal at all sites
    PUT  /v1/rounds/{round}/{digest} a site's pseudo-gradient, from the parameters with this digest
    GET  /v1/rounds/{round}          how it ended; the answer waits up to POLL_S for that
    GET  /v1/rounds/{round}/average  the average that every site applies
    POST /v1/state                   the signed descriptor of what is agreed
    GET  /v1/state/{round}/{offset}  a piece of that file, of at most PIECE_BYTES
    POST /v1/shares, /v1/leave       the next share of the data; good-bye
    POST /v1/rounds/{round}/deal     the sites that share the work of a round
    GET  /v1/status                  who is here, and what they last said of themselves; open to all

Invariant: every request is signed by a key that a valid invite brought, and every answer for the request that it answers
(`front`). An invite works for one key. What one may ask is bounded (`gate`).
Called by `shoal meet`. If the disk fails it ends; a restart goes on from the last round that was written.
Left out: several meetings that share the work.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from shoal.diloco.codec import most_bytes
from shoal.diloco.front import Front
from shoal.diloco.gate import listen
from shoal.diloco.invites import DOMAIN, STATE_DOMAIN, JoinRequest, SiteInvite
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import (
    PIECE_BYTES,
    ClosedError,
    Dealt,
    Figures,
    MeetingError,
    Progress,
    Share,
    Welcome,
    Why,
)
from shoal.diloco.report import summary
from shoal.errors import ShoalError
from shoal.files import write_file
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.shardcast.serve.connections import BACKLOG, PATIENCE

POLL_S = 8.0  # below the 30 s that a site waits for an answer
LOOK_S = 0.1

log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    def __init__(self, meeting: Meeting, identity: Identity) -> None:
        self.meeting, self.identity = meeting, identity
        self.keys_path = meeting.folder / "keys.json"
        self.names: dict[str, str] = json.loads(self.keys_path.read_text()) if self.keys_path.exists() else {}
        self.front = Front(meeting.run, identity, self.names)
        self.lock = asyncio.Lock()
        self.ended = asyncio.Event()  # a round ended
        self.offered = asyncio.Event()  # a round may be due
        self.failure: Exception | None = None

    def app(self) -> web.Application:
        largest = max(most_bytes(self.meeting.terms.kind, size) for size in self.meeting.terms.fragments.sizes)
        application = web.Application(middlewares=[self.front.around])
        checked = self.front.checked
        application.add_routes(
            [
                web.post("/v1/join", checked(self._join, stranger=True, rare=True)),
                web.put(r"/v1/rounds/{round:\d{1,9}}/{digest:[0-9a-f]{64}}", checked(self._offer, largest, large=True)),
                web.get(r"/v1/rounds/{round:\d{1,9}}", checked(self._outcome)),
                web.get(r"/v1/rounds/{round:\d{1,9}}/average", checked(self._average, large=True)),
                web.post("/v1/state", checked(self._describe, rare=True)),
                web.get(r"/v1/state/{round:\d{1,9}}/{offset:\d{1,15}}", checked(self._state)),
                web.post("/v1/shares", checked(self._share)),
                web.post("/v1/leave", checked(self._leave, rare=True)),
                web.post(r"/v1/rounds/{round:\d{1,9}}/deal", checked(self._deal)),
                web.get("/v1/status", self._status),
            ]
        )
        return application

    async def live(self, stop: Callable[[], bool]) -> None:
        """Close rounds when they are due, until the run is over and every site left, or `stop`. Raises what broke it."""
        over_s: float | None = None
        while not stop():
            if self.failure is not None:
                raise self.failure
            with suppress(web.HTTPServiceUnavailable):  # `failure` says why
                await self._close_if_due()
            if self.meeting.over:
                over_s = over_s or time.monotonic()
                if not self.meeting.members.expected() or time.monotonic() - over_s > self.meeting.terms.wait_s:
                    return
            with suppress(TimeoutError):
                await asyncio.wait_for(self.offered.wait(), LOOK_S)
            self.offered.clear()

    async def _alone(self, call: Callable[[], T]) -> T:
        """One call of the meeting at a time, beside the event loop. What is not a refusal ends the meeting."""
        async with self.lock:
            if self.failure is not None:
                raise web.HTTPServiceUnavailable(reason="the meeting failed and ends")
            try:
                return await asyncio.to_thread(call)
            except MeetingError:
                raise
            except Exception as error:
                self.failure = error
                raise web.HTTPServiceUnavailable(reason="the meeting failed and ends") from error

    async def _close_if_due(self) -> None:
        if self.meeting.due() and self.failure is None:
            outcome = await self._alone(lambda: self.meeting.close() if self.meeting.due() else None)
            if outcome is not None:
                log.info("%s", summary(outcome, self.meeting.status()))
                self.ended.set()
                self.ended = asyncio.Event()

    # --- routes --------------------------------------------------------------------------------------------------------

    async def _join(self, request: web.Request, who: str, body: bytes) -> web.Response:
        asked = JoinRequest.model_validate_json(body)
        invited = self._invited(asked.invite)

        def join() -> Welcome:
            key = next((key for key, name in self.names.items() if name == who), who)
            holder = next((holder for holder, name in self.names.items() if name == invited.name), key)
            if holder != key or self.names.get(key, invited.name) != invited.name:
                raise MeetingError(f"the invite of {invited.name} is used by another key: ask for one of your own")
            welcome = self.meeting.join(invited.name, asked.greeting)
            if key not in self.names:
                write_file(self.keys_path, json.dumps(self.names | {key: invited.name}).encode())
                self.names[key] = invited.name
            return welcome

        return _answer(await self._alone(join))

    def _invited(self, invite: Signed) -> SiteInvite:
        try:
            invited = SiteInvite.model_validate_json(invite.open(self.identity.public, domain=DOMAIN))
        except (IdentityError, ValidationError) as error:
            raise MeetingError("the invite is not one of this meeting: copy it again from its folder") from error
        if invited.run != self.meeting.run:
            raise MeetingError(f"the invite is for run {invited.run}, this is {self.meeting.run}")
        return invited

    async def _offer(self, request: web.Request, name: str, body: bytes) -> web.Response:
        info = request.match_info
        figures = Figures.model_validate_json(request.query.get("figures", "{}"))
        await self._alone(partial(self.meeting.offer, name, int(info["round"]), info["digest"], body, figures))
        self.offered.set()
        return _answer(None)

    async def _outcome(self, request: web.Request, name: str, body: bytes) -> web.Response:
        round, deadline_s = int(request.match_info["round"]), time.monotonic() + POLL_S
        look = partial(self.meeting.outcome, name, round)  # never while a round is being written
        ended = self.ended
        while (outcome := await self._alone(look)) is None and time.monotonic() < deadline_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), deadline_s - time.monotonic())
            ended = self.ended
        return _answer(Progress(outcome=outcome, waiting_for=[] if outcome else self.meeting.waiting_for()))

    async def _average(self, request: web.Request, name: str, body: bytes) -> web.Response:
        return web.Response(body=await self._alone(partial(self.meeting.average, int(request.match_info["round"]))))

    async def _describe(self, request: web.Request, name: str, body: bytes) -> web.Response:
        await self._alone(partial(self.meeting.heal, name, Why.model_validate_json(body).why))
        described, _ = await self._alone(self.meeting.state)
        return _answer(Signed.make(self.identity, described.model_dump_json(), domain=STATE_DOMAIN))

    async def _state(self, request: web.Request, name: str, body: bytes) -> web.Response:
        described, path = await self._alone(self.meeting.state)
        if described.round != int(request.match_info["round"]):
            raise ClosedError(f"the state of round {described.round} is agreed now")
        offset_bytes = int(request.match_info["offset"])
        return web.Response(body=await asyncio.to_thread(_piece, path, offset_bytes))

    async def _share(self, request: web.Request, name: str, body: bytes) -> web.Response:
        return _answer(Share(number=await self._alone(partial(self.meeting.take, name))))

    async def _deal(self, request: web.Request, name: str, body: bytes) -> web.Response:
        round = int(request.match_info["round"])
        return _answer(Dealt(sites=await self._alone(partial(self.meeting.deal, name, round))))

    async def _status(self, request: web.Request) -> web.Response:
        self.front.gate.reader(request)
        return _answer(await self._alone(self.meeting.status))

    async def _leave(self, request: web.Request, name: str, body: bytes) -> web.Response:
        await self._alone(partial(self.meeting.leave, name))
        return _answer(None)


async def serve(server: Server, host: str, port: int, tls: object, listening: Path) -> tuple[web.AppRunner, int]:
    """Listen; port 0 is the one from before a restart, or a free one."""
    last = listening.read_text() if port == 0 and listening.exists() else ""
    port = int(last) if last.isdecimal() else port
    application = server.app()
    try:
        listener = listen(application, host, port)
    except OSError as error:
        raise ShoalError(f"{error.strerror}: set the port of the sites' meeting to a free one") from error
    runner = web.AppRunner(
        application,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=PATIENCE.idle_s,
        lingering_time=0,  # `Front` reads what is left of a refused body
        auto_decompress=False,
    )
    await runner.setup()
    await web.SockSite(runner, listener, ssl_context=tls, backlog=BACKLOG).start()  # type: ignore[arg-type]
    bound = int(listener.getsockname()[1])
    write_file(listening, str(bound).encode())
    return runner, bound


def _piece(path: Path, offset_bytes: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), PIECE_BYTES, offset_bytes)


def _answer(message: BaseModel | None) -> web.Response:
    return web.Response(body=message.model_dump_json().encode() if message else b"{}", content_type="application/json")
