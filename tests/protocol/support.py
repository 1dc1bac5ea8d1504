"""A fake coordinator (a function behind httpx.MockTransport), and nodes that join it."""

import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from shoal.config import Config
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import Invite, make_invite
from shoal.protocol.messages import VERSION, Heartbeat, HeartbeatAnswer, RunDescriptor
from shoal.protocol.node import Node
from shoal.protocol.signing import NonceStore, sign_answer, verify_head

COORDINATOR, OTHER = Identity.generate(), Identity.generate()
RUN = "run-0"


def signer_of(request: httpx.Request, audience: str, now_s: float, nonces: NonceStore | None = None) -> str:
    """Verify this request as servers do and return the key that signed it. Raise SignatureError if it is invalid."""
    target = request.url.raw_path.decode("ascii")
    head = verify_head(request.method, target, request.headers, audience=audience, now_s=now_s)
    if nonces:
        head.spend(nonces)
    head.check_body(sha256(request.content).digest(), len(request.content))
    return head.key


def answered(
    request: httpx.Request, response: httpx.Response, signer: Identity = COORDINATOR, now_s: float | None = None
) -> httpx.Response:
    """Sign the response as an answer to the request and return it. A streamed response stays unsigned."""
    if isinstance(response.stream, httpx.ByteStream) and "content-encoding" not in response.headers:
        digest = sha256(response.content).digest()
        headers = sign_answer(
            signer,
            request.method,
            request.url.raw_path.decode(),
            request.headers,
            status=response.status_code,
            body_sha256=digest,
            created_s=int(time.time() if now_s is None else now_s),
        )
        response.headers.update(headers)
    return response


class FakeCoordinator:
    """It fails `away` times, then answers from `answers` (JSON text or a response, by path). It keeps all requests."""

    def __init__(self, away: int = 0, **descriptor: Any) -> None:
        self.away = away
        self.signer: Identity | None = COORDINATOR
        self.requests: list[httpx.Request] = []
        fields = {"protocol": VERSION, "run": RUN, "config": Config().model_dump(mode="json"), "keys": {}} | descriptor
        self.answers: dict[str, str | httpx.Response] = {
            "/v1/register": '{"name": "w-0", "role": "worker"}',
            "/v1/run": self.signed(fields),
            "/v1/heartbeat": HeartbeatAnswer(state="running", newest_version=3, relays=[]).model_dump_json(),
        }

    @staticmethod
    def signed(descriptor: dict[str, Any], identity: Identity = COORDINATOR, domain: str = "run") -> str:
        text = RunDescriptor.model_validate(descriptor).model_dump_json()
        return Signed.make(identity, text, domain=domain).model_dump_json()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.away:
            self.away -= 1
            raise httpx.ConnectError("refused", request=request)
        answer = self.answers[request.url.path]
        response = answer if isinstance(answer, httpx.Response) else httpx.Response(200, text=answer)
        return response if self.signer is None else answered(request, response, self.signer)

    def beats(self) -> list[Heartbeat]:
        requests = [request for request in self.requests if request.url.path == "/v1/heartbeat"]
        return [Heartbeat.model_validate_json(request.content) for request in requests]


def invite() -> Invite:
    return make_invite(COORDINATOR, url="http://c:1", run=RUN, role="worker", name="w-0", expires_s=2_000_000_000)


def join(coordinator: FakeCoordinator, folder: Path, patience_s: float = 5.0, **options: Any) -> Node:
    return Node.join(invite(), folder, patience_s=patience_s, transport=httpx.MockTransport(coordinator), **options)


class NoPauses(threading.Event):
    """A stop event whose waits return at once. It records their timeouts, and is set after `most` waits."""

    def __init__(self, most: int = 1_000) -> None:
        super().__init__()
        self.most = most
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        if len(self.pauses) >= self.most:
            self.set()
        return self.is_set()
