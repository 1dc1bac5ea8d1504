"""The coordinator's defences against strangers and greedy members, and the signatures of its answers."""

import asyncio
import contextlib
import json
import secrets
import socket
import sqlite3
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.config import parse
from shoal.coordinator import credit
from shoal.coordinator.database import PoolError
from shoal.coordinator.http.files import UPLOADS
from shoal.coordinator.http.reports import SHARE, CachedBody
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.members import RECORDS_PER_S
from shoal.protocol import pace
from shoal.protocol.identity import Identity
from shoal.protocol.invite import InviteError, make_invite
from shoal.protocol.messages import VERSION, Fingerprint, Finished, Heartbeat, Registration
from shoal.protocol.server import Request
from shoal.protocol.signing import SignedAuth, SignedHead, UnsignedAnswerError, check_answer

from ..support import ALICE, BOB, Harness
from .support import ANYONE, RUN, Site, refused, sending, served, upload, worker_with_task


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/status", 200), ("GET", "/nothing", 404), ("DELETE", "/v1/run", 405), ("POST", "/v1/heartbeat", 401)],
)
def test_only_a_members_connection_stays_open_after_its_answer(site: Site, method: str, path: str, status: int) -> None:
    """Otherwise thousands of idle connections could stay open, each for over a minute."""
    with sending(site, None, method, path) as connection:
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert int(received.split()[1]) == status
    answer = site.clients["worker"].post("/v1/heartbeat", json={})
    assert answer.status_code == 200 and answer.headers.get("connection", "keep-alive") == "keep-alive"


@pytest.mark.parametrize(
    ("role", "method", "path", "status"),
    [
        ("worker", "POST", "/v1/heartbeat", 200),
        ("worker", "POST", "/v1/claims", 403),
        ("validator", "GET", "/v1/submissions/x", 404),
        ("worker", "GET", "/v1/run", 200),
        ("worker", "GET", "/v2/run", 404),
        ("worker", "PATCH", "/v1/run", 405),
        ("stranger", "POST", "/v1/heartbeat", 403),
        ("learner", "GET", "/v1/tasks/" + "a" * 64, 404),
    ],
)
def test_every_answer_to_a_signed_request_is_signed(site: Site, role: str, method: str, path: str, status: int) -> None:
    client = site.clients.get(role) or site.client(Identity.generate())
    answer = client.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == status, answer.text
    check_signature(site, answer)
    with pytest.raises(UnsignedAnswerError, match="does not cover this answer"):
        check_signature(site, answer, status=status + 1)
    with pytest.raises(UnsignedAnswerError, match="body"):
        check_signature(site, answer, body_sha256=sha256(answer.content + b" ").digest())


def test_task_data_is_signed_too(site: Site) -> None:
    data = b"a chunk of tasks"
    name = sha256(data).hexdigest()
    (site.folder / "tasks").mkdir(exist_ok=True)
    (site.folder / "tasks" / name).write_bytes(data)
    answer = site.clients["validator"].get(f"/v1/tasks/{name}")
    assert answer.content == data
    check_signature(site, answer)


def test_an_answer_to_another_request_with_the_same_nonce_is_rejected(site: Site) -> None:
    """A member that sees a victim's request sends its own with the same nonce, and forwards the answer to the victim."""
    nonce = secrets.token_hex(16)
    signed = [
        SignedAuth(site.identities[name], RUN, new_nonce=lambda: nonce, clock=lambda: float(int(time.time())))
        for name in ("worker", "relay")
    ]
    victim, attacker = (
        next(auth.auth_flow(httpx.Request("POST", f"{site.url}/v1/heartbeat", content=b"{}"))) for auth in signed
    )
    with httpx.Client(timeout=60, verify=False) as client:
        answer = client.send(attacker)
    assert answer.status_code == 200
    check_signature(site, answer)
    with pytest.raises(UnsignedAnswerError):
        check_signature_for(site, victim, answer)


@pytest.mark.parametrize(
    ("path", "changed", "status"),
    [
        ("/healthz", {}, 200),
        ("/v1/submissions/y", {}, 401),
        ("/v1/submissions/x?y", {}, 401),
        ("/v1/nowhere", {}, 404),
        ("/v1/submissions/x", {"shoal-audience": "other"}, 401),
        ("/v1/submissions/x", {"content-digest": "none"}, 401),
        ("/v1/submissions/x", {"content-encoding": "gzip"}, 415),
        ("/v1/submissions/x", {"content": "a body"}, 401),
        ("/v1/submissions/x", {"content": "a longer body" * 1000}, 413),
    ],
)
def test_a_changed_request_gets_no_answer_that_its_signer_accepts(
    site: Site, path: str, changed: dict[str, str], status: int
) -> None:
    """Otherwise an attacker on the path could send a node's signature with another request and forward the answer."""
    auth = SignedAuth(site.identities["validator"], RUN)
    victim = next(auth.auth_flow(httpx.Request("GET", f"{site.url}/v1/submissions/x")))
    headers = {name: text for name, text in changed.items() if name != "content"}
    forged = httpx.Request(
        "GET", site.url + path, headers={**victim.headers, **headers}, content=changed.get("content", "").encode()
    )
    with httpx.Client(timeout=60, verify=False) as client:
        answer = client.send(forged)
    assert answer.status_code == status, answer.text
    with pytest.raises(UnsignedAnswerError):
        check_signature_for(site, victim, answer)


def check_signature(site: Site, answer: httpx.Response, **changed: Any) -> None:
    check_signature_for(site, answer.request, answer, **changed)


def check_signature_for(site: Site, request: httpx.Request, answer: httpx.Response, **changed: Any) -> None:
    claimed: dict[str, Any] = {"status": answer.status_code, "body_sha256": sha256(answer.content).digest()} | changed
    check_answer(site.identity.public, request, answer.headers, **claimed)


# --- allowances of bytes ---------------------------------------------------------------------------------------------


@pytest.fixture
def thrifty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A coordinator with small allowances of bytes."""
    monkeypatch.setattr(pace, "MEMBER_BYTES", 100)
    monkeypatch.setattr(pace, "OPEN_BYTES", 100)
    with served(tmp_path) as site:
        yield site


@pytest.mark.parametrize(("role", "path"), [("validator", "/v1/ledger/0"), ("worker", f"/v1/tasks/{'ab' * 32}")])
def test_a_members_reads_of_ledger_and_tasks_are_limited_in_bytes(thrifty: Site, role: str, path: str) -> None:
    (thrifty.folder / "tasks" / "public").mkdir(parents=True, exist_ok=True)
    (thrifty.folder / "tasks" / "public" / ("ab" * 32)).write_bytes(bytes(100_000))
    greedy, other = thrifty.register("greedy", role), thrifty.register("other", role)
    answers = [greedy.get(path) for _ in range(10)]
    assert answers[0].status_code == 200
    refused(answers[-1], 429, "of answers to this node")
    assert other.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/run", "/v1/status", "/v1/history", "/metrics", "/v1/offer"])
def test_strangers_reads_are_limited_in_bytes_but_members_at_the_same_address_are_served(
    thrifty: Site, path: str
) -> None:
    worker = thrifty.register("worker", "worker")
    with sqlite3.connect(thrifty.folder / "pool.sqlite") as database:
        database.execute(
            "INSERT INTO history (kind, key, body) VALUES ('step', '0', ?)", (f'{{"step": 0, "loss": 1{" " * 2_000}}}',)
        )
    answers = [ANYONE.get(thrifty.url + path) for _ in range(20)]
    assert answers[0].status_code == 200
    refused(answers[-1], 429, "of answers to 127.0.0.1")
    assert worker.post("/v1/heartbeat", json={}).status_code == 200


def test_slow_readers_hold_a_bounded_part_of_the_memory(tmp_path: Path) -> None:
    with served(tmp_path) as site, contextlib.ExitStack() as opened:
        with sqlite3.connect(tmp_path / "pool.sqlite") as database:
            body = json.dumps({"step": 0, "x" * (3 << 20): 1.0})
            database.execute("INSERT INTO history (kind, key, body) VALUES ('step', '0', ?)", (body,))
        host, port = site.url.removeprefix("http://").split(":")
        statuses, readers = [], list[socket.socket]()
        for _ in range(4):
            reader = opened.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(60)
            reader.connect((host, int(port)))
            reader.sendall(b"GET /v1/history?after=0 HTTP/1.1\r\nhost: c\r\n\r\n")
            statuses.append(int(reader.recv(100).split()[1]))
            readers.append(reader)
        assert statuses == [200, 429, 429, 429]
        assert site.register("beside", "worker").post("/v1/heartbeat", json={}).status_code == 200
        readers[0].close()
        while (answer := ANYONE.get(f"{site.url}/v1/history")).status_code == 429:
            time.sleep(0.05)
        assert len(answer.content) > 3 << 20


def test_a_client_that_disconnects_in_the_middle_of_its_body_logs_no_error(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with sending(site, "worker", "POST", "/v1/heartbeat", body=b"{}") as connection:
        connection.sendall(b"{")
        time.sleep(0.2)
    for _ in range(20):
        assert site.clients["worker"].post("/v1/heartbeat", json={}).status_code == 200
        time.sleep(0.02)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_node_that_sends_too_many_heartbeats_is_recorded_less_often(harness: Harness) -> None:
    """Each record syncs the disk, and every request waits for that."""
    members = harness.pool.members
    changed = harness.pool.db.connection.sqlite.total_changes
    for _ in range(400):
        harness.clock.now_s += 0.01
        members.heartbeat(ALICE, Heartbeat(policy_version=0))
    recorded = harness.pool.db.connection.sqlite.total_changes - changed
    assert RECORDS_PER_S * 10 <= recorded <= RECORDS_PER_S * 15 + 1
    members.heartbeat(BOB, Heartbeat(policy_version=0))
    assert harness.node(BOB).seen_s == harness.clock.now_s
    harness.clock.now_s += 1 / RECORDS_PER_S
    members.heartbeat(ALICE, Heartbeat(policy_version=1))
    assert harness.node(ALICE).version == 1, "a change must be recorded soon"


@pytest.mark.parametrize("changing", ["version", "fingerprint", "upload"])
def test_a_node_whose_heartbeats_all_differ_is_not_recorded_more_often(harness: Harness, changing: str) -> None:
    harness.publish(1)
    task, beats = harness.task(ALICE), []
    for number in (0, 1):
        beat = Heartbeat(policy_version=0, fingerprint=Fingerprint(version=0, value="a" * 64), working_on=[task.id])
        changes: dict[str, dict[str, Any]] = {
            "version": {"policy_version": number},
            "fingerprint": {"fingerprint": Fingerprint(version=0, value=f"{number}" * 64)},
            "upload": {"finished": Finished(submission=task.id, hash="9" * 64)} if number else {"wants_task": True},
        }
        beats.append(beat.model_copy(update=changes[changing]))
    changed = harness.pool.db.connection.sqlite.total_changes
    for number in range(400):
        harness.clock.now_s += 0.01
        harness.pool.members.heartbeat(ALICE, beats[number % 2])
    per_record = {"version": 1, "fingerprint": 4, "upload": 3}[changing]
    recorded = harness.pool.db.connection.sqlite.total_changes - changed
    assert recorded <= per_record * (RECORDS_PER_S * 15 + 1)


def test_a_worker_whose_upload_is_not_recorded_yet_does_not_get_the_same_task_again(harness: Harness) -> None:
    members, task = harness.pool.members, harness.task(ALICE)
    for _ in range(int(RECORDS_PER_S * pace.BURST_S) + 1):
        members.heartbeat(ALICE, Heartbeat(policy_version=0, working_on=[task.id]))
    upload = Finished(submission=task.id, hash="9" * 64)
    for recorded in (False, True):
        answer = members.heartbeat(ALICE, Heartbeat(policy_version=0, wants_task=True, finished=upload))
        submission = harness.pool.db.submissions.get(task.id)
        assert answer.assignment is None and submission is not None and bool(submission.announced) is recorded
        harness.clock.now_s += 1 / RECORDS_PER_S


def test_joining_and_leaving_again_and_again_is_rate_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RARE_RATE", 1e-6)
    with served(tmp_path) as site:
        worker = site.register("worker", "worker")
        assert worker.post("/v1/drain").status_code == 200
        refused(worker.post("/v1/drain"), 429, "such request a second")
        refused(worker.post("/v1/register", json={}), 429, "such request a second")
        assert worker.post("/v1/heartbeat", json={}).status_code == 200


# --- uploads ---------------------------------------------------------------------------------------------------------


def test_sixty_uploads_at_once_for_one_task_leave_one_file(coordinator: Any) -> None:
    """The last two uploads end at the same time: both pass every check before either is recorded."""
    worker, task = worker_with_task(coordinator)

    async def all_at_once() -> list[Any]:
        arrived, everyone = 0, asyncio.Event()

        def arriving(body: bytes) -> Any:
            left = [body]

            async def read() -> bytes:
                nonlocal arrived
                if left:
                    return left.pop()
                arrived += 1
                if arrived == UPLOADS:
                    everyone.set()
                await asyncio.wait_for(everyone.wait(), 60)
                return b""

            return read

        bodies = [bytes([number]) * 1000 for number in range(60)]
        return await asyncio.gather(
            *(upload(coordinator, worker, task, body, arriving(body)) for body in bodies), return_exceptions=True
        )

    ended = asyncio.run(all_at_once())
    stored = [outcome for outcome in ended if not isinstance(outcome, BaseException)]
    assert len(stored) == 1 and all(isinstance(outcome, PoolError) for outcome in ended if outcome is not stored[0])
    kept = [path.stem for path in (Path(coordinator.store.root) / "submissions").iterdir()]
    assert kept == [stored[0].hash]


# --- refused bodies --------------------------------------------------------------------------------------------------


def test_a_sender_that_reads_only_after_sending_its_refused_body_gets_the_answer(site: Site) -> None:
    body = bytes(8 << 20)
    with sending(site, "stranger", "PUT", "/v1/submissions/x", body=body) as connection:
        connection.sendall(body)
        assert int(connection.recv(100).split()[1]) == 403


# --- cached reports --------------------------------------------------------------------------------------------------


def test_making_a_report_takes_a_bounded_share_of_the_time() -> None:
    now_s, made = 0.0, 0

    def make() -> str:
        nonlocal now_s, made
        now_s, made = now_s + 0.5, made + 1
        return f"status {made}"

    costly = CachedBody(make, lambda: now_s)
    while now_s < 100.0:
        assert costly.get() == f"status {made}".encode()
        now_s += 0.01
    assert 0.9 * SHARE * 100.0 <= 0.5 * made <= 1.1 * SHARE * 100.0


def test_a_cheap_report_is_made_again_soon() -> None:
    now_s = 0.0
    cheap = CachedBody(lambda: f"at {now_s}", lambda: now_s)
    cheap.get()
    now_s = 0.001
    assert cheap.get() == b"at 0.001"


# --- strangers that join by stake on a chain -----------------------------------------------------------------------------


class Chain:
    """A contract in which nobody has staked."""

    def __init__(self) -> None:
        self.keys: list[str] = []  # whose stake was read

    def account(self, key: str) -> None:
        self.keys.append(key)

    def deposited(self, key: str, payer: str) -> int:
        return 0


class Staking:
    """A pool with a contract and an open invite."""

    def __init__(self, folder: Path, **requirements: Any) -> None:
        ledger = {"contract": "0x" + "11" * 20, "rpc": "http://127.0.0.1:1"}
        config = parse({"ledger": ledger, "requirements": {"stake": 100} | requirements})
        self.coordinator, self.chain = Coordinator(config, RUN, Identity.generate(), folder), Chain()
        assert self.coordinator.settlement is not None
        self.coordinator.settlement._contracts["read"] = self.chain  # type: ignore[assignment]

    def invite(self, *, days: int = 1, open: bool = True) -> str:
        expires_s = int(time.time()) + days * 86_400
        return make_invite(
            self.coordinator.identity, url="http://c", run=RUN, role="worker", name="w", expires_s=expires_s, open=open
        ).signed.model_dump_json()

    async def join(self, key: str, address: str = "203.0.113.7", invite: str = "") -> str:
        """Return why this key may not join; "" if it may."""
        body = Registration(invite=invite or self.invite(), protocol=VERSION, payer="0x" + "2" * 40).model_dump_json()
        head = SignedHead(key, "", secrets.token_hex(16), int(time.time()))
        try:
            await self.coordinator._register(Request(head, body.encode(), {}, {}, address))
        except (PoolError, InviteError) as error:
            return str(error)
        return ""


def test_the_chain_is_read_only_for_a_stranger_that_nothing_else_refuses(tmp_path: Path) -> None:
    async def main() -> None:
        staking = Staking(tmp_path, places=1)
        assert "expired" in await staking.join(ALICE, invite=staking.invite(days=-1))
        assert not await staking.join(ALICE, invite=(own := staking.invite(open=False)))
        assert not await staking.join(ALICE, invite=own)  # a member comes back
        assert "this run is full" in await staking.join(BOB)
        assert not staking.chain.keys

    asyncio.run(main())


def test_a_stranger_that_repeats_its_request_causes_one_read_of_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credit, "READ_KEPT_S", 3600.0)

    async def main() -> None:
        staking = Staking(tmp_path)
        for _ in range(2):
            answers = await asyncio.gather(*(staking.join(ALICE) for _ in range(20)), staking.join(BOB))
            assert all("has staked 0" in answer for answer in answers)
        assert staking.chain.keys == [ALICE, BOB]

    asyncio.run(main())


def test_many_strangers_at_one_address_do_not_keep_out_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credit, "READS_PER_S", 1e-3)  # the test must not depend on its own speed

    async def main() -> None:
        staking = Staking(tmp_path)
        answers = [await staking.join(f"{number:064x}") for number in range(30)]
        assert "has staked 0" in answers[0] and all("too many nodes are joining" in answer for answer in answers[1:])
        assert "has staked 0" in await staking.join(ALICE, address="203.0.113.8")

    asyncio.run(main())
