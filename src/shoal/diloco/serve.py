"""The meeting over HTTP: `shoal meet`. Every connection is made by a site, so sites open no port.

    POST /v1/join                    an invite, and what must be equal at all sites
    PUT  /v1/rounds/{round}/{digest} a site's pseudo-gradient, from the parameters with this digest
    GET  /v1/rounds/{round}          how it ended; the answer waits up to POLL_S for that
    GET  /v1/rounds/{round}/average  the average that every site applies
    POST /v1/state                   the signed descriptor of what is agreed; GET /v1/state/{round}: the file itself
    POST /v1/shares, /v1/leave       the next share of the data; good-bye
    POST /v1/rounds/{round}/deal     the sites that share the work of a round
    GET  /v1/status                  who is here, and what they last said of themselves; open to all

Invariant: every request is signed by a key that a valid invite brought, its head is checked before its body is read, and
every answer, refusals included, is signed for the request that it answers (`protocol`). An invite works for one key.
Called by `shoal meet`. If the disk fails it ends; a restart goes on from the last round that was written.
What one may ask is bounded by `gate`. Left out: several meetings that share the work.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from shoal.diloco.codec import most_bytes
from shoal.diloco.gate import Gate, listen, read_body
from shoal.diloco.invites import DOMAIN, STATE_DOMAIN, SiteInvite
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import (
    SILENT,
    Dealt,
    Figures,
    Greeting,
    MeetingError,
    MeetingStatus,
    Message,
    Outcome,
    Progress,
    Share,
    Why,
)
from shoal.errors import ShoalError
from shoal.files import write_file
from shoal.protocol.answers import sign_answer
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.signing import MAX_AGE_S, SignatureError, split_target, verify_head
from shoal.shardcast.serve.connections import BACKLOG, PATIENCE

POLL_S = 8.0  # below the 30 s that a site waits for an answer
LOOK_S = 0.1
SMALL_BYTES = 64 << 10

log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[web.Request, str, bytes], Awaitable[web.Response]]


class JoinRequest(Message):
    invite: Signed
    greeting: Greeting


class Nonces:
    """Which requests were served, in memory: a restart forgets, and the clock bounds what can be served again."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        now_s = time.time()
        if len(self._seen) > 10_000:
            self._seen = {each: end_s for each, end_s in self._seen.items() if end_s > now_s}
        if (key, nonce) in self._seen:
            return False
        self._seen[key, nonce] = created_s + 2 * MAX_AGE_S
        return True


class Server:
    def __init__(self, meeting: Meeting, identity: Identity) -> None:
        self.meeting, self.identity = meeting, identity
        self.nonces, self.gate = Nonces(), Gate()
        self.keys_path = meeting.folder / "keys.json"
        self.names: dict[str, str] = json.loads(self.keys_path.read_text()) if self.keys_path.exists() else {}
        self.lock = asyncio.Lock()
        self.ended = asyncio.Event()  # a round ended
        self.failure: Exception | None = None

    def app(self) -> web.Application:
        largest = max(most_bytes(self.meeting.terms.kind, size) for size in self.meeting.terms.fragments.sizes)
        application = web.Application(middlewares=[self._front])
        application.add_routes(
            [
                web.post("/v1/join", self._checked(self._join, stranger=True)),
                web.put(r"/v1/rounds/{round:\d{1,9}}/{digest:[0-9a-f]{64}}", self._checked(self._offer, largest)),
                web.get(r"/v1/rounds/{round:\d{1,9}}", self._checked(self._outcome)),
                web.get(r"/v1/rounds/{round:\d{1,9}}/average", self._checked(self._average)),
                web.post("/v1/state", self._checked(self._describe)),
                web.get(r"/v1/state/{round:\d{1,9}}", self._checked(self._state)),
                web.post("/v1/shares", self._checked(self._share)),
                web.post("/v1/leave", self._checked(self._leave)),
                web.post(r"/v1/rounds/{round:\d{1,9}}/deal", self._checked(self._deal)),
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
            await self._close_if_due()
            if self.meeting.over:
                over_s = over_s or time.monotonic()
                here = any(member.expected for member in self.meeting.members.values())
                if not here or time.monotonic() - over_s > self.meeting.terms.wait_s:
                    return
            await asyncio.sleep(LOOK_S)

    # --- every request -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _front(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _refusal(error.status, error.reason)
        except MeetingError as error:
            response = _refusal(error.status, str(error))
        assert isinstance(response, web.Response) and isinstance(response.body, bytes | None)
        await self.gate.leave(request, response)
        if response.status >= 400:
            response.force_close()  # the rest of its body is not read
        signed = sign_answer(
            self.identity,
            request.headers,
            status=response.status,
            body_sha256=sha256(response.body or b"").digest(),
            created_s=int(time.time()),
        )
        response.headers.update(signed)
        return response

    def _checked(
        self, handler: Handler, most: int = SMALL_BYTES, *, stranger: bool = False
    ) -> Callable[..., Awaitable[web.Response]]:
        async def respond(request: web.Request) -> web.Response:
            path, query = split_target(request.raw_path)
            try:
                head = verify_head(
                    method=request.method,
                    path=path,
                    query=query,
                    headers=request.headers,
                    audience=self.meeting.run,
                    now_s=time.time(),
                    nonces=None,
                )
                if name := self.names.get(head.key, ""):
                    head.spend(self.nonces)  # of sites alone: strangers could fill the memory
            except SignatureError as error:
                return _refusal(401, str(error))
            if not (name or stranger):
                return _refusal(403, "this key has not joined the meeting: join with an invite")
            if request.content_length is None and request.method != "GET":
                return _refusal(411, "a body needs a content-length")
            if (request.content_length or 0) > most:
                return _refusal(413, f"the body has {request.content_length} bytes, at most {most} are taken")
            with self.gate.site(request, name) if name else nullcontext():
                body = await read_body(request, most)
                try:
                    head.check_body(sha256(body).digest(), len(body))
                    return await handler(request, name or head.key, body)
                except SignatureError as error:
                    return _refusal(401, str(error))
                except ValidationError as error:
                    return _refusal(422, f"malformed: {error.errors()[0]['msg']}")

        return respond

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
        key = who if who not in self.names.values() else next(key for key, name in self.names.items() if name == who)
        holder = next((holder for holder, name in self.names.items() if name == invited.name), key)
        if holder != key or self.names.get(key, invited.name) != invited.name:
            raise MeetingError(f"the invite of {invited.name} is used by another key: ask for one of your own")
        welcome = await self._alone(partial(self.meeting.join, invited.name, asked.greeting))
        if key not in self.names:
            self.names[key] = invited.name
            write_file(self.keys_path, json.dumps(self.names).encode())
        return _answer(welcome)

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
        await self._close_if_due()
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
        self.meeting.heal(name, Why.model_validate_json(body).why)
        described, _ = await self._alone(self.meeting.state)
        return _answer(Signed.make(self.identity, described.model_dump_json(), domain=STATE_DOMAIN))

    async def _state(self, request: web.Request, name: str, body: bytes) -> web.Response:
        described, path = await self._alone(self.meeting.state)
        if described.round != int(request.match_info["round"]):
            return _refusal(409, f"the state of round {described.round} is agreed now")
        return web.Response(body=await asyncio.to_thread(path.read_bytes))

    async def _share(self, request: web.Request, name: str, body: bytes) -> web.Response:
        return _answer(Share(number=await self._alone(partial(self.meeting.take, name))))

    async def _deal(self, request: web.Request, name: str, body: bytes) -> web.Response:
        round = int(request.match_info["round"])
        return _answer(Dealt(sites=await self._alone(partial(self.meeting.deal, name, round))))

    async def _status(self, request: web.Request) -> web.Response:
        self.gate.reader(request)
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
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, keepalive_timeout=PATIENCE.idle_s)
    await runner.setup()
    await web.SockSite(runner, listener, ssl_context=tls, backlog=BACKLOG).start()  # type: ignore[arg-type]
    bound = int(listener.getsockname()[1])
    write_file(listening, str(bound).encode())
    return runner, bound


def summary(outcome: Outcome, status: MeetingStatus) -> str:
    """One line about a round that ended: who counted, with what loss, and how each spent its time."""
    told = [f"{name} {_told(status.sites[name].figures or SILENT)}" for name in outcome.kept]
    told += [f"{name} left out" for name in outcome.left_out] + [f"{name} missing" for name in outcome.missing]
    return f"round {outcome.round + 1} of {status.rounds}: " + "; ".join(told)


def _told(figures: Figures) -> str:
    total_s = figures.computed_s + figures.waited_s + figures.synced_s or 1.0
    shares = [
        f"{100 * seconds / total_s:.0f} % {what}"
        for what, seconds in (
            ("computing", figures.computed_s),
            ("waiting for data", figures.waited_s),
            ("for sites", figures.synced_s),
        )
    ]
    return (f"loss {figures.loss:.4g}, " if figures.loss is not None else "") + ", ".join(shares)


def _answer(message: BaseModel | None) -> web.Response:
    return web.Response(body=message.model_dump_json().encode() if message else b"{}", content_type="application/json")


def _refusal(status: int, message: str) -> web.Response:
    return web.Response(body=json.dumps({"error": message}).encode(), status=status, content_type="application/json")
