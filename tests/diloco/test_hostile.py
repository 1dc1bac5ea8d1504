"""A site with an invite, broken or hostile: it ends no meeting, fills no memory and no log, and stalls nobody for long."""

import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from shoal.diloco import serve
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import BadOfferError, Figures, Greeting, JoinRequest, MeetingError
from shoal.diloco.remote import Remote
from shoal.diloco.serve import RecentNonces
from shoal.protocol import pace
from shoal.protocol.pace import Refusal
from shoal.protocol.signing import SignedAuth

from .direct import encode
from .test_meeting import ABOUT, Clock, found, rounds, terms, together
from .test_serve import RUN, Trainee, at_once, served

LENGTH = 320  # numbers in a vector of `terms()`


def file_of(dtype: str, shape: list[int], size_bytes: int) -> bytes:
    """A safetensors file that its header describes rightly."""
    header = json.dumps({"data": {"dtype": dtype, "shape": shape, "data_offsets": [0, size_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size_bytes)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x08" + bytes(7) + b"{}      ", encode(torch.zeros(7), "fp16")),
        file_of("F4", [LENGTH], LENGTH // 2),  # PyTorch has no name for it
        file_of("F8_E8M0", [LENGTH], LENGTH),
        file_of("F16", [0, 2**63], 0),  # a size that does not fit into 64 bits
        file_of("F16", [0, 2**62, 2], 0),
        file_of("F16", [LENGTH, 1], 2 * LENGTH),
        file_of("BF16", [LENGTH], 2 * LENGTH),
    ],
)
def test_no_bytes_of_a_site_end_the_meeting(data: bytes, tmp_path: Path) -> None:
    meeting = found(tmp_path, terms())
    together(meeting, "a")
    with pytest.raises(BadOfferError, match="the offer of a for round 0 is malformed"):
        meeting.offer("a", 0, meeting.agreed.digest, data, Figures())
    assert meeting.offers == {}
    with pytest.raises(MeetingError, match="x has not joined"):
        meeting.offer("x", 0, meeting.agreed.digest, data, Figures())


def test_of_several_offers_the_first_stands_and_no_other_is_decoded(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2))
    together(meeting, "ab")
    digest = meeting.agreed.digest
    meeting.offer("a", 0, digest, encode(torch.ones(LENGTH), "fp16"), Figures())
    first = meeting.offers["a"]
    meeting.offer("a", 0, digest, encode(torch.zeros(LENGTH), "fp16"), Figures())
    meeting.offer("a", 0, digest, b"not a file", Figures())
    assert meeting.offers["a"] is first


def test_one_of_two_sites_cannot_break_the_first_round(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2, kind="fp32"))
    a, b = together(meeting, "ab")
    a.offer()
    meeting.offer("b", 0, meeting.agreed.digest, encode(torch.full((LENGTH,), 1e30), "fp32"), Figures())
    a.finish()
    assert meeting.outcomes[0].kept == ["a"] and "times the usual" in meeting.outcomes[0].left_out["b"]


@pytest.mark.parametrize("returns", ["join", "heal"])
def test_a_site_that_returns_and_never_offers_is_counted_on_less_and_less_often(returns: str, tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=2, wait_s=10.0), clock)
    a, b = together(meeting, "ab")
    for _ in range(24):
        b.join() if returns == "join" else b.heal("it is late")  # again and again
        assert a.exchange.deal(meeting.round)
        a.offer()
        if meeting.waiting_for():
            clock.now_s += 10.0
        a.finish()
    missing = [each["round"] for each in read(meeting) if each["missing"]]
    assert missing[0] == 0 and len(missing) <= 5  # of 24 rounds
    assert len([each for each in read(meeting) if "b" in each["dealt"]]) == len(missing)
    b.heal("it trains at last")
    rounds([b, a], 1)
    assert meeting.waiting_for() == ["a", "b"]  # it counts as before


def read(meeting: Meeting) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (meeting.folder / "rounds.jsonl").read_text().splitlines()]


def test_the_work_of_a_round_is_shared_by_enough_sites_to_end_it(tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=3, quorum=2), clock)
    a, b = together(meeting, "ab")
    clock.now_s += 10.0
    assert a.exchange.deal(0) == []  # asked first: the wait for c begins
    clock.now_s += 10.0
    assert a.exchange.deal(0) == ["a", "b"]
    rounds([a, b], 1)
    meeting.leave("b")
    assert a.exchange.deal(1) == []  # a alone could not end the round
    b.join()
    assert a.exchange.deal(1) == ["a", "b"]
    rounds([a, b], 1)
    assert meeting.round == 2


def test_why_a_site_heals_is_logged_once_a_round_and_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = found(tmp_path, terms())
    meeting.join("a", Greeting(about=ABOUT, placed=True))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            meeting.heal("a", "x\n12:00:00 meet: round 7 is over\x1b[2J")
    assert [record.getMessage() for record in caplog.records] == [
        "a is healed in round 0: x 12:00:00 meet: round 7 is over [2J"
    ]


def test_nonces_of_one_site_take_a_bounded_memory_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_NONCES", 100)
    nonces, now_s = RecentNonces(), int(time.time())
    for number in range(100):
        assert nonces.spend("site", f"{number}", now_s)
    with pytest.raises(Refusal, match="more than 100 requests in 120 s"):
        nonces.spend("site", "next", now_s)
    assert not nonces.spend("site", "7", now_s)  # a repetition
    assert nonces.spend("other", "7", now_s)
    nonces = RecentNonces()
    for number in range(300):
        assert nonces.spend("site", f"{number}", now_s - 121)  # over before the next
    assert sum(map(len, nonces._seen.values())) <= 100


def test_an_answer_that_is_not_read_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "AT_ONCE", 1)
    with served(tmp_path / "meet", terms()) as host:
        site = Trainee(host, "site-a", tmp_path)
        site.join()
        monkeypatch.setattr(serve, "_piece", lambda path, offset_bytes: bytes(32 << 20))
        url = f"http://127.0.0.1:{host.port}/v1/state/0/0"
        request = next(SignedAuth(site.remote.node.identity, RUN).auth_flow(httpx.Request("GET", url)))
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with socket.create_connection(("127.0.0.1", host.port), timeout=20) as unread:
            unread.sendall(f"GET /v1/state/0/0 HTTP/1.1\r\n{head}\r\n".encode())
            unread.recv(1)
            answer = httpx.get(url, auth=SignedAuth(site.remote.node.identity, RUN))
            assert answer.status_code == 429 and "1 requests by this node are under way" in answer.text
        site.remote.take()  # asks until its place is free


def test_a_request_to_join_that_was_overheard_is_not_served_again(tmp_path: Path) -> None:
    """Again, as by a site without a checkpoint, it would cost the site its share of the data."""
    with served(tmp_path / "meet", terms()) as host:
        remote = Remote(host.invite("site-a"), tmp_path / "a", host.terms, patience_s=5.0)
        asks = JoinRequest(invite=remote.invite.signed, greeting=Greeting(about=ABOUT, placed=False))
        url = f"http://127.0.0.1:{host.port}/v1/join"
        request = httpx.Request("POST", url, content=asks.model_dump_json().encode())
        signed = next(SignedAuth(remote.node.identity, RUN).auth_flow(request))
        with httpx.Client(verify=False) as client:
            assert client.send(signed).status_code == 200
            share = remote.take()
            assert client.send(signed).status_code == 425
        assert host.meeting.members["site-a"].share == share


def test_two_keys_that_bring_one_invite_at_once_do_not_both_get_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeting = Greeting(about=ABOUT, placed=False)
    with served(tmp_path / "meet", terms()) as host:
        join = host.meeting.join

        def slowly(*arguments: Any) -> Any:
            time.sleep(0.2)
            return join(*arguments)

        monkeypatch.setattr(host.meeting, "join", slowly)
        sites = [Remote(host.invite("site-a"), tmp_path / each, host.terms, patience_s=20.0) for each in "xy"]
        with pytest.raises(MeetingError, match="the invite of site-a is used by another key"):
            at_once(*(lambda each=each: each.join(greeting) for each in sites))
        assert list(json.loads((tmp_path / "meet" / "keys.json").read_text()).values()) == ["site-a"]


def test_a_disk_that_is_full_when_a_site_joins_ends_the_meeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with served(tmp_path / "meet", terms()) as host:
        site = Remote(host.invite("site-a"), tmp_path / "a", host.terms, patience_s=0.5)
        monkeypatch.setattr(serve, "write_file", full)
        with pytest.raises(Exception, match="did not answer"):
            site.join(Greeting(about=ABOUT, placed=False))
        host.thread.join(20)
    assert isinstance(ended[0], OSError) and ended[0].errno == 28
