"""No client can block the others: clients take turns, slow work runs in threads, and all sizes are bounded."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from shoal.serve import proof
from shoal.serve.chat import routes as chat_routes
from shoal.serve.errors import ReplyError, RequestError
from shoal.serve.openai import routes
from shoal.serve.openai.requests import ChatRequest, parse_request
from shoal.serve.scheduler import ServeLimits
from shoal.watch.page import guard

from .support import CHEAP, DEADLINE_S, Running, User, serving, until

SHORT_S = 30.0  # longer than an idle server takes for any response
MESSAGES = [{"role": "user", "content": "one"}]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that is set at the end of the test, so that no thread waits for it after that."""
    event = threading.Event()
    yield event
    event.set()


def disconnect(user: User, reply: str, started: Callable[[], object] = lambda: True) -> None:
    """Request a verification and disconnect. Repeat with longer timeouts until a verification has `started`."""
    after_s = 0.1
    while after_s < DEADLINE_S:
        after_s *= 2
        with pytest.raises(httpx.ReadTimeout):
            user.post(f"{reply}/verify", timeout=httpx.Timeout(DEADLINE_S, read=after_s))
        if started():
            return


@pytest.mark.parametrize("stops", [["a" * 1_400_000], ["a" * 401], ["a"] * 9])
def test_stop_strings_are_bounded_in_reply_files_and_requests(ada: User, page: Running, stops: list[str]) -> None:
    file = ada.get(f"{ada.reply()}/proof").json()
    with pytest.raises(ReplyError, match="stops"):
        proof.Reply.read(json.dumps(file | {"stops": stops}).encode())
    assert page.complete(prompt="one", stop=stops).json()["error"]["param"] == "stop"


def test_verifications_of_disconnected_clients_run_one_at_a_time_and_do_not_block_logins(
    page: Running, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = [0, 0]  # verifications running now, and their maximum

    def stuck(*_: Any) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        gate.wait(DEADLINE_S)
        at_once[0] -= 1

    users = [User.registered(page, f"stuck-{n}") for n in range(3)]
    replies = [user.reply() for user in users]
    monkeypatch.setattr(chat_routes.proof, "verify", stuck)
    disconnect(users[0], replies[0], lambda: at_once[0])
    for user, reply in zip(users * 3, replies * 3, strict=True):
        disconnect(user, reply)
    assert at_once == [1, 1]
    assert users[0].enter("login").status_code == 200
    # This reply's proof must be built although the thread that verifies proofs is stuck.
    assert users[0].say(users[0].begin())[-1]["event"] == "done"
    gate.set()
    monkeypatch.undo()
    assert users[1].post(f"{replies[1]}/verify").json()["passed"]


def test_a_verification_ends_when_its_client_disconnects(page: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()

    def long(reply: Any, loaded: Any, config: Any, client_left: Any) -> None:
        started.set()
        until(client_left)
        ended.set()

    user = User.registered(page, "leaver")
    reply = user.reply()
    monkeypatch.setattr(chat_routes.proof, "verify", long)
    disconnect(user, reply, started.is_set)
    assert ended.wait(DEADLINE_S)


def test_a_verification_has_a_deadline(page: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    user = User.registered(page, "patient")
    reply = user.reply()
    monkeypatch.setattr(chat_routes.proof, "verify", lambda reply, loaded, config, client_left: until(client_left))
    monkeypatch.setattr(chat_routes, "VERIFY_S", 0.1)
    response = user.post(f"{reply}/verify")
    assert response.status_code == 429 and "0.1 s" in response.json()["error"] and response.headers["Retry-After"]


STUCK = """
import sys, time
from shoal.serve import proof
def stuck(*_):
    print("stuck", flush=True)
    time.sleep(600)
proof.verify = stuck
from shoal.cli import main
sys.exit(main(["serve", sys.argv[1], "--open", "--port", "0", "--dir", sys.argv[2]]))
"""


def test_a_process_obeys_sigterm_while_a_thread_is_stuck(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK, str(tiny_folder), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split()[0]
        assert process.stdout.readline().startswith("ready")
        with httpx.Client(base_url=url, timeout=DEADLINE_S, headers={"Origin": url}) as http:
            http.headers["X-CSRF-Token"] = http.get("/chat/me").json()["csrf"]
            model = http.get("/v1/models").json()["data"][0]["id"]
            id = http.post("/chat/conversations", json={}).json()["id"]
            body = {"content": "one", "models": [model], "max_tokens": 4}
            events = http.post(f"/chat/conversations/{id}/replies", json=body).text
            message = json.loads(events.splitlines()[-2][6:])["message"]["id"]
            with ThreadPoolExecutor(1) as clients:
                request = clients.submit(http.post, f"/chat/conversations/{id}/messages/{message}/verify", json={})
                assert process.stdout.readline() == "stuck\n"
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_S) == 0  # long before the thread's 600 s are over
                assert isinstance(request.exception(), httpx.TransportError)
    finally:
        process.kill()
        process.wait()


class CountingTokenizer:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str) -> Any:
        self.calls += 1
        return self.tokenizer(text)

    def apply_chat_template(self, *given: Any, **options: Any) -> Any:
        self.calls += 1
        return self.tokenizer.apply_chat_template(*given, **options)


@pytest.mark.parametrize(
    ("route", "params"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 390_000}] * 10}),
        ("completions", {"prompt": "x" * 390_000}),
    ],
)
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    api: Running, route: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = CountingTokenizer(api.newest.tokenizer)
    monkeypatch.setattr(api.newest, "tokenizer", tokenizer)
    with api.api() as client:
        response = client.post(f"/v1/{route}", json={"model": api.model} | params)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert "characters" in response.json()["error"]["message"]
    assert tokenizer.calls == 0


def test_tokenizing_blocks_neither_the_event_loop_nor_another_caller(
    page: Running, ada: User, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, started = routes.encode, list[int]()

    def slow(*given: Any) -> Any:
        started.append(1)
        gate.wait(DEADLINE_S)
        return encode(*given)

    monkeypatch.setattr(routes, "encode", slow)
    with page.api() as client, ThreadPoolExecutor(4) as clients:
        requests = [clients.submit(page.chat, MESSAGES, max_tokens=4) for _ in range(4)]
        try:
            until(lambda: started)
            assert client.get("/health", timeout=SHORT_S).status_code == 200
            assert ada.say(ada.begin())[-1]["event"] == "done"
            assert len(started) == 1, "the texts of one caller must be tokenized one after the other"
        finally:
            gate.set()
        assert [request.result().status_code for request in requests] == [200] * 4


def test_a_caller_has_few_large_bodies_in_memory_and_small_bodies_do_not_wait(page: Running, ada: User) -> None:
    slots = page.service.bodies
    cookie = "; ".join(f"{name}={value}" for name, value in ada.http.cookies.items())
    head = (
        f"POST /chat/conversations/{ada.begin()}/replies HTTP/1.1\r\nHost: {page.url.removeprefix('http://')}\r\n"
        f"Cookie: {cookie}\r\nX-CSRF-Token: {ada.csrf}\r\n"
        "Content-Type: application/json\r\nContent-Length: 300000\r\n\r\n{"
    )
    connections = [socket.create_connection(page.address, timeout=DEADLINE_S) for _ in range(4)]
    try:
        for connection in connections:
            connection.sendall(head.encode())
        until(lambda: any(slots._queues.values()))
        assert slots._held.total() == slots.per_caller
        assert ada.say(ada.begin())[-1]["event"] == "done"
    finally:
        for connection in connections:
            connection.close()
    until(lambda: not slots._held and not slots._queues)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":[' + b'"",' * guard.STRINGS + b'""]}',
        b'{"a":[' + b"[]," * guard.CONTAINERS + b"[]]}",
        b"[" * (guard.CONTAINERS + 1),
        b'{"a":"\\\\",' + b'"\\"":{},' * guard.CONTAINERS + b'"b":1}',
        b"{" + b",".join(b'"k%d":1' % n for n in range(guard.STRINGS + 1)) + b"}",
    ],
)
def test_json_with_too_many_values_is_not_parsed(data: bytes, api: Running) -> None:
    with pytest.raises(ReplyError, match="more than"):
        proof.Reply.read(data)
    with api.api() as client:
        response = client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and "more than" in response.json()["error"]["message"]


def test_brackets_and_quotes_inside_strings_are_only_text() -> None:
    assert not guard.json_size_error(json.dumps({"a": '[{"\\' * 100_000}).encode())


@pytest.mark.parametrize("field", ["tokens", "prompt", "proofs", "messages"])
def test_many_invalid_values_give_few_errors(field: str) -> None:
    with pytest.raises(ReplyError) as reply_error:
        proof.Reply.read(b'{"%s":[' % field.encode() + b"-1," * 9_999 + b"-1]}")
    assert reply_error.value.__cause__.error_count() < 20  # type: ignore[union-attr]
    with pytest.raises(RequestError) as request_error:
        parse_request(ChatRequest, b'{"model":"m","messages":[' + b"1," * 1_999 + b"1]}")
    assert request_error.value.__cause__.error_count() < 20  # type: ignore[union-attr]


def test_the_logprobs_and_completions_of_a_response_are_bounded(api: Running) -> None:
    params = {"logprobs": True, "top_logprobs": 20}
    for stream in (False, True):
        refused = api.chat(MESSAGES, n=64, max_tokens=100, stream=stream, **params)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
    assert api.chat(MESSAGES, n=2, max_tokens=4, **params).status_code == 200
    assert api.complete(prompt=["one"] * 64, n=64, stop=["a" * 400]).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_counts_until_its_answer_is_sent_but_its_version_is_free_before(
    api: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    scheduler, counts, users = api.service.scheduler, list[int](), list[int]()
    write_eof = web.StreamResponse.write_eof

    async def counted(response: web.StreamResponse, data: bytes = b"") -> None:
        counts.append(scheduler._callers.total())
        users.append(api.newest.users)
        await write_eof(response, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", counted)
    until(lambda: not api.newest.users)
    assert api.chat(MESSAGES, n=2, max_tokens=4, stream=stream).status_code == 200
    assert counts[0] == 2
    assert users[0] == 0  # a slow reader does not keep the version in memory
    until(lambda: not scheduler._callers)


def test_a_user_of_the_page_has_a_smaller_share_than_a_key(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, hasher=CHEAP, limits=ServeLimits(per_caller=8)) as running:
        user = User.registered(running)
        body = {"content": "one", "models": [user.model] * 2, "max_tokens": 4}
        refused = user.post(f"conversations/{user.begin()}/replies", body)
        assert refused.status_code == 429 and "at most 1 completions" in refused.json()["error"]
        assert running.chat(MESSAGES, n=2, max_tokens=4).status_code == 200


def test_a_compressed_body_is_refused(page: Running, ada: User) -> None:
    """It would become a large body without a slot."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    data = gzip.compress(json.dumps({"model": page.model, "prompt": "one" + " " * guard.STRINGS}).encode())
    with page.api() as client:
        response = client.post("/v1/completions", content=data, headers=headers)
    assert response.status_code == 415 and "Content-Encoding" in response.json()["error"]["message"]
    reply = f"/chat/conversations/{ada.begin()}/replies"
    assert ada.http.post(reply, content=data, headers=headers | {"X-CSRF-Token": ada.csrf}).status_code == 415


def test_a_body_without_a_content_length_releases_its_slot(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path) as running, running.api() as client:
        data = json.dumps({"model": running.model, "prompt": "one", "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=iter([data]), headers=headers).status_code == 200
        until(lambda: not running.service.bodies._held)
