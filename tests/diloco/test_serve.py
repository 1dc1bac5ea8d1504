"""The meeting over real sockets: sites in threads, restarts, strangers, and what everybody is told."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from shoal.diloco.agreed import Agreed
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import SILENT, BadOfferError, Greeting, MeetingError, RoundClosedError, Terms, site_invite
from shoal.diloco.remote import Remote
from shoal.diloco.serve import MeetingServer, serve
from shoal.diloco.site import Site, meet
from shoal.protocol.calling import NodeError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, make_invite
from shoal.protocol.signing import SignedAuth
from tests.diloco.test_meeting import ABOUT, start, terms

RUN = "run-0123456789abcdef"


class Served:
    """A meeting on a port of loopback, in a thread; `kill` ends it without a word."""

    def __init__(self, folder: Path, agreed_terms: Terms) -> None:
        self.folder, self.terms = folder, agreed_terms
        self.identity = Identity.load_or_create(folder / "identity.pem")
        self.start()

    def start(self) -> None:
        self.stopping, ready = threading.Event(), threading.Event()

        async def live() -> None:
            self.meeting = Meeting(self.folder, self.terms, ABOUT, RUN, lambda: Agreed.of(start(), self.terms.shapes))
            server = MeetingServer(self.meeting, self.identity)
            runner, self.port = await serve(server, "127.0.0.1", 0, self.folder / "port")
            ready.set()
            try:
                await server.live(self.stopping.is_set)
            finally:
                await runner.cleanup()

        self.thread = threading.Thread(target=asyncio.run, args=(live(),), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def kill(self) -> None:
        self.stopping.set()
        self.thread.join(30)

    def invite(self, name: str) -> Invite:
        return site_invite(self.identity, f"http://127.0.0.1:{self.port}", RUN, name)


@contextmanager
def served(folder: Path, agreed_terms: Terms) -> Iterator[Served]:
    host = Served(folder, agreed_terms)
    try:
        yield host
    finally:
        host.kill()


class Trainee:
    """A site that trains by adding random numbers, in a thread of its own."""

    def __init__(self, host: Served, name: str, folder: Path) -> None:
        self.remote = Remote(host.invite(name), folder / name, host.terms, patience_s=20.0)
        self.tensors = start()
        self.site = Site(name, host.terms, Agreed.of(self.tensors, host.terms.shapes))
        self.draw = torch.Generator().manual_seed(ord(name[-1]))
        self.history: list[str] = []

    def join(self) -> None:
        self.remote.join(Greeting(about=ABOUT, placed=True))
        self.site.adopt(self.tensors, *self.remote.state("joins"))

    def rounds(self, count: int) -> None:
        for _ in range(count):
            for tensor in self.tensors.values():
                tensor += torch.randn(tensor.shape, generator=self.draw) * 0.01
            digest, data = self.site.offer(self.tensors)
            outcome, average = meet(self.remote, self.site.round, digest, data, SILENT, give_up_s=20.0)
            self.site.apply(self.tensors, outcome, average)
            self.history.append(outcome.digest)


def at_once(*calls: Any) -> None:
    failures: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


def test_sites_agree_over_http_through_a_killed_and_restarted_meeting(tmp_path: Path) -> None:
    with served(tmp_path / "meet", terms(sites=2, rounds=6)) as host:
        a, b = (Trainee(host, name, tmp_path) for name in ("site-a", "site-b"))
        for each in (a, b):
            each.join()
        at_once(lambda: a.rounds(2), lambda: b.rounds(2))
        assert a.history == b.history and len(set(a.history)) == 2

        def restart() -> None:
            while not host.meeting.offers:  # one offer is in memory only, and is lost
                time.sleep(0.01)
            host.kill()
            host.start()
            at_once(lambda: b.rounds(2))

        at_once(lambda: a.rounds(2), restart)
        assert a.history == b.history
        assert host.meeting.round == 4
        c = Trainee(host, "site-c", tmp_path)
        c.join()
        assert c.site.round == 4 and c.site.agreed.digest == a.site.agreed.digest

        def after_c(site: Trainee) -> None:
            while "site-c" not in host.meeting.offers:  # a newcomer is not waited for in its first round
                time.sleep(0.01)
            site.rounds(2)

        at_once(lambda: after_c(a), lambda: after_c(b), lambda: c.rounds(2))
        assert a.history == b.history and c.history == a.history[4:]
        for each in (a, b, c):
            each.remote.leave()
        host.thread.join(10)  # over, and everybody left
        assert not host.thread.is_alive()


def test_a_site_that_was_late_once_counts_again_although_it_is_no_faster_than_the_others(tmp_path: Path) -> None:
    with served(tmp_path / "meet", terms(sites=2, wait_s=60.0)) as host:
        a, b = (Trainee(host, name, tmp_path) for name in ("site-a", "site-b"))
        for each in (a, b):
            each.join()
        at_once(lambda: a.rounds(1), lambda: b.rounds(1))

        def passes_without_b() -> None:
            while "site-a" not in host.meeting.offers:
                time.sleep(0.01)
            host.meeting.clock = lambda: time.monotonic() + 60.0

        at_once(lambda: a.rounds(1), passes_without_b)
        host.meeting.clock = time.monotonic
        assert host.meeting.outcomes[1].missing == ["site-b"]

        with pytest.raises(RoundClosedError, match="round 1 is over; round 2 is open"):
            b.rounds(1)
        b.site.adopt(b.tensors, *b.remote.state("its round was over"))
        a.rounds(1)  # the round that was open when b came back waits for nobody
        with pytest.raises(RoundClosedError, match="round 2 is over; round 3 is open"):
            b.rounds(1)
        b.site.adopt(b.tensors, *b.remote.state("its round was over"))

        def after_a() -> None:
            while not host.meeting.offers and host.meeting.round == 3:
                time.sleep(0.01)
            b.rounds(1)

        at_once(lambda: a.rounds(1), after_a)
        assert host.meeting.outcomes[3].kept == ["site-a", "site-b"]
        restarted = Meeting(tmp_path / "meet", host.terms, ABOUT, RUN, lambda: pytest.fail("there is a state already"))
        assert restarted.members["site-b"].expected


def test_who_has_no_invite_of_this_meeting_is_told_so(tmp_path: Path) -> None:
    greeting = Greeting(about=ABOUT, placed=True)
    with served(tmp_path / "meet", terms()) as host:
        other = site_invite(Identity.generate(), "http://127.0.0.1:1", RUN, "site-x")
        forged = host.invite("site-x").model_copy(update={"signed": other.signed})
        remote = Remote(host.invite("site-x"), tmp_path / "x", host.terms, patience_s=5.0)
        remote.invite = forged
        with pytest.raises(MeetingError, match="the invite is not one of this meeting"):
            remote.join(greeting)
        with pytest.raises(MeetingError, match="only sites that joined with an invite"):
            remote.offer(0, "0" * 64, b"")
        Remote(host.invite("site-a"), tmp_path / "a", host.terms, patience_s=5.0).join(greeting)
        again = Remote(host.invite("site-a"), tmp_path / "another", host.terms, patience_s=5.0)
        with pytest.raises(MeetingError, match="the invite of site-a is used by another key"):
            again.join(greeting)
        url = f"http://127.0.0.1:{host.port}/v1/state"
        assert httpx.post(url, content=b"{}").status_code == 401
        auth = SignedAuth(Identity.generate(), RUN)
        assert httpx.post(url, content=b"{}", auth=auth).status_code == 403


def test_an_invite_of_another_meeting_or_kind_is_refused(tmp_path: Path) -> None:
    with served(tmp_path / "meet", terms()) as host:
        other = site_invite(Identity.generate(), f"http://127.0.0.1:{host.port}", RUN, "site-a")
        with pytest.raises(NodeError, match="it is signed by"):
            Remote(other, tmp_path / "a", host.terms, patience_s=0.3).join(Greeting(about=ABOUT, placed=True))
    told = {"url": "http://c:1", "run": RUN, "name": "w-0", "expires_s": 2_000_000_000}
    with pytest.raises(MeetingError, match="this is not an invite for a site: `shoal pool meet` writes them"):
        Remote(make_invite(Identity.generate(), role="worker", **told), tmp_path, terms(), patience_s=1.0)  # type: ignore[arg-type]


def test_bad_bytes_and_a_round_that_is_over_are_refused_with_the_reason(tmp_path: Path) -> None:
    with served(tmp_path / "meet", terms()) as host:
        a = Trainee(host, "site-a", tmp_path)
        a.join()
        digest = a.site.agreed.digest
        with pytest.raises(MeetingError, match="the offer of site-a for round 0 is malformed"):
            a.remote.offer(0, digest, b"x" * 100)
        with pytest.raises(MeetingError, match="at most"):
            a.remote.offer(0, digest, b"x" * 1_000_000)
        with pytest.raises(RoundClosedError, match="round 7 is over; round 0 is open"):
            a.remote.offer(7, digest, b"x")
        a.rounds(1)
        assert BadOfferError.status == 422


def test_a_changed_state_is_not_taken(tmp_path: Path) -> None:
    with served(tmp_path / "meet", terms()) as host:
        a = Trainee(host, "site-a", tmp_path)
        a.join()
        signed = host.meeting.state

        def changed() -> Any:
            described, path = signed()
            return described.model_copy(update={"sha256": "0" * 64}), path

        host.meeting.state = changed  # type: ignore[method-assign]
        with pytest.raises(MeetingError, match="is not the one that the meeting signed"):
            a.remote.state("test")


class Cutting(httpx.HTTPTransport):
    """Every other answer with a piece of the state breaks off in the middle. Notes which pieces were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if not request.url.path.startswith("/v1/state/"):
            return response
        self.asked.append(request.url.path.rpartition("/")[2])
        if len(self.asked) % 2:
            return response
        whole = response.read()

        def half() -> Iterator[bytes]:
            yield whole[: len(whole) // 2]
            raise httpx.ReadError("cut", request=request)

        return httpx.Response(response.status_code, headers=response.headers, content=half())


def test_a_state_comes_in_pieces_and_a_connection_that_breaks_costs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("remote", "serve"):
        monkeypatch.setattr(f"shoal.diloco.{module}.PIECE_BYTES", 1000)
    with served(tmp_path / "meet", terms()) as host:
        a = Trainee(host, "site-a", tmp_path)
        a.join()
        cutting = a.remote.node.client._transport = Cutting()
        round, data = a.remote.state("test")
        assert round == 0 and Agreed.from_bytes(data, host.terms.shapes).digest == a.site.agreed.digest
        pieces = [str(offset) for offset in range(0, len(data), 1000)]
        assert len(pieces) > 2 and sorted(set(cutting.asked), key=int) == pieces
        assert len(cutting.asked) == len(pieces) + len(cutting.asked) // 2  # each cut is one piece more


def test_a_state_that_is_never_whole_within_a_round_is_an_error(tmp_path: Path) -> None:
    with served(tmp_path / "meet", terms()) as host:
        a = Trainee(host, "site-a", tmp_path)
        a.join()
        piece = a.remote._piece

        def late(round: int, at_bytes: int) -> bytes:
            a.rounds(1)
            return piece(round, at_bytes)

        a.remote._piece = late  # type: ignore[method-assign]
        with pytest.raises(MeetingError, match="3 times a round ended before the state had come"):
            a.remote.state("test")
        assert host.meeting.round == 3


def test_a_full_disk_ends_the_meeting_with_its_message_and_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path / "meet", terms(rounds=2)) as host:
        a = Trainee(host, "site-a", tmp_path)
        a.join()
        a.rounds(1)
        ended: list[BaseException] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))

        def full(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device", str(path))

        with monkeypatch.context() as patch:
            patch.setattr("shoal.diloco.archive.write_file", full)
            at_most = threading.Thread(target=a.rounds, args=(1,), daemon=True)
            at_most.start()
            host.thread.join(20)
        assert isinstance(ended[0], OSError) and ended[0].errno == 28
        host.start()
        at_most.join(30)
        assert len(a.history) == 2 and host.meeting.agreed.digest == a.site.agreed.digest
        lines = [json.loads(line) for line in (tmp_path / "meet" / "rounds.jsonl").read_text().splitlines()]
        assert lines[-1]["round"] == 1 and lines[-1]["digest"] == a.history[-1]


def test_a_stranger_gets_the_reason_and_loses_its_connection_and_a_site_keeps_its_own(tmp_path: Path) -> None:
    """Without lingering, what is left of a refused body would reset the connection under the answer."""
    with served(tmp_path / "meet", terms()) as host:
        site = Trainee(host, "site-a", tmp_path)
        site.join()
        site.rounds(1)
        pool = site.remote.node.client._transport._pool  # type: ignore[attr-defined]
        assert any(connection.is_idle() for connection in pool.connections)
        sent = [(b"POST /v1/state", b"{}"), (b"PUT /v1/rounds/0/" + b"0" * 64, bytes(16 << 20))]
        for request, body in sent:
            with socket.create_connection(("127.0.0.1", host.port), timeout=30) as stranger:
                stranger.sendall(request + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                answer = b""
                while piece := stranger.recv(4096):  # until the meeting closes it
                    answer += piece
            assert answer.startswith(b"HTTP/1.1 401") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_an_address_has_only_so_many_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.diloco.serve.CONNECTIONS_PER_ADDRESS", 3)
    with served(tmp_path / "meet", terms()) as host:
        idle = [socket.create_connection(("127.0.0.1", host.port), timeout=20) for _ in range(3)]
        with socket.create_connection(("127.0.0.1", host.port), timeout=20) as fourth:
            assert fourth.recv(1) == b""
        for each in idle:
            each.close()
