"""What happens to every request before and after its route: connections are noted, answers signed, strangers slowed.

Invariant: only a connection whose last request a member signed stays open; every other is closed with its answer. So
strangers hold no idle connection, and each of their refusals costs them a new one, held back longer the more there are.
Every answer to a signed request is signed by the coordinator, refusals included: a node believes no other.
Attached by `routes`. `member` is called by a route once the request was admitted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256

from aiohttp import web

from shoal.coordinator.http.pace import Pace
from shoal.coordinator.state.database import PoolError
from shoal.protocol.answers import sign_answer
from shoal.protocol.identity import Identity
from shoal.shardcast.serve.connections import LISTENER, network

LARGE_BYTES = 1 << 20
MEMBER = web.RequestKey("member", bool)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    def __init__(self, identity: Identity, pace: Pace) -> None:
        self.identity = identity
        self.pace = pace

    def attach(self, application: web.Application) -> None:
        application.middlewares.append(self._pass)

    @web.middleware
    async def _pass(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:  # no such path or method
            response = refusal(error.status, error.reason)
        if MEMBER not in request:
            response.force_close()
            if response.status >= 400:
                await asyncio.sleep(self.pace.refusal_hold_s(network(request.remote or "")))
        elif response.status == 429:
            response.force_close()
        await self._sign(request, response)
        return response

    def open_to_all(self, handler: Handler) -> Handler:
        """A route that needs no signature."""

        async def respond(request: web.Request) -> web.StreamResponse:
            try:
                self.pace.reader(network(request.remote or ""))
            except PoolError as error:
                return refusal(error.status, str(error))
            asked(request)
            return await handler(request)

        return respond

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        digest = await _digest(request, response)
        if digest is not None:
            headers = sign_answer(
                self.identity,
                request.headers,
                status=response.status,
                body_sha256=digest,
                created_s=int(time.time()),
            )
            response.headers.update(headers)


def member(request: web.Request) -> None:
    """Note that a member signed this request."""
    request[MEMBER] = True
    asked(request)


def asked(request: web.Request) -> None:
    """Note that the connection of this request has a right to be open."""
    if (listener := request.app.get(LISTENER)) and request.transport:
        listener.asked(request.transport.get_extra_info("peername"))


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


async def _digest(request: web.Request, response: web.StreamResponse) -> bytes | None:
    """SHA-256 of an answer's body; None for a body that is not known before it is sent."""
    if isinstance(response, web.FileResponse):  # task data, whose name is its digest
        return bytes.fromhex(request.match_info["sha256"])
    if isinstance(response, web.Response) and isinstance(response.body, bytes | bytearray | None):
        body = response.body or b""
        if len(body) <= LARGE_BYTES:
            return sha256(body).digest()
        return await asyncio.to_thread(lambda: sha256(body).digest())  # a file: others must not wait for it
    return None
