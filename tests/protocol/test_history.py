"""Looking at a run from outside: its address, its state, its history by cursor."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from shoal.protocol import history
from shoal.protocol.history import History, PoolWatch, Status, UnreachableError
from shoal.protocol.invite import Address, AddressError, find_coordinator, server_url
from tests.watch.support import status

URL = "http://pool:8700"
STATE: Status = status().status
STEPS = [{"step": float(number), "reward/mean": 0.5} for number in range(5)]


def watching(answer: Callable[[httpx.Request], httpx.Response]) -> PoolWatch:
    return PoolWatch(URL, httpx.Client(transport=httpx.MockTransport(answer)))


def test_a_look_fetches_the_state_and_only_new_history() -> None:
    cursors = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/status":
            return httpx.Response(200, text=STATE.model_dump_json())
        after = int(request.url.params["after"])
        cursors.append(after)
        upto = min(after + 2, len(STEPS))
        return httpx.Response(
            200, text=History(cursor=upto, metrics=STEPS[after:upto], evaluations=[], samples=[]).model_dump_json()
        )

    pool = watching(answer)
    assert pool.look() == STATE
    assert (pool.history.metrics, cursors) == (STEPS, [0, 2, 4, 5])
    pool.look()
    assert cursors[4:] == [5], "what is known is not fetched again"


def test_a_coordinator_that_asks_to_wait_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It bounds the bytes that one address reads; a long run's history, or a large pool's state, may be more."""
    asked: list[str] = []
    monkeypatch.setattr(history, "time", SimpleNamespace(monotonic=lambda: float(len(asked)), sleep=lambda _: None))

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) % 3:
            return httpx.Response(429)
        if request.url.path == "/v1/status":
            return httpx.Response(200, text=STATE.model_dump_json())
        return httpx.Response(200, text='{"cursor": 0, "metrics": [], "evaluations": [], "samples": []}')

    assert watching(answer).look() == STATE and asked == 3 * ["/v1/status"] + 3 * ["/v1/history"]
    with pytest.raises(UnreachableError):
        watching(lambda request: asked.append("") or httpx.Response(429)).look()


def test_a_coordinator_that_does_not_answer_is_named() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(UnreachableError, match=f"no coordinator answers at {URL} .connection refused."):
        watching(refuse).look()


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(404), httpx.Response(200, text="<html>"), httpx.Response(200, text="{}"), httpx.Response(302)],
    ids=["404", "html", "json", "redirect"],
)
def test_another_server_is_not_taken_for_a_coordinator(answer: httpx.Response) -> None:
    with pytest.raises(UnreachableError, match=f"what answers at {URL} is not a Shoal coordinator"):
        watching(lambda request: answer).look()


@pytest.mark.parametrize(
    "text",
    [
        "http://h",
        "https://h.example.org",
        "http://10.0.0.1:1/",
        "http://[::1]:8700",
        "http://h:65535",
    ],
)
def test_a_coordinators_url_has_scheme_and_host(text: str) -> None:
    assert server_url(text) == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:8700",
        "localhost:8700",
        "10.0.0.1",
        "http://",
        "http://:8700",
        "http://h:0",
        "http://h:70000",
        "http://h:x",
        "http://h/v1",
        "http://h/runs",
        "http://h?x=1",
        "http://h?",
        "http://h:1#",
        "http://u@h",
        "http://:password@h",
        "http://two words:1",
        "http://h:1\n",
        "ftp://h",
        "http://" + "h" * 200,
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(AddressError, match="write http://HOST:PORT"):
        server_url(text)


def test_a_pool_is_found_by_url_and_by_the_folder_of_a_run_or_coordinator(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    Address(url=URL, run="sums").write(tmp_path / "coordinator")
    for where in (URL, f"{URL}/", str(tmp_path), str(tmp_path / "coordinator")):
        assert find_coordinator(where) == URL


def test_a_folder_without_a_coordinator_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=f"{tmp_path} is neither the folder of a run nor of a coordinator"):
        find_coordinator(str(tmp_path))
    (tmp_path / "coordinator.json").write_text("{")
    with pytest.raises(AddressError, match=f"{tmp_path}/coordinator.json is damaged: restore"):
        find_coordinator(str(tmp_path))
