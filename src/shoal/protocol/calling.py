"""Signed requests to one coordinator: repeated while it is away, until a deadline, and ended soon after a stop.

Invariants: no answer is believed that the coordinator's key, which is in the invite, has not signed for this very request
(`answers`): another counts as none, and the request is repeated. No answer takes more memory than its caller allows. Once
`stop` is set, no request takes longer than GRACE_S.
`node` adds membership to it.
"""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from datetime import timedelta
from hashlib import sha256
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from shoal.errors import ShoalError
from shoal.protocol.answers import UnsignedAnswerError, check_answer
from shoal.protocol.bodies import LEAST_BPS, PLAIN, BodyError, OversizeError, read_body
from shoal.protocol.clock import PoolClock
from shoal.protocol.invite import Invite

PATIENCE_S = 120.0  # how long a request is repeated while the coordinator is down or restarting
LONGEST_PAUSE_S = 2.0  # between two of its attempts; the first are closer
GRACE_S = 1.0  # for a request in flight when this process is told to stop
ASKING = 0.2  # of its time, at most, a node waits for answers to what it asks again and again
LOOK_S = 0.1  # between two looks at the stop event
SEND_BYTES = 1 << 20  # of a body, handed over at once
MESSAGE_BYTES = 16 << 20  # the largest answer that is a message, unless its caller names another limit
# HTTP statuses. 425: signed before the coordinator started, which cannot tell whether it served the request then. 503:
# another coordinator is taking over.
BUSY, UNSIGNED = (425, 429, 503), 401

M = TypeVar("M", bound=BaseModel)
log = logging.getLogger(__name__)


class NodeError(ShoalError):
    """The coordinator refused, or did not answer in time; the message says which and what to try."""

    restart_helps = True


class StoppedError(NodeError):
    """This process was told to stop before the coordinator answered."""


class RefusedError(NodeError):
    """The coordinator answered with a refusal; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class TooLargeError(NodeError):
    """An answer is larger than its caller allows."""

    restart_helps = False


class ProtocolError(NodeError):
    """The coordinator is of another version of Shoal."""

    restart_helps = False


class _BusyError(Exception):
    """The coordinator asks this node to wait."""


class Pieces(httpx.ByteStream):
    """A body that goes out piece by piece: httpcore copies all that is left of a piece after each part that is sent."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), SEND_BYTES):
            yield self.data[at : at + SEND_BYTES]


class Caller:
    def __init__(
        self, invite: Invite, client: httpx.Client, patience_s: float, stop: threading.Event, clock: PoolClock
    ) -> None:
        """`client` signs the requests; `clock` is the one that it dates them by."""
        self.invite = invite
        self.client = client
        self.patience_s = patience_s
        self.stop = stop
        self.clock = clock
        self.answered_in_s = 0.0  # the newest message

    def get(self, path: str, answer: type[M], *, most_bytes: int = MESSAGE_BYTES) -> M:
        return self._parse(answer, self._request("GET", path, most_bytes=most_bytes))

    def get_bytes(self, path: str, *, most_bytes: int) -> bytes:
        """A file. Raises TooLargeError if it has more bytes than that."""
        return self._request("GET", path, most_bytes=most_bytes).content

    def post(self, path: str, message: BaseModel | None, answer: type[M]) -> M:
        response = self._request("POST", path, message.model_dump_json().encode() if message else b"")
        self.answered_in_s = response.elapsed.total_seconds()
        return self._parse(answer, response)

    def pause_s(self, least_s: float) -> float:
        """How long to wait before the same is asked again: longer, the longer the coordinator takes for its answers.

        So nodes that wait for something, or only say that they live, do not ask more of a coordinator than it can answer.
        """
        return max(least_s, self.answered_in_s * (1 - ASKING) / ASKING)

    def put(self, path: str, data: bytes, answer: type[M]) -> M:
        return self._parse(answer, self._request("PUT", path, data))

    def _request(
        self, method: str, path: str, content: bytes = b"", *, most_bytes: int = MESSAGE_BYTES
    ) -> httpx.Response:
        deadline_s = time.monotonic() + self.patience_s
        pause_s = 0.1
        while True:
            offset_s = self.clock.offset_s
            try:
                response = self._send(method, path, content, most_bytes)
                if response.status_code in BUSY:
                    raise _BusyError(_reason(response))
            except (httpx.TransportError, UnsignedAnswerError, _BusyError) as error:
                if self.stop.is_set():
                    raise self._stopped(method, path) from error
                if time.monotonic() + pause_s > deadline_s:
                    raise self._silent(method, path, error) from error
                self.stop.wait(pause_s)
                if pause_s < LONGEST_PAUSE_S <= 2 * pause_s:
                    why = type(error).__name__.lstrip("_")
                    log.warning(
                        "waiting up to %.0f s for the coordinator at %s: %s", self.patience_s, self.invite.url, why
                    )
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if response.status_code == UNSIGNED and self.clock.offset_s != offset_s and time.monotonic() < deadline_s:
                continue  # the request was dated by a wrong clock, and the refusal says what time it is
            if response.status_code >= 400:
                raise RefusedError(f"{method} {path}: {_reason(response)}", response.status_code)
            return response

    def _send(self, method: str, path: str, content: bytes, most_bytes: int) -> httpx.Response:
        """One request. It runs in its own thread, so that a silent host does not delay a stop."""
        answer: Future[httpx.Response] = Future()
        begun = threading.Event()  # the answer's headers have come
        begun_by_s = time.monotonic() + self.patience_s + len(content) / LEAST_BPS

        def ask() -> None:
            try:
                answer.set_result(self._receive(method, path, content, most_bytes, begun))
            except Exception as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True, name="request").start()
        stopped_s: float | None = None
        while True:
            try:
                return answer.result(LOOK_S)
            except TimeoutError:
                if self.stop.is_set():
                    stopped_s = stopped_s or time.monotonic()
                    if time.monotonic() - stopped_s > GRACE_S:
                        raise self._stopped(method, path) from None
                if not begun.is_set() and time.monotonic() > begun_by_s:
                    raise httpx.ReadTimeout(f"no answer to {method} {path} began in time") from None

    def _receive(
        self, method: str, path: str, content: bytes, most_bytes: int, begun: threading.Event
    ) -> httpx.Response:
        """One answer, read whole and signed for this request. Raises NodeError, UnsignedAnswerError."""
        asked_s, begun_s = self.clock.clock(), time.monotonic()
        request = self.client.build_request(method, path, content=content, headers=PLAIN)
        request.stream = Pieces(content)
        with closing(self.client.send(request, stream=True)) as response:
            begun.set()
            try:
                body = read_body(response, most_bytes)
            except OversizeError as error:
                raise TooLargeError(
                    f"the coordinator at {self.invite.url} answers {method} {path} with more than {most_bytes} bytes, "
                    "the limit for such an answer; ask its operator what it serves there"
                ) from error
            except BodyError as error:
                raise NodeError(f"{method} {path} at the coordinator {self.invite.url}: {error}") from error
        asked, status, digest = response.request.headers, response.status_code, sha256(body).digest()
        try:
            created_s = check_answer(self.invite.key, asked, response.headers, status=status, body_sha256=digest)
        except UnsignedAnswerError as error:
            raise UnsignedAnswerError(f"an answer with status {status}, but {error}") from error
        self.clock.heard(created_s, asked_s, self.clock.clock())
        answer = httpx.Response(status, content=body, request=response.request)
        answer.elapsed = timedelta(seconds=time.monotonic() - begun_s)
        return answer

    def _silent(self, method: str, path: str, error: Exception) -> NodeError:
        came = f": {error}" if isinstance(error, UnsignedAnswerError | _BusyError) else ""
        return NodeError(
            f"the coordinator at {self.invite.url} did not answer {method} {path} for {self.patience_s:.0f} s "
            f"({type(error).__name__}{came}); is it running and reachable, and nothing else at its address?"
        )

    def _stopped(self, method: str, path: str) -> StoppedError:
        return StoppedError(f"stopped: the coordinator at {self.invite.url} did not answer {method} {path}")

    def _parse(self, model: type[M], response: httpx.Response) -> M:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise NodeError(f"{response.request.url.path}: unexpected answer: {error.errors()[0]['msg']}") from error


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code}"
