"""Access control of a server: passes and bans.

    grant   the pool signs: the reader with this key may read this run's weights until a given time
    visit   the reader signs: the reader requests something from one server at a given time
    pass    GRANT~VISIT

Invariant: every request except /healthz needs a valid pass. Its visit must name this server's URL, be at most `PASS_S`
old, and be signed by the reader in the grant, who must not be banned. Its grant must be signed by the pool for this
audience, and not expired. Because a visit names the server, a relay cannot use its readers' passes elsewhere. A ban
also resets the reader's connections. A connection stays open only for requests with a valid pass.
Left out: a nonce, because a pass replayed to the same server within a minute reveals nothing new; and a rate limit per
reader, because the server limits the connections of each address.
Source: RFC 6750 (bearer tokens), RFC 9449 (proof of possession).
"""

from __future__ import annotations

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Collection, Set
from functools import lru_cache
from typing import TypeVar

from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field

from shoal.identity import public_key
from shoal.shardcast.connections import LISTENER, keep_open
from shoal.shardcast.manifest import Hash, Record

# Domain separation: nothing else that these keys sign is a valid grant or visit.
GRANT_DOMAIN = b"shoal shardcast reader token 1\n"
VISIT_DOMAIN = b"shoal shardcast visit 1\n"
MAX_PASS_CHARS = 4096
PASS_S = 60.0  # as for signed requests, because the clocks of honest machines differ by less
RENEW_S = 20.0  # a reader reuses a pass for this long
MAX_KNOWN = 4096  # verified passes to cache, so that not every shard costs a signature check

_SIGNED = re.compile(r"([A-Za-z0-9_-]+)\.([0-9a-f]{128})")


class Refused(ValueError):
    """A pass is not accepted."""


C = TypeVar("C", bound=Record)


class Grant(Record):
    reader: Hash  # ed25519 public key, hex
    audience: str  # the run
    expires_s: float = Field(ge=0, le=1e12)  # seconds since 1970


class Visit(Record):
    server: str  # its URL, as the pool announces it
    created_s: float = Field(ge=0, le=1e12)


def issue(private_key: Ed25519PrivateKey, reader: str, audience: str, expires_s: float) -> str:
    """Sign a grant with the pool's key. It is useless without the reader's own signature."""
    return _sign(private_key, Grant(reader=reader, audience=audience, expires_s=expires_s), GRANT_DOMAIN)


def visit(private_key: Ed25519PrivateKey, grant: str, server: str, now_s: float) -> str:
    """Return a pass for `Authorization: Bearer ...`, valid only for the server at this URL."""
    return f"{grant}~{_sign(private_key, Visit(server=server.rstrip('/'), created_s=now_s), VISIT_DOMAIN)}"


def check(text: str, pool_key: str, audience: str, servers: Collection[str], now_s: float) -> str:
    """Verify a pass for a server with these URLs. Return the reader. Raise Refused."""
    if len(text) > MAX_PASS_CHARS:
        raise Refused("malformed pass: too long")
    grant, shown = _opened(text, pool_key)
    if grant.audience != audience:
        raise Refused(f"the grant is for {grant.audience!r}, but this is {audience!r}")
    if now_s >= grant.expires_s:
        raise Refused(f"the grant expired {now_s - grant.expires_s:.0f} s ago")
    if shown.server not in servers:
        raise Refused(f"the pass was signed for {shown.server[:200]!r}, which is another server")
    if abs(now_s - shown.created_s) > PASS_S:
        raise Refused(
            f"the pass was signed {now_s - shown.created_s:.0f} s ago, outside of the allowed {PASS_S:.0f} s: "
            "check the clock"
        )
    return grant.reader


class Passes:
    """A reader's passes: one per server, renewed every RENEW_S."""

    def __init__(
        self, private_key: Ed25519PrivateKey, grant: Callable[[], str], clock: Callable[[], float] = time.time
    ) -> None:
        self._private_key, self._grant, self._clock = private_key, grant, clock
        self._made: dict[str, tuple[str, float, str]] = {}  # for each server, its grant, creation time and pass

    def __call__(self, server: str) -> str:
        """Return a current pass for this server; "" before the pool has sent a grant."""
        grant, now_s = self._grant(), self._clock()
        if not grant:
            return ""
        known = self._made.get(server)
        if known is None or known[0] != grant or not 0 <= now_s - known[1] < RENEW_S:
            known = self._made[server] = (grant, now_s, visit(self._private_key, grant, server, now_s))
        return known[2]


@lru_cache(MAX_KNOWN)
def _opened(text: str, pool_key: str) -> tuple[Grant, Visit]:
    """Verify the signatures of pool and reader. Return grant and visit. Raise Refused."""
    granted, _, visited = text.partition("~")
    grant = _verified(granted, pool_key, GRANT_DOMAIN, Grant, "the pool did not sign this grant")
    shown = _verified(visited, grant.reader, VISIT_DOMAIN, Visit, "the reader did not sign this visit")
    return grant, shown


def _sign(private_key: Ed25519PrivateKey, claims: Record, domain: bytes) -> str:
    text = claims.model_dump_json().encode()
    return f"{urlsafe_b64encode(text).rstrip(b'=').decode()}.{private_key.sign(domain + text).hex()}"


def _verified(text: str, key: str, domain: bytes, kind: type[C], forged: str) -> C:
    parts = _SIGNED.fullmatch(text)
    if parts is None:
        raise Refused("malformed pass: not base64url(json).hexsig~base64url(json).hexsig")
    try:
        claims = urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        public_key(key).verify(bytes.fromhex(parts[2]), domain + claims)
        if (shown := kind.model_validate_json(claims)).model_dump_json().encode() != claims:
            raise ValueError("not the canonical text")
        return shown
    except InvalidSignature as error:
        raise Refused(f"bad signature: {forged}") from error
    except ValueError as error:  # including pydantic's ValidationError
        raise Refused("malformed pass") from error


class Guard:
    def __init__(
        self,
        *,
        audience: str,
        pool_key: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`pool_key` signs the grants."""
        self.audience, self.pool_key = audience, pool_key
        self.servers: Set[str] = frozenset()  # URLs by which readers know this server; a pass names one of them
        self.banned: Set[str] = frozenset()
        self.refused = 0
        self._clock = clock
        self._applications: list[web.Application] = []

    def ban(self, readers: Set[str]) -> None:
        """Replace the set of banned readers, and reset their open connections."""
        self.banned = readers
        for application in self._applications:
            if listener := application.get(LISTENER):
                listener.cut_readers(readers)

    def attach(self, application: web.Application) -> None:
        self._applications.append(application)
        application.middlewares.append(self._admit)

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/healthz":
            response = await handler(request)
            response.force_close()
            return response
        try:
            self._check(request)
        except web.HTTPException as refusal:
            self.refused += 1
            refusal.force_close()
            raise
        return await handler(request)

    def _check(self, request: web.Request) -> None:
        """Raise HTTPException unless the request has a valid pass of a reader who is not banned."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer":
                raise Refused("no pass")
            reader = check(token.strip(), self.pool_key, self.audience, self.servers, self._clock())
        except Refused as reason:
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"}, text=f"{reason}\n") from reason
        if reader in self.banned:
            raise web.HTTPForbidden(text="banned\n")
        keep_open(request, reader)
