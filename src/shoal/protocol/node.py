"""A member of the pool: every process except the coordinator. It joins, sends heartbeats, and makes requests.

    node = Node.join(invite, folder, stop=stop)   loads or makes the key, registers with the invite
    with node.heart(): ...                        a heartbeat a second in the background; `node.answer` is the newest reply
    node.post("/v1/claims", ...)                  a signed request, repeated while the coordinator is away, until a deadline

Invariants: a node believes no answer that the coordinator's key, which is in the invite, has not signed for this very
request (`answers`): another counts as none, and the request is repeated. No answer takes more memory than its caller allows.
Once `stop` is set, no request takes longer than GRACE_S.
Called by worker, validator, learner, origin, relay and evaluator. It knows no other process.
"""

import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from shoal import config as config_module
from shoal.config import Config
from shoal.errors import ShoalError
from shoal.files import write_file
from shoal.protocol.answers import UnsignedAnswerError, check_answer
from shoal.protocol.clock import PoolClock
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.invite import Invite
from shoal.protocol.messages import (
    MAX_SENDERS,
    VERSION,
    Capability,
    CurriculumPage,
    Fingerprint,
    Finished,
    Heartbeat,
    HeartbeatAnswer,
    Intake,
    Registered,
    Registration,
    Role,
    RunDescriptor,
    Stats,
)
from shoal.protocol.signing import SignedAuth
from shoal.shardcast import Access, Arrival
from shoal.shardcast.serve.passes import Passes
from shoal.shardcast.tls import client_context

HEARTBEAT_S = 1.0
PATIENCE_S = 120.0  # how long a request is repeated while the coordinator is down or restarting
GRACE_S = 1.0  # for a request in flight when this process is told to stop
ASKING = 0.2  # of its time, at most, a node waits for answers to what it asks again and again
LOOK_S = 0.1  # between two looks at the stop event
MESSAGE_BYTES = 16 << 20  # the largest answer that is a message, unless its caller names another limit
BUSY, UNSIGNED, UNREADABLE = (429, 503), 401, 400  # HTTP statuses; 503: another coordinator is taking over
KEY, PAYER = "identity.pem", "payer"  # in a node's folder
SEND_BYTES = 1 << 20  # of a body, handed over at once
PAGE_BYTES = 64 << 20  # the largest page of the curriculum: over a million tasks

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)


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


class Node:
    def __init__(
        self,
        identity: Identity,
        invite: Invite,
        client: httpx.Client,
        patience_s: float,
        stop: threading.Event,
        clock: PoolClock,
    ) -> None:
        self.identity = identity
        self.invite = invite
        self.client = client
        self.patience_s = patience_s
        self.stop = stop
        self.name = ""
        self.direct = False  # rollout files go to and from the pool's bucket (`transfer`); `config` finds out
        self.policy_version: int | None = None
        self.fingerprint: Fingerprint | None = None  # of the version that it loaded last
        self.finished: Finished | None = None  # a submission that is being uploaded
        self.renewals = 0  # requests for a new fingerprint that it has carried out
        self.answer: HeartbeatAnswer | None = None
        self._doing, self._waiting = "starting", False
        self._since_s, self._seconds = time.monotonic(), {"busy": 0.0, "waiting": 0.0}
        self.tokens = 0
        self.arrival: Arrival | None = None  # of weights, the newest
        self.clock = clock
        self.answered_in_s = 0.0  # the newest message
        self.reader_pass = Passes(identity.private_key, self.reader_grant, clock)

    @classmethod
    def join(
        cls,
        invite: Invite,
        folder: Path,
        *,
        url: str | None = None,
        patience_s: float = PATIENCE_S,
        stop: threading.Event | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: PoolClock | None = None,
        capability: Capability | None = None,
    ) -> "Node":
        """Load or make this node's key in `folder` and register. `url` is where an origin or relay serves.

        `stop` ends every wait of this node. Raises RefusedError for an invite that is not accepted.
        """
        node = cls.of(
            invite,
            Identity.load_or_create(folder / KEY),
            patience_s=patience_s,
            stop=stop,
            transport=transport,
            clock=clock,
        )
        registration = Registration(
            invite=invite.signed.model_dump_json(),
            url=url,
            capability=capability,
            protocol=VERSION,
            payer=read_payer(folder),
        )
        try:
            registered = node.post("/v1/register", registration, Registered)
        except RefusedError as refusal:
            if refusal.status == UNREADABLE:
                node.descriptor()  # an older coordinator does not know all that is in a registration
            refusal.restart_helps = refusal.status >= 500  # an invite that is refused once is refused again
            raise
        node.name = registered.name
        log.info("joined run %s at %s as %s (%s)", invite.run, invite.url, registered.name, registered.role)
        return node

    @classmethod
    def read_config(cls, invite: Invite, stop: threading.Event) -> Config:
        """The run's config, for a role that must listen before it can register its address."""
        return cls.of(invite, Identity.generate(), stop=stop).config()

    @classmethod
    def of(
        cls,
        invite: Invite,
        identity: Identity,
        *,
        patience_s: float = PATIENCE_S,
        stop: threading.Event | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: PoolClock | None = None,
    ) -> "Node":
        """A node that only asks: it does not register."""
        clock = clock or PoolClock()
        auth = SignedAuth(identity, invite.run, clock=clock)
        client = httpx.Client(base_url=invite.url, auth=auth, timeout=30, transport=transport)
        return cls(identity, invite, client, patience_s, stop or threading.Event(), clock)

    # --- the run -----------------------------------------------------------------------------------------------------

    def descriptor(self) -> RunDescriptor:
        """The coordinator's description of the run, with its signature checked against the key in the invite."""
        signed = self._parse(Signed, self._request("GET", "/v1/run"))
        try:
            descriptor = RunDescriptor.model_validate_json(signed.open(self.invite.key, domain="run"))
        except (IdentityError, ValidationError) as error:
            raise NodeError(f"{self.invite.url} is not this run's coordinator: {error}") from error
        if descriptor.protocol != VERSION:
            raise ProtocolError(
                f"the coordinator at {self.invite.url} speaks protocol {descriptor.protocol}, this node {VERSION}: "
                "install the same version of Shoal on both"
            )
        if descriptor.run != self.invite.run:
            raise NodeError(f"{self.invite.url} serves run {descriptor.run}, not {self.invite.run}")
        return descriptor

    def config(self) -> Config:
        found = config_module.parse(self.descriptor().config, source="run descriptor")
        self.direct = bool(found.store.url)
        return found

    def wait_for_key(self, role: Role, stop: threading.Event) -> str:
        """The key of the first node registered as `role`; waits up to `patience_s` for one."""
        deadline_s = time.monotonic() + self.patience_s
        while not stop.is_set():
            if keys := self.descriptor().keys.get(role):
                return keys[0]
            if time.monotonic() > deadline_s:
                raise NodeError(f"no {role} joined run {self.invite.run} in {self.patience_s:.0f} s; start one")
            stop.wait(0.2)
        raise StoppedError(f"stopped while waiting for a node of role {role}")

    # --- requests ----------------------------------------------------------------------------------------------------

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
                pause_s = min(2 * pause_s, 2.0)
                continue
            if response.status_code == UNSIGNED and self.clock.offset_s != offset_s and time.monotonic() < deadline_s:
                continue  # the request was dated by a wrong clock, and the refusal says what time it is
            if response.status_code >= 400:
                raise RefusedError(f"{method} {path}: {_reason(response)}", response.status_code)
            return response

    def _send(self, method: str, path: str, content: bytes, most_bytes: int) -> httpx.Response:
        """One request. It runs in its own thread, so that a silent host does not delay a stop."""
        answer: Future[httpx.Response] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._receive(method, path, content, most_bytes))
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

    def _receive(self, method: str, path: str, content: bytes, most_bytes: int) -> httpx.Response:
        """One answer, read whole and signed for this request. Raises TooLargeError, UnsignedAnswerError."""
        plain = {"accept-encoding": "identity"}  # a few compressed bytes could become any number
        body, asked_s, begun_s = bytearray(), self.clock.clock(), time.monotonic()
        request = self.client.build_request(method, path, content=content, headers=plain)
        request.stream = Pieces(content)
        with closing(self.client.send(request, stream=True)) as response:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise NodeError(
                    f"the coordinator at {self.invite.url} answers {method} {path} in {encoding}: turn that off"
                )
            for piece in response.iter_bytes():
                body += piece
                if len(body) > most_bytes:
                    raise TooLargeError(
                        f"the coordinator at {self.invite.url} answers {method} {path} with more than {most_bytes} bytes, "
                        "the limit for such an answer; ask its operator what it serves there"
                    )
        asked, status, digest = response.request.headers, response.status_code, sha256(body).digest()
        try:
            created_s = check_answer(self.invite.key, asked, response.headers, status=status, body_sha256=digest)
        except UnsignedAnswerError as error:
            raise UnsignedAnswerError(f"an answer with status {status}, but {error}") from error
        self.clock.heard(created_s, asked_s, self.clock.clock())
        answer = httpx.Response(status, content=bytes(body), request=response.request)
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

    # --- heartbeats and what they report -----------------------------------------------------------------------------

    def access(self, publisher: str, config: Config) -> Access:
        """How this node reaches relays and the origin, whose key is `publisher`. Heartbeats report each download."""
        authority = Path(config.relays.tls_ca) if config.relays.tls_ca else None
        return Access(
            publisher,
            self.invite.run,
            token=self.reader_pass,
            tls=client_context(authority),
            reach=config.reach,
            on_fetched=self.came,
        )

    def came(self, arrival: Arrival) -> None:
        """Report a download of weights, with its fastest senders."""
        self.arrival = arrival

    def _intake(self) -> Intake:
        if (came := self.arrival) is None:
            return Intake()
        fastest = sorted(came.rates_Bps, key=lambda url: -came.rates_Bps[url])[:MAX_SENDERS]
        return Intake(
            bytes_per_s={url: came.rates_Bps[url] for url in fastest},
            behind_s=came.behind_s,
            version=came.version,
            size_bytes=came.size_bytes,
            took_s=came.took_s,
            ago_s=max(time.monotonic() - came.at_s, 0.0),
        )

    def reader_grant(self) -> str:
        """What the pool grants this key; each heartbeat's answer renews it."""
        return self.answer.reader_grant if self.answer else ""

    def curriculum_page(self, digest: str) -> CurriculumPage:
        """A page of the run's curriculum, as the coordinator has it; the caller checks its digest."""
        return self.get(f"/v1/curricula/{digest}", CurriculumPage, most_bytes=PAGE_BYTES)

    def renewal(self) -> int | None:
        """The newest request to load the weights anew and to report a new fingerprint; None if all are carried out."""
        asked = self.answer.renewals if self.answer else 0
        return asked if asked > self.renewals else None

    def doing(self, what: str, *, waiting: bool = False) -> None:
        """Report what this node does, or waits for, from now on. The time since the last call counts as busy or waiting."""
        now_s = time.monotonic()
        self._seconds["waiting" if self._waiting else "busy"] += now_s - self._since_s
        self._doing, self._waiting, self._since_s = what, waiting, now_s

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        stats = Stats(
            doing=self._doing[:80],
            waiting=self._waiting,
            tokens=self.tokens,
            busy_s=self._seconds["busy"],
            waiting_s=self._seconds["waiting"],
            rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            pid=os.getpid(),
            intake=self._intake(),
        )
        beat = Heartbeat(
            policy_version=self.policy_version,
            wants_task=wants_task,
            stats=stats,
            fingerprint=self.fingerprint,
            renewals=self.renewals,
            finished=self.finished,
        )
        self.answer = self.post("/v1/heartbeat", beat, HeartbeatAnswer)
        return self.answer

    @contextmanager
    def heart(self) -> Iterator[None]:
        """Send a heartbeat each second, or as `pause_s` says, in the background.

        Failures are left to the caller's own next request.
        """
        stopped = threading.Event()

        def beat_on() -> None:
            while not stopped.wait(self.pause_s(HEARTBEAT_S)):
                try:
                    self.beat()
                except NodeError:
                    continue  # the caller's next request fails in the same way and reports it

        thread = threading.Thread(target=beat_on, daemon=True, name="heart")
        thread.start()
        try:
            yield
        finally:
            stopped.set()


def read_payer(folder: Path) -> str:
    """The account on a chain that stakes on the node in this folder; "" if `shoal stake` never named one."""
    path = folder / PAYER
    return path.read_text().strip() if path.is_file() else ""


def write_payer(folder: Path, account: str) -> None:
    write_file(folder / PAYER, account.encode())


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
