"""Who may read from a server, and how much: reader tokens, bans, and a rate for each client.

Invariant: with a `pool_key`, nothing but /healthz is answered without a token that this key signed for this audience,
not expired, whose reader is allowed and not banned. Updates of the two lists are signed by the same key and never go
back, over restarts too where `state` is given. A reader that an update shuts out is cut in the middle of what it gets.
Called by `server.app`, which attaches it; the pool calls `issue` for a reader and `issue_update` for `PUT /readers`.
Left out: the addresses behind a proxy.
Source: RFC 6750 (bearer tokens).
"""

from __future__ import annotations

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from math import ceil
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field

from shoal.files import write_file
from shoal.shardcast.format.manifest import Hash
from shoal.shardcast.serve.connections import LISTENER, network
from shoal.shardcast.serve.rates import Rates

# Two kinds of text signed by one key must never be taken for one another.
TOKEN_DOMAIN = b"shoal shardcast reader token 1\n"
UPDATE_DOMAIN = b"shoal shardcast readers 1\n"

MAX_TOKEN_CHARS = 4096
MAX_UPDATE_BYTES = 4 << 20  # about 45,000 readers

# Who asks, in the task that answers: a reader's key, or a network.
CLIENT: ContextVar[str | None] = ContextVar("client", default=None)

_SEALED = re.compile(r"([A-Za-z0-9_-]+)\.([0-9a-f]{128})")


class Refused(ValueError):
    """This token or update is not accepted, and why."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Kind = TypeVar("Kind", bound=_Record)


class ReaderToken(_Record):
    reader: Hash  # ed25519 public key, hex
    audience: str  # the run
    expires_s: float  # seconds since 1970


class ReadersUpdate(_Record):
    audience: str
    serial: int = Field(ge=1)
    allowed: frozenset[Hash] | None  # None: everyone who holds a token
    banned: frozenset[Hash]


def issue(private_key: Ed25519PrivateKey, reader: str, audience: str, expires_s: float) -> str:
    """A token for `Authorization: Bearer ...`: base64url(json).hexsig, signed by the pool's key."""
    return _seal(private_key, TOKEN_DOMAIN, ReaderToken(reader=reader, audience=audience, expires_s=expires_s))


def check(token: str, pool_key: str, audience: str, now_s: float) -> str:
    """The reader that the token was issued to. Raises Refused."""
    if len(token) > MAX_TOKEN_CHARS:
        raise Refused("token too long")
    told = _open(token, pool_key, TOKEN_DOMAIN, ReaderToken)
    if told.audience != audience:
        raise Refused(f"token for {told.audience!r}, this is {audience!r}")
    if now_s >= told.expires_s:
        raise Refused(f"token expired {now_s - told.expires_s:.0f} s ago")
    return told.reader


def issue_update(
    private_key: Ed25519PrivateKey,
    audience: str,
    serial: int,
    *,
    allowed: frozenset[str] | None,
    banned: frozenset[str],
) -> bytes:
    """The body of a `PUT /readers`, which replaces both lists. `serial` is higher than in all earlier ones."""
    update = ReadersUpdate(audience=audience, serial=serial, allowed=allowed, banned=banned)
    return _seal(private_key, UPDATE_DOMAIN, update).encode()


class Guard:
    def __init__(
        self,
        readers: frozenset[str] | None,
        *,
        audience: str,
        pool_key: str | None = None,
        rate_Bps: float | None = None,
        connections: int = 64,
        total_connections: int = 4096,
        state: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Without `pool_key` everyone may read; with it, the holders of its tokens who are in `readers` (None: all).
        `rate_Bps` is for each client, that is a token's reader or else an address; `connections` for each address.
        `state` is a file that keeps the last update. Raises Refused where it holds another pool's or run's.
        """
        if readers is not None and pool_key is None:
            raise ValueError("readers are told apart by the pool's tokens: give pool_key too")
        self.allowed, self.banned = readers, frozenset[str]()
        self.audience, self.pool_key = audience, pool_key
        self.connections, self.total_connections = connections, total_connections
        self.rates = Rates(rate_Bps) if rate_Bps else None
        self.refused = 0
        self._serial, self._clock = 0, clock
        self._applications: list[web.Application] = []
        self._state: Path | None = None
        if state is not None and state.exists():
            self.accept(state.read_text())
        self._state = state

    def update(self, *, allowed: frozenset[str] | None, banned: frozenset[str]) -> None:
        """At once: a reader that may read no longer loses the connections it has, too."""
        self.allowed, self.banned = allowed, banned
        for application in self._applications:
            if listener := application.get(LISTENER):
                listener.cut_readers(lambda reader: self._refusal(reader) is not None)

    def accept(self, text: str) -> None:
        """Takes over a signed update. Raises Refused."""
        if self.pool_key is None:
            raise Refused("a public server has no readers to update")
        told = _open(text, self.pool_key, UPDATE_DOMAIN, ReadersUpdate)
        if told.audience != self.audience:
            raise Refused(f"update for {told.audience!r}, this is {self.audience!r}")
        if told.serial <= self._serial:
            raise Refused(f"update {told.serial} is not newer than {self._serial}")
        if self._state is not None:
            write_file(self._state, text.encode())
        self._serial = told.serial
        self.update(allowed=told.allowed, banned=told.banned)

    def attach(self, application: web.Application) -> None:
        self._applications.append(application)
        application.middlewares.append(self._admit)
        application.on_response_prepare.append(self._charge)
        application.router.add_put("/readers", self._put_readers)

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/healthz":
            return await handler(request)
        try:
            client = self._client(request)
            CLIENT.set(client)
            wait_s = self.rates.wait_s(client, time.monotonic()) if self.rates else 0.0
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
        if refusal := self._refusal(reader):
            raise web.HTTPForbidden(text=refusal)
        if (listener := request.app.get(LISTENER)) and request.transport:
            listener.read_by(request.transport.get_extra_info("peername"), reader)
        return reader

    def _refusal(self, reader: str) -> str | None:
        """Why the lists shut this reader out, if they do."""
        if reader in self.banned:
            return "banned\n"
        if self.allowed is not None and reader not in self.allowed and reader != self.pool_key:
            return "not a reader of this run\n"
        return None

    async def _charge(self, request: web.Request, response: web.StreamResponse) -> None:
        client = CLIENT.get()
        if self.rates and client is not None and request.method == "GET":
            self.rates.charge(client, response.content_length or 0, time.monotonic())

    async def _put_readers(self, request: web.Request) -> web.Response:
        # Only the pool's own token gets a body read at all, so that strangers can't fill the memory.
        if self.pool_key is None or CLIENT.get() != self.pool_key:
            raise web.HTTPForbidden(text="the pool alone updates the readers, with a token issued to its own key\n")
        body = await request.clone(client_max_size=MAX_UPDATE_BYTES).read()
        try:
            self.accept(body.decode("ascii", "replace"))
        except Refused as reason:
            raise web.HTTPConflict(text=f"{reason}\n") from reason
        return web.json_response({"serial": self._serial})


def _seal(private_key: Ed25519PrivateKey, domain: bytes, record: _Record) -> str:
    text = record.model_dump_json().encode()
    return f"{urlsafe_b64encode(text).rstrip(b'=').decode()}.{private_key.sign(domain + text).hex()}"


def _open(sealed: str, key: str, domain: bytes, kind: type[Kind]) -> Kind:
    parts = _SEALED.fullmatch(sealed)
    if parts is None:
        raise Refused("malformed: not base64url(json).hexsig")
    try:
        text = urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(parts[2]), domain + text)
        return kind.model_validate_json(text)
    except InvalidSignature as error:
        raise Refused("bad signature: the pool did not sign this") from error
    except ValueError as error:  # ValidationError among them
        raise Refused(f"malformed {kind.__name__}") from error
