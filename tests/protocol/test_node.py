"""The node against a coordinator that is a function (httpx.MockTransport)."""

import gzip
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shoal.config import Config
from shoal.errors import restart_helps
from shoal.protocol import calling
from shoal.protocol import node as node_module
from shoal.protocol.answers import sign_answer
from shoal.protocol.calling import ASKING, NodeError, RefusedError, StoppedError, TooLargeError
from shoal.protocol.clock import PoolClock
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import Invite, make_invite, open_payload
from shoal.protocol.messages import MAX_SENDERS, VERSION, Heartbeat, HeartbeatAnswer, Ok, RunDescriptor
from shoal.protocol.node import Node
from shoal.protocol.signing import split_target, verify_request
from shoal.shardcast import Arrival

COORDINATOR, OTHER = Identity.generate(), Identity.generate()
RUN = "run-0"


class AllFresh:
    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        return True


def answered(
    request: httpx.Request, response: httpx.Response, signer: Identity = COORDINATOR, now_s: float | None = None
) -> httpx.Response:
    """The response, signed as an answer to the request. A stream is left as it is."""
    if isinstance(response.stream, httpx.ByteStream) and "content-encoding" not in response.headers:
        digest = sha256(response.content).digest()
        headers = sign_answer(
            signer,
            request.headers,
            status=response.status_code,
            body_sha256=digest,
            created_s=int(time.time() if now_s is None else now_s),
        )
        response.headers.update(headers)
    return response


class FakeCoordinator:
    """Answers what is in `answers` (path -> JSON text or response), after failing `away` times; keeps what came."""

    def __init__(self, away: int = 0, **descriptor: Any) -> None:
        self.away = away
        self.signer: Identity | None = COORDINATOR
        self.requests: list[httpx.Request] = []
        fields = {"protocol": VERSION, "run": RUN, "config": Config().model_dump(mode="json"), "keys": {}} | descriptor
        self.answers: dict[str, str | httpx.Response] = {
            "/v1/register": '{"name": "w-0", "role": "worker"}',
            "/v1/run": self.signed(fields),
            "/v1/heartbeat": HeartbeatAnswer(state="running", newest_version=3, relays=[]).model_dump_json(),
        }

    @staticmethod
    def signed(descriptor: dict[str, Any], identity: Identity = COORDINATOR, domain: str = "run") -> str:
        text = RunDescriptor.model_validate(descriptor).model_dump_json()
        return Signed.make(identity, text, domain=domain).model_dump_json()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.away:
            self.away -= 1
            raise httpx.ConnectError("refused", request=request)
        answer = self.answers[request.url.path]
        response = answer if isinstance(answer, httpx.Response) else httpx.Response(200, text=answer)
        return response if self.signer is None else answered(request, response, self.signer)

    def beats(self) -> list[Heartbeat]:
        found = [r for r in self.requests if r.url.path == "/v1/heartbeat"]
        return [Heartbeat.model_validate_json(request.content) for request in found]


def invite() -> Invite:
    return make_invite(COORDINATOR, url="http://c:1", run=RUN, role="worker", name="w-0", expires_s=2_000_000_000)


def join(coordinator: FakeCoordinator, folder: Path, patience_s: float = 5.0, **options: Any) -> Node:
    return Node.join(invite(), folder, patience_s=patience_s, transport=httpx.MockTransport(coordinator), **options)


class NoPauses(threading.Event):
    """A stop event that notes how long it is waited for, and is set after `most` waits."""

    def __init__(self, most: int = 1_000) -> None:
        super().__init__()
        self.most = most
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        if len(self.pauses) >= self.most:
            self.set()
        return self.is_set()


# --- joining ---------------------------------------------------------------------------------------------------------


def test_joining_makes_a_key_and_shows_the_invite_under_it(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path, url="http://me:2")
    (request,) = coordinator.requests
    path, query = split_target(request.url.raw_path.decode())
    signer = verify_request(
        method=request.method,
        path=path,
        query=query,
        headers=request.headers,
        body=request.content,
        audience=RUN,
        now_s=time.time(),
        nonces=AllFresh(),
    )
    body = httpx.Response(200, content=request.content).json()
    assert open_payload(body["invite"], COORDINATOR.public, RUN).name == "w-0"
    assert body["url"] == "http://me:2"
    assert node.name == "w-0" and signer == node.identity.public == Identity.load(tmp_path / "identity.pem").public


def test_joining_again_keeps_the_key(tmp_path: Path) -> None:
    first = join(FakeCoordinator(), tmp_path)
    assert join(FakeCoordinator(), tmp_path).identity.public == first.identity.public


def test_a_refused_invite_says_why(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    coordinator.answers["/v1/register"] = httpx.Response(403, json={"error": "the invite has expired"})
    with pytest.raises(RefusedError, match="the invite has expired") as caught:
        join(coordinator, tmp_path)
    assert caught.value.status == 403 and len(coordinator.requests) == 1, "a no is not asked for again"


# --- whom to believe -------------------------------------------------------------------------------------------------


def test_the_config_comes_from_the_descriptor(tmp_path: Path) -> None:
    assert join(FakeCoordinator(), tmp_path).config() == Config()


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
    ("changed", "told"),
    [({"run": "run-1"}, "serves run"), ({"protocol": VERSION + 1}, "install the same version of Shoal")],
)
def test_a_descriptor_of_another_run_or_protocol_is_refused(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(NodeError, match=told):
        join(FakeCoordinator(**changed), tmp_path).config()


def test_an_older_coordinator_that_cannot_read_the_registration_is_told_as_such(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(protocol=VERSION - 1)
    coordinator.answers["/v1/register"] = httpx.Response(400, json={"error": "protocol: extra inputs"})
    with pytest.raises(NodeError, match=f"speaks protocol {VERSION - 1}, this node {VERSION}"):
        join(coordinator, tmp_path)


def test_waiting_for_a_key_names_the_role_that_did_not_come(tmp_path: Path) -> None:
    node = join(FakeCoordinator(), tmp_path, patience_s=0.05)
    with pytest.raises(NodeError, match="no origin joined run run-0"):
        node.wait_for_key("origin", threading.Event())


def test_waiting_for_a_key_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(NodeError, match="stopped"):
        join(FakeCoordinator(), tmp_path).wait_for_key("origin", stop)


def test_the_first_key_of_a_role_is_the_one(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(keys={"origin": ["a" * 64, "b" * 64]})
    assert join(coordinator, tmp_path).wait_for_key("origin", threading.Event()) == "a" * 64


# --- asking ----------------------------------------------------------------------------------------------------------


def test_requests_outlast_a_coordinator_that_is_away(tmp_path: Path) -> None:
    coordinator, stop = FakeCoordinator(away=6), NoPauses()
    assert join(coordinator, tmp_path, stop=stop).name == "w-0"
    assert len(coordinator.requests) == 7
    assert stop.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0]), "ever longer, up to two seconds"


def test_each_attempt_is_signed_anew(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(away=3)
    join(coordinator, tmp_path, stop=NoPauses())
    assert len({request.headers["signature"] for request in coordinator.requests}) == 4, "or it would be a replay"


def test_a_large_body_goes_out_in_pieces_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """httpcore copies what is left of a piece after each part that is sent: 270 MB in one piece took 15 s on loopback."""
    monkeypatch.setattr(calling, "SEND_BYTES", 1000)
    coordinator = FakeCoordinator()
    node, data = join(coordinator, tmp_path), bytes(range(250)) * 10
    coordinator.answers["/v1/x"] = "{}"
    node.put("/v1/x", data, Ok)
    assert isinstance(stream := coordinator.requests[-1].stream, httpx.SyncByteStream)
    assert [len(piece) for piece in stream] == [1000, 1000, 500] and b"".join(stream) == data
    assert coordinator.requests[-1].headers["content-length"] == "2500"


def test_the_deadline_names_whom_it_waited_for(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(NodeError, match="http://c:1 did not answer POST /v1/register for 0 s .ConnectError.") as caught:
        join(FakeCoordinator(away=1_000), tmp_path, patience_s=0.4)
    assert time.monotonic() - started_s < 5
    assert not isinstance(caught.value, RefusedError) and "is it running" in str(caught.value)


def test_a_node_that_is_told_to_stop_makes_no_further_attempt(tmp_path: Path) -> None:
    coordinator, stop = FakeCoordinator(away=1_000), NoPauses(most=2)
    with pytest.raises(StoppedError, match="http://c:1 did not answer POST /v1/register"):
        join(coordinator, tmp_path, patience_s=1e9, stop=stop)
    assert len(coordinator.requests) == 3


def test_a_stop_does_not_wait_for_a_coordinator_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()  # the clock goes on by a quarter of a second with each look at it
    monkeypatch.setattr(calling, "time", SimpleNamespace(monotonic=lambda: next(looks) / 4))
    monkeypatch.setattr(calling, "LOOK_S", 0.001)
    stop, freed = threading.Event(), threading.Event()
    looks_before_stop = 0

    def silent(request: httpx.Request) -> httpx.Response:
        nonlocal looks_before_stop
        looks_before_stop = next(looks)
        stop.set()
        freed.wait(60)
        return httpx.Response(500)

    try:
        with pytest.raises(StoppedError):
            Node.join(invite(), tmp_path, stop=stop, transport=httpx.MockTransport(silent))
    finally:
        freed.set()
    assert calling.GRACE_S <= (next(looks) - looks_before_stop) / 4 <= calling.GRACE_S + 1.5


def test_an_answer_that_comes_soon_after_the_stop_counts(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert join(FakeCoordinator(), tmp_path, stop=stop).name == "w-0", "a last report is not lost"


@pytest.mark.parametrize(("status", "helps"), [(403, False), (499, False), (500, True), (502, True)])
def test_a_refused_invite_is_not_tried_again_by_a_restart(tmp_path: Path, status: int, helps: bool) -> None:
    coordinator = FakeCoordinator()
    coordinator.answers["/v1/register"] = httpx.Response(status, json={"error": "no"})
    with pytest.raises(RefusedError) as caught:
        join(coordinator, tmp_path)
    assert restart_helps(caught.value) is helps
    assert restart_helps(NodeError("away")) is True


def test_joining_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        join(FakeCoordinator(), tmp_path)
    assert "joined run run-0 at http://c:1 as w-0 (worker)" in caplog.messages


def test_a_refusal_without_a_reason_tells_its_status(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    coordinator.answers["/v1/claims"] = httpx.Response(502, text="<html>bad gateway</html>")
    with pytest.raises(RefusedError, match="POST /v1/claims: HTTP 502"):
        node.post("/v1/claims", None, Ok)


# --- whose answers ---------------------------------------------------------------------------------------------------


def test_an_answer_of_anybody_else_counts_as_none(tmp_path: Path) -> None:
    """A proxy whose coordinator is away, or somebody on the way: neither may stop a node, nor be believed."""
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path, patience_s=0.2, stop=NoPauses())
    for signer, word in ((None, "not signed"), (OTHER, "signed by")):
        coordinator.signer = signer
        for status in (200, 403, 502):
            coordinator.answers["/v1/claims"] = httpx.Response(status, json={"ok": True})
            with pytest.raises(NodeError, match=f"status {status}, but it is {word}") as caught:
                node.post("/v1/claims", None, Ok)
            assert not isinstance(caught.value, RefusedError)


@pytest.mark.parametrize("change", ["body", "status", "another request"])
def test_an_answer_that_was_changed_on_the_way_counts_as_none(tmp_path: Path, change: str) -> None:
    """Also the coordinator's own answer to another request, such as another worker's task or a batch of another step."""
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path, patience_s=0.2, stop=NoPauses())
    asked_first: list[httpx.Request] = []

    def between(request: httpx.Request) -> httpx.Response:
        asked_first.append(request)
        answer = answered(asked_first[0], httpx.Response(200, json={"ok": True}))
        if change == "body":
            return httpx.Response(200, json={"ok": False}, headers={**answer.headers, "content-length": "12"})
        if change == "status":
            return httpx.Response(409, content=answer.content, headers=answer.headers)
        return answer

    node.client = httpx.Client(base_url="http://c:1", auth=node.client.auth, transport=httpx.MockTransport(between))
    if change == "another request":
        assert node.post("/v1/steps", None, Ok).ok
    with pytest.raises(NodeError, match="UnsignedAnswerError"):
        node.post("/v1/steps", None, Ok)


def test_a_node_that_asks_too_often_waits_and_asks_again(tmp_path: Path) -> None:
    coordinator, stop = FakeCoordinator(), NoPauses()
    node = join(coordinator, tmp_path, stop=stop)
    busy = [httpx.Response(429, json={"error": "wait"}), httpx.Response(429, json={"error": "wait"})]
    coordinator.answers["/v1/steps"] = '{"ok": true}'
    good = coordinator.__call__

    def first_busy(request: httpx.Request) -> httpx.Response:
        return answered(request, busy.pop()) if busy else good(request)

    node.client = httpx.Client(base_url="http://c:1", auth=node.client.auth, transport=httpx.MockTransport(first_busy))
    assert node.post("/v1/steps", None, Ok).ok and stop.pauses == pytest.approx([0.1, 0.2])


def test_a_request_that_was_signed_before_the_coordinator_started_is_signed_again(tmp_path: Path) -> None:
    """A coordinator that has just started refuses what may be a replay, and an honest node must not end of that."""
    coordinator, stop = FakeCoordinator(), NoPauses()
    node = join(coordinator, tmp_path, stop=stop)
    coordinator.answers["/v1/steps"] = '{"ok": true}'
    signatures: list[str] = []

    def early_once(request: httpx.Request) -> httpx.Response:
        signatures.append(request.headers["signature"])
        return (
            answered(request, httpx.Response(425, json={"error": "replayed"}))
            if len(signatures) == 1
            else coordinator(request)
        )

    node.client = httpx.Client(base_url="http://c:1", auth=node.client.auth, transport=httpx.MockTransport(early_once))
    assert node.post("/v1/steps", None, Ok).ok and len(set(signatures)) == 2


def test_the_longer_answers_take_the_less_often_a_node_asks_again(tmp_path: Path) -> None:
    """So that a coordinator with more members than it can answer at their pace is not asked ever more."""
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    node.answered_in_s = 0.0
    assert node.pause_s(0.1) == 0.1
    quick = coordinator.__call__

    def slow(request: httpx.Request) -> httpx.Response:
        time.sleep(0.2)
        return quick(request)

    node.client = httpx.Client(base_url="http://c:1", auth=node.client.auth, transport=httpx.MockTransport(slow))
    node.beat()
    assert node.pause_s(0.1) >= 0.2 * (1 - ASKING) / ASKING


def test_an_answer_that_is_not_the_message_is_refused(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    coordinator.answers["/v1/steps"] = '{"ok": true, "more": 1}'
    with pytest.raises(NodeError, match="/v1/steps: unexpected answer"):
        node.post("/v1/steps", None, Ok)


# --- living ----------------------------------------------------------------------------------------------------------


class Endless(httpx.SyncByteStream):
    """A body without end; `sent` counts its bytes."""

    sent = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.sent < 1 << 24:  # where nobody stops reading, the test ends all the same
            self.sent += 1024
            yield bytes(1024)


def test_an_answer_above_its_limit_is_not_read_on(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    coordinator.answers["/v1/tasks/a"] = httpx.Response(200, content=bytes(5000))
    assert node.get_bytes("/v1/tasks/a", most_bytes=5000) == bytes(5000)
    endless = Endless()
    coordinator.answers["/v1/tasks/a"] = httpx.Response(200, stream=endless)
    with pytest.raises(TooLargeError, match=r"http://c:1 answers GET /v1/tasks/a with more than 4999 bytes"):
        node.get_bytes("/v1/tasks/a", most_bytes=4999)
    assert endless.sent <= 1 << 17


def test_messages_and_curriculum_pages_have_limits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "PAGE_BYTES", 2000)
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    for path in ("/v1/batches/1", "/v1/curricula/a"):
        coordinator.answers[path] = httpx.Response(200, stream=Endless())
    with pytest.raises(TooLargeError, match="more than 2000 bytes"):
        node.curriculum_page("a")
    with pytest.raises(TooLargeError, match="more than 4096 bytes"):
        node.get("/v1/batches/1", Ok, most_bytes=4096)


def test_a_compressed_answer_is_refused(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    data = gzip.compress(bytes(1 << 20))
    coordinator.answers["/v1/tasks/a"] = httpx.Response(
        200, stream=httpx.ByteStream(data), headers={"content-encoding": "gzip"}
    )
    with pytest.raises(NodeError, match="answers GET /v1/tasks/a in gzip"):
        node.get_bytes("/v1/tasks/a", most_bytes=1 << 21)
    assert coordinator.requests[-1].headers["accept-encoding"] == "identity"


def test_a_beat_tells_what_the_node_does(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    node.policy_version, node.tokens = 7, 42
    node.doing("x" * 300)
    time.sleep(0.02)
    node.doing("work", waiting=True)
    time.sleep(0.02)
    node.doing("something")
    answer = node.beat(wants_task=True)
    (beat,) = coordinator.beats()
    assert (beat.policy_version, beat.wants_task, beat.stats.tokens, beat.stats.doing) == (7, True, 42, "something")
    assert 0.02 <= beat.stats.waiting_s < beat.stats.busy_s + 1 and beat.stats.busy_s >= 0.02
    assert node.answer == answer and answer.newest_version == 3


def test_time_counts_as_busy_or_waiting_by_what_the_node_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    for took_s, then, waiting in ((3, "a batch", True), (5, "training", False), (7, "a batch", True)):
        now_s += took_s
        node.doing(then, waiting=waiting)
    node.beat()
    stats = coordinator.beats()[0].stats
    assert (stats.busy_s, stats.waiting_s, stats.waiting) == (10.0, 5.0, True)


def test_a_long_doing_is_cut_not_refused(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    node.doing("y" * 300)
    node.beat()
    assert coordinator.beats()[0].stats.doing == "y" * 80


def test_the_fastest_senders_of_a_download_are_reported(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    rates_Bps = {f"http://relay-{n}": float(n) for n in range(MAX_SENDERS + 2)}
    node.came(Arrival(3, 700, took_s=2.0, at_s=time.monotonic() - 60, rates_Bps=rates_Bps, behind_s=1.5))
    node.beat()
    intake = coordinator.beats()[0].stats.intake
    assert min(intake.bytes_per_s.values()) == 2.0 and len(intake.bytes_per_s) == MAX_SENDERS
    assert (intake.version, intake.size_bytes, intake.took_s, intake.behind_s) == (3, 700, 2.0, 1.5)
    assert 60 <= intake.ago_s < 120, "this machine's clock is not asked"


def test_the_heart_beats_in_the_background_and_outlives_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 0.01)
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    good = coordinator.answers["/v1/heartbeat"]
    coordinator.answers["/v1/heartbeat"] = httpx.Response(500)
    with node.heart():
        wait_until(lambda: len(coordinator.beats()) >= 3)
        assert node.answer is None
        coordinator.answers["/v1/heartbeat"] = good
        wait_until(lambda: node.answer is not None)
    time.sleep(0.05)
    after = len(coordinator.beats())
    time.sleep(0.1)
    assert len(coordinator.beats()) == after, "it ends with its block"
    assert not any(beat.wants_task for beat in coordinator.beats()), "only the worker's loop asks for tasks"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.01)


# --- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off_s", [-600.0, 600.0])
def test_a_node_whose_clock_is_minutes_off_joins_by_the_coordinators_time(
    tmp_path: Path, off_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused once, with the time in the refusal; accepted when it asks again."""
    coordinator, statuses = FakeCoordinator(), []

    def checked(request: httpx.Request) -> httpx.Response:
        response = coordinator(request)
        created = int(request.headers["signature-input"].partition("created=")[2].partition(";")[0])
        if abs(created - time.time()) > 60:
            response = answered(request, httpx.Response(401, text='{"error": "stale: check the clock"}'))
        statuses.append(response.status_code)
        return response

    clock = PoolClock(lambda: time.time() + off_s)
    node = Node.join(invite(), tmp_path, patience_s=5.0, transport=httpx.MockTransport(checked), clock=clock)
    assert node.name == "w-0" and statuses == [401, 200]
    assert "the coordinator's; its requests carry the coordinator's time" in caplog.text
    assert node.beat().state == "running" and statuses == [401, 200, 200]


def test_a_refusal_that_nobody_signed_changes_no_clock(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    coordinator.signer = None
    coordinator.answers["/v1/register"] = httpx.Response(401, text='{"error": "stale"}')
    clock = PoolClock(lambda: time.time() + 600)
    with pytest.raises(NodeError, match="did not answer"):
        Node.join(invite(), tmp_path, patience_s=0.3, transport=httpx.MockTransport(coordinator), clock=clock)
    assert clock.offset_s == 0
