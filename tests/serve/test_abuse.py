"""What one client can cost all others: work beside the event loop, bounded, in turns."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.serve import proof
from shoal.serve.chat import routes as chat_routes
from shoal.serve.errors import ReplyError, RequestError
from shoal.serve.openai import routes, tools
from shoal.serve.openai.requests import ChatRequest, read
from shoal.serve.openai.tools import CallFormat, CallReader
from shoal.watch.page import guard

from .people import PASSWORD, Person
from .support import DEADLINE_S, Running, serving, until

SHORT_S = 30.0  # more than any answer of a server that is idle takes


@pytest.fixture
def file(ada: Person) -> dict[str, Any]:
    """A reply file."""
    id = ada.begin()
    message = ada.say(id)[-1]["message"]["id"]
    found: dict[str, Any] = ada.get(f"conversations/{id}/messages/{message}/proof").json()
    return found


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Whatever waits for it ends with the test."""
    event = threading.Event()
    yield event
    event.set()


def leave(person: Person, file: dict[str, Any], begun: Callable[[], object] = lambda: True) -> None:
    """Ask for a verification and hang up; again with more patience until one has `begun`."""
    after_s = 0.1
    while after_s < DEADLINE_S:
        after_s *= 2
        with pytest.raises(httpx.ReadTimeout):
            person.post("verify", file, timeout=httpx.Timeout(DEADLINE_S, read=after_s))
        if begun():
            return


def test_a_reply_file_is_bounded_as_a_request_is(page: Running, file: dict[str, Any]) -> None:
    person = Person(page, "bounded")
    person.enter()
    for stops in (["a" * 1_400_000], ["a" * 401], ["a"] * 9):
        answer = person.post("verify", file | {"stops": stops}, timeout=SHORT_S)
        assert answer.status_code == 400 and "stops" in answer.json()["error"]
    with page.api() as client:
        asked = {"model": page.model, "prompt": "one", "stop": "a" * 401}
        assert client.post("/v1/completions", json=asked).json()["error"]["param"] == "stop"


def test_verifications_whose_clients_left_run_one_at_a_time_and_leave_logins_alone(
    page: Running, file: dict[str, Any], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = [0, 0]

    def stuck(*more: Any) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        gate.wait(DEADLINE_S)
        at_once[0] -= 1

    people = [Person(page, f"stuck-{n}") for n in range(3)]
    for person in people:
        assert person.enter().status_code == 200
    monkeypatch.setattr(chat_routes.proof, "verify", stuck)
    leave(people[0], file, lambda: at_once[0])
    for person in people * 3:
        leave(person, file)
    assert at_once == [1, 1]
    assert people[0].enter("login", PASSWORD).status_code == 200
    id = people[0].begin()
    assert people[0].say(id)[-1]["event"] == "done"  # its proof is made while the other thread is stuck
    gate.set()
    monkeypatch.undo()
    assert people[1].post("verify", file).json()["passed"]


def test_a_verification_whose_client_left_is_told_so(
    page: Running, file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def long(reply: Any, held: Any, config: Any = None, unwanted: Any = None) -> None:
        begun.set()
        until(unwanted)
        ended.set()

    person = Person(page, "leaver")
    person.enter()
    monkeypatch.setattr(chat_routes.proof, "verify", long)
    leave(person, file, begun.is_set)
    assert ended.wait(DEADLINE_S)


def test_a_verification_has_a_deadline(page: Running, file: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    person = Person(page, "patient")
    person.enter()
    monkeypatch.setattr(chat_routes.proof, "verify", lambda reply, held, config, unwanted: until(unwanted))
    monkeypatch.setattr(chat_routes, "VERIFY_S", 0.1)
    answer = person.post("verify", file)
    assert answer.status_code == 429 and "0.1 s" in answer.json()["error"] and answer.headers["Retry-After"]


STUCK = """
import sys, time
from shoal.serve import proof
def stuck(*more, **named):
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
            said = http.post(f"/chat/conversations/{id}/replies", json=body).text
            message = json.loads(said.splitlines()[-2][6:])["message"]["id"]
            with ThreadPoolExecutor(1) as clients:
                asked = clients.submit(http.post, f"/chat/conversations/{id}/messages/{message}/verify", json={})
                assert process.stdout.readline() == "stuck\n"
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_S) == 0  # a fraction of the thread's 600 s
                assert isinstance(asked.exception(), httpx.TransportError)
    finally:
        process.kill()
        process.wait()


class Untouched:
    """A tokenizer that must not be asked to tokenize."""

    def __init__(self, own: Any) -> None:
        self.own, self.asked = own, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, text: str) -> Any:
        self.asked += 1
        return self.own(text)

    def apply_chat_template(self, *given: Any, **more: Any) -> Any:
        self.asked += 1
        return self.own.apply_chat_template(*given, **more)


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 390_000}] * 10}),
        ("completions", {"prompt": "x" * 390_000}),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": "x" * 3_000_000}}}],
            },
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    api: Running, route: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = api.service.versions.newest
    assert held is not None
    spy = Untouched(held.tokenizer)
    monkeypatch.setattr(held, "tokenizer", spy)
    monkeypatch.setattr(routes, "detect_call_format", lambda tokenizer, is_forced: None)
    with api.api() as client:
        answer = client.post(f"/v1/{route}", json={"model": api.model} | asked)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "characters" in answer.json()["error"]["message"]
    assert spy.asked == 0


def test_tokenizing_stops_neither_the_event_loop_nor_another_caller(
    page: Running, ada: Person, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, begun = routes.encode, list[int]()

    def slow(*given: Any) -> Any:
        begun.append(1)
        gate.wait(DEADLINE_S)
        return own(*given)

    monkeypatch.setattr(routes, "encode", slow)
    body = {"model": page.model, "messages": [{"role": "user", "content": "one"}], "max_tokens": 4}
    with page.api() as client, ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(client.post, "/v1/chat/completions", json=body) for _ in range(4)]
        try:
            until(lambda: begun)
            assert client.get("/health", timeout=SHORT_S).status_code == 200
            assert ada.say(ada.begin())[-1]["event"] == "done"
            assert len(begun) == 1  # one caller's texts are read one after the other
        finally:
            gate.set()
        assert [one.result().status_code for one in asked] == [200] * 4


def test_a_caller_has_few_large_bodies_in_memory_and_small_ones_pass(page: Running, ada: Person) -> None:
    places = page.service.bodies
    host, port = page.url.removeprefix("http://").split(":")
    import socket

    cookie = "; ".join(f"{name}={value}" for name, value in ada.http.cookies.items())
    head = (
        f"POST /chat/verify HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\nX-CSRF-Token: {ada.csrf}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{"
    )
    raw = [socket.create_connection((host, int(port)), timeout=DEADLINE_S) for _ in range(4)]
    try:
        for one in raw:
            one.sendall(head.encode())
        until(lambda: any(places._lines.values()))
        assert places._held.total() == places.per_caller
        assert ada.say(ada.begin())[-1]["event"] == "done"
    finally:
        for one in raw:
            one.close()
    until(lambda: not places._held and not places._lines)


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
def test_json_of_very_many_parts_is_not_parsed(data: bytes, ada: Person, page: Running) -> None:
    with pytest.raises(ReplyError, match="more than"):
        proof.Reply.read(data)
    with page.api() as client:
        answer = client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and "more than" in answer.json()["error"]["message"]


def test_brackets_and_quotes_inside_of_texts_are_only_text() -> None:
    assert not guard.json_fault(json.dumps({"a": '[{"\\' * 100_000}).encode())


@pytest.mark.parametrize("field", ["tokens", "prompt", "proofs", "messages"])
def test_a_million_wrong_values_are_one_error(field: str) -> None:
    with pytest.raises(ReplyError) as refused:
        proof.Reply.read(b'{"%s":[' % field.encode() + b"-1," * 9_999 + b"-1]}")
    assert refused.value.__cause__.error_count() < 20  # type: ignore[union-attr]
    with pytest.raises(RequestError) as other:
        read(ChatRequest, b'{"model":"m","messages":[' + b"1," * 1_999 + b"1]}")
    assert other.value.__cause__.error_count() < 20  # type: ignore[union-attr]


def test_a_streamed_call_is_parsed_once_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, own = [], tools._decoded
    monkeypatch.setattr(tools, "_decoded", lambda text: (parsed.append(len(text)), own(text))[1])
    reading = CallReader(CallFormat("<call>", "</call>", "name", "arguments"), [{"function": {"name": "f"}}])
    arguments = {"a": ['}]"\\', {"b": "x" * 3000}]}
    text = "<call>" + json.dumps({"name": "f", "arguments": arguments}) + " " * 100 + "</call>"
    parts = [part for character in text for part in reading.add(character)] + reading.end()
    assert [json.loads(part.arguments) for part in parts if not isinstance(part, str)] == [arguments]
    assert sum(parsed) < 3 * len(text)


def test_spaces_that_may_stand_before_a_call_are_not_held_for_ever() -> None:
    reading = CallReader(CallFormat("<call>", "</call>", "name", "arguments"), [])
    given = "".join(str(part) for _ in range(100) for part in reading.add(" " * 100))
    assert len(given) + tools.MAX_SPACES >= 10_000
    assert given + "".join(map(str, reading.end())) == " " * 10_000


def test_an_answer_has_an_end_of_logprobs(api: Running) -> None:
    body = {"model": api.model, "messages": [{"role": "user", "content": "one"}], "logprobs": True, "top_logprobs": 20}
    with api.api() as client:
        refused = client.post("/v1/chat/completions", json=body | {"n": 64, "max_tokens": 100})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
        assert client.post("/v1/chat/completions", json=body | {"n": 2, "max_tokens": 4}).status_code == 200
        many = {"model": api.model, "prompt": ["one"] * 64, "n": 64, "stop": ["a" * 400]}
        assert client.post("/v1/completions", json=many).status_code == 429  # before anything is made of them


def test_a_large_request_without_a_length_is_bounded_too(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path) as running, running.api() as client:
        data = json.dumps({"model": running.model, "prompt": "one", "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=iter([data]), headers=headers).status_code == 200
        until(lambda: not running.service.bodies._held)
