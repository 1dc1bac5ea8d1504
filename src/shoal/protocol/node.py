"""A member of the pool: every process except the coordinator. It joins, reads the config, and sends heartbeats.

    node = Node.join(invite, folder, stop=stop)   loads or creates the key, registers with the invite
    with node.heartbeats(): ...                   sends one heartbeat per second; `node.answer` is the newest answer
    node.post("/v1/claims", ...)                  sends a signed request (`calling`), repeated until a deadline

Invariant: a run's description is used only if the coordinator's key signed it, for this run and this protocol.
"""

import asyncio
import logging
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
from blake3 import blake3
from pydantic import ValidationError

from shoal import config as config_module
from shoal.config import Config
from shoal.config.sections import StoreSection
from shoal.errors import first_line, printable
from shoal.files import write_file
from shoal.protocol.calling import (
    PATIENCE_S,
    AgainError,
    Caller,
    NodeError,
    RefusedError,
    StoppedError,
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
from shoal.shardcast import Access, Arrival, Manifest
from shoal.shardcast.fetch import SourceError
from shoal.shardcast.fetch.reach import OutOfReach, Reach, address_of, narrower, narrowest, proxy_for
from shoal.shardcast.fetch.source import Limits, exchange
from shoal.shardcast.guard import Passes
from shoal.shardcast.manifest import MAX_SIZE_BYTES

HEARTBEAT_S = 1.0
UNREADABLE = 400  # HTTP status
KEY, PAYER = "identity.pem", "payer"  # in a node's folder
EXISTS = 412  # HTTP status: the bucket already has this file
TOO_EARLY = 425  # HTTP status: the file has not arrived yet
NOT_THERE = 404  # HTTP status: the bucket has no such file
WRONG_ANSWERS = 3  # answers of the bucket without the right file, before the coordinator is asked
BUCKET_S = 30.0  # timeout of each read from and write to a bucket
BUCKET_HINT = "is store.endpoint reachable from here, and is this machine's clock right?"
# What the coordinator may name for a request to the bucket: headers and parameters of S3. These files of a version.
HEADER = re.compile(r"x-amz-[a-z0-9-]+|content-(length|type|md5)|if-none-match")
PARAMETER = re.compile(r"x-amz-[a-z0-9-]+|x-id", re.IGNORECASE)
AWS = re.compile(r"s3([.-][a-z0-9-]+)*\.amazonaws\.com(\.cn)?")
FILES = re.compile(
    r"model\.safetensors|(additional_chat_templates/)?[\w-]+\.jinja|[\w.-]+\.(model|tiktoken)|(merges|vocab|bpe)\.(txt|codes)"
    r"|((generation_|tokenizer_)?config|tokenizer|special_tokens_map|added_tokens|vocab|chat_template)\.json"
)
GROWTH_BYTES = 64 << 20  # a later version may be twice as large as the first, which has the same tensors, and this more
MAX_HEARD = 100  # refusals of other nodes that are logged; any worker can invent them
FOLDER = re.compile(r"/[^\s:,]*/")  # a path, which would tell the pool the names of this machine's folders
ANSWERS = re.compile(r"\(?(https?://[^\s/]+)[^\s:]*: .*")  # in an error: what servers answered

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """What this machine's owner allows, whatever the run's config says."""

    reach: Reach | None = None  # None: as near as the coordinator's own address
    disk_bytes: int | None = None  # for one version; None: half of the free space at the start


class Node(Caller):
    bounds: ClassVar[Bounds] = Bounds()  # of this machine: a process has one owner

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
        self.disk_bytes = MAX_SIZE_BYTES
        self.store = StoreSection()  # where rollout files go to and come from; set by `config`
        self.reach: Reach = "public"  # set by `config`
        self.first_bytes: int | None = None  # size of the first version that it downloaded
        self.refused = ""  # the version that it does not load, and why
        self.heard = set[str]()  # what other nodes refused to load; told to the learner only
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
        node.disk_bytes = node.bounds.disk_bytes or shutil.disk_usage(folder).free // 2
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
        proxy = None if transport else proxy_for(invite.url)
        direct = None if proxy else {"http://": None, "https://": None}
        client = httpx.Client(
            base_url=invite.url,
            auth=auth,
            timeout=30,
            transport=transport,
            proxy=proxy.url if proxy else None,
            mounts=direct,
        )
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
        self.store, self.reach = config.store, self.reach_of(config)
        return config

    def reach_of(self, config: Config) -> Reach:
        """Return the narrower of the config's reach and what the owner set, or else what the coordinator's address implies.

        If its URL has a name, its address is where its signed answers come from.
        """
        if self.bounds.reach:
            return narrower(config.reach, self.bounds.reach)
        host = urlsplit(self.invite.url).hostname or ""
        if address_of(host) is None and self.peer and proxy_for(self.invite.url) is None:
            host = self.peer
        try:
            return narrower(config.reach, narrowest(host))
        except OutOfReach:
            return "public"

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
        if not self.store.url:
            return self.put(path, data, Stored)
        file = Announced(size_bytes=len(data), sha256=sha256(data).hexdigest())

        def send() -> Stored:
            grant = self.post(f"{path}/grant", file, UploadGrant)
            if foreign := [name for name in grant.headers if not HEADER.fullmatch(name.lower())]:
                raise NodeError(
                    f"the coordinator asks for an upload with the header {foreign[0]!r}", restart_helps=False
                )
            headers = {name: value for name, value in grant.headers.items() if name.lower() != "content-length"}
            status, _ = self._bucket("PUT", grant.url, headers=headers, data=data)
            if status not in (200, 201, EXISTS):
                raise AgainError(f"it answered with status {status}")
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
        if not self.store.url:
            return self.get_bytes(path, max_bytes=max_bytes)
        wrong = 0  # answers of the bucket without the right file

        def fetch() -> bytes:
            nonlocal wrong
            link = self.get(f"{path}/link", FileLink)
            status, data = self._bucket("GET", link.url, max_bytes=max_bytes)
            if status not in (200, NOT_THERE):
                raise AgainError(f"it answered with status {status}")
            if status == 200 and blake3(data).hexdigest() == link.hash:
                return data
            wrong += 1
            if wrong == WRONG_ANSWERS:
                return self.get_bytes(path, max_bytes=max_bytes)
            raise AgainError("it does not have the file")

        return self.retry(fetch, "the pool's bucket", f"GET {path}", BUCKET_HINT)

    def _bucket(
        self, method: str, url: str, *, headers: dict[str, str] | None = None, data: bytes = b"", max_bytes: int = 0
    ) -> tuple[int, bytes]:
        """Send a request that the coordinator signed for the bucket in the run's signed config, and to nothing else."""
        if not in_bucket(url, self.store):
            raise NodeError(
                f"the coordinator names {url.partition('?')[0][:80]!r} for a file, which is not in {self.store.url} at "
                f"{self.store.endpoint or 'AWS'}: ask its operator",
                restart_helps=False,
            )
        access = Access(self.invite.key, reach=self.reach, limits=Limits(idle_timeout_s=BUCKET_S))
        try:
            return asyncio.run(exchange(access, method, url, headers=headers or {}, data=data, max_bytes=max_bytes))
        except SourceError as error:
            raise AgainError(str(error)) from error

    # --- heartbeats and what they report -----------------------------------------------------------------------------

    def access(self, publisher: str, config: Config) -> Access:
        """Return this node's access to relays and the origin, whose key is `publisher`. Heartbeats report downloads."""
        return Access(
            publisher,
            self.invite.run,
            token=self.reader_pass,
            reach=self.reach_of(config),
            on_fetched=self.note_arrival,
            refuses=self.refuses,
        )

    def refuses(self, manifest: Manifest) -> str:
        """Return why this node does not download a version; "" if it does. Heartbeats report it."""
        if why := self._fault(manifest):
            self.refused = f"version {manifest.version}: {why}"[:200]
        return why

    def _fault(self, manifest: Manifest) -> str:
        if strange := [file.path for file in manifest.files if not FILES.fullmatch(file.path)]:
            return f"it holds {strange[0]!r}, and a policy version holds only weights, tokenizer and settings"
        size_bytes = manifest.size_bytes + (manifest.delta.stream.size_bytes if manifest.delta else 0)
        if size_bytes > self.disk_bytes:
            return f"it reserves {size_bytes} bytes, and this machine allows {self.disk_bytes}; --disk allows more"
        self.first_bytes = self.first_bytes or manifest.size_bytes
        if manifest.size_bytes > 2 * self.first_bytes + GROWTH_BYTES:
            return f"it has {manifest.size_bytes} bytes, and the first version here had {self.first_bytes}"
        return ""

    def refuse(self, version: int, error: Exception) -> None:
        """Report in the next heartbeats that this node does not load a version, and keeps the last one that it loaded."""
        self.refused = f"version {version}: {FOLDER.sub('', printable(first_line(error)))}"[:200]
        log.error("version %d is refused: %s", version, first_line(error))

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
        # Not what servers answered, because a coordinator could name any address in this machine's network.
        self._doing, self._waiting, self._since_s = ANSWERS.sub(r"\1 failed", what), waiting, now_s

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
            refused=self.refused,
            finished=self.finished,
        )
        self.answer = self.post("/v1/heartbeat", beat, HeartbeatAnswer)
        for refusal in set(self.answer.refused) - self.heard if len(self.heard) < MAX_HEARD else ():
            self.heard.add(refusal)
            log.warning("%s", refusal)
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


def in_bucket(url: str, store: StoreSection) -> bool:
    """Return whether a signed URL names a file in the config's bucket, as path or host (`Bucket` makes paths)."""
    try:
        parts, bucket = urlsplit(url), urlsplit(store.url)
    except ValueError:
        return False
    endpoint, prefix = urlsplit(store.endpoint), bucket.path.strip("/")
    inside, own = f"/{prefix}/" if prefix else "/", f"{bucket.netloc}."
    host = parts.netloc
    if not parts.path.startswith(f"/{bucket.netloc}{inside}"):
        if not (host.startswith(own) and parts.path.startswith(inside)):
            return False
        host = host.removeprefix(own)
    here = (parts.scheme, host) == endpoint[:2] if store.endpoint else parts.scheme == "https" and AWS.fullmatch(host)
    plain = not parts.fragment and not {".", ".."} & set(unquote(parts.path).replace("\\", "/").split("/"))
    return bool(here and plain and all(PARAMETER.fullmatch(name) for name, _ in parse_qsl(parts.query, True)))


def read_payer(folder: Path) -> str:
    """Return the on-chain account that stakes for the node in this folder; "" if `shoal pool stake` set none."""
    path = folder / PAYER
    return path.read_text().strip() if path.is_file() else ""


def write_payer(folder: Path, account: str) -> None:
    write_file(folder / PAYER, account.encode())
