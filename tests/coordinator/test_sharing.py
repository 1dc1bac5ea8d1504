"""Two pools at one listener: each is served as if alone, what is signed for one is worth nothing at the other, and neither
takes the other with it. No models."""

import asyncio
import errno
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer

from shoal.cli.main import DONE, FAILED, main
from shoal.config import Config, load
from shoal.coordinator.http import serving
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.http.serving import OPEN_INVITE
from shoal.coordinator.http.sharing import BY_FAULT, BY_OPERATOR, Place, SharingError, serve_shared, shared_application
from shoal.coordinator.operating import (
    CONFIG,
    Invited,
    PoolFolderError,
    close_pool,
    found_pool,
    invite_from,
    open_pool,
    reopen_pool,
)
from shoal.protocol import pace
from shoal.protocol.address import Address
from shoal.protocol.calling import NodeError, RefusedError
from shoal.protocol.discovery import DiscoveryError, FoundRuns, find_runs
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, InviteError, make_invite, read_invite
from shoal.protocol.messages import (
    VERSION,
    Capability,
    ClosedRun,
    Heartbeat,
    HeartbeatAnswer,
    Ok,
    Policy,
    Role,
    RunOffer,
)
from shoal.protocol.node import Node
from shoal.protocol.pace import Strangers
from shoal.protocol.server import Front
from shoal.protocol.signing import SignedAuth, sign_request
from shoal.shardcast.guard import BURST_S

from ..servers import free_port
from .support import config, payload

PATIENCE_S = 60.0
ANYONE = httpx.Client(timeout=PATIENCE_S, verify=False)
MEMBERS = Invited(workers=2, relays=0, validators=0, evaluator=False)
MACHINE = Capability(memory_bytes=8 << 30, device="cpu", engine="torch")


@dataclass
class Site:
    """A listener with its runs, and what its operator and nodes have of them."""

    url: str
    folder: Path

    def invite(self, place: str, name: str = "worker-0") -> Invite:
        return read_invite(str(self.folder / place / "invites" / f"{name}.invite"))

    def join(self, place: str, folder: Path, name: str = "worker-0") -> Node:
        return Node.join(self.invite(place, name), folder, patience_s=PATIENCE_S, capability=MACHINE)

    def find(self, key: str = "", client: httpx.Client | None = None) -> FoundRuns:
        with client or nullcontext(ANYONE) as client:
            return find_runs(self.url, client, key)


def found(folder: Path, url: str, place: str, **settings: Any) -> None:
    """All runs have one name: their keys tell them apart."""
    found_pool(folder / place, config(**settings), "same", f"{url}/runs/{place}", MEMBERS, days=1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Runs at /runs/first, /runs/words and /runs/large, which wants more machine; and two that cannot be served."""
    folder, url = tmp_path_factory.mktemp("runs"), f"http://127.0.0.1:{(port := free_port())}"
    for place in ("first", "words", "damaged"):
        found(folder, url, place)
    found(folder, url, "large", requirements={"memory_gib": 1_000, "places": 1})
    (folder / "damaged" / "pool.sqlite").write_bytes(b"no database" * 1000)
    (folder / "second").mkdir()
    for name in (CONFIG, "identity.pem"):
        (folder / "second" / name).write_bytes((folder / "first" / name).read_bytes())
    Address(url=f"{url}/runs/second", run=Address.read(folder / "first").run).write(folder / "second")
    stop, ended = threading.Event(), list[BaseException]()

    def serve() -> None:
        try:
            serve_shared(folder, open_pool, stop, host="127.0.0.1", port=port, connections=64)
        except SharingError as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    wait_for(lambda: answers(url))
    yield Site(url, folder)
    stop.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert [str(error).rpartition(": ")[2] for error in ended] == ["damaged, second"]
    assert last_words(folder / "words") == "sealed", "a stop seals every run"


def answers(url: str) -> bool:
    try:
        return ANYONE.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


# --- each run as if alone --------------------------------------------------------------------------------------------


def test_runs_of_one_name_are_two_runs_and_each_has_its_members_and_tasks(site: Site, tmp_path: Path) -> None:
    runs = {site.invite(place).run for place in ("first", "words")}
    assert len(runs) == 2 and all(run.startswith("same-") for run in runs)
    tasks = []
    for place in ("first", "words"):
        origin = site.join(place, tmp_path / f"{place}-origin", "origin")
        origin.post("/v1/policies", Policy(version=0, digest="d" * 64, size_bytes=1), Ok)
        worker = site.join(place, tmp_path / f"{place}-worker")
        assert worker.descriptor().run == site.invite(place).run
        answer = worker.post("/v1/heartbeat", Heartbeat(policy_version=0, wants_task=True), HeartbeatAnswer)
        assert answer.assignment is not None, answer.waiting_for
        tasks.append(answer.assignment)
    assert tasks[0].nonce != tasks[1].nonce
    status = ANYONE.get(f"{site.url}/runs/first/v1/status").json()
    assert sorted(node["name"] for node in status["nodes"]) == ["origin", "worker-0"]


def test_what_is_signed_for_one_run_is_refused_by_the_other(site: Site, tmp_path: Path) -> None:
    """Every way to carry it over: as it is, with the other's path signed, and with the other's audience signed too."""
    node = site.join("first", tmp_path / "w", "worker-1")

    def sent(place: str, signed_path: str, audience: str) -> tuple[int, str]:
        headers = sign_request(
            node.identity,
            method="POST",
            path=signed_path,
            query="",
            body=b"{}",
            audience=site.invite(audience).run,
            created_s=int(time.time()),
            nonce=Identity.generate().public[:32],
        )
        answer = ANYONE.post(f"{site.url}/runs/{place}/v1/heartbeat", content=b"{}", headers=headers)
        return answer.status_code, answer.json().get("error", "")

    first, words = "/runs/first/v1/heartbeat", "/runs/words/v1/heartbeat"
    assert sent("first", first, "first") == (200, "")
    for carried, status, why in (
        (sent("words", first, "first"), 401, "wrong audience"),
        (sent("words", words, "first"), 401, "wrong audience"),
        (sent("words", first, "words"), 401, "bad signature"),
        (sent("words", words, "words"), 403, "only learner or"),
    ):
        assert carried[0] == status and why in carried[1]


def test_an_invite_to_one_run_is_none_to_the_other(site: Site, tmp_path: Path) -> None:
    first, words = site.invite("first"), site.invite("words")
    forged = words.model_copy(update={"signed": first.signed})
    with pytest.raises(RefusedError, match="not signed by this coordinator"):
        Node.join(forged, tmp_path / "n", patience_s=PATIENCE_S)
    with pytest.raises(NodeError):
        Node.of(words.model_copy(update={"url": first.url}), Identity.generate(), patience_s=0.01).descriptor()


def signed_routes(folder: Path) -> list[tuple[str, str]]:
    """Method and path of every route that needs a signature."""
    open_paths = {"/healthz", "/metrics", "/v1/run", "/v1/status", "/v1/history"}
    routes = Coordinator(config(), "r", Identity.generate(), folder).routes().router.routes()
    found = [(route.method, route.resource.canonical) for route in routes if route.resource]
    return [(method, path) for method, path in found if path not in open_paths and method != "HEAD"]


def test_no_member_of_one_run_may_ask_the_other_anything(site: Site, tmp_path: Path) -> None:
    """Read, submit, beat, judge, publish, train: every signed route refuses the other run's members and writes nothing."""
    roles: tuple[Role, ...] = ("worker", "validator")
    members = []
    for role in roles:
        invite = invite_from(site.folder / "first", role, f"other-{role}", None, 1)
        members.append(Node.join(invite, tmp_path / role, patience_s=PATIENCE_S, capability=MACHINE).identity)
    audience, entries = site.invite("words").run, count_entries(site.folder / "words")
    routes = signed_routes(tmp_path / "r")
    assert len(routes) >= 18 and {("POST", "/v1/verdicts"), ("PUT", "/v1/submissions/{id}")} <= set(routes)
    for identity in members:
        auth = SignedAuth(identity, audience)
        with httpx.Client(base_url=f"{site.url}/runs/words", auth=auth, timeout=PATIENCE_S, verify=False) as client:
            statuses = {
                (method, path): client.request(method, path.replace("{", "").replace("}", ""))
                for method, path in routes
            }
        others = {route: answer.status_code for route, answer in statuses.items() if answer.status_code != 403}
        assert others == {("POST", "/v1/register"): 400}, "there a stranger shows an invite, and here none came"
    assert count_entries(site.folder / "words") == entries


def count_entries(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "pool.sqlite")) as connection:
        return int(connection.execute("SELECT count(*) FROM ledger").fetchone()[0])


def test_an_operator_books_no_stakes_in_another_run(site: Site) -> None:
    operator = Identity.load(site.folder / "first" / "identity.pem")
    for place, status in (("words", 403), ("first", 200)):
        assert book(site, place, operator, "c" * 64).status_code == status


def book(site: Site, place: str, operator: Identity, key: str) -> httpx.Response:
    """A stake of 1, as `shoal stake book` sends it."""
    body = {"kind": "stake", "key": key, "amount": 1}
    auth = SignedAuth(operator, site.invite(place).run)
    return ANYONE.post(f"{site.url}/runs/{place}/v1/bookings", json=body, auth=auth)


# --- discovery -------------------------------------------------------------------------------------------------------


def test_the_list_says_what_each_run_requires_and_who_may_join(site: Site) -> None:
    key = Identity.load(site.folder / "identity.pem").public
    offers = {offer.place: offer for offer in site.find(key).runs.runs}
    assert set(offers) == {"first", "words", "large"}
    assert offers["first"].run == site.invite("first").run and offers["first"].url == f"{site.url}/runs/first"
    assert (offers["first"].steps, offers["first"].places_free) == (6, None)
    assert (offers["large"].requirements["memory_gib"], offers["large"].places_free) == (1_000, 1)
    assert {one.place: one.why for one in site.find().runs.closed} == {"second": BY_FAULT, "damaged": BY_FAULT}


def test_an_open_run_is_joined_from_the_list_by_name(site: Site) -> None:
    with pytest.raises(DiscoveryError, match="only workers with an invite"):
        site.find().invite("large")
    published = site.folder / "large" / OPEN_INVITE
    invite_from(site.folder / "large", "worker", "guest", None, 1, open=True).save(published)
    wait_for(lambda: any(offer.invite for offer in site.find().runs.runs))
    taken = site.find().invite("large")
    assert taken.url == f"{site.url}/runs/large" and taken.run == site.invite("large").run
    for name in ("damaged", "nowhere"):
        with pytest.raises(DiscoveryError, match="closed|not listed"):
            site.find().invite(name)
    published.unlink()


def test_a_list_that_somebody_changed_or_kept_is_not_believed(site: Site) -> None:
    kept: list[httpx.Response] = []

    def changing(change: Any) -> httpx.Client:
        def answer(request: httpx.Request) -> httpx.Response:
            real = ANYONE.get(str(request.url), headers=request.headers)
            kept.append(real)
            return httpx.Response(real.status_code, headers=real.headers, content=change(real.content))

        return httpx.Client(transport=httpx.MockTransport(answer))

    assert site.find(client=changing(lambda body: body)).runs.runs
    for before, after in ((b"first", b"worst"), (b'\\"step\\":0', b'\\"step\\":1')):
        assert before in kept[0].content
        with pytest.raises(DiscoveryError, match="cannot be trusted"):
            site.find(client=changing(lambda body, pair=(before, after): body.replace(*pair)))
    old = httpx.MockTransport(lambda request: httpx.Response(200, headers=kept[0].headers, content=kept[0].content))
    with pytest.raises(DiscoveryError, match="not over this answer to this request"):
        site.find(client=httpx.Client(transport=old))
    with pytest.raises(DiscoveryError, match="cannot be trusted"):
        site.find(Identity.generate().public)


def test_an_invite_in_the_list_that_is_not_the_runs_own_is_refused(site: Site) -> None:
    """The listener's owner signs the list; an invite needs the run's key."""
    offer, other = site.find().runs.runs[0], Identity.generate()
    foreign = make_invite(other, url=offer.url, run=offer.run, role="worker", name="g", expires_s=2**40, open=True)
    own = invite_from(site.folder / offer.place, "worker", "only", None, 1)
    for made, key, words in (
        (foreign, offer.key, "is of another run"),
        (foreign, other.public, "did not found the run"),
        (foreign.model_copy(update={"key": offer.key}), offer.key, "not signed by this coordinator"),
        (own, offer.key, "for one node only"),
    ):
        listed = site.find()
        changed = offer.model_copy(update={"invite": made.encode(), "key": key})
        runs = listed.runs.model_copy(update={"runs": [changed]})
        with pytest.raises((DiscoveryError, InviteError), match=words):
            FoundRuns(listed.url, listed.key, runs).invite(offer.place)


def test_discover_at_a_shell(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command against the real listener: the list, an invite that works, and another key than the listener's."""
    key = Identity.load(site.folder / "identity.pem").public
    assert main(["discover", site.url]) == DONE
    printed = capsys.readouterr().out
    assert printed.startswith(f"{site.url}, key {key}\n") and "lacks 1000 GiB" in printed
    assert "damaged: closed, its coordinator failed" in printed and "\nwords: " in printed
    published, taken = site.folder / "words" / OPEN_INVITE, tmp_path / "words.invite"
    invite_from(site.folder / "words", "worker", "guest", None, 1, open=True).save(published)
    wait_for(lambda: any(offer.invite for offer in site.find().runs.runs))
    assert main(["discover", f"{site.url}/runs/words", "--key", key, "--join", "words", "--out", str(taken)]) == DONE
    stranger = Identity.load_or_create(tmp_path / "stranger" / "identity.pem")

    def join() -> Node:
        return Node.join(read_invite(str(taken)), tmp_path / "stranger", patience_s=PATIENCE_S, capability=MACHINE)

    with pytest.raises(RefusedError, match="an open invite needs 1"):
        join()
    assert (
        book(site, "words", Identity.load(site.folder / "words" / "identity.pem"), stranger.public).status_code == 200
    )
    assert join().name == f"guest-{stranger.public[:16]}"
    published.unlink()
    capsys.readouterr()
    assert main(["discover", site.url, "--key", "0" * 64]) == FAILED
    assert "cannot be trusted" in capsys.readouterr().err


def test_a_run_is_full_once_its_places_are_taken(site: Site, tmp_path: Path) -> None:
    strong = MACHINE.model_copy(update={"memory_bytes": 1 << 50})
    first = Node.join(site.invite("large"), tmp_path / "a", patience_s=PATIENCE_S, capability=strong)
    with pytest.raises(RefusedError, match="full: it has places for 1 workers"):
        Node.join(site.invite("large", "worker-1"), tmp_path / "b", patience_s=PATIENCE_S, capability=strong)
    Node.join(site.invite("large"), tmp_path / "a", patience_s=PATIENCE_S, capability=strong)  # the same one comes back
    first.post("/v1/drain", None, Ok)


# --- one closes or fails, the others go on ---------------------------------------------------------------------------


def test_a_run_that_cannot_be_served_is_away_and_the_others_are_served(site: Site) -> None:
    for place in ("damaged", "second"):
        assert ANYONE.get(f"{site.url}/runs/{place}/v1/run").status_code == 503
    assert ANYONE.get(f"{site.url}/runs/words/v1/run").status_code == 200
    assert ANYONE.get(f"{site.url}/runs/nowhere/v1/run").status_code == 404
    assert ANYONE.get(f"{site.url}/v1/run").status_code == 404


def test_one_run_is_closed_and_sealed_while_the_other_goes_on(site: Site, tmp_path: Path) -> None:
    node = site.join("words", tmp_path / "w", "worker-1")
    close_pool(site.folder / "first")
    wait_for(lambda: ANYONE.get(f"{site.url}/runs/first/v1/run").status_code == 503)
    node.post("/v1/drain", None, Ok)
    assert {one.place: one.why for one in site.find().runs.closed}["first"] == BY_OPERATOR
    with pytest.raises(DiscoveryError, match="its operator closed it"):
        site.find().invite("first")
    wait_for(lambda: last_words(site.folder / "first") == "sealed")
    assert last_words(site.folder / "words") != "sealed"
    reopen_pool(site.folder / "first")
    with pytest.raises(PoolFolderError, match="is not closed"):
        reopen_pool(site.folder / "first")


def last_words(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "pool.sqlite")) as connection:
        return str(connection.execute("SELECT kind FROM ledger ORDER BY seq DESC LIMIT 1").fetchone()[0])


def places(folder: Path, *names: str, front: Front | None = None) -> list[Place]:
    """Opened, without a listener."""
    for name in names:
        found(folder, "http://h:1", name)
    opened, taken, front = [Place(folder / name) for name in names], dict[str, str](), front or Front()
    for place in opened:
        place.open(lambda path: (Config.model_validate(load(path / CONFIG)), Address.read(path)), front, taken)
    return opened


@pytest.mark.parametrize(
    ("settings", "url", "words"),
    [
        ({}, "http://h:1/runs/elsewhere", "the two must agree"),
        ({"database": "postgresql://u@h/n"}, "http://h:1/runs/a", "start it alone, with `shoal coordinator --dir`"),
        ({"run": {"steps": 6, "tracker": "wandb"}}, "http://h:1/runs/a", "wandb knows one run in a process"),
    ],
)
def test_a_run_that_cannot_share_a_listener_is_not_served(
    settings: dict[str, Any], url: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path / "a")
    place.open(lambda folder: (config(**settings), Address(url=url, run="r")), Front(), {})
    assert place.run is None and place.failed and words in caplog.text


def test_requests_under_way_end_before_their_run_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [place] = places(tmp_path, "a")
    order: list[str] = []
    assert place.run is not None
    close = place.run.close
    monkeypatch.setattr(place.run, "close", lambda: (order.append("sealed"), close()))

    async def slow(request: web.Request) -> web.Response:
        close_pool(place.folder)
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            order.append("request ended")
            raise
        return web.Response()

    async def both() -> None:
        application = place.application()
        application.router.add_get("/slow", slow)
        async with TestClient(TestServer(application)) as client:
            asked = asyncio.create_task(client.get("/slow"))
            await place.live(threading.Event())
            assert (await client.get("/v1/run")).status == 503
            asked.cancel()

    asyncio.run(both())
    assert order == ["request ended", "sealed"]


def test_a_listener_whose_runs_are_all_closed_is_not_healthy(tmp_path: Path) -> None:
    front, opened = Front(), [Place(tmp_path / "a")]
    (tmp_path / "a").mkdir()
    Address(url="http://h:1/runs/a", run="r").write(tmp_path / "a")
    close_pool(tmp_path / "a")
    opened[0].open(open_pool, front, {})

    async def ask() -> tuple[int, dict[str, Any]]:
        async with TestClient(TestServer(shared_application(opened, front, Identity.generate()))) as client:
            answer = await client.get("/healthz")
            return answer.status, await answer.json()

    assert asyncio.run(ask()) == (503, {"runs": [], "protocol": VERSION})


def test_lines_of_the_log_begin_with_the_run_that_they_are_about(
    site: Site, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level("INFO"):
        Node.join(invite_from(site.folder / "words", "worker", "logged", None, 1), tmp_path / "n", capability=MACHINE)
    assert any(line.startswith("words: logged joined as worker") for line in caplog.messages)


def test_only_a_published_invite_that_is_open_and_valid_is_listed(tmp_path: Path) -> None:
    [place] = places(tmp_path, "a")
    path = place.folder / OPEN_INVITE
    for days, listed in ((1, True), (-1, False)):
        invite = invite_from(place.folder, "worker", "guest", None, days, open=True)
        invite.save(path)
        found = place.listed()
        assert isinstance(found, RunOffer) and (found.invite == invite.encode()) is listed
        path.unlink()
    invite_from(place.folder, "worker", "one", None, 1).save(path)
    assert place.listed() == ClosedRun(place="a", why=BY_FAULT), "an invite for one node is not for the public"
    path.unlink()
    place.why = BY_OPERATOR
    assert place.listed() == ClosedRun(place="a", why=BY_OPERATOR), "also while its last requests end"
    place.close()


def test_a_full_disk_ends_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RECORD_S", 0.01)
    full, sound = places(tmp_path, "full", "sound")
    stop = threading.Event()

    def take(news: object) -> bool:
        raise OSError(errno.ENOSPC, "no space left on device")

    assert full.run is not None
    monkeypatch.setattr(full.run.record, "take", take)

    async def both() -> None:
        living = [asyncio.create_task(place.live(stop)) for place in (full, sound)]
        await asyncio.wait(living, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        assert full.why == BY_FAULT and full.failed and not living[1].done() and not sound.why
        stop.set()
        await asyncio.gather(*living)

    asyncio.run(both())
    sound.close()
    assert last_words(tmp_path / "sound") == "sealed"


def test_strangers_have_one_allowance_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every run at a listener would be another allowance."""
    monkeypatch.setattr(pace, "OPEN_RATE", 1.0)
    front = Front(Strangers(lambda: 0.0))
    opened = places(tmp_path, "a", "b", front=front)

    async def ask() -> list[int]:
        application = shared_application(opened, front, Identity.generate())
        async with TestClient(TestServer(application)) as client:
            paths = [f"/runs/{'ab'[number % 2]}/healthz" for number in range(int(BURST_S) + 1)]
            return [(await client.get(path)).status for path in (*paths, "/runs/a/healthz", "/runs/b/healthz", "/runs")]

    *allowed, a, b, listed = asyncio.run(ask())
    assert set(allowed) == {200} and (a, b, listed) == (429, 429, 429)
    for place in opened:
        place.close()


def test_a_flood_of_strangers_at_one_run_does_not_delay_the_members_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the member's own address, the worst case: open routes and refusals are slowed, the member is not."""
    for name, value in {"OPEN_RATE": 1.0, "REFUSED_RATE": 1.0, "LONGEST_HOLD_S": 600.0}.items():
        monkeypatch.setattr(pace, name, value)
    front = Front(Strangers(lambda: 0.0))
    opened = places(tmp_path, "a", "b", front=front)
    member, calm = Identity.generate(), opened[1].run
    assert calm is not None
    calm.coordinator.pool.members.register(member.public, payload("w", expires_s=2**40), None)
    signed = {
        "method": "POST",
        "path": "/runs/b/v1/heartbeat",
        "query": "",
        "body": b"{}",
        "audience": calm.coordinator.run,
    }

    async def attack() -> None:
        application = shared_application(opened, front, Identity.generate())
        server = TestServer(application)
        async with TestClient(server) as client, ClientSession() as calm_client:
            reads = [await client.get("/runs/a/healthz") for _ in range(int(BURST_S) + 2)]
            assert reads[-1].status == 429
            flood = [asyncio.create_task(client.post("/runs/a/v1/heartbeat")) for _ in range(80)]
            while sum(task.done() for task in flood) < BURST_S / 2:
                await asyncio.sleep(0.01)
            headers = sign_request(member, **signed, created_s=int(time.time()), nonce="0" * 32)
            answer = await calm_client.post(server.make_url("/runs/b/v1/heartbeat"), data=b"{}", headers=headers)
            assert answer.status == 200, await answer.text()
            assert not all(task.done() for task in flood), "they are held back for seconds, the member is not"
            for task in flood:
                task.cancel()

    asyncio.run(attack())
    for place in opened:
        place.close()


def test_a_refusal_by_a_run_counts_once_for_its_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener's front stands before all of its runs; a run with a front of its own would hold each refusal twice."""
    front, held = Front(), list[str]()
    monkeypatch.setattr(front.strangers, "refusal_hold_s", lambda address: held.append(address) or 0.0)
    opened = places(tmp_path, "a", front=front)

    async def ask() -> int:
        async with TestClient(TestServer(shared_application(opened, front, Identity.generate()))) as client:
            return (await client.post("/runs/a/v1/heartbeat")).status

    assert asyncio.run(ask()) == 401 and len(held) == 1
    opened[0].close()
