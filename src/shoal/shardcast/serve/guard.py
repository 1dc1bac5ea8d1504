"""Who may read from a server, and how much: reader tokens, bans, and a rate for each client.

Invariant: with a `pool_key`, every request except /healthz needs a token that this key signed for this audience, that has
not expired and whose reader is not banned. A ban also cuts the reader's open connections.
Called by `server.app`, which attaches it. The coordinator calls `issue`; the roles origin and relay call `ban`.
Left out: client addresses behind a proxy.
Source: RFC 6750 (bearer tokens).
"""

from __future__ import annotations

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Set
from contextvars import ContextVar
from math import ceil

from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict

from shoal.shardcast.format.manifest import Hash
from shoal.shardcast.serve.connections import LISTENER, network
from shoal.shardcast.serve.rates import Rates

# Domain separation: nothing else that the pool's key signs can be taken for a token.
TOKEN_DOMAIN = b"shoal shardcast reader token 1\n"
MAX_TOKEN_CHARS = 4096

# The client of the current request: a reader's key, or a network.
CLIENT: ContextVar[str | None] = ContextVar("client", default=None)

_TOKEN = re.compile(r"([A-Za-z0-9_-]+)\.([0-9a-f]{128})")


class Refused(ValueError):
    """This token is not accepted, and why."""


class ReaderToken(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    reader: Hash  # ed25519 public key, hex
    audience: str  # the run
    expires_s: float  # seconds since 1970


def issue(private_key: Ed25519PrivateKey, reader: str, audience: str, expires_s: float) -> str:
    """A token for `Authorization: Bearer ...`: base64url(json).hexsig, signed by the pool's key."""
    text = ReaderToken(reader=reader, audience=audience, expires_s=expires_s).model_dump_json().encode()
    return f"{urlsafe_b64encode(text).rstrip(b'=').decode()}.{private_key.sign(TOKEN_DOMAIN + text).hex()}"


def check(token: str, pool_key: str, audience: str, now_s: float) -> str:
    """The reader that the token was issued to. Raises Refused."""
    parts = _TOKEN.fullmatch(token) if len(token) <= MAX_TOKEN_CHARS else None
    if parts is None:
        raise Refused("malformed token: not base64url(json).hexsig")
    try:
        text = urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(pool_key)).verify(bytes.fromhex(parts[2]), TOKEN_DOMAIN + text)
        claims = ReaderToken.model_validate_json(text)
    except InvalidSignature as error:
        raise Refused("bad signature: the pool did not sign this token") from error
    except ValueError as error:  # including pydantic's ValidationError
        raise Refused("malformed token") from error
    if claims.audience != audience:
        raise Refused(f"token for {claims.audience!r}, this is {audience!r}")
    if now_s >= claims.expires_s:
        raise Refused(f"token expired {now_s - claims.expires_s:.0f} s ago")
    return claims.reader


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
        """Without `pool_key` anyone may read; with it, only holders of its tokens. `rate_Bps` limits each client: the
        reader of a token, or else an address. `connections` limits each address. `clock` dates tokens, `monotonic`
        rates."""
        self.audience, self.pool_key = audience, pool_key
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
                raise Refused("no token")
            reader = check(token.strip(), self.pool_key, self.audience, self._clock())
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
