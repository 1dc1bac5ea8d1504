"""Helpers: a coordinator that `serve_forever` runs in a thread, on real loopback HTTP; and uploads without a socket."""

import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx
from aiohttp.test_utils import make_mocked_request

from shoal.config import Config, parse
from shoal.coordinator.folder import create_invite
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.http.serving import serve_forever
from shoal.protocol.identity import Identity
from shoal.protocol.invite import FILE as ADDRESS
from shoal.protocol.invite import make_invite
from shoal.protocol.messages import VERSION, Assignment, Heartbeat, HeartbeatAnswer, Role, Stored
from shoal.protocol.server import SLOT
from shoal.protocol.signing import SignedAuth, sign_request

from ..support import payload

RUN = "test-0"
PATIENCE_S = 60.0  # far more than anything here needs

ANYONE = httpx.Client(timeout=PATIENCE_S, verify=False)  # saves the 30 ms to load certificates; nothing uses TLS

CONFIG = parse(
    {
        "coordinator": {"prompts_per_step": 4},
        "workers": {"groups_per_submission": 2},
        "learner": {"optimizer_steps_per_step": 1},
    }
)

ROLES = get_args(Role)


@dataclass
class Site:
    """A coordinator that listens, and a client for each role that is registered."""

    url: str
    folder: Path
    identity: Identity
    clients: dict[str, httpx.Client] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)  # by name

    def client(self, identity: Identity, audience: str = RUN) -> httpx.Client:
        return httpx.Client(base_url=self.url, auth=SignedAuth(identity, audience), timeout=PATIENCE_S, verify=False)

    def staff(self, *roles: Any) -> "Site":
        """Register a member of each role, and publish version 0."""
        self.clients = {role: self.register(role, role) for role in roles}
        self.clients["origin"].post("/v1/policies", json={"version": 0, "digest": "d" * 64, "size_bytes": 1})
        return self

    def register(self, name: str, role: Any, **changed: Any) -> httpx.Client:
        fields = {"url": self.url, "run": RUN, "role": role, "name": name, "expires_s": int(time.time()) + 60} | changed
        self.identities[name] = Identity.generate()
        client = self.client(self.identities[name])
        made = make_invite(self.identity, **fields)
        client.post(
            "/v1/register", json={"protocol": VERSION, "invite": made.signed.model_dump_json()}
        ).raise_for_status()
        return client


class served:
    """Run a coordinator in its own thread."""

    def __init__(self, folder: Path, config: Config = CONFIG) -> None:
        self.folder = folder
        self.stop = threading.Event()
        self.thread = threading.Thread(target=serve_forever, args=(config, RUN, folder, 0, self.stop))

    def __enter__(self) -> Site:
        (self.folder / ADDRESS).unlink(missing_ok=True)
        self.thread.start()
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if (self.folder / ADDRESS).exists() and (self.folder / ADDRESS).read_text():
                url = create_invite(self.folder, "worker", "x", None, 1).url
                return Site(url, self.folder, Identity.load(self.folder / "identity.pem"))
            time.sleep(0.02)
        raise TimeoutError("the coordinator did not listen")

    def __exit__(self, *exc_info: object) -> None:
        self.stop.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def refused(response: httpx.Response, status: int, *words: str) -> None:
    """Check that a refusal is one line of JSON with these words, and no traceback."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    for word in words:
        assert word in error
    assert "Traceback" not in response.text and 'File "' not in response.text and "\n" not in error and error[0] != ":"


def task_of(client: httpx.Client) -> dict[str, Any]:
    body = client.post("/v1/heartbeat", json={"policy_version": 0, "wants_task": True}).raise_for_status().content
    answer = HeartbeatAnswer.model_validate_json(body)
    assert answer.assignment is not None, answer.waiting_for
    return answer.assignment.model_dump()


@contextmanager
def sending(
    site: Site, signer: str | None, method: str, path: str, *, body: bytes = b"", size_bytes: int | None = None
) -> Iterator[socket.socket]:
    """Send only the head of this request, which announces a body of this size. Yield the connection."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: c",
        f"content-length: {len(body) if size_bytes is None else size_bytes}",
    ]
    if signer is not None:
        identity = site.identities.get(signer) or Identity.generate()
        signed = {"method": method, "path": path, "query": "", "body": body, "audience": RUN}
        headers = sign_request(identity, **signed, created_s=int(time.time()), nonce=secrets.token_hex(16))  # type: ignore[arg-type]
        lines += [f"{name}: {value}" for name, value in headers.items()]
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        yield connection


PIECE = bytes(64 << 10)


def pieces(*parts: bytes) -> Callable[[], Awaitable[bytes]]:
    left = [*parts]

    async def read() -> bytes:
        return left.pop(0) if left else b""

    return read


def worker_with_task(coordinator: Coordinator, name: str = "w") -> tuple[Identity, Assignment]:
    identity = Identity.generate()
    invite = payload(name, nonce=secrets.token_hex(16), expires_s=1 << 40)
    coordinator.pool.members.register(identity.public, invite, None)
    answer = coordinator.pool.members.heartbeat(identity.public, Heartbeat(policy_version=0, wants_task=True))
    assert answer.assignment is not None, answer.waiting_for
    return identity, answer.assignment


async def upload(
    coordinator: Coordinator, worker: Identity, task: Assignment, body: bytes, read: Callable[[], Awaitable[bytes]]
) -> Stored:
    headers = sign_request(
        worker,
        method="PUT",
        path=task.upload_path,
        query="",
        body=body,
        audience="r",
        created_s=int(coordinator.admission.clock()),
        nonce=secrets.token_hex(16),
    )
    arriving: Any = SimpleNamespace(readany=read)
    request = make_mocked_request("PUT", task.upload_path, headers, match_info={"id": task.id}, payload=arriving)
    with ExitStack() as slot:
        request[SLOT] = slot
        stored = await coordinator.files.receive(request, coordinator.files.submissions)
    assert isinstance(stored, Stored)
    return stored
