"""What a request must meet before its content is looked at: origin, type, size, time; and how often one may ask.

Invariant: no other site can make a browser's request count here; a body is read only up to its limit and its deadline.
Used by the routes of every page.
"""

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web

from shoal.errors import ShoalError
from shoal.protocol.pace import Rates

BODY_S = 10.0  # for a whole body to arrive
MOST_KEYS = 50_000
STRINGS, CONTAINERS = 50_000, 20_000  # of one JSON document


class HttpError(ShoalError):
    """`status` and a message for the client."""

    def __init__(self, status: int, message: str, retry_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.retry_s = status, retry_s


def from_own_page(request: web.Request) -> None:
    """Raises HttpError for a request that another site's page sent."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
        raise HttpError(403, "this request comes from another site")
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower():
        raise HttpError(403, "this request comes from another site")


async def json_body(request: web.Request, max_bytes: int, within_s: float = BODY_S) -> bytes:
    """The body of a JSON request. Raises HttpError.

    The type matters: a browser sends JSON across sites only after asking, and this server never permits it.
    """
    if request.content_type != "application/json":
        raise HttpError(415, "send JSON with Content-Type: application/json")
    if (request.content_length or 0) > max_bytes:
        raise HttpError(413, f"the body is larger than {max_bytes} bytes")
    found = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.content.iter_any():
                found += chunk
                if len(found) > max_bytes:
                    raise HttpError(413, f"the body is larger than {max_bytes} bytes")
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {within_s:g} s") from None
    if fault := json_fault(found):
        raise HttpError(400, fault)
    return bytes(found)


def json_fault(data: bytes | bytearray) -> str:
    """Why this JSON should not be parsed; "" if nothing. It takes milliseconds where a parser takes seconds.

    A parser makes an object of each string and list, and an error of each unknown field: gigabytes of a few MiB.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # only quotes that begin or end a string are left
    if plain.count(b'"') > 2 * STRINGS:
        return f"the JSON has more than {STRINGS} strings"
    structure = b"".join(plain.split(b'"')[::2])
    if structure.count(b"[") + structure.count(b"{") > CONTAINERS:
        return f"the JSON has more than {CONTAINERS} lists and objects"
    return ""


class Allowance:
    """`count` uses in `per_s` seconds for each key; what was used comes back evenly."""

    def __init__(self, count: int, per_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._rates = Rates(count / per_s, clients=MOST_KEYS, burst_s=(count - 1 + 1e-6) * per_s / count)

    def take(self, key: str, what: str) -> None:
        """Charge one use. Raises HttpError with status 429."""
        wait_s = self._rates.wait_s(key, self._monotonic())
        if wait_s > 0:
            raise HttpError(429, f"too many {what}; try again in {int(wait_s) + 1} s", int(wait_s) + 1)
        self._rates.charge(key, 1, self._monotonic())

    def give_back(self, key: str) -> None:
        self._rates.charge(key, -1, self._monotonic())
