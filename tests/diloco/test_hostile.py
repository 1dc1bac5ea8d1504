"""A broken or hostile site cannot end the meeting, fill its memory or log, or delay the others for long."""

import json
import logging
import socket
import time
from statistics import median
from typing import Any

import httpx
import pytest
import torch

from shoal.diloco import serve
from shoal.diloco.meeting import AHEAD, SPARE_SHARES, STEADY, Meeting
from shoal.diloco.messages import BadOfferError, Figures, Greeting, JoinRequest, MeetingError, RoundClosedError
from shoal.diloco.remote import Remote
from shoal.diloco.serve import RecentNonces
from shoal.protocol import pace
from shoal.protocol.pace import Refusal
from shoal.protocol.signing import SignedAuth

from .support import (
    ABOUT,
    LENGTH,
    RUN,
    Clock,
    RemoteTrainee,
    at_once,
    encode,
    joined,
    open_meeting,
    rounds,
    served,
    shared_terms,
    terms,
)


def file_of(dtype: str, shape: list[int], size_bytes: int) -> bytes:
    """Return a safetensors file with a correct header."""
    header = json.dumps({"data": {"dtype": dtype, "shape": shape, "data_offsets": [0, size_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size_bytes)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x08" + bytes(7) + b"{}      ", encode(torch.zeros(7), "fp16")),
        file_of("F4", [LENGTH], LENGTH // 2),  # PyTorch does not have this dtype
        file_of("F8_E8M0", [LENGTH], LENGTH),
        file_of("F16", [0, 2**63], 0),  # a size that does not fit into 64 bits
        file_of("F16", [0, 2**62, 2], 0),
        file_of("F16", [LENGTH, 1], 2 * LENGTH),
        file_of("BF16", [LENGTH], 2 * LENGTH),
    ],
)
def test_a_malformed_offer_is_refused(data, tmp_path):
    meeting = open_meeting(tmp_path, terms())
    joined(meeting, "a")
    with pytest.raises(BadOfferError, match="the offer of a for round 0 is malformed"):
        meeting.offer("a", 0, meeting.agreed.digest, data, Figures())
    assert meeting.offers == {}
    with pytest.raises(MeetingError, match="x has not joined"):
        meeting.offer("x", 0, meeting.agreed.digest, data, Figures())


def test_only_the_first_of_several_offers_is_decoded_and_counts(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2))
    joined(meeting, "ab")
    digest = meeting.agreed.digest
    meeting.offer("a", 0, digest, encode(torch.ones(LENGTH), "fp16"), Figures())
    first = meeting.offers["a"]
    meeting.offer("a", 0, digest, encode(torch.zeros(LENGTH), "fp16"), Figures())
    meeting.offer("a", 0, digest, b"not a file", Figures())
    assert meeting.offers["a"] is first


def test_one_of_two_sites_cannot_break_the_first_round(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2, kind="fp32"))
    a, b = joined(meeting, "ab")
    a.offer()
    meeting.offer("b", 0, meeting.agreed.digest, encode(torch.full((LENGTH,), 1e30), "fp32"), Figures())
    a.finish()
    assert meeting.outcomes[0].kept == ["a"] and "times the usual" in meeting.outcomes[0].left_out["b"]


def test_one_of_two_sites_cannot_raise_its_limit_round_by_round(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2, kind="fp32", lr=1e-3))
    joined(meeting, "ab")
    for round in range(30):
        kept = [norm for each in meeting.norms for norm in each.values()] or [1.0]
        for name, norm in (("a", 1.0), ("b", 9.9 * median(kept))):
            change = encode(torch.full((LENGTH,), norm / LENGTH**0.5), "fp32")
            meeting.offer(name, round, meeting.agreed.digest, change, Figures())
        meeting.close()
    assert max(each.get("b", 0.0) for each in meeting.norms) < 10


def test_a_site_cannot_offer_without_a_share_of_the_rounds_work(tmp_path):
    """Such an offer has no weight in the average, so it would end the meeting."""
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(sites=2), clock)
    a, b = joined(meeting, "ab")
    while meeting.members["b"].failed < 2:
        b.heal("it is late")
        assert a.link.deal(meeting.round)
        a.offer()
        clock.now_s += 10.0
        a.finish()
    b.heal("it offers before the deal")
    round, digest = meeting.round, meeting.agreed.digest
    for _ in ("before the deal", "after it"):
        with pytest.raises(RoundClosedError, match=f"b has no share of the work of round {round}"):
            meeting.offer("b", round, digest, encode(torch.zeros(LENGTH), "fp16"), Figures())
        assert meeting.offers == {}
        assert a.link.deal(round) == ["a"]
    rounds([a], 1)
    assert meeting.outcomes[round].kept == ["a"]


def test_a_pretraining_site_cannot_deal_itself_the_work(tmp_path):
    meeting = open_meeting(tmp_path, terms())
    (a,) = joined(meeting, "a")
    with pytest.raises(MeetingError, match="do not share the work"):
        a.link.deal(0)
    rounds([a], 1)


@pytest.mark.parametrize("returns", ["join", "heal"])
def test_rounds_wait_ever_less_often_for_a_site_that_returns_but_never_offers(returns, tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(sites=2, wait_s=10.0), clock)
    a, b = joined(meeting, "ab")
    for _ in range(24):
        b.join() if returns == "join" else b.heal("it is late")  # in every round
        assert a.link.deal(meeting.round)
        a.offer()
        if meeting.waiting_for():
            clock.now_s += 10.0
        a.finish()
    missing = [each["round"] for each in read(meeting) if each["missing"]]
    assert missing[0] == 0 and len(missing) <= 5  # at most 5 of 24 rounds waited in vain
    assert len([each for each in read(meeting) if "b" in each["dealt"]]) == len(missing)
    b.heal("it trains at last")
    while "b" not in a.link.deal(meeting.round):
        rounds([a], 1)
        b.heal("it has no share yet")
    rounds([b, a], 1)
    assert meeting.waiting_for() == ["a", "b"]  # rounds wait for b as before


def test_rounds_wait_ever_less_often_for_a_site_that_offers_only_now_and_then(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, terms(sites=2), clock)
    a, b = joined(meeting, "ab")
    for round in range(64):
        b.heal("it is late")
        if round % 2 == 0:
            b.offer()
        a.offer()
        if meeting.round == round:
            clock.now_s += 10.0
        a.finish()
    missing = [each["round"] for each in read(meeting) if each["missing"]]
    assert len(missing) <= 7  # at most 7 of 64 rounds waited in vain
    while meeting.round < meeting.members["b"].since:
        rounds([a], 1)
    b.heal("it trains at last")
    for _ in range(STEADY + 2):
        rounds([b, a], 1)
    assert meeting.members["b"].failed == 0
    a.offer()
    clock.now_s += 10.0
    a.finish()
    b.join()
    rounds([a], 1)
    assert meeting.waiting_for() == ["a", "b"]  # one failure costs a steady site nothing


def read(meeting: Meeting) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (meeting.folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("per_round", [1, 20])
def test_a_site_that_takes_many_shares_does_not_move_the_others_forward(per_round, tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=3))
    trainees, take = joined(meeting, "abc"), meeting.members.take
    shares: list[int] = []
    for _ in range(5):
        for _ in range(per_round):
            shares += [take("a"), take("b")]
            for _ in range(100):
                take("c")
        rounds(trainees, 1)
    assert shares == sorted(set(shares))  # those of a and b stay apart
    assert shares[-1] <= 3 * len(shares) + SPARE_SHARES + AHEAD  # c gets AHEAD = 4 times as many as a


def test_a_site_gets_all_its_shares_even_if_another_site_trains_on_none(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2))
    trainees, take = joined(meeting, "ab"), meeting.members.take
    take("b")
    shares = []
    for _ in range(3):
        shares += [take("a") for _ in range(50)]
        rounds(trainees, 1)
    assert shares == list(range(1, 151))


def test_the_work_of_a_round_is_dealt_only_to_a_quorum(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(sites=3, quorum=2), clock)
    a, b = joined(meeting, "ab")
    clock.now_s += 10.0
    assert a.link.deal(0) == []  # the wait for c starts
    clock.now_s += 10.0
    assert a.link.deal(0) == ["a", "b"]
    rounds([a, b], 1)
    meeting.leave("b")
    assert a.link.deal(1) == []  # because a alone could not end the round
    b.join()
    assert a.link.deal(1) == ["a", "b"]
    rounds([a, b], 1)
    assert meeting.round == 2


def test_the_reason_for_healing_is_logged_once_per_round_in_one_line(tmp_path, caplog):
    meeting = open_meeting(tmp_path, terms())
    meeting.join("a", Greeting(about=ABOUT, placed=True))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            meeting.heal("a", "x\n12:00:00 meet: round 7 is over\x1b[2J")
    assert [record.getMessage() for record in caplog.records] == [
        "a is healed in round 0: x?12:00:00 meet: round 7 is over?[2J"
    ]


def test_the_nonces_of_each_site_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(serve, "MAX_NONCES", 100)
    nonces, now_s = RecentNonces(), int(time.time())
    for number in range(100):
        assert nonces.spend("site", f"{number}", now_s)
    with pytest.raises(Refusal, match="more than 100 requests in 120 s"):
        nonces.spend("site", "next", now_s)
    assert not nonces.spend("site", "7", now_s)  # a replay
    assert nonces.spend("other", "7", now_s)
    nonces = RecentNonces()
    for number in range(300):
        assert nonces.spend("site", f"{number}", now_s - 121)  # each expires before the next
    assert sum(map(len, nonces._seen.values())) <= 100


def test_an_unread_answer_counts_as_a_request_in_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "AT_ONCE", 1)
    with served(tmp_path / "meet", terms()) as host:
        site = RemoteTrainee(host, "site-a", tmp_path)
        monkeypatch.setattr(serve, "_piece", lambda path, offset_bytes: bytes(32 << 20))
        url = f"http://127.0.0.1:{host.port}/v1/state/0/0"
        request = next(SignedAuth(site.remote.node.identity, RUN).auth_flow(httpx.Request("GET", url)))
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with socket.create_connection(("127.0.0.1", host.port), timeout=20) as unread:
            unread.sendall(f"GET /v1/state/0/0 HTTP/1.1\r\n{head}\r\n".encode())
            unread.recv(1)
            answer = httpx.get(url, auth=SignedAuth(site.remote.node.identity, RUN))
            assert answer.status_code == 429 and "1 requests from this node are in progress" in answer.text
        site.remote.take()  # retries until the other request has ended


def test_a_replayed_join_request_is_refused(tmp_path):
    """Otherwise a replay would look like a site without a checkpoint, and cost the site its share of the data."""
    with served(tmp_path / "meet", terms()) as host:
        remote = Remote(host.invite("site-a"), tmp_path / "a", host.terms, patience_s=5.0)
        message = JoinRequest(invite=remote.invite.signed, greeting=Greeting(about=ABOUT, placed=False))
        url = f"http://127.0.0.1:{host.port}/v1/join"
        request = httpx.Request("POST", url, content=message.model_dump_json().encode())
        signed = next(SignedAuth(remote.node.identity, RUN).auth_flow(request))
        with httpx.Client(verify=False) as client:
            assert client.send(signed).status_code == 200
            share = remote.take()
            assert client.send(signed).status_code == 425
        assert host.meeting.members["site-a"].share == share


def test_two_keys_cannot_use_one_invite_at_once(tmp_path, monkeypatch):
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
