"""Who may read from a server, and how much: passes, bans, and a rate for each client.

Invariant: with a `pool_key`, every request except /healthz needs a pass (`passes`). This key granted it for this audience,
and its reader, who is not banned, signed it for this server just now. A ban also cuts the reader's connections.
Called by `server.app`, which attaches it. The roles origin and relay call `ban`, and set `servers`.
Left out: client addresses behind a proxy.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Set
from contextvars import ContextVar
from math import ceil

from aiohttp import web

from shoal.shardcast.serve.connections import LISTENER, network
from shoal.shardcast.serve.passes import Refused, check
from shoal.shardcast.serve.rates import Rates

# The client of the current request: a reader's key, or a network.
CLIENT: ContextVar[str | None] = ContextVar("client", default=None)


class Guard:
    def __init__(
        self,
        *,
        audience: str,
        pool_key: str | None = None,
        rate_Bps: float | None = None,
        connections: int = 64,
        total_connections: int = 4096,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `pool_key` anyone may read; with it, only readers with its grant. `rate_Bps` limits each client: the
        reader of a pass, or else an address. `connections` limits each address. `clock` dates passes, `monotonic`
        rates."""
        self.audience, self.pool_key = audience, pool_key
        self.servers: Set[str] = frozenset()  # the URLs that readers know this server by; a pass names one of them
        self.connections, self.total_connections = connections, total_connections
        self.banned: Set[str] = frozenset()
        self.rates = Rates(rate_Bps) if rate_Bps else None
        self.refused = 0
        self._clock, self._monotonic = clock, monotonic
        self._applications: list[web.Application] = []

    def ban(self, readers: Set[str]) -> None:
        """Replaces the set of banned readers, and cuts their open connections at once."""
        self.banned = readers
        for application in self._applications:
            if listener := application.get(LISTENER):
                listener.cut_readers(readers)

    def attach(self, application: web.Application) -> None:
        self._applications.append(application)
        application.middlewares.append(self._admit)
        application.on_response_prepare.append(self._charge)

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/healthz":
            return await handler(request)
        try:
            client = self._client(request)
            CLIENT.set(client)
            wait_s = self.rates.wait_s(client, self._monotonic()) if self.rates else 0.0
            if wait_s > 0:
                raise web.HTTPTooManyRequests(headers={"Retry-After": str(ceil(wait_s))}, text="over your rate\n")
        except web.HTTPException:
            self.refused += 1
            raise
        return await handler(request)

    def _client(self, request: web.Request) -> str:
        if self.pool_key is None:
            return network(request.remote or "")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer":
                raise Refused("no pass")
            reader = check(token.strip(), self.pool_key, self.audience, self.servers, self._clock())
        except Refused as reason:
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"}, text=f"{reason}\n") from reason
        if reader in self.banned:
            raise web.HTTPForbidden(text="banned\n")
        if (listener := request.app.get(LISTENER)) and request.transport:
            listener.read_by(request.transport.get_extra_info("peername"), reader)
        return reader

    async def _charge(self, request: web.Request, response: web.StreamResponse) -> None:
        client = CLIENT.get()
        if self.rates and client is not None and request.method == "GET":
            self.rates.charge(client, response.content_length or 0, self._monotonic())
