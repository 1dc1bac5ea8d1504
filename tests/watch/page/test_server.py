"""What the dashboard answers over HTTP, and what it never does."""

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
from shoal.watch.page import server
from shoal.watch.run import FolderRun

from .conftest import MARKUP, Serving

ASKED = [
    "/api/overview",
    "/api/curves",
    "/api/flow",
    "/api/nodes",
    "/api/timeline?last=100000",
    "/api/validation",
    "/api/about",
]


def everything(url: str) -> dict[str, httpx.Response]:
    with httpx.Client(base_url=url, timeout=30) as client:
        return {path: client.get(path) for path in ASKED}


def test_every_question_is_answered(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))
    assert {path: response.status_code for path, response in found.items()} == dict.fromkeys(ASKED, 200)
    told = found["/api/overview"].json()["overview"]
    assert told["trained"] == 3 and found["/api/curves"].json()["curves"]["x"] == [1, 2, 3]
    assert {one["question"]: one["answer"] for one in told["answers"]}["Is anyone cheating?"] == "Caught"
    assert found["/api/flow"].json()["verdicts"].keys() == {"", "bounds", "proof"}


def test_a_rejection_is_told_in_words(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))["/api/validation"].json()["rejected"]
    by_reason = {row["reason"]: row for row in found}
    assert "another model" in by_reason["proof"]["words"] and by_reason["proof"]["hard"]
    assert not by_reason["bounds"]["hard"]


def test_the_timeline_has_a_lane_for_each_node_and_its_downloads(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))["/api/timeline?last=100000"].json()
    lanes = {lane["name"]: (lane["role"], {bar["kind"] for bar in lane["bars"]}) for lane in found["lanes"]}
    assert lanes["learner"] == ("learner", {"wait", "train"})
    assert lanes["alice"] == ("worker", {"generate", "receive"}) and lanes["mallory"] == ("worker", {"generate"})
    assert lanes["validator"] == ("validator", {"check"})
    [download] = [bar for lane in found["lanes"] for bar in lane["bars"] if bar["kind"] == "receive"]
    assert (download["version"], download["bytes"], download["to_s"] - download["from_s"]) == (1, 700, 2)


def test_other_runs_come_with_their_reward_and_accuracy(finished: Path, serving: Serving) -> None:
    url = serving(finished, compare=[finished, finished])
    opened = httpx.get(f"{url}/api/curves").json()
    name = httpx.get(f"{url}/api/overview").json()["overview"]["name"]
    assert [other["name"] for other in opened["others"]] == [name] * 2
    other = opened["others"][0]
    assert other["curves"]["values"] == {"reward": opened["curves"]["values"]["reward"]}
    assert other["evaluations"] == opened["evaluations"]


def test_no_answer_holds_a_key_an_address_or_an_invite(finished: Path, serving: Serving) -> None:
    database = sqlite3.connect(f"file:{finished / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    nodes = database.execute("SELECT key, invite FROM nodes").fetchall()
    founder = json.loads(database.execute("SELECT body FROM ledger WHERE kind = 'started'").fetchone()[0])["key"]
    nonces = [row[0] for row in database.execute("SELECT nonce FROM submissions")]
    found = everything(serving(finished, hosts=()))
    text = "".join(response.text for response in found.values())
    for secret in [*nonces, *(word for node in nodes for word in (node[0][:16], node[1])), founder[:16], "10.1.2.3"]:
        assert secret not in text, secret
    assert not re.search(r"[0-9a-f]{32}", text)
    assert str(finished) not in text


def test_markup_of_others_arrives_as_text_under_a_strict_policy(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))
    assert MARKUP[:40] in found["/api/about"].json()["samples"][0]["completion"]
    for response in found.values():
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
def test_no_path_leads_to_another_file(finished: Path, serving: Serving, path: str) -> None:
    host, port = serving(finished).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:  # httpx would tidy the path
        plain.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: plain.recv(65536), b""))
    assert answer.split()[1] in (b"404", b"400", b"403")


@pytest.mark.parametrize("path", ["/api/timeline?last=nan", "/api/timeline?to=x", "/api/timeline?to=1e999"])
def test_questions_that_make_no_sense_are_refused(finished: Path, serving: Serving, path: str) -> None:
    response = httpx.get(serving(finished) + path)
    assert response.status_code == 400 and response.json()["error"]


def test_other_methods_and_other_names_are_refused(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    assert httpx.post(f"{url}/api/overview").status_code == 405
    assert httpx.get(f"{url}/api/overview", headers={"Host": "evil.example"}).status_code == 421


async def asked_by_many(url: str, many: int) -> list[int]:
    async def page(session: aiohttp.ClientSession) -> int:
        async with session.get(f"{url}/api/overview") as answer:
            return answer.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(page(session) for _ in range(many)))


def test_many_pages_share_one_look_and_none_is_turned_away(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, looks, own = serving(finished), [0], FolderRun.look

    def look(run: FolderRun) -> Status:
        looks[0] += 1
        return own(run)

    monkeypatch.setattr(FolderRun, "look", look)
    many = 2 * server.MAX_WAITING + 20
    assert asyncio.run(asked_by_many(url, many)) == [200] * many
    assert looks == [1]


@pytest.mark.parametrize(("share", "answers"), [(1e9, 2), (1e-9, 1)])
def test_an_answer_that_costs_much_is_given_again_for_longer(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch, share: float, answers: int
) -> None:
    made = []
    monkeypatch.setattr(server, "FRESH_S", 0.0)
    monkeypatch.setattr(server, "SHARE", share)
    monkeypatch.setattr(server, "flow", lambda work: made.append(1) or {})
    url = serving(finished)
    assert [httpx.get(f"{url}/api/flow").status_code for _ in range(2)] == [200, 200]
    assert len(made) == answers


def test_a_page_that_has_an_answer_gets_no_second_copy(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    first = httpx.get(f"{url}/api/curves")
    again = httpx.get(f"{url}/api/curves", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_new_step_is_seen_and_a_lost_run_keeps_what_it_told(
    finished: Path, tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FRESH_S", 0.0)
    monkeypatch.setattr(server, "LOOK_S", 0.0)
    monkeypatch.setattr(server, "SHARE", 1e9)
    folder = shutil.copytree(finished, tmp_path / "run")
    url = serving(folder)
    before = httpx.get(f"{url}/api/overview").json()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3.0, "time_s": 1.0, "reward/mean": 0.5}) + "\n")
    after = httpx.get(f"{url}/api/overview").json()
    assert (before["seen"], after["seen"]) == ("3.1", "4.1") and after["overview"]["trained"] == 4
    assert httpx.get(f"{url}/api/curves").json()["curves"]["x"] == [1, 2, 3, 4]
    (folder / "state.json").write_text("{}")
    assert httpx.get(f"{url}/api/overview").json()["overview"]["trained"] == 4


def test_nothing_in_the_folder_changes(finished: Path, serving: Serving) -> None:
    def state() -> dict[str, bytes]:
        paths = (path for path in finished.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
        return {str(path): path.read_bytes() for path in paths}

    url, before = serving(finished), state()
    everything(url)
    assert state() == before
