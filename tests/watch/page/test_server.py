"""The dashboard over HTTP. Its responses are complete and reveal no secret. No request changes a file."""

import asyncio
import json
import re
import shutil
import socket
import sqlite3
from pathlib import Path

import aiohttp
import httpx
import pytest

from shoal.protocol.history import Status
from shoal.shardcast.connections import Listener, Patience
from shoal.watch.page import server
from shoal.watch.run import FolderRun

from .conftest import MARKUP, Serving

PATHS = [
    "/api/overview",
    "/api/curves",
    "/api/flow",
    "/api/nodes",
    "/api/timeline?last=3600",
    "/api/validation",
    "/api/about",
]


def get_all(url: str) -> dict[str, httpx.Response]:
    with httpx.Client(base_url=url, timeout=30) as client:
        return {path: client.get(path) for path in PATHS}


def test_every_path_responds(finished: Path, serving: Serving) -> None:
    responses = get_all(serving(finished))
    assert {path: response.status_code for path, response in responses.items()} == dict.fromkeys(PATHS, 200)
    overview = responses["/api/overview"].json()["overview"]
    assert overview["trained"] == 3 and responses["/api/curves"].json()["curves"]["x"] == [1, 2, 3]
    assert [answer["answer"] for answer in overview["answers"]][2] == "Caught"
    assert responses["/api/flow"].json()["verdicts"].keys() == {"", "bounds", "proof"}
    by_reason = {row["reason"]: row for row in responses["/api/validation"].json()["rejected"]}
    assert "The model may be another one" in by_reason["proof"]["words"] and by_reason["proof"]["hard"]
    assert not by_reason["bounds"]["hard"]


def test_the_timeline_has_a_lane_for_each_node_and_its_downloads(finished: Path, serving: Serving) -> None:
    timeline = get_all(serving(finished))["/api/timeline?last=3600"].json()
    lanes = {lane["name"]: (lane["role"], {bar["kind"] for bar in lane["bars"]}) for lane in timeline["lanes"]}
    assert lanes["learner"] == ("learner", {"wait", "train"})
    assert lanes["alice"] == ("worker", {"generate", "receive"}) and lanes["mallory"] == ("worker", {"generate"})
    assert lanes["validator"] == ("validator", {"check"})
    [download] = [bar for lane in timeline["lanes"] for bar in lane["bars"] if bar["kind"] == "receive"]
    assert (download["version"], download["bytes"], download["to_s"] - download["from_s"]) == (1, 700, 2)


def test_compared_runs_are_sent_with_their_reward_and_accuracy(finished: Path, serving: Serving) -> None:
    url = serving(finished, compare=[finished, finished])
    curves = httpx.get(f"{url}/api/curves").json()
    name = httpx.get(f"{url}/api/overview").json()["overview"]["name"]
    assert [other["name"] for other in curves["others"]] == [name] * 2
    other = curves["others"][0]
    assert other["curves"]["values"] == {"reward": curves["curves"]["values"]["reward"]}
    assert other["evaluations"] == curves["evaluations"]


def test_no_response_contains_a_key_an_address_or_an_invite(finished: Path, serving: Serving) -> None:
    database = sqlite3.connect(f"file:{finished / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    nodes = database.execute("SELECT key, invite FROM nodes").fetchall()
    founder = json.loads(database.execute("SELECT body FROM ledger WHERE kind = 'started'").fetchone()[0])["key"]
    nonces = [row[0] for row in database.execute("SELECT nonce FROM submissions")]
    text = "".join(response.text for response in get_all(serving(finished, hosts=())).values())
    for secret in [
        *nonces,
        *(secret for key, invite in nodes for secret in (key[:16], invite)),
        founder[:16],
        "10.1.2.3",
    ]:
        assert secret not in text, secret
    assert not re.search(r"[0-9a-f]{32}", text)
    assert str(finished) not in text


def test_markup_in_a_completion_is_served_as_json_with_a_strict_content_security_policy(
    finished: Path, serving: Serving
) -> None:
    responses = get_all(serving(finished))
    assert MARKUP[:40] in responses["/api/about"].json()["samples"][0]["completion"]
    for response in responses.values():
        assert response.headers["Content-Type"].startswith("application/json")
        assert "script-src 'self'" in response.headers["Content-Security-Policy"]
        assert "unsafe-inline" not in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/assets/..%2f..%2fserver.py",
        "/assets/%2e%2e/server.py",
        "/assets/../server.py",
        "/assets/..%5cserver.py",
        "/assets//etc/passwd",
        "/../../etc/passwd",
        "/assets/identity.pem",
    ],
)
def test_no_path_reaches_a_file_outside_the_page(finished: Path, serving: Serving, path: str) -> None:
    host, port = serving(finished).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:  # httpx would normalize the path
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        response = b"".join(iter(lambda: connection.recv(65536), b""))
    assert response.split()[1] in (b"404", b"400", b"403")


@pytest.mark.parametrize("query", ["last=nan", "last=31", "last=100000", "to=x", "to=1e999"])
def test_invalid_queries_are_refused(finished: Path, serving: Serving, query: str) -> None:
    response = httpx.get(f"{serving(finished)}/api/timeline?{query}")
    assert response.status_code == 400 and response.json()["error"]


def test_post_requests_and_foreign_host_names_are_refused(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    assert httpx.post(f"{url}/api/overview").status_code == 405
    assert httpx.get(f"{url}/api/overview", headers={"Host": "evil.example"}).status_code == 421


async def get_at_once(url: str, count: int) -> list[int]:
    async def get(session: aiohttp.ClientSession) -> int:
        async with session.get(f"{url}/api/overview") as response:
            return response.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(get(session) for _ in range(count)))


def test_concurrent_clients_share_one_read_of_the_run_and_all_are_served(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, reads, refresh = serving(finished), [0], FolderRun.refresh

    def counting(run: FolderRun) -> Status:
        reads[0] += 1
        return refresh(run)

    monkeypatch.setattr(FolderRun, "refresh", counting)
    count = 2 * server.MAX_WAITING + 20
    assert asyncio.run(get_at_once(url, count)) == [200] * count
    assert reads == [1]


@pytest.mark.parametrize(("share", "computed"), [(1e9, 2), (1e-9, 1)])
def test_an_expensive_response_is_cached_for_longer(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch, share: float, computed: int
) -> None:
    calls = []
    monkeypatch.setattr(server, "FRESH_S", 0.0)
    monkeypatch.setattr(server, "SHARE", share)
    monkeypatch.setattr(server, "flow", lambda work: calls.append(1) or {})
    url = serving(finished)
    assert [httpx.get(f"{url}/api/flow").status_code for _ in range(2)] == [200, 200]
    assert len(calls) == computed


def test_unknown_parameters_and_nearly_equal_times_cause_no_new_computation(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, compute = list[float](), server.timeline
    monkeypatch.setattr(server, "FRESH_S", 1e9)
    monkeypatch.setattr(server, "timeline", lambda run, from_s, to_s: calls.append(to_s) or compute(run, from_s, to_s))
    url = serving(finished)
    queries = ["last=30", "last=30&x=1", "last=30.0&x=2", "last=30&to=1000", "last=30&to=1001.5", "to=1000&last=30&x=1"]
    assert [httpx.get(f"{url}/api/timeline?{query}").status_code for query in queries] == [200] * 6
    assert len(calls) == 2 and calls[1] == 997.5


def test_many_earlier_parts_of_the_timeline_wait_for_each_other_and_do_not_delay_its_newest_part(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SHARE", 1e-9)  # the second computation has to wait for weeks
    url = serving(finished)

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def get(query: str) -> int:
                async with session.get(f"{url}/api/timeline?{query}") as response:
                    return response.status

            assert await get("to=0") == 200
            requests = [asyncio.create_task(get(f"to={60 * n}")) for n in range(1, server.MAX_WAITING + 2)]
            answered, waiting = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            assert [request.result() for request in answered] == [503] and len(waiting) == server.MAX_WAITING
            assert [await get("last=30"), await get("last=60")] == [200, 200]
            for request in waiting:
                request.cancel()

    asyncio.run(main())


def test_the_spans_of_the_page_are_accepted() -> None:
    [spans] = re.findall(r"SPANS_S = \[(.*)\];", (server.STATIC / "timeline.js").read_text())
    assert tuple(map(int, spans.split(","))) == server.SPANS_S


def test_a_connection_without_a_request_is_closed(finished: Path) -> None:
    async def request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))  # type: ignore[index]

    async def main() -> None:
        listener = Listener("127.0.0.1", 0, Patience(headers_s=0.5), per_address=9, total=9)
        listener.listen()
        ended = asyncio.Event()
        dashboard = server.Dashboard(FolderRun(finished))
        serve = asyncio.create_task(server.serve(dashboard, listener, server.LOOPBACK, ended.is_set))
        async with asyncio.timeout(60):
            used = await asyncio.open_connection(*listener.getsockname()[:2])
            await request(*used)
            silent = await asyncio.open_connection(*listener.getsockname()[:2])
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await silent[0].readexactly(1)
            await request(*used)
            ended.set()
            await serve

    asyncio.run(main())


def test_an_unchanged_response_is_not_sent_again(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    first = httpx.get(f"{url}/api/curves")
    again = httpx.get(f"{url}/api/curves", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_new_step_appears_and_the_last_state_of_a_deleted_run_is_still_shown(
    finished: Path, tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FRESH_S", 0.0)
    monkeypatch.setattr(server, "REFRESH_S", 0.0)
    monkeypatch.setattr(server, "SHARE", 1e9)
    folder = shutil.copytree(finished, tmp_path / "run")
    url = serving(folder)
    before = httpx.get(f"{url}/api/overview").json()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3.0, "time_s": 1.0, "reward/mean": 0.5}) + "\n")
    after = httpx.get(f"{url}/api/overview").json()
    assert (before["revision"], after["revision"]) == ("3.1", "4.1") and after["overview"]["trained"] == 4
    assert httpx.get(f"{url}/api/curves").json()["curves"]["x"] == [1, 2, 3, 4]
    (folder / "state.json").write_text("{}")
    assert httpx.get(f"{url}/api/overview").json()["overview"]["trained"] == 4


def test_no_request_changes_a_file_in_the_runs_folder(finished: Path, serving: Serving) -> None:
    def state() -> dict[str, bytes]:
        paths = (path for path in finished.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
        return {str(path): path.read_bytes() for path in paths}

    url, before = serving(finished), state()
    get_all(url)
    assert state() == before
