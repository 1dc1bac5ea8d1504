"""Answers of other machines over httpx: bounded in bytes and time, and never decompressed.

Invariant: whatever a server sends, reading its answer takes no more memory than the caller allows, and ends unless the body
comes at LEAST_BPS. A few compressed bytes could become any number, so a compressed body is refused.
Called by all clients of this package that use httpx. Left out: SHARDCAST, which has a client of its own.
"""

import time
from collections.abc import Callable

import httpx

PLAIN = {"accept-encoding": "identity"}  # of a request
LEAST_BPS, GRACE_S = 1024, 30.0  # how fast a body comes at least, and after how long that is looked at


class BodyError(httpx.HTTPError):
    """This body is not read on; the message says why."""


class OversizeError(BodyError):
    """It has more bytes than the caller allows."""


def check_plain(response: httpx.Response) -> None:
    """Raise BodyError if the body is compressed."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise BodyError(f"it answers in {encoding}: turn that off")


def read_body(response: httpx.Response, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> bytes:
    """The body of a response that was opened as a stream. Raises BodyError, httpx.ReadTimeout."""
    check_plain(response)
    body, begun_s = bytearray(), clock()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > most_bytes:
            raise OversizeError(f"it answers with more than {most_bytes} bytes")
        if (took_s := clock() - begun_s) > GRACE_S + len(body) / LEAST_BPS:
            raise httpx.ReadTimeout(f"it sent {len(body)} bytes in {took_s:.0f} s", request=response.request)
    return bytes(body)


def get(client: httpx.Client, url: str, most_bytes: int, **options: object) -> httpx.Response:
    """`client.get`, with a body of at most so many bytes. Raises httpx.HTTPError, httpx.InvalidURL."""
    with client.stream("GET", url, headers=PLAIN, **options) as response:  # type: ignore[arg-type]
        body = read_body(response, most_bytes)
    return httpx.Response(response.status_code, headers=response.headers, content=body, request=response.request)
