"""Signed requests to one coordinator, retried until a deadline and cancelled soon after a stop.

Invariants: an answer is believed only if the coordinator's key, which is in the invite, signed it for this very request
(`signing`); otherwise the request is repeated. No answer takes more memory than its caller allows. Once `stop` is set, a
request ends within STOP_S. A body that arrives more slowly than MIN_BPS is abandoned. A compressed body is refused, because
a few bytes could expand without limit.
`node` adds membership. SHARDCAST has a client of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from datetime import timedelta
from hashlib import sha256
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from shoal.errors import ShoalError, first_problem, printable
from shoal.protocol.invite import Invite
from shoal.protocol.signing import UnsignedAnswerError, check_answer

PATIENCE_S = 120.0  # how long a request is repeated while the coordinator is down or restarting
MAX_PAUSE_S = 2.0  # the longest pause between two attempts; pauses double up to it
STOP_S = 1.0  # a request in progress may take this much longer after this process is told to stop
WAITING_SHARE = 0.2  # a polling node spends at most this share of its time waiting for answers
LOOK_S = 0.1  # the time between two checks of the stop event
SEND_BYTES = 1 << 20  # bytes of a body that are passed to httpcore at once
MESSAGE_BYTES = 16 << 20  # the largest message, unless the caller names another limit
PLAIN = {"accept-encoding": "identity"}  # request header that asks for an uncompressed answer
MIN_BPS, GRACE_S = 1024, 30.0  # a body of n bytes must arrive within GRACE_S + n / MIN_BPS seconds
# HTTP statuses after which a request is repeated. 425: the request was signed before the coordinator started, so the
# coordinator cannot know whether it has already served that request. 503: a service that the coordinator
# needs (a chain) does not answer.
BUSY = (425, 429, 503)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
log = logging.getLogger(__name__)


class NodeError(ShoalError):
    """The coordinator refused, or did not answer in time. The message says which of the two, and what to try."""

    def __init__(self, message: str, *, restart_helps: bool = True) -> None:
        super().__init__(message)
        self.restart_helps = restart_helps


class StoppedError(NodeError):
    """This process was told to stop before the coordinator answered."""


class RefusedError(NodeError):
    """The coordinator answered with a refusal; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BodyError(httpx.HTTPError):
    """Reading a body was aborted; the message says why."""


class AgainError(Exception):
    """The attempt failed temporarily: retry it."""


class Pieces(httpx.ByteStream):
    """A body sent in small pieces, because after each send httpcore copies the unsent rest of a piece."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), SEND_BYTES):
            yield self.data[at : at + SEND_BYTES]


class Caller:
    def __init__(self, invite: Invite, client: httpx.Client, patience_s: float, stop: threading.Event) -> None:
        """`client` signs the requests."""
        self.invite = invite
        self.client = client
        self.patience_s = patience_s
        self.stop = stop
        self.answered_in_s = 0.0  # how long the newest answer to a `post` took
        self.peer = ""  # the address that sent the newest signed answer; "": unknown

    def get(self, path: str, answer: type[M], *, max_bytes: int = MESSAGE_BYTES) -> M:
        return self._parse(answer, self._request("GET", path, max_bytes=max_bytes))

    def get_bytes(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file. Raise NodeError if it is larger than `max_bytes`."""
        return self._request("GET", path, max_bytes=max_bytes).content

    def post(self, path: str, message: BaseModel | None, answer: type[M]) -> M:
        response = self._request("POST", path, message.model_dump_json().encode() if message else b"")
        self.answered_in_s = response.elapsed.total_seconds()
        return self._parse(answer, response)

    def pause_s(self, min_s: float) -> float:
        """Return the pause before the next poll: at least `min_s`, and longer if the coordinator answers slowly.

        This keeps polls and heartbeats from overloading the coordinator.
        """
        return max(min_s, self.answered_in_s * (1 - WAITING_SHARE) / WAITING_SHARE)

    def put(self, path: str, data: bytes, answer: type[M]) -> M:
        return self._parse(answer, self._request("PUT", path, data))

    def _request(
        self, method: str, path: str, content: bytes = b"", *, max_bytes: int = MESSAGE_BYTES
    ) -> httpx.Response:
        def attempt() -> httpx.Response:
            response = self._send(method, path, content, max_bytes)
            if response.status_code in BUSY:
                raise AgainError(_reason(response))
            return response

        server = f"the coordinator at {self.invite.url}"
        response = self.retry(
            attempt,
            server,
            f"{method} {path}",
            "is it running and reachable, and does no other server use its address?",
        )
        if response.status_code >= 400:
            raise RefusedError(f"{method} {path}: {_reason(response)}", response.status_code)
        return response

    def retry(self, attempt: Callable[[], T], server: str, request: str, try_this: str) -> T:
        """Retry an attempt with exponential backoff, for at most `patience_s`. Raise NodeError, StoppedError."""
        deadline_s = time.monotonic() + self.patience_s
        pause_s = 0.1
        while True:
            try:
                return attempt()
            except (httpx.TransportError, UnsignedAnswerError, AgainError) as error:
                why = f"{type(error).__name__}: {error}"
                if self.stop.is_set():
                    raise StoppedError(f"stopped: {server} did not answer {request}") from error
                if time.monotonic() + pause_s > deadline_s:
                    raise NodeError(
                        f"{server} did not answer {request} for {self.patience_s:.0f} s ({why}); {try_this}"
                    ) from error
                self.stop.wait(pause_s)
                if pause_s < MAX_PAUSE_S <= 2 * pause_s:
                    log.warning("waiting up to %.0f s for %s: %s", self.patience_s, server, why)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _send(self, method: str, path: str, content: bytes, max_bytes: int) -> httpx.Response:
        """Send one request, in its own thread, so that a silent host does not delay a stop."""
        answer: Future[httpx.Response] = Future()
        responding = threading.Event()  # the answer's headers have arrived
        deadline_s = time.monotonic() + self.patience_s + len(content) / MIN_BPS  # for the headers

        def run() -> None:
            try:
                answer.set_result(self._receive(method, path, content, max_bytes, responding))
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True, name="request").start()
        stopped_s: float | None = None
        while True:
            try:
                return answer.result(LOOK_S)
            except TimeoutError:
                if self.stop.is_set():
                    stopped_s = stopped_s or time.monotonic()
                    if time.monotonic() - stopped_s > STOP_S:
                        raise StoppedError(
                            f"stopped: the coordinator at {self.invite.url} did not answer {method} {path}"
                        ) from None
                if not responding.is_set() and time.monotonic() > deadline_s:
                    raise httpx.ReadTimeout(f"no headers of an answer to {method} {path} arrived in time") from None

    def _receive(
        self, method: str, path: str, content: bytes, max_bytes: int, responding: threading.Event
    ) -> httpx.Response:
        """Send a request. Check the signature and return the whole answer. Raise NodeError, UnsignedAnswerError."""
        start_s = time.monotonic()
        request = self.client.build_request(method, path, content=content, headers=PLAIN)
        request.stream = Pieces(content)
        with closing(self.client.send(request, stream=True)) as response:
            responding.set()
            peer = _peer(response)
            try:
                body = read_body(response, max_bytes)
            except BodyError as error:
                raise NodeError(
                    f"{method} {path} at the coordinator {self.invite.url}: {error}; "
                    "ask the coordinator's operator which server runs at this address",
                    restart_helps=False,
                ) from error
        status, digest = response.status_code, sha256(body).digest()
        answer = httpx.Response(status, content=body, request=response.request)
        try:
            check_answer(self.invite.key, response.request, response.headers, status=status, body_sha256=digest)
        except UnsignedAnswerError as error:
            says = f"; it says {printable(_reason(answer))[:200]}" if status >= 400 else ""  # such as: check the clock
            raise UnsignedAnswerError(f"an answer with status {status}, but {error}{says}") from error
        self.peer = peer
        answer.elapsed = timedelta(seconds=time.monotonic() - start_s)
        return answer

    def _parse(self, model: type[M], response: httpx.Response) -> M:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise NodeError(f"{response.request.url.path}: unexpected answer: {first_problem(error)}") from error


def _peer(response: httpx.Response) -> str:
    """Return the address that sends an open response; "" if it is unknown."""
    try:
        return str(response.extensions["network_stream"].get_extra_info("server_addr")[0])
    except (KeyError, TypeError, OSError):  # not a socket, or it is closed
        return ""


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code}"


# --- bounded answers from any server -----------------------------------------------------------------------------------


def read_body(response: httpx.Response, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> bytes:
    """Return the body of a response that was opened as a stream. Raise BodyError, httpx.ReadTimeout."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise BodyError(f"its answer is compressed ({encoding}): turn compression off")
    body, start_s = bytearray(), clock()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > max_bytes:
            raise BodyError(f"its answer has more than {max_bytes} bytes")
        if (took_s := clock() - start_s) > GRACE_S + len(body) / MIN_BPS:
            raise httpx.ReadTimeout(f"it sent {len(body)} bytes in {took_s:.0f} s", request=response.request)
    return bytes(body)


def get(client: httpx.Client, url: str, max_bytes: int, **options: object) -> httpx.Response:
    """Call `client.get` with a body of at most `max_bytes`. Raise httpx.HTTPError, httpx.InvalidURL."""
    with client.stream("GET", url, headers=PLAIN, **options) as response:  # type: ignore[arg-type]
        body = read_body(response, max_bytes)
    return httpx.Response(response.status_code, headers=response.headers, content=body, request=response.request)
