"""What happens to every request before and after its route: connections are noted, answers signed, strangers slowed.

Invariant: only a connection whose last request a member signed stays open; every other is closed with its answer. So
strangers hold no idle connection, and each of their refusals costs them a new one, held back longer the more there are.
Every answer to a signed request is signed by the run that was asked, refusals included: a node accepts no other. A listener
has one front, which stands before all of its runs.
Answers that their readers do not take are bounded (`pace.Untaken`).
The rest of a refused body is read at a bounded rate, and not kept. So a sender that reads no answer before its body is out
gets the refusal, and a flood of bodies takes little of this process.
Attached by `routes` and `sharing`. `member` is called by a route once the request was admitted.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256

from aiohttp import web

from shoal.coordinator.http.pace import LARGE_BYTES, Strangers, Untaken
from shoal.coordinator.state.database import PoolError
from shoal.protocol.answers import sign_answer
from shoal.protocol.identity import Identity
from shoal.shardcast.serve.connections import LISTENER, network

BESIDE_BYTES = 1 << 20  # more is hashed beside the event loop
LINGER_S = 30.0  # how long the rest of a refused body is read
MEMBER = web.RequestKey("member", str)  # its key
IDENTITY = web.AppKey("identity", Identity)  # of the run, or of the listener, that an application answers for
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    def __init__(self, strangers: Strangers | None = None) -> None:
        self.strangers = strangers or Strangers()
        self.untaken = Untaken()

    def attach(self, application: web.Application) -> web.Application:
        """Stand before this application and all that are in it. Returns it."""
        application.middlewares.append(self._pass)
        return application

    @web.middleware
    async def _pass(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:  # no such path or method
            response = refusal(error.status, error.reason)
        key, address, size = request.get(MEMBER), network(request.remote or ""), size_bytes(response)
        with contextlib.ExitStack() as sending:
            try:
                sending.enter_context(self.untaken.answer(key or address, size, member=key is not None))
            except PoolError as error:
                response = refusal(error.status, str(error))
            if key is None:
                response.force_close()
                if response.status >= 400:
                    await asyncio.sleep(self.strangers.refusal_hold_s(address))
            elif response.status == 429:
                response.force_close()
            await self._sign(request, response)
            if response.status >= 400 or size > LARGE_BYTES:
                with contextlib.suppress(ConnectionError):  # whoever asked is gone
                    await response.prepare(request)
                    await response.write_eof()  # ends once all but a connection's buffers is taken
        if response.status >= 400:
            await self._discard(request)
        return response

    async def _discard(self, request: web.Request) -> None:
        """Read what is left of a refused body until it ends, its sender goes, or LINGER_S are over."""
        with contextlib.suppress(TimeoutError, ConnectionError, web.RequestPayloadError):
            async with asyncio.timeout(LINGER_S):
                while piece := await request.content.readany():
                    await asyncio.sleep(self.strangers.discard_hold_s(len(piece)))

    def open_to_all(self, handler: Handler) -> Handler:
        """A route that needs no signature."""

        async def respond(request: web.Request) -> web.StreamResponse:
            address = network(request.remote or "")
            try:
                self.strangers.reader(address)
            except PoolError as error:
                return refusal(error.status, str(error))
            asked(request)
            response = await handler(request)
            self.strangers.answered(address, size_bytes(response))
            return response

        return respond

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        if "signature" not in request.headers:
            return
        digest = await _digest(request, response)
        if digest is not None:
            headers = sign_answer(
                _asked_of(request),
                request.headers,
                status=response.status,
                body_sha256=digest,
                created_s=int(time.time()),
            )
            response.headers.update(headers)


def member(request: web.Request, key: str) -> None:
    """Note that this member signed this request."""
    request[MEMBER] = key
    asked(request)


def asked(request: web.Request) -> None:
    """Note that the connection of this request has a right to be open."""
    if (listener := request.config_dict.get(LISTENER)) and request.transport:
        listener.asked(request.transport.get_extra_info("peername"))


def _asked_of(request: web.Request) -> Identity:
    """Whose answer it is: that of the innermost application with a key."""
    return next(app[IDENTITY] for app in reversed(request.match_info.apps) if IDENTITY in app)


def size_bytes(response: web.StreamResponse) -> int:
    """Of its body, if that is in memory."""
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes | bytearray) else 0


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


async def _digest(request: web.Request, response: web.StreamResponse) -> bytes | None:
    """SHA-256 of an answer's body; None for a body that is not known before it is sent."""
    if isinstance(response, web.FileResponse):  # task data, whose name is its digest
        return bytes.fromhex(request.match_info["sha256"])
    if isinstance(response, web.Response) and isinstance(response.body, bytes | bytearray | None):
        body = response.body or b""
        if len(body) <= BESIDE_BYTES:
            return sha256(body).digest()
        return await asyncio.to_thread(lambda: sha256(body).digest())  # a file: others must not wait for it
    return None
