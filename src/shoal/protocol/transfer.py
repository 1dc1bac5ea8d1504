"""How a node sends and fetches rollout files: to and from the coordinator, or a bucket by the coordinator's signed URLs.

Invariant: what was fetched has the hash that the coordinator signed, and no more bytes than the caller allows. Whatever a
bucket answers, the node asks the coordinator again until its patience ends. Called by worker, validator and learner.
"""

import time
from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

import httpx
from blake3 import blake3

from shoal.protocol.calling import PLAIN, BodyError, NodeError, RefusedError, StoppedError, read_body
from shoal.protocol.messages import Announced, Grant, Link, Stored
from shoal.protocol.node import Node

TOO_EARLY = 425  # HTTP status: the file has not come, or the coordinator is another one now
EXISTS = 412  # of a bucket: this very file was sent before
PAUSE_S = 1.0
TIMEOUT_S = 30.0  # for the next bytes

T = TypeVar("T")


class _BucketError(Exception):
    """What the bucket answered; another URL may help."""


def send_file(node: Node, path: str, data: bytes) -> Stored:
    """Store the file that `path` names. Raises RefusedError, NodeError."""
    if not node.direct:
        return node.put(path, data, Stored)
    file = Announced(size_bytes=len(data), sha256=sha256(data).hexdigest())

    def send() -> Stored:
        grant = node.post(f"{path}/grant", file, Grant)
        with httpx.stream("PUT", grant.url, content=data, headers=grant.headers, timeout=TIMEOUT_S) as answer:
            if answer.status_code not in (200, 201, EXISTS):  # its body is of no interest
                raise _BucketError(f"answered PUT with {answer.status_code}")
        try:
            return node.post(f"{path}/stored", file, Stored)
        except RefusedError as refusal:
            if refusal.status != TOO_EARLY:
                raise
            raise _BucketError(str(refusal)) from refusal

    return _patiently(node, send)


def fetch_file(node: Node, path: str, *, most_bytes: int) -> bytes:
    """The file that `path` names. Raises RefusedError, NodeError."""
    if not node.direct:
        return node.get_bytes(path, most_bytes=most_bytes)

    def fetch() -> bytes:
        link = node.get(f"{path}/link", Link)
        with httpx.stream("GET", link.url, headers=PLAIN, timeout=TIMEOUT_S) as answer:
            if answer.status_code != 200:
                raise _BucketError(f"answered GET with {answer.status_code}")
            try:
                data = read_body(answer, most_bytes)
            except BodyError as error:
                raise _BucketError(f"{path}: {error}") from error
        if blake3(data).hexdigest() != link.hash:
            raise _BucketError(f"has another file under {path}")
        return data

    return _patiently(node, fetch)


def _patiently(node: Node, attempt: Callable[[], T]) -> T:
    deadline_s = time.monotonic() + node.patience_s
    while True:
        try:
            return attempt()
        except (httpx.TransportError, _BucketError) as error:
            if time.monotonic() + PAUSE_S > deadline_s:
                raise NodeError(
                    f"the pool's bucket did not serve for {node.patience_s:.0f} s ({type(error).__name__}: {error}); "
                    "is store.endpoint reachable from here, and this machine's clock right?"
                ) from error
        if node.stop.wait(PAUSE_S):
            raise StoppedError("stopped: the pool's bucket did not answer")
