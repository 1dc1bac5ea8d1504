"""Admission of signed requests: the headers decide who may ask, and only then is a bounded body read.

Invariant: of a request without a valid signature, by a key without the route's role, or over its rate, no body is read and
nothing is written. Of an admitted one at most `limit_bytes` are read, and `read_body` and `body_pieces` end normally only if
the body is the one that was signed.
Called by `routes`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from aiohttp import web

from shoal.coordinator.http.front import member
from shoal.coordinator.http.pace import Pace
from shoal.coordinator.state.database import PoolError
from shoal.protocol.messages import Role
from shoal.protocol.signing import NonceStore, SignedHead, verify_head

BODY_TIMEOUT_S = 30.0  # for a whole message, and for the next piece of a file

Read = Callable[[], Awaitable[bytes]]  # the next piece of a body, b"" at its end


@dataclass(frozen=True)
class Admission:
    run: str
    nonces: NonceStore
    role_of: Callable[[str], Role | None]
    clock: Callable[[], float]
    pace: Pace

    def admit(self, request: web.Request, roles: Sequence[Role] | None, limit_bytes: int) -> SignedHead:
        """Verify the headers: signature, role, encoding and length of the body, rate.

        `roles` None: strangers too, whose nonce the route spends once it knows their invite; else they could fill the disk.
        Raises SignatureError, and PoolError with status 403, 413, 415 or 429.
        """
        head = verify_head(request.method, request.raw_path, request.headers, audience=self.run, now_s=self.clock())
        role = self.role_of(head.key)
        if role is not None:
            member(request, head.key)
        if roles is not None and role not in roles:
            raise PoolError(f"only {' or '.join(roles)} may ask for {request.path}", 403)
        if "Content-Encoding" in request.headers:
            raise PoolError("the body must come without content-encoding", 415)
        if (request.content_length or 0) > limit_bytes:
            raise PoolError(f"a body of {request.content_length} bytes; at most {limit_bytes} are allowed here", 413)
        if role is not None:
            self.pace.member(head.key)
        if roles is not None:
            head.spend(self.nonces)
        return head


async def read_body(read: Read, head: SignedHead, limit_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole verified body. Raises SignatureError, and PoolError with status 408 or 413."""
    try:
        async with asyncio.timeout(timeout_s):
            return b"".join([piece async for piece in body_pieces(read, head, limit_bytes, timeout_s)])
    except TimeoutError as error:
        raise PoolError(f"the body did not arrive within {timeout_s:g} s; send the request again", 408) from error


async def body_pieces(
    read: Read, head: SignedHead, limit_bytes: int, timeout_s: float = BODY_TIMEOUT_S
) -> AsyncIterator[bytes]:
    """The body in pieces, which are not verified until the iteration ends. Raises like `read_body`."""
    size_bytes, digest = 0, sha256()
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                piece = await read()
        except TimeoutError as error:
            raise PoolError(f"nothing of the body arrived for {timeout_s:g} s; send the request again", 408) from error
        if not piece:
            break
        size_bytes += len(piece)
        if size_bytes > limit_bytes:
            raise PoolError(f"a body of more than {limit_bytes} bytes", 413)
        digest.update(piece)
        yield piece
    head.check_body(digest.digest(), size_bytes)
