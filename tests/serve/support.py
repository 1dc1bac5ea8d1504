"""A server with a tiny random Llama runs in a thread and on real sockets. API clients and users of the page use it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from argon2 import PasswordHasher

from shoal.engine.torch_engine import TorchEngine
from shoal.serve import proof
from shoal.serve.service import CONNECTIONS, PATIENCE, PER_ADDRESS, Service, Settings
from shoal.serve.versions import LoadedModel, ModelSource, source_of
from shoal.shardcast.connections import Listener, started

KEY = "sk-a-key-for-these-tests"
PASSWORD = "correct horse battery"  # noqa: S105
DEADLINE_S = 60.0
CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@dataclass
class Running:
    url: str
    service: Service
    model: str

    @property
    def newest(self) -> LoadedModel:
        assert self.service.versions.newest is not None
        return self.service.versions.newest

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, **options: Any) -> httpx.Client:
        """Return a client without `verify`, because reading the system's certificates is slow."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, verify=False, **options)

    def api(self) -> httpx.Client:
        return self.client(headers={"Authorization": f"Bearer {KEY}"})

    def chat(self, messages: list[Any], **params: Any) -> httpx.Response:
        """Request a chat completion."""
        body = {"model": self.model, "messages": messages, "max_tokens": 12, "seed": 3} | params
        with self.api() as client:
            return client.post("/v1/chat/completions", json=body)

    def complete(self, **params: Any) -> httpx.Response:
        with self.api() as client:
            return client.post("/v1/completions", json={"model": self.model} | params)

    def verify(self, reply: dict[str, Any]) -> proof.ReplyVerdict:
        """Verify a reply file with the newest version."""
        return proof.verify(proof.Reply.read(json.dumps(reply).encode()), self.newest)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the server-sent events of a streamed response."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def engine() -> TorchEngine:
    return TorchEngine("float32", "cpu", "fast")


@contextmanager
def serving(
    source: ModelSource | Path,
    folder: Path,
    *,
    ready: bool = True,
    new_engine: Callable[[], TorchEngine] = engine,
    **settings: Any,
) -> Iterator[Running]:
    """Run the whole application on a free port. With `ready`, wait until its model is loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "api.keys").write_text(f"tester {KEY}\n")
    source = source if isinstance(source, ModelSource) else source_of(str(source))
    service = Service(source, Settings(folder=folder, **settings), new_engine)
    loop = asyncio.new_event_loop()
    listener = Listener("127.0.0.1", 0, PATIENCE, per_address=PER_ADDRESS, total=CONNECTIONS)
    starting = started(service.app(), listener, shutdown_s=0.1, handler_cancellation=True)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(starting, loop).result(DEADLINE_S)
        try:
            running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, source.name)
            if ready:
                until(lambda: service.versions.newest is not None)
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(DEADLINE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.01)


class User:
    """A user of the chat page, with the requests that a browser would send."""

    def __init__(self, running: Running, name: str = "ada") -> None:
        self.name = name
        self.model = running.model
        self.http = running.client(headers={"Origin": running.url})
        self.csrf = ""

    @classmethod
    def registered(cls, running: Running, name: str = "ada") -> "User":
        user = cls(running, name)
        assert user.enter().status_code == 200
        return user

    def enter(self, route: str = "register", password: str = PASSWORD) -> httpx.Response:
        response = self.http.post(f"/chat/{route}", json={"name": self.name, "password": password})
        self.csrf = response.json().get("csrf", "")
        return response

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"X-CSRF-Token": self.csrf} | options.pop("headers", {})
        return self.http.post(f"/chat/{path}", json={} if body is None else body, headers=headers, **options)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"/chat/{path}")

    def delete(self, path: str) -> httpx.Response:
        headers = {"X-CSRF-Token": self.csrf, "Content-Type": "application/json"}
        return self.http.request("DELETE", f"/chat/{path}", headers=headers)

    def begin(self) -> str:
        """Create a conversation and return its id."""
        return str(self.post("conversations").json()["id"])

    def say(self, conversation: str, content: str | None = "one", **form: Any) -> list[dict[str, Any]]:
        """Send a message and return the events of the reply."""
        body = {"content": content, "models": [self.model], "max_tokens": 12} | form
        response = self.post(f"conversations/{conversation}/replies", body)
        assert response.status_code == 200, response.text
        return [json.loads(line[6:]) for line in response.text.splitlines() if line]

    def read(self, conversation: str) -> dict[str, Any]:
        body: dict[str, Any] = self.get(f"conversations/{conversation}").json()
        return body

    def reply(self) -> str:
        """Get a reply in a new conversation; return the message's path."""
        id = self.begin()
        return f"conversations/{id}/messages/{self.say(id)[-1]['message']['id']}"
