"""A node that talks to a fake coordinator (`FakeCoordinator`)."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from blake3 import blake3

from shoal.config import Config, parse
from shoal.config.sections import StoreSection
from shoal.errors import restart_helps
from shoal.protocol import node as node_module
from shoal.protocol.calling import NodeError, RefusedError, StoppedError
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import open_payload
from shoal.protocol.messages import MAX_SENDERS, VERSION, FileLink, HeartbeatAnswer
from shoal.protocol.node import Bounds, in_bucket
from shoal.shardcast import Access, Arrival

from .support import COORDINATOR, OTHER, RUN, FakeCoordinator, NoPauses, join, signer_of

# --- joining ---------------------------------------------------------------------------------------------------------


def test_joining_creates_a_key_and_registers_it_with_the_invite(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path, url="http://me:2")
    assert node.name == "w-0"
    (request,) = coordinator.requests
    signer = signer_of(request, RUN, time.time())
    body = httpx.Response(200, content=request.content).json()
    assert open_payload(body["invite"], COORDINATOR.public, RUN).name == "w-0"
    assert body["url"] == "http://me:2"
    assert signer == node.identity.public == Identity.load(tmp_path / "identity.pem").public
    assert join(FakeCoordinator(), tmp_path).identity.public == signer, "joining again must keep the key"
    assert node.config() == Config()


@pytest.mark.parametrize(("status", "helps"), [(403, False), (499, False), (500, True), (502, True)])
def test_a_refused_invite_is_reported_and_not_tried_again(tmp_path: Path, status: int, helps: bool) -> None:
    coordinator = FakeCoordinator()
    coordinator.answers["/v1/register"] = httpx.Response(status, json={"error": "the invite has expired"})
    with pytest.raises(RefusedError, match="the invite has expired") as caught:
        join(coordinator, tmp_path)
    assert caught.value.status == status and len(coordinator.requests) == 1
    assert restart_helps(caught.value) is helps and restart_helps(NodeError("away"))


# --- the run's description -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forge",
    [
        lambda fields: FakeCoordinator.signed(fields, OTHER),
        lambda fields: FakeCoordinator.signed(fields, domain="invite"),
        lambda fields: FakeCoordinator.signed(fields).replace("async_level", "async_levels"),
        lambda fields: Signed.make(COORDINATOR, "{}", domain="run").model_dump_json(),
    ],
)
def test_a_descriptor_that_the_inviter_did_not_sign_is_refused(
    tmp_path: Path, forge: Callable[[dict[str, Any]], str]
) -> None:
    coordinator = FakeCoordinator()
    coordinator.answers["/v1/run"] = forge({"protocol": VERSION, "run": RUN, "config": {"async_level": 1}, "keys": {}})
    with pytest.raises(NodeError, match="is not this run's coordinator"):
        join(coordinator, tmp_path).descriptor()


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"run": "run-1"}, "serves run"), ({"protocol": VERSION + 1}, "install the same version of Shoal")],
)
def test_a_descriptor_of_another_run_or_protocol_is_refused(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(NodeError, match=words):
        join(FakeCoordinator(**changed), tmp_path).config()


def test_if_an_older_coordinator_cannot_read_the_registration_the_error_names_both_versions(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(protocol=VERSION - 1)
    coordinator.answers["/v1/register"] = httpx.Response(400, json={"error": "protocol: extra inputs"})
    with pytest.raises(NodeError, match=f"speaks protocol {VERSION - 1}, but this node speaks {VERSION}"):
        join(coordinator, tmp_path)


def test_a_node_waits_for_the_first_key_of_a_role(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(keys={"origin": ["a" * 64, "b" * 64]})
    node, stop = join(coordinator, tmp_path, patience_s=0.05), threading.Event()
    assert node.wait_for_key("origin", stop) == "a" * 64
    with pytest.raises(NodeError, match="no learner joined run run-0"):
        node.wait_for_key("learner", stop)
    stop.set()
    with pytest.raises(StoppedError, match="stopped"):
        node.wait_for_key("learner", stop)


# --- heartbeats ------------------------------------------------------------------------------------------------------


def test_a_heartbeat_reports_the_activity_and_the_busy_and_waiting_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    node.policy_version, node.tokens = 7, 42
    for took_s, then, waiting in ((3, "a batch", True), (5, "training", False), (7, "y" * 300, True)):
        now_s += took_s
        node.doing(then, waiting=waiting)
    answer = node.beat(wants_task=True)
    (beat,) = coordinator.beats()
    stats = beat.stats
    assert (beat.policy_version, beat.wants_task, stats.tokens, stats.doing) == (7, True, 42, "y" * 80)
    assert (stats.busy_s, stats.waiting_s, stats.waiting) == (10.0, 5.0, True)
    assert node.answer == answer and answer.newest_version == 3


def test_the_fastest_senders_of_a_download_are_reported(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    rates_Bps = {f"http://relay-{n}": float(n) for n in range(MAX_SENDERS + 2)}
    node.note_arrival(Arrival(3, 700, took_s=2.0, at_s=time.monotonic() - 60, rates_Bps=rates_Bps, behind_s=1.5))
    node.beat()
    intake = coordinator.beats()[0].stats.intake
    assert min(intake.bytes_per_s.values()) == 2.0 and len(intake.bytes_per_s) == MAX_SENDERS
    assert (intake.version, intake.size_bytes, intake.took_s, intake.behind_s) == (3, 700, 2.0, 1.5)
    assert 60 <= intake.ago_s < 120, "the age must be measured by a monotonic clock"


def test_heartbeats_are_sent_in_the_background_and_continue_after_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 0.01)
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    good = coordinator.answers["/v1/heartbeat"]
    coordinator.answers["/v1/heartbeat"] = httpx.Response(500)
    with node.heartbeats():
        wait_until(lambda: len(coordinator.beats()) >= 3)
        assert node.answer is None
        coordinator.answers["/v1/heartbeat"] = good
        wait_until(lambda: node.answer is not None)
    time.sleep(0.05)
    after = len(coordinator.beats())
    time.sleep(0.1)
    assert len(coordinator.beats()) == after, "heartbeats were sent after the block ended"
    assert not any(beat.wants_task for beat in coordinator.beats()), "background heartbeats must not ask for tasks"


# --- files in the pool's bucket --------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [(404, b""), (200, b"changed"), (200, b"larger" * 20)])
def test_after_three_wrong_answers_of_the_bucket_the_coordinator_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes]
) -> None:
    answers: list[tuple[int, bytes]] = []

    async def exchange(access: Access, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        status, body = answers.pop(0)
        return status, body if len(body) <= options["max_bytes"] else b""

    monkeypatch.setattr(node_module, "exchange", exchange)
    coordinator = FakeCoordinator()
    path = "/v1/submissions/s-1"
    link = FileLink(url="http://bucket/files/a", hash=blake3(b"rollouts").hexdigest())
    coordinator.answers[f"{path}/link"] = link.model_dump_json()
    node = join(coordinator, tmp_path, patience_s=60.0, stop=NoPauses())
    node.store = StoreSection(url="s3://files", endpoint="http://bucket")
    answers[:] = [answer, answer, (200, b"rollouts")]
    assert node.fetch_file(path, max_bytes=100) == b"rollouts"
    coordinator.answers[path] = httpx.Response(200, content=b"read by the coordinator")
    answers[:] = [answer, (503, b""), answer, answer, answer]
    assert node.fetch_file(path, max_bytes=100) == b"read by the coordinator"
    assert len(answers) == 1, "a busy bucket says nothing about the file"
    coordinator.answers[path] = httpx.Response(410, json={"error": "it was changed"})
    answers[:] = [answer] * 3
    with pytest.raises(RefusedError, match="it was changed") as caught:
        node.fetch_file(path, max_bytes=100)
    assert caught.value.status == 410


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        time.sleep(0.01)


# --- what a run may make this machine reach ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "url", "peer", "own", "expected"),
    [
        ("local", "http://127.0.0.1:1", "", None, "local"),
        ("local", "http://localhost:1", "", None, "local"),
        ("local", "http://10.0.0.1:1", "", None, "private"),
        ("local", "http://8.8.8.8:1", "", None, "public"),
        ("local", "http://pool.example:1", "", None, "public"),
        ("local", "http://pool.example:1", "10.0.0.9", None, "private"),
        ("local", "http://pool.example:1", "127.0.0.1", None, "local"),
        ("local", "http://pool.example:1", "169.254.169.254", None, "public"),
        ("local", "http://8.8.8.8:1", "10.0.0.9", None, "public"),
        ("public", "http://127.0.0.1:1", "127.0.0.1", None, "public"),
        ("public", "http://127.0.0.1:1", "127.0.0.1", "local", "public"),
        ("local", "http://8.8.8.8:1", "", "local", "local"),
        ("local", "http://127.0.0.1:1", "", "public", "public"),
    ],
)
def test_the_reach_is_the_narrower_of_the_configs_and_the_nodes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, url: str, peer: str, own: Any, expected: str
) -> None:
    monkeypatch.setattr(node_module.Node, "bounds", Bounds(reach=own))
    node = join(FakeCoordinator(), tmp_path)
    node.invite, node.peer = node.invite.model_copy(update={"url": url}), peer
    config = parse({"relays": {"reach": said}})
    assert node.reach_of(config) == node.access("0" * 64, config).reach == expected


def test_behind_a_proxy_the_proxys_address_implies_no_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = join(FakeCoordinator(), tmp_path)
    node.invite, node.peer = node.invite.model_copy(update={"url": "http://pool.example:1"}), "10.0.0.9"
    monkeypatch.setenv("http_proxy", "http://10.0.0.9:3128")
    assert node.reach_of(parse({"relays": {"reach": "local"}})) == "public"


@pytest.mark.parametrize(
    ("url", "store", "inside"),
    [
        ("http://s3:9000/files/p/a?X-Amz-Signature=1&x-id=PutObject", ("s3://files/p", "http://s3:9000"), True),
        ("http://files.s3:9000/p/a?X-Amz-Signature=1", ("s3://files/p", "http://s3:9000"), True),
        ("http://files.s3:9000/files/p/a", ("s3://files/p", "http://s3:9000"), False),
        ("http://s3:9000/p/a", ("s3://files/p", "http://s3:9000"), False),
        ("http://s3:9000/files/pp/a", ("s3://files/p", "http://s3:9000"), False),
        ("http://s3:9001/files/p/a", ("s3://files/p", "http://s3:9000"), False),
        ("https://s3.us-east-1.amazonaws.com/files/a", ("s3://files", ""), True),
        ("https://files.s3.eu-west-2.amazonaws.com/a", ("s3://files", ""), True),
        ("https://files.s3.amazonaws.com.cn/a", ("s3://files", ""), True),
        ("http://s3.us-east-1.amazonaws.com/files/a", ("s3://files", ""), False),
        ("https://s3.us-east-1.amazonaws.com.evil.example/files/a", ("s3://files", ""), False),
        ("https://evil.example/files/a", ("s3://files", ""), False),
        ("https://other.s3.us-east-1.amazonaws.com/files/a", ("s3://files", ""), False),
        ("https://s3.us-east-1.amazonaws.com@10.0.0.1/files/a", ("s3://files", ""), False),
        ("http://s3:9000/files/p/..%5c..%5ca", ("s3://files/p", "http://s3:9000"), False),
    ],
)
def test_a_grant_lies_in_the_bucket_of_the_signed_config(url: str, store: tuple[str, str], inside: bool) -> None:
    assert in_bucket(url, StoreSection(url=store[0], endpoint=store[1])) is inside


def test_a_heartbeat_tells_nothing_that_a_server_in_this_network_answered(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    for what in (
        "weights: no relay gave a valid manifest of version 3 (http://192.168.1.1: answered 401 for it); check the URLs",
        "the origin: http://192.168.1.1:80/x: answered 401 for versions.json",
    ):
        node.doing(what)
        node.beat()
        told = coordinator.beats()[-1].stats.doing
        assert "401" not in told and "http://192.168.1.1" in told


@pytest.mark.parametrize(("size_bytes", "refused"), [(1_000, False), (100 << 20, True)])
def test_a_later_version_may_not_be_much_larger_than_the_first(tmp_path: Path, size_bytes: int, refused: bool) -> None:
    node = join(FakeCoordinator(), tmp_path)
    node.disk_bytes = 1 << 40

    def manifest(size: int) -> Any:
        return SimpleNamespace(
            version=1, files=[SimpleNamespace(path="model.safetensors")], size_bytes=size, delta=None
        )

    assert node.refuses(manifest(1_000)) == ""
    assert bool(node.refuses(manifest(size_bytes))) is refused


def test_the_learner_logs_each_refusal_of_a_version_once_and_no_more_than_a_hundred(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    for number in range(200):
        refused = [f"w-{number} refuses version 3", "w refuses version 3"]
        answer = HeartbeatAnswer(state="running", newest_version=3, relays=[], refused=refused)
        coordinator.answers["/v1/heartbeat"] = answer.model_dump_json()
        node.beat()
    told = [message for message in caplog.messages if "refuses" in message]
    assert len(set(told)) == len(told) <= 101 and "w refuses version 3" in told
