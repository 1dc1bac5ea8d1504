"""The meeting over HTTP: `shoal pool meet`. Every connection is made by a site, so sites open no port.

    POST /v1/join                    an invite, and the facts that must be equal at all sites
    PUT  /v1/rounds/{round}/{digest} a site's pseudo-gradient; the digest is of the parameters before the round
    GET  /v1/rounds/{round}          the round's outcome; long poll of up to POLL_S
    GET  /v1/rounds/{round}/average  the average that every site applies
    POST /v1/state                   the descriptor of the agreed state
    GET  /v1/state/{round}/{offset}  a piece of the state file, of at most PIECE_BYTES
    POST /v1/shares, /v1/leave       take the next share of the data; leave
    POST /v1/rounds/{round}/deal     the sites that share a round's work

Invariant: every request is signed by a key that joined with a valid invite, and every answer is signed for its request
(`protocol.server`). An invite works for one key. If the disk fails, the meeting ends; a restart continues from the last
round written.
Left out: several meetings that share the work.
"""

import asyncio
import errno
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
from pydantic import ValidationError

from shoal.diloco.codec import max_size_bytes
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import (
    DOMAIN,
    PIECE_BYTES,
    Dealt,
    Figures,
    JoinRequest,
    MeetingError,
    RoundClosedError,
    RoundOutcome,
    RoundProgress,
    Share,
    SiteInvite,
    StateDescriptor,
    Welcome,
    Why,
)
from shoal.errors import ShoalError
from shoal.files import read_json, write_file
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.messages import Ok
from shoal.protocol.pace import MEMBER_UNREAD, Pace, Refusal, Unread
from shoal.protocol.server import IDENTITY, Admission, Front, Request, listen, on_last_port
from shoal.protocol.signing import MAX_AGE_S, SignatureError

POLL_S = 8.0  # below a site's timeout of 30 s
LOOK_S = 0.1
CONNECTIONS_PER_ADDRESS, CONNECTIONS = 64, 1024
MEMBERS = ["sites that joined with an invite"]  # the only role
MESSAGE_BYTES = 64 << 10
MAX_NONCES = 10_000  # per site: more than `pace.MEMBER_RATE` allows

log = logging.getLogger(__name__)
T = TypeVar("T")


class RecentNonces:
    """Nonces of recent requests, in memory. After a restart, only the age limit of signatures bounds replays."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}  # by key

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        """Record a nonce; return False for a replay. Raise Refusal if a key sent more than MAX_NONCES."""
        now_s, seen = time.time(), self._seen.setdefault(key, {})
        if nonce in seen:
            return False
        if len(seen) >= MAX_NONCES:
            seen = self._seen[key] = {each: end_s for each, end_s in seen.items() if end_s > now_s}
            if len(seen) >= MAX_NONCES:
                raise Refusal(f"more than {MAX_NONCES} requests in {2 * MAX_AGE_S} s; wait", 429)
        seen[nonce] = created_s + 2 * MAX_AGE_S
        return True


class MeetingServer:
    def __init__(self, meeting: Meeting, identity: Identity) -> None:
        self.meeting, self.identity = meeting, identity
        self.keys_path = meeting.folder / "keys.json"
        self.names: dict[str, str] = read_json(self.keys_path) if self.keys_path.exists() else {}
        self.largest = max_size_bytes(meeting.terms.kind, meeting.terms.shapes.size)
        self.front = Front(unread=Unread(member_bytes=2 * self.largest + MEMBER_UNREAD))
        self.admission = Admission(meeting.run, RecentNonces(), self._role, time.time, Pace())
        self.lock = asyncio.Lock()
        self.ended = asyncio.Event()  # set when a round ends
        self.offered = asyncio.Event()  # set when an offer arrives, because the round may then be due
        self.failure: Exception | None = None

    def app(self) -> web.Application:
        application = self.front.attach(web.Application())
        application[IDENTITY] = self.identity
        signed = partial(self.admission.signed, roles=MEMBERS, limit_bytes=MESSAGE_BYTES)
        offer = signed(self._offer, limit_bytes=self.largest, large=True)
        application.add_routes(
            [
                web.post("/v1/join", signed(self._join, roles=None, rare=True)),
                web.put(r"/v1/rounds/{round:\d{1,9}}/{digest:[0-9a-f]{64}}", offer),
                web.get(r"/v1/rounds/{round:\d{1,9}}", signed(self._outcome)),
                web.get(r"/v1/rounds/{round:\d{1,9}}/average", signed(self._average, large=True)),
                web.post("/v1/state", signed(self._describe, rare=True)),
                web.get(r"/v1/state/{round:\d{1,9}}/{offset:\d{1,15}}", signed(self._state)),
                web.post("/v1/shares", signed(self._share)),
                web.post("/v1/leave", signed(self._leave, rare=True)),
                web.post(r"/v1/rounds/{round:\d{1,9}}/deal", signed(self._deal)),
            ]
        )
        return application

    def _role(self, key: str) -> str | None:
        return MEMBERS[0] if key in self.names else None

    async def live(self, stop: Callable[[], bool]) -> None:
        """Close rounds when they are due, until `stop`. After the last round, wait up to `wait_s` for sites to leave.

        Raise the meeting's failure.
        """
        over_s: float | None = None
        while not stop():
            if self.failure is not None:
                raise self.failure
            with suppress(web.HTTPServiceUnavailable):  # `failure` says why
                await self._close_if_due()
                if self.meeting.over:
                    over_s = over_s or time.monotonic()
                    expected = await self._alone(self.meeting.members.expected)
                    if not expected or time.monotonic() - over_s > self.meeting.terms.wait_s:
                        return
            with suppress(TimeoutError):
                await asyncio.wait_for(self.offered.wait(), LOOK_S)
            self.offered.clear()

    async def _alone(self, call: Callable[[], T]) -> T:
        """Run one call of the meeting at a time, in a thread. Any error but a refusal ends the meeting."""
        async with self.lock:
            if self.failure is not None:
                raise web.HTTPServiceUnavailable(reason="the meeting failed and ends")
            try:
                return await asyncio.to_thread(call)
            except (Refusal, SignatureError):
                raise
            except Exception as error:
                self.failure = error
                raise web.HTTPServiceUnavailable(reason="the meeting failed and ends") from error

    async def _close_if_due(self) -> None:
        outcome = await self._alone(lambda: self.meeting.close() if self.meeting.due() else None)
        if outcome is not None:
            log.info("%s", summary(outcome, self.meeting.terms.rounds))
            self.ended.set()
            self.ended = asyncio.Event()

    # --- routes --------------------------------------------------------------------------------------------------------

    async def _join(self, request: Request) -> Welcome:
        join_request = JoinRequest.model_validate_json(request.body)
        invited = self._invited(join_request.invite)

        def join() -> Welcome:
            holder = next((holder for holder, name in self.names.items() if name == invited.name), request.key)
            if holder != request.key or self.names.get(request.key, invited.name) != invited.name:
                raise MeetingError(f"the invite of {invited.name} is used by another key: request one for this site")
            # Only for valid invites: otherwise strangers could fill the memory.
            request.head.spend(self.admission.nonces)
            welcome = self.meeting.join(invited.name, join_request.greeting)
            if request.key not in self.names:
                write_file(self.keys_path, json.dumps(self.names | {request.key: invited.name}).encode())
                self.names[request.key] = invited.name
            return welcome

        return await self._alone(join)

    def _invited(self, invite: Signed) -> SiteInvite:
        try:
            invited = SiteInvite.model_validate_json(invite.open(self.identity.public, domain=DOMAIN))
        except (IdentityError, ValidationError) as error:
            raise MeetingError(
                "the invite was not made by this meeting: copy it again from the meeting's folder"
            ) from error
        if invited.run != self.meeting.run:
            raise MeetingError(f"the invite is for run {invited.run}, but this is run {self.meeting.run}")
        return invited

    async def _offer(self, request: Request) -> Ok:
        name, round, digest = self.names[request.key], int(request.match["round"]), request.match["digest"]
        figures = Figures.model_validate_json(request.query.get("figures", "{}"))
        await self._alone(partial(self.meeting.offer, name, round, digest, request.body, figures))
        self.offered.set()
        return Ok()

    async def _outcome(self, request: Request) -> RoundProgress:
        deadline_s = time.monotonic() + POLL_S
        look = partial(self.meeting.outcome, self.names[request.key], int(request.match["round"]))
        ended = self.ended
        while (outcome := await self._alone(look)) is None and time.monotonic() < deadline_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), deadline_s - time.monotonic())
            ended = self.ended
        return RoundProgress(
            outcome=outcome, waiting_for=[] if outcome else await self._alone(self.meeting.waiting_for)
        )

    async def _average(self, request: Request) -> bytes:
        return await self._alone(partial(self.meeting.average, int(request.match["round"])))

    async def _describe(self, request: Request) -> StateDescriptor:
        why = Why.model_validate_json(request.body).why
        await self._alone(partial(self.meeting.heal, self.names[request.key], why))
        return (await self._alone(self.meeting.state))[0]

    async def _state(self, request: Request) -> bytes:
        described, path = await self._alone(self.meeting.state)
        if described.round != int(request.match["round"]):
            raise RoundClosedError(f"the agreed state is now that of round {described.round}")
        return await asyncio.to_thread(_piece, path, int(request.match["offset"]))

    async def _share(self, request: Request) -> Share:
        return Share(number=await self._alone(partial(self.meeting.take, self.names[request.key])))

    async def _deal(self, request: Request) -> Dealt:
        deal = partial(self.meeting.deal, self.names[request.key], int(request.match["round"]))
        return Dealt(sites=await self._alone(deal))

    async def _leave(self, request: Request) -> Ok:
        await self._alone(partial(self.meeting.leave, self.names[request.key]))
        return Ok()


async def serve(server: MeetingServer, host: str, port: int, listening: Path) -> tuple[web.AppRunner, int]:
    """Start listening. Port 0 means the port used before a restart if it is still free, or else any free port."""
    start = partial(listen, server.app(), host, per_address=CONNECTIONS_PER_ADDRESS, total=CONNECTIONS)
    try:
        return await on_last_port(start, port, listening)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ShoalError(f"{error.strerror}: set the port of the sites' meeting to a free one") from error


def _piece(path: Path, offset_bytes: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), PIECE_BYTES, offset_bytes)


def summary(outcome: RoundOutcome, rounds: int) -> str:
    """Summarise a finished round in one line: the sites kept, their losses, and how each spent its time."""
    parts = [f"{name} {_time_spent(outcome.figures[name])}" for name in outcome.kept]
    parts += [f"{name} left out" for name in outcome.left_out] + [f"{name} missing" for name in outcome.missing]
    return f"round {outcome.round + 1} of {rounds}: " + "; ".join(parts)


def _time_spent(figures: Figures) -> str:
    total_s = figures.computed_s + figures.waited_s + figures.synced_s or 1.0
    shares = [
        f"{100 * seconds / total_s:.0f} % {what}"
        for what, seconds in (
            ("computing", figures.computed_s),
            ("waiting for data", figures.waited_s),
            ("waiting for sites", figures.synced_s),
        )
    ]
    return (f"loss {figures.loss:.4g}, " if figures.loss is not None else "") + ", ".join(shares)
