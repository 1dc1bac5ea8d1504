"""A member of the pool: every process except the coordinator. It joins, reads the config, and sends heartbeats.

    node = Node.join(invite, folder, stop=stop)   loads or creates the key, registers with the invite
    with node.heartbeats(): ...                   sends one heartbeat per second; `node.answer` is the newest answer
    node.post("/v1/claims", ...)                  sends a signed request (`calling`), repeated until a deadline

Invariant: a run's description is used only if the coordinator's key signed it, for this run and this protocol.
"""

import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import httpx
from blake3 import blake3
from pydantic import ValidationError

from shoal import config as config_module
from shoal.config import Config
from shoal.files import write_file
from shoal.protocol.calling import (
    PATIENCE_S,
    PLAIN,
    AgainError,
    BodyError,
    Caller,
    NodeError,
    RefusedError,
    StoppedError,
    read_body,
)
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.invite import Invite
from shoal.protocol.messages import (
    GRADING,
    MAX_SENDERS,
    VERSION,
    Announced,
    Capability,
    FileLink,
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
    Stored,
    UploadGrant,
)
from shoal.protocol.signing import SignedAuth
from shoal.shardcast import Access, Arrival
from shoal.shardcast.guard import Passes

HEARTBEAT_S = 1.0
UNREADABLE = 400  # HTTP status
KEY, PAYER = "identity.pem", "payer"  # in a node's folder
EXISTS = 412  # HTTP status: the bucket already has this file
TOO_EARLY = 425  # HTTP status: the file has not arrived yet
NOT_THERE = 404  # HTTP status: the bucket has no such file
WRONG_ANSWERS = 3  # answers of the bucket without the right file, before the coordinator is asked
BUCKET_S = 30.0  # timeout of each read from and write to a bucket
BUCKET_HINT = "is store.endpoint reachable from here, and is this machine's clock right?"

log = logging.getLogger(__name__)


class Node(Caller):
    def __init__(
        self,
        identity: Identity,
        invite: Invite,
        client: httpx.Client,
        patience_s: float,
        stop: threading.Event,
    ) -> None:
        super().__init__(invite, client, patience_s, stop)
        self.identity = identity
        self.name = ""
        self.role: Role | None = None  # None: not registered
        self.direct = False  # whether rollout files go to and from the pool's bucket; set by `config`
        self.policy_version: int | None = None
        self.fingerprint: Fingerprint | None = None  # of the version that it loaded last
        self.working_on: list[str] = []  # submissions that it is generating
        self.finished: Finished | None = None  # the submission that it is uploading
        self.renewals = 0  # completed requests for a new fingerprint
        self.answer: HeartbeatAnswer | None = None
        self._doing, self._waiting = "starting", False
        self._since_s, self._seconds = time.monotonic(), {"busy": 0.0, "waiting": 0.0}
        self.tokens = 0
        self.arrival: Arrival | None = None  # its newest download of weights
        self.reader_pass = Passes(identity.private_key, self.reader_grant)

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
        capability: Capability | None = None,
    ) -> "Node":
        """Load or create this node's key in `folder`, and register. `url`: where an origin or relay serves.

        `stop` ends every wait of this node. Raise RefusedError if the invite is not accepted.
        """
        node = cls.of(
            invite,
            Identity.load_or_create(folder / KEY),
            patience_s=patience_s,
            stop=stop,
            transport=transport,
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
                node.descriptor()  # if the versions of Shoal differ, this raises an error that names both
            refusal.restart_helps = refusal.status >= 500  # after any other refusal the invite would be refused again
            raise
        node.name, node.role = registered.name, registered.role
        log.info("joined run %s at %s as %s (%s)", invite.run, invite.url, registered.name, registered.role)
        return node

    @classmethod
    def read_config(cls, invite: Invite, stop: threading.Event) -> Config:
        """Return the run's config, for a role that must listen before it can register its address."""
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
    ) -> "Node":
        """Return a node that is not registered."""
        auth = SignedAuth(identity, invite.run)
        client = httpx.Client(base_url=invite.url, auth=auth, timeout=30, transport=transport)
        return cls(identity, invite, client, patience_s, stop or threading.Event())

    # --- the run -----------------------------------------------------------------------------------------------------

    def descriptor(self, path: str = "/v1/run") -> RunDescriptor:
        """Return the coordinator's description of the run. Raise NodeError unless the key in the invite signed it."""
        signed = self._parse(Signed, self._request("GET", path))
        try:
            descriptor = RunDescriptor.model_validate_json(signed.open(self.invite.key, domain="run"))
        except (IdentityError, ValidationError) as error:
            raise NodeError(f"{self.invite.url} is not this run's coordinator: {error}") from error
        if descriptor.protocol != VERSION:
            raise NodeError(
                f"the coordinator at {self.invite.url} speaks protocol {descriptor.protocol}, but this node speaks "
                f"{VERSION}: install the same version of Shoal on both",
                restart_helps=False,
            )
        if descriptor.run != self.invite.run:
            raise NodeError(f"{self.invite.url} serves run {descriptor.run}, not {self.invite.run}")
        return descriptor

    def config(self) -> Config:
        """Return the run's config, without the origin of tasks and all about rewards unless this node grades."""
        path = "/v1/config" if self.role in GRADING else "/v1/run"
        config = config_module.parse(self.descriptor(path).config, source="run descriptor")
        self.direct = bool(config.store.url)
        return config

    def wait_for_key(self, role: Role, stop: threading.Event) -> str:
        """Return the key of the first node registered as `role`. Wait up to `patience_s` for one."""
        deadline_s = time.monotonic() + self.patience_s
        while not stop.is_set():
            if keys := self.descriptor().keys.get(role):
                return keys[0]
            if time.monotonic() > deadline_s:
                raise NodeError(f"no {role} joined run {self.invite.run} in {self.patience_s:.0f} s; start one")
            stop.wait(0.2)
        raise StoppedError(f"stopped while waiting for a node of role {role}")

    # --- rollout files: to and from the coordinator, or the pool's bucket by signed URLs -------------------------------

    def send_file(self, path: str, data: bytes) -> Stored:
        """Upload a file to `path`. Raise RefusedError, NodeError."""
        if not self.direct:
            return self.put(path, data, Stored)
        file = Announced(size_bytes=len(data), sha256=sha256(data).hexdigest())

        def send() -> Stored:
            grant = self.post(f"{path}/grant", file, UploadGrant)
            with httpx.stream("PUT", grant.url, content=data, headers=grant.headers, timeout=BUCKET_S) as answer:
                if answer.status_code not in (200, 201, EXISTS):
                    raise AgainError(f"it answered with status {answer.status_code}")
            try:
                return self.post(f"{path}/stored", file, Stored)
            except RefusedError as refusal:
                if refusal.status != TOO_EARLY:
                    raise
                raise AgainError(str(refusal)) from refusal

        return self.retry(send, "the pool's bucket", f"PUT {path}", BUCKET_HINT)

    def fetch_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return the verified content of the file at `path`.

        After WRONG_ANSWERS missing or wrong files, ask the coordinator, which reads the file itself and records it as
        damaged if it is.

        Raise RefusedError, with status 410 if the stored file is missing or was changed; NodeError.
        """
        if not self.direct:
            return self.get_bytes(path, max_bytes=max_bytes)
        wrong = 0  # answers of the bucket without the right file

        def fetch() -> bytes:
            nonlocal wrong
            link = self.get(f"{path}/link", FileLink)
            with httpx.stream("GET", link.url, headers=PLAIN, timeout=BUCKET_S) as answer:
                if answer.status_code not in (200, NOT_THERE):
                    raise AgainError(f"it answered with status {answer.status_code}")
                try:
                    data, why = read_body(answer, max_bytes), "it does not have the file"
                except BodyError as error:  # for example, a larger file is in its place
                    data, why = b"", str(error)
            if answer.status_code == 200 and blake3(data).hexdigest() == link.hash:
                return data
            wrong += 1
            if wrong == WRONG_ANSWERS:
                return self.get_bytes(path, max_bytes=max_bytes)
            raise AgainError(why)

        return self.retry(fetch, "the pool's bucket", f"GET {path}", BUCKET_HINT)

    # --- heartbeats and what they report -----------------------------------------------------------------------------

    def access(self, publisher: str, config: Config) -> Access:
        """Return this node's access to relays and the origin, whose key is `publisher`. Heartbeats report downloads."""
        return Access(
            publisher,
            self.invite.run,
            token=self.reader_pass,
            reach=config.reach,
            on_fetched=self.note_arrival,
        )

    def note_arrival(self, arrival: Arrival) -> None:
        """Report this download of weights in the next heartbeats."""
        self.arrival = arrival

    def _intake(self) -> Intake:
        """Describe the newest download, with its fastest senders."""
        if (arrival := self.arrival) is None:
            return Intake()
        rates = sorted(arrival.rates_Bps.items(), key=lambda rate: -rate[1])
        return Intake(
            bytes_per_s=dict(rates[:MAX_SENDERS]),
            behind_s=arrival.behind_s,
            version=arrival.version,
            size_bytes=arrival.size_bytes,
            took_s=arrival.took_s,
            ago_s=max(time.monotonic() - arrival.at_s, 0.0),
        )

    def reader_grant(self) -> str:
        """Return this key's read grant, which each heartbeat answer renews."""
        return self.answer.reader_grant if self.answer else ""

    def renewal(self) -> int | None:
        """Return the number of the newest request for a new fingerprint; None if all are completed."""
        requested = self.answer.renewals if self.answer else 0
        return requested if requested > self.renewals else None

    def doing(self, what: str, *, waiting: bool = False) -> None:
        """Report what this node does, or waits for, from now on. The time until now counts towards the previous report."""
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
            working_on=self.working_on,
            stats=stats,
            fingerprint=self.fingerprint,
            renewals=self.renewals,
            finished=self.finished,
        )
        self.answer = self.post("/v1/heartbeat", beat, HeartbeatAnswer)
        return self.answer

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send a heartbeat every HEARTBEAT_S, or less often if the coordinator is slow, in the background."""
        stopped = threading.Event()

        def beat_until_stopped() -> None:
            while not stopped.wait(self.pause_s(HEARTBEAT_S)):
                with suppress(NodeError):  # the caller's next request fails in the same way and reports it
                    self.beat()

        threading.Thread(target=beat_until_stopped, daemon=True, name="heart").start()
        try:
            yield
        finally:
            stopped.set()


def read_payer(folder: Path) -> str:
    """Return the on-chain account that stakes for the node in this folder; "" if `shoal pool stake` set none."""
    path = folder / PAYER
    return path.read_text().strip() if path.is_file() else ""


def write_payer(folder: Path, account: str) -> None:
    write_file(folder / PAYER, account.encode())
