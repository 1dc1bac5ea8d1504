"""Rate limits, and checks on a request before its body is parsed: origin, content type, size, deadline.

Invariant: a browser's request on behalf of another site is refused (CSRF). A body is read only up to its size limit and
deadline. The routes of all pages use this module.
"""

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from shoal.errors import ShoalError
from shoal.protocol.pace import Rates

BODY_S = 10.0  # time limit for the whole body to arrive
MAX_KEYS = 50_000  # largest number of keys that a rate limit remembers
STRINGS, CONTAINERS = 50_000, 20_000  # limits in one JSON document: of strings, and of lists and objects


class HttpError(ShoalError):
    """An error response, with a status, a message, and `retry_s` for the header Retry-After."""

    def __init__(self, status: int, message: str, retry_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.retry_s = status, retry_s


def check_same_origin(request: web.Request) -> None:
    """Raise HttpError if another site's page sent this request."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
        raise HttpError(403, "this request comes from another site")
    origin = request.headers.get("Origin")  # browsers send SCHEME://HOST[:PORT] or "null"
    if origin is not None and origin.partition("://")[2].lower() != request.headers.get("Host", "").lower():
        raise HttpError(403, "this request comes from another site")


async def json_body(request: web.Request, max_bytes: int) -> bytes:
    """Read the body of a JSON request. Raise HttpError.

    The content type is checked, because browsers send JSON to another site only after a CORS preflight. This server
    never allows a preflight.
    """
    if request.content_type != "application/json":
        raise HttpError(415, "send JSON with Content-Type: application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(415, "send the body without Content-Encoding")
    if (request.content_length or 0) > max_bytes:
        raise HttpError(413, f"the body is larger than {max_bytes} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise HttpError(413, f"the body is larger than {max_bytes} bytes")
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {BODY_S:g} s") from None
    if error := json_size_error(body):
        raise HttpError(400, error)
    return bytes(body)


def json_size_error(data: bytes | bytearray) -> str:
    """Return why this JSON would need too much memory to parse, or "". The check takes milliseconds.

    A parser allocates an object per string and list, and an error per unknown field, so a few MiB of JSON can take
    gigabytes.
    """
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # leaves only the quotes that delimit strings
    if unescaped.count(b'"') > 2 * STRINGS:
        return f"the JSON has more than {STRINGS} strings"
    structure = b"".join(unescaped.split(b'"')[::2])
    if structure.count(b"[") + structure.count(b"{") > CONTAINERS:
        return f"the JSON has more than {CONTAINERS} lists and objects"
    return ""


class RateLimit:
    """A rate limit: `count` uses per `per_s` seconds for each key, refilled evenly."""

    def __init__(self, count: int, per_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._rates = Rates(count / per_s, clients=MAX_KEYS, burst_s=(count - 1 + 1e-6) * per_s / count)

    def take(self, key: str, what: str) -> None:
        """Charge one use. Raise HttpError with status 429."""
        wait_s = self._rates.wait_s(key, self._monotonic())
        if wait_s > 0:
            raise HttpError(429, f"too many {what}; try again in {int(wait_s) + 1} s", int(wait_s) + 1)
        self._rates.charge(key, 1, self._monotonic())

    def refund(self, key: str) -> None:
        self._rates.charge(key, -1, self._monotonic())
