"""A model behind a URL: a real HTTP server that answers, fails, stalls and lies."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from shoal.evals import remote
from shoal.evals.completions import Answer, Asked, EvalError, Key
from shoal.evals.evaluate import asked_of
from shoal.evals.remote import Address, RemoteSampler
from shoal.evals.samplers import Sampling
from tests.evals.support import entry

Handler = Callable[["Server", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    handler: Handler
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        try:
            return await self.handler(self, request, body)
        finally:
            self.busy -= 1


def completion(text: str | None, why: str = "stop", tokens: int = 3) -> web.Response:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": why}
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": tokens}})


@contextmanager
def serving(handler: Handler) -> Iterator[Server]:
    server = Server(handler)
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def ask(url: str, asked: list[Asked] | None = None, known: set[Key] | None = None, **address: Any) -> dict[Key, Answer]:
    found: dict[Key, Answer] = {}
    sampler = RemoteSampler(Address(url, "served", **address))
    sampler.answer(
        asked_of(entry(4, 2), 0) if asked is None else asked,
        Sampling(0.7, 8),
        known or set(),
        lambda many: found.update((one.key, answer) for one, answer in many),
    )
    return found


async def echo(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return completion(f"{body['messages'][0]['content']} {body['seed']}")


def test_every_completion_is_asked_for_once_with_its_seed_and_settings() -> None:
    asked = asked_of(entry(4, 2), 0)
    with serving(echo) as server:
        found = ask(server.url, known={asked[0].key})
    assert set(found) == {one.key for one in asked[1:]}
    for one in asked[1:]:
        assert found[one.key] == Answer(f"{one.message} {one.seed % remote.SEEDS}", 3, ended=True)
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("served", 0.7, 8)
    assert all(0 <= body["seed"] < 2**31 for body in server.bodies)


def test_no_more_requests_are_under_way_than_allowed() -> None:
    async def slow(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        for _ in range(50):  # give others the chance to come
            await asyncio.sleep(0.001)
        return completion("x")

    with serving(slow) as server:
        assert len(ask(server.url, asked_of(entry(10, 2), 0), concurrency=3)) == 20
    assert server.busiest <= 3


def test_a_cut_off_completion_and_one_without_content_are_told() -> None:
    async def cut(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return completion(None, "length", 8)

    with serving(cut) as server:
        assert set(ask(server.url).values()) == {Answer("", 8, ended=False)}


@pytest.mark.parametrize(("status", "wait"), [(429, "0"), (500, "0"), (503, "-1"), (503, "nan")])
def test_passing_faults_are_tried_again(status: int, wait: str) -> None:
    async def shaky(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if server.bodies.count(body) == 1:
            return web.Response(status=status, headers={"Retry-After": wait})
        return await echo(server, request, body)

    with serving(shaky) as server:
        assert len(ask(server.url)) == 8
    assert len(server.bodies) == 16


def test_a_dropped_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)

    async def drops(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if server.bodies.count(body) == 1:
            assert request.transport is not None
            request.transport.close()
        return await echo(server, request, body)

    with serving(drops) as server:
        assert len(ask(server.url)) == 8


def test_a_server_that_stays_silent_is_named_when_the_deadline_passes() -> None:
    async def silent(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    with serving(silent) as server, pytest.raises(EvalError, match=r"chat/completions gave no completion within 0.2 s"):
        ask(server.url, deadline_s=0.2)


def test_nobody_listening_is_named_with_the_cause() -> None:
    with serving(echo) as server:
        url = server.url
    with pytest.raises(EvalError, match=r"within 0.2 s \(ConnectError.*run the same command again"):
        ask(url, deadline_s=0.2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: web.Response(status=401), "environment variable SHOAL_API_KEY"),
        (lambda: web.Response(status=400, text="max_tokens is too large"), "status 400: max_tokens is too large"),
        (lambda: web.Response(text="<html>"), "does not answer as the OpenAI API does: <html>"),
        (lambda: web.json_response({"choices": []}), "does not answer as the OpenAI API does"),
        (lambda: web.json_response([1]), "does not answer as the OpenAI API does"),
        (lambda: web.Response(text="[" * 65_536), "does not answer as the OpenAI API does"),
        (
            lambda: web.json_response({"choices": [{"message": {"content": 5}}]}),
            "does not answer as the OpenAI API does",
        ),
    ],
)
def test_lasting_faults_end_the_evaluation_with_their_cause(answer: Callable[[], web.Response], said: str) -> None:
    async def refuses(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return answer()

    with serving(refuses) as server, pytest.raises(EvalError, match=said):
        ask(server.url)
    assert len(server.bodies) <= 8  # none was tried again


def test_a_wrong_path_and_a_wrong_scheme_say_what_a_url_looks_like() -> None:
    with serving(echo) as server, pytest.raises(EvalError, match="--url ends with /v1"):
        ask(server.url.removesuffix("/v1"))
    with pytest.raises(EvalError, match="http://HOST:PORT/v1"):
        ask("127.0.0.1:1/v1")


def test_what_came_before_a_failure_is_kept() -> None:
    async def third_fails(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await echo(server, request, body) if len(server.bodies) < 3 else web.Response(status=400)

    kept: dict[Key, Answer] = {}
    with serving(third_fails) as server, pytest.raises(EvalError):
        RemoteSampler(Address(server.url, "served", concurrency=1)).answer(
            asked_of(entry(4, 2), 0),
            Sampling(0.7, 8),
            set(),
            lambda many: kept.update((one.key, answer) for one, answer in many),
        )
    assert len(kept) == 2


def test_the_key_is_sent_only_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not for everyone")
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    with serving(echo) as server:
        ask(server.url)
        assert all("Authorization" not in headers for headers in server.headers)
        monkeypatch.setenv("MY_KEY", "secret")
        ask(server.url, key_variable="MY_KEY")
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    assert "secret" not in json.dumps(server.bodies)
