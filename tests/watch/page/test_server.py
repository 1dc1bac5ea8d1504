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

from shoal.store.folder import Folder
from shoal.store.rollouts import read_submission, write_submission
from shoal.watch.page.feed import MOST_WAITING

from ...cli.audit.recorded import MALLORY
from ...turns import misfit
from .conftest import MARKUP, Serving, rewrite

ASKED = [
    "/api/open",
    "/api/flow",
    "/api/nodes",
    "/api/timeline?last=100000",
    "/api/validation",
    "/api/about",
    "/api/groups",
    "/api/groups?verdict=rejected",
    "/api/submissions/1",
    "/api/submissions/1/groups/0",
]


def everything(url: str) -> dict[str, httpx.Response]:
    with httpx.Client(base_url=url, timeout=30) as client:
        return {path: client.get(path) for path in ASKED}


def events(url: str, headers: dict[str, str], *, lines: int) -> list[str]:
    """The first non-empty lines of the stream."""
    found: list[str] = []
    with httpx.stream("GET", f"{url}/api/events", headers=headers, timeout=30) as stream:
        for line in stream.iter_lines():
            found += [line] if line else []
            if len(found) >= lines:
                return found
    return found


def test_every_question_is_answered(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))
    assert {path: response.status_code for path, response in found.items()} == dict.fromkeys(ASKED, 200)
    opened = found["/api/open"].json()
    assert opened["overview"]["trained"] == 3 and opened["curves"]["x"] == [1, 2, 3]
    answers = {one["question"]: one["answer"] for one in opened["overview"]["answers"]}
    assert answers["Is anyone cheating?"] == "Caught"
    assert opened["flow"]["verdicts"].keys() == {"", "bounds", "proof"}


def test_a_rejection_is_told_in_words(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))["/api/validation"].json()["rejected"]
    by_reason = {row["reason"]: row for row in found}
    assert "another model" in by_reason["proof"]["words"] and by_reason["proof"]["hard"]
    assert not by_reason["bounds"]["hard"]


def test_a_group_is_shown_from_its_accepted_file(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))["/api/submissions/1/groups/0"].json()
    rewards = [one["reward"] for one in found["completions"]]
    assert not found["claimed"] and len(rewards) == 2
    assert found["mean"] == pytest.approx(sum(rewards) / 2)
    assert all(len(one["tokens"]) == one["length"] for one in found["completions"])


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
    opened = httpx.get(f"{url}/api/open").json()
    assert [other["name"] for other in opened["others"]] == [opened["overview"]["name"]] * 2
    other = opened["others"][0]
    assert other["curves"]["values"] == {"reward": opened["curves"]["values"]["reward"]}
    assert other["evaluations"] == opened["evaluations"]


def test_tokens_carry_the_margins_that_their_validator_recorded(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    found = httpx.get(f"{url}/api/submissions/1/groups/0").json()
    margins = [[margin for _, _, margin in one["tokens"]] for one in found["completions"]]
    assert found["margins"] and found["farthest"] is None
    assert margins[1][0] == 0.7 and sum(map(sum, margins)) == 0.7, "rollout 1, position 0"
    assert not httpx.get(f"{url}/api/submissions/2/groups/0").json()["margins"], "this one's verdict says nothing"


def test_groups_are_filtered_and_paged(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    every = httpx.get(f"{url}/api/groups").json()["rows"]
    alice = httpx.get(f"{url}/api/groups?worker=alice").json()["rows"]
    assert {row["worker"] for row in alice} == {"alice"} and len(alice) < len(every)
    good = httpx.get(f"{url}/api/groups?reward_min=0.4").json()["rows"]
    assert good and all(row["reward"] >= 0.4 for row in good)
    seventh = every[6]
    older = httpx.get(f"{url}/api/groups?before={seventh['submission']}.{seventh['group'] or 0}").json()["rows"]
    assert older == every[7:]


def test_public_answers_hold_no_key_address_or_invite(finished: Path, serving: Serving) -> None:
    database = sqlite3.connect(f"file:{finished / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    nodes = database.execute("SELECT key, invite FROM nodes").fetchall()
    founder = json.loads(database.execute("SELECT body FROM ledger WHERE kind = 'started'").fetchone()[0])["key"]
    nonces = [row[0] for row in database.execute("SELECT nonce FROM submissions")]
    found = everything(serving(finished, public=True, hosts=()))
    text = "".join(response.text for response in found.values())
    for secret in [*nonces, *(word for node in nodes for word in (node[0][:16], node[1])), founder[:16], "10.1.2.3"]:
        assert secret not in text, secret
    assert not re.search(r"[0-9a-f]{32}", text)
    assert str(finished) not in text


def test_the_operator_sees_addresses_and_still_no_key(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))
    assert "10.1.2.3:99" in found["/api/nodes"].text
    assert not re.search(r"[0-9a-f]{32}", "".join(response.text for response in found.values()))


def test_markup_of_others_arrives_as_text_under_a_strict_policy(finished: Path, serving: Serving) -> None:
    found = everything(serving(finished))
    assert MARKUP[:40] in found["/api/groups"].json()["rows"][0]["completion"]
    for response in found.values():
        assert response.headers["Content-Type"].startswith("application/json")
        assert "script-src 'self'" in response.headers["Content-Security-Policy"]
        assert "unsafe-inline" not in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_a_rejected_file_whose_turns_do_not_fit_is_not_expanded(
    finished: Path, tmp_path: Path, serving: Serving
) -> None:
    """A file of 2 kB named a turn of 2^26 tokens, and the page made a list of as many positions."""
    folder = shutil.copytree(finished, tmp_path / "run")
    store = Folder(folder / "coordinator" / "store")
    lines = [json.loads(line) for line in (folder / "work.jsonl").read_text().splitlines()]
    [line] = [line for line in lines if line.get("reason") == "proof"]
    seq = line["submission"]
    honest = read_submission(store.get("submissions", line["file"]), max_rows=64, max_tokens=64)
    rows = [misfit(row, [1 << 22, 1]) for row in honest.rows]
    hostile = store.put("submissions", write_submission(honest.header, rows, MALLORY))
    rewrite(folder / "work.jsonl", lambda one: one | {"file": hostile} if one.get("submission") == seq else one)
    found = httpx.get(f"{serving(folder)}/api/submissions/{seq}/groups/0", timeout=60)
    assert found.status_code == 404 and "do not fit 3 tokens" in found.text


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


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/submissions/999", 404),
        ("/api/submissions/-1", 400),
        ("/api/submissions/x", 400),
        ("/api/submissions/1/groups/77", 404),
        ("/api/groups?verdict=none", 400),
        ("/api/groups?reward_min=nan", 400),
        ("/api/groups?task=1e9", 400),
        ("/api/groups?worker=%3Cscript%3E", 400),
        ("/api/timeline?from=5&to=4", 400),
    ],
)
def test_questions_that_make_no_sense_are_refused(finished: Path, serving: Serving, path: str, status: int) -> None:
    response = httpx.get(serving(finished) + path)
    assert response.status_code == status and response.json()["error"]


def test_other_methods_and_other_names_are_refused(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    assert httpx.post(f"{url}/api/open").status_code == 405
    assert httpx.get(f"{url}/api/open", headers={"Host": "evil.example"}).status_code == 421


def test_a_page_that_comes_back_gets_what_it_missed(finished: Path, serving: Serving) -> None:
    url = serving(finished)
    found = events(url, {"Last-Event-ID": "1.0"}, lines=7)
    ids = [line for line in found if line.startswith("id: ")]
    assert ids[:2] == ["id: 2.0", "id: 3.0"]
    assert [json.loads(line[6:])["x"] for line in found if line.startswith("data: ")][:2] == [2, 3]


def test_more_pages_than_may_wait_open_at_once_and_none_is_turned_away(finished: Path, serving: Serving) -> None:
    url, many = serving(finished), 2 * MOST_WAITING + 20

    async def page(session: aiohttp.ClientSession) -> tuple[int, bytes]:
        async with session.get(f"{url}/api/open") as opened:
            status = opened.status
        async with session.get(f"{url}/api/events?seen=3.0") as stream:
            return status, await stream.content.readuntil(b"event: overview")

    async def main() -> list[tuple[int, bytes]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(page(session) for _ in range(many)))

    found = asyncio.run(main())
    assert [status for status, _ in found] == [200] * many
    assert all(begun.startswith(b"retry: 2000") for _, begun in found)


@pytest.mark.parametrize("seen", ["", "junk", "99.0", "-1.0"])
def test_a_page_of_another_run_opens_anew(finished: Path, serving: Serving, seen: str) -> None:
    found = events(serving(finished), {"Last-Event-ID": seen}, lines=4)
    assert "event: reopen" in found


def test_nothing_in_the_folder_changes(finished: Path, serving: Serving) -> None:
    def state() -> dict[str, bytes]:
        paths = (path for path in finished.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
        return {str(path): path.read_bytes() for path in paths}

    url, before = serving(finished), state()
    everything(url)
    assert state() == before
