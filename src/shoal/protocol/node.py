"""A member of the pool, as every process but the coordinator is one: joins, lives, asks.

    node = Node.join(invite, folder)      identity from the folder, run descriptor under the coordinator's signature
    with node.heart(): ...                a heartbeat a second in the background; `node.answer` is the latest reply
    node.post("/v1/claims", ...)          signed requests, repeated while the coordinator is away, up to a deadline

Invariant: nothing is believed of the run that the coordinator, whose key is in the invite, has not signed.
Called by worker, validator, learner, origin, relay and evaluator. It knows no other process.
"""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from shoal import config as config_module
from shoal.config import Config
from shoal.errors import ShoalError
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.invite import Invite
from shoal.protocol.messages import (
    MAX_SENDERS,
    VERSION,
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
from shoal.shardcast import Access
from shoal.shardcast.tls import client_context

HEARTBEAT_S = 1.0
PATIENCE_S = 120.0  # how long a request outlasts a coordinator that is down or restarting

M = TypeVar("M", bound=BaseModel)


class NodeError(ShoalError):
    """The coordinator refused, or could not be reached in time; the message says which and what to try."""


class RefusedError(NodeError):
    """The coordinator answered, and the answer is no."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Node:
    def __init__(self, identity: Identity, invite: Invite, client: httpx.Client, patience_s: float) -> None:
        self.identity = identity
        self.invite = invite
        self.client = client
        self.patience_s = patience_s
        self.name = ""
        self.policy_version: int | None = None
        self.answer: HeartbeatAnswer | None = None
        self._doing, self._waiting = "starting", False
        self._since_s, self._seconds = time.monotonic(), {"busy": 0.0, "waiting": 0.0}
        self.tokens = 0
        self.intake = Intake()

    @classmethod
    def join(
        cls,
        invite: Invite,
        folder: Path,
        *,
        url: str | None = None,
        patience_s: float = PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
    ) -> "Node":
        """Load or make this node's key in `folder` and register. `url` is where an origin or relay serves."""
        identity = Identity.load_or_create(folder / "identity.pem")
        auth = SignedAuth(identity, invite.run)
        client = httpx.Client(base_url=invite.url, auth=auth, timeout=30, transport=transport)
        node = cls(identity, invite, client, patience_s)
        registration = Registration(invite=invite.signed.model_dump_json(), url=url)
        node.name = node.post("/v1/register", registration, Registered).name
        return node

    @classmethod
    def read_config(cls, invite: Invite) -> Config:
        """The run's config, for a role that must listen before it can register its address."""
        return cls(Identity.generate(), invite, httpx.Client(base_url=invite.url, timeout=30), PATIENCE_S).config()

    # --- the run -----------------------------------------------------------------------------------------------------

    def descriptor(self) -> RunDescriptor:
        """What the coordinator says of the run now, checked against the key in the invite."""
        signed = self._parse(Signed, self._request("GET", "/v1/run"))
        try:
            descriptor = RunDescriptor.model_validate_json(signed.open(self.invite.key, domain="run"))
        except (IdentityError, ValidationError) as error:
            raise NodeError(f"{self.invite.url} is not this run's coordinator: {error}") from error
        if descriptor.protocol != VERSION or descriptor.run != self.invite.run:
            raise NodeError(f"{self.invite.url} serves run {descriptor.run}, protocol {descriptor.protocol}")
        return descriptor

    def config(self) -> Config:
        return config_module.parse(self.descriptor().config, source="run descriptor")

    def wait_for_key(self, role: Role, stop: threading.Event) -> str:
        """The key of the first node registered as `role`; waits for one, up to this node's patience."""
        deadline_s = time.monotonic() + self.patience_s
        while not stop.is_set():
            if keys := self.descriptor().keys.get(role):
                return keys[0]
            if time.monotonic() > deadline_s:
                raise NodeError(f"no {role} joined run {self.invite.run} in {self.patience_s:.0f} s; start one")
            stop.wait(0.2)
        raise NodeError("stopped while waiting")

    # --- asking ------------------------------------------------------------------------------------------------------

    def get(self, path: str, answer: type[M]) -> M:
        return self._parse(answer, self._request("GET", path))

    def get_bytes(self, path: str) -> bytes:
        return self._request("GET", path).content

    def post(self, path: str, message: BaseModel | None, answer: type[M]) -> M:
        return self._parse(answer, self._request("POST", path, message.model_dump_json().encode() if message else b""))

    def put(self, path: str, data: bytes, answer: type[M]) -> M:
        return self._parse(answer, self._request("PUT", path, data))

    def _request(self, method: str, path: str, content: bytes = b"") -> httpx.Response:
        deadline_s = time.monotonic() + self.patience_s
        pause_s = 0.1
        while True:
            try:
                response = self.client.request(method, path, content=content)
            except httpx.TransportError as error:
                if time.monotonic() + pause_s > deadline_s:
                    raise NodeError(
                        f"the coordinator at {self.invite.url} did not answer {method} {path} for "
                        f"{self.patience_s:.0f} s ({type(error).__name__}); is it running and reachable?"
                    ) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
                continue
            if response.status_code >= 400:
                raise RefusedError(f"{method} {path}: {_reason(response)}", response.status_code)
            return response

    def _parse(self, model: type[M], response: httpx.Response) -> M:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise NodeError(f"{response.request.url.path}: unexpected answer: {error.errors()[0]['msg']}") from error

    # --- living ------------------------------------------------------------------------------------------------------

    def access(self, publisher: str, config: Config) -> Access:
        """How this node reaches relays and the origin, whose key is `publisher`; how versions came is told to the view."""
        authority = Path(config.relays.tls_ca) if config.relays.tls_ca else None
        return Access(
            publisher,
            self.invite.run,
            token=self.reader_token,
            tls=client_context(authority),
            on_fetched=self.came,
        )

    def came(self, rates_Bps: dict[str, float], behind_s: float | None) -> None:
        """How the newest weights came to this node: bytes a second by sender's URL, seconds since their publication."""
        fastest = sorted(rates_Bps, key=lambda url: -rates_Bps[url])[:MAX_SENDERS]
        self.intake = Intake(bytes_per_s={url: rates_Bps[url] for url in fastest}, behind_s=behind_s)

    def reader_token(self) -> str:
        """What opens relays and the origin to this node; the coordinator renews it with each heartbeat."""
        return self.answer.reader_token if self.answer else ""

    def doing(self, what: str, *, waiting: bool = False) -> None:
        """Report what this node does from now on, or what it waits for, and count the time of what it did before."""
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
            intake=self.intake,
        )
        beat = Heartbeat(policy_version=self.policy_version, wants_task=wants_task, stats=stats)
        self.answer = self.post("/v1/heartbeat", beat, HeartbeatAnswer)
        return self.answer

    @contextmanager
    def heart(self) -> Iterator[None]:
        """Beat once a second in the background. A coordinator that stays away too long shows at the next request."""
        stopped = threading.Event()

        def beat_on() -> None:
            while not stopped.wait(HEARTBEAT_S):
                try:
                    self.beat()
                except NodeError:
                    continue  # the loop's own next request meets the same and reports it

        thread = threading.Thread(target=beat_on, daemon=True, name="heart")
        thread.start()
        try:
            yield
        finally:
            stopped.set()


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
