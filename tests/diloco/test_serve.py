"""The meeting over real sockets: restarts, strangers, and the errors that sites get."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.diloco import serve
from shoal.diloco.agreed import Agreed
from shoal.diloco.messages import BadOfferError, Figures, Greeting, MeetingError, RoundClosedError, site_invite
from shoal.diloco.remote import Remote
from shoal.protocol.calling import NodeError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite
from shoal.protocol.signing import SignedAuth

from .support import ABOUT, RUN, RemoteTrainee, Trainee, at_once, served, terms


def test_sites_agree_over_http_although_the_meeting_is_killed_and_restarted(tmp_path):
    with served(tmp_path / "meet", terms(sites=2, rounds=6)) as host:
        a, b = (RemoteTrainee(host, name, tmp_path) for name in ("site-a", "site-b"))
        at_once(lambda: a.rounds(2), lambda: b.rounds(2))
        assert a.history == b.history and len(set(a.history)) == 2

        def restart() -> None:
            while not host.meeting.offers:  # wait for an offer, which will be lost because it is only in memory
                time.sleep(0.01)
            host.kill()
            host.start()
            at_once(lambda: b.rounds(2))

        at_once(lambda: a.rounds(2), restart)
        assert a.history == b.history
        assert host.meeting.round == 4
        c = RemoteTrainee(host, "site-c", tmp_path)
        assert c.site.round == 4 and c.site.agreed.digest == a.site.agreed.digest

        def after_c(site: Trainee) -> None:
            while "site-c" not in host.meeting.offers:  # a round that is open when a site joins does not wait for it
                time.sleep(0.01)
            site.rounds(2)

        at_once(lambda: after_c(a), lambda: after_c(b), lambda: c.rounds(2))
        assert a.history == b.history and c.history == a.history[4:]
        for each in (a, b, c):
            each.remote.leave()
        host.thread.join(10)  # ends because the run is over and all sites left
        assert not host.thread.is_alive()


def test_a_site_without_a_valid_invite_is_refused(tmp_path):
    greeting = Greeting(about=ABOUT, placed=True)
    with served(tmp_path / "meet", terms()) as host:
        other = site_invite(Identity.generate(), "http://127.0.0.1:1", RUN, "site-x")
        forged = host.invite("site-x").model_copy(update={"signed": other.signed})
        remote = Remote(host.invite("site-x"), tmp_path / "x", host.terms, patience_s=5.0)
        remote.invite = forged
        with pytest.raises(MeetingError, match="the invite was not made by this meeting"):
            remote.join(greeting)
        with pytest.raises(MeetingError, match="only sites that joined with an invite"):
            remote.offer(0, "0" * 64, b"", Figures())
        Remote(host.invite("site-a"), tmp_path / "a", host.terms, patience_s=5.0).join(greeting)
        again = Remote(host.invite("site-a"), tmp_path / "another", host.terms, patience_s=5.0)
        with pytest.raises(MeetingError, match="the invite of site-a is used by another key"):
            again.join(greeting)
        url = f"http://127.0.0.1:{host.port}/v1/state"
        assert httpx.post(url, content=b"{}").status_code == 401
        auth = SignedAuth(Identity.generate(), RUN)
        assert httpx.post(url, content=b"{}", auth=auth).status_code == 403


def test_an_invite_of_another_meeting_or_role_is_refused(tmp_path):
    with served(tmp_path / "meet", terms()) as host:
        other = site_invite(Identity.generate(), f"http://127.0.0.1:{host.port}", RUN, "site-a")
        with pytest.raises(NodeError, match="it is signed by"):
            Remote(other, tmp_path / "a", host.terms, patience_s=3.0).join(Greeting(about=ABOUT, placed=True))
    fields = {"url": "http://c:1", "run": RUN, "name": "w-0", "expires_s": 2_000_000_000}
    with pytest.raises(MeetingError, match="this is not an invite for a site: `shoal pool meet` writes site invites"):
        Remote(make_invite(Identity.generate(), role="worker", **fields), tmp_path, terms(), patience_s=1.0)  # type: ignore[arg-type]


def test_a_malformed_offer_or_one_for_another_round_is_refused_with_the_reason(tmp_path):
    with served(tmp_path / "meet", terms()) as host:
        a = RemoteTrainee(host, "site-a", tmp_path)
        digest = a.site.agreed.digest
        with pytest.raises(MeetingError, match="the offer of site-a for round 0 is malformed"):
            a.remote.offer(0, digest, b"x" * 100, Figures())
        with pytest.raises(RoundClosedError, match="round 7 is over; round 0 is open"):
            a.remote.offer(7, digest, b"x", Figures())
        a.rounds(1)
        assert BadOfferError.status == 422


def test_a_state_that_differs_from_its_descriptor_is_refused(tmp_path):
    with served(tmp_path / "meet", terms()) as host:
        a = RemoteTrainee(host, "site-a", tmp_path)
        signed = host.meeting.state

        def changed() -> Any:
            descriptor, path = signed()
            return descriptor.model_copy(update={"sha256": "0" * 64}), path

        host.meeting.state = changed  # type: ignore[method-assign]
        with pytest.raises(MeetingError, match="is not the one that the meeting signed"):
            a.remote.state("test")


class Cutting(httpx.HTTPTransport):
    """Cut short every other response that carries a piece of the state. Record the requested pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if not request.url.path.startswith("/v1/state/"):
            return response
        self.requests.append(request.url.path.rpartition("/")[2])
        if len(self.requests) % 2:
            return response
        whole = response.read()

        def half() -> Iterator[bytes]:
            yield whole[: len(whole) // 2]
            raise httpx.ReadError("cut", request=request)

        return httpx.Response(response.status_code, headers=response.headers, content=half())


def test_a_state_is_fetched_in_pieces_and_a_broken_connection_costs_only_one_piece(tmp_path, monkeypatch):
    for module in ("remote", "serve"):
        monkeypatch.setattr(f"shoal.diloco.{module}.PIECE_BYTES", 1000)
    with served(tmp_path / "meet", terms()) as host:
        a = RemoteTrainee(host, "site-a", tmp_path)
        cutting = a.remote.node.client._transport = Cutting()
        round, data = a.remote.state("test")
        assert round == 0 and Agreed.from_bytes(data, host.terms.shapes).digest == a.site.agreed.digest
        pieces = [str(offset) for offset in range(0, len(data), 1000)]
        assert len(pieces) > 2 and sorted(set(cutting.requests), key=int) == pieces
        assert len(cutting.requests) == len(pieces) + len(cutting.requests) // 2  # each cut costs one more piece


def test_downloading_the_state_more_slowly_than_rounds_end_is_an_error(tmp_path):
    with served(tmp_path / "meet", terms()) as host:
        a = RemoteTrainee(host, "site-a", tmp_path)
        piece = a.remote._piece

        def late(round: int, at_bytes: int) -> bytes:
            a.rounds(1)
            return piece(round, at_bytes)

        a.remote._piece = late  # type: ignore[method-assign]
        with pytest.raises(MeetingError, match="3 times a round ended before the state was downloaded"):
            a.remote.state("test")
        assert host.meeting.round == 3


def test_only_one_thread_at_a_time_uses_the_meeting(tmp_path, monkeypatch):
    """The event loop must not read the members, because a thread may change them."""
    with served(tmp_path / "meet", terms(sites=2, rounds=1)) as host:
        monkeypatch.setattr(serve, "POLL_S", 0.0)
        users: dict[str, set[threading.Thread]] = {"due": set(), "waiting_for": set(), "expected": set()}

        def watched(name: str, real: Any) -> Any:
            return lambda: (users[name].add(threading.current_thread()), real())[1]

        for name, owner in zip(users, (host.meeting, host.meeting, host.meeting.members), strict=True):
            monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
        a, b = (RemoteTrainee(host, name, tmp_path) for name in ("site-a", "site-b"))
        at_once(lambda: a.rounds(1), lambda: b.rounds(1))
        for each in (a, b):
            each.remote.leave()
        host.thread.join(10)
        assert not host.thread.is_alive()
        assert all(users.values()) and not any(host.thread in threads for threads in users.values())


def test_a_meeting_whose_port_was_taken_takes_a_free_one(tmp_path):
    folder = tmp_path / "meet"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        (folder / "port").write_text(str(taken))
        with served(folder, terms()) as host:
            assert host.port != taken


def test_a_full_disk_ends_the_meeting_and_a_restart_continues(tmp_path, monkeypatch):
    with served(tmp_path / "meet", terms(rounds=2)) as host:
        a = RemoteTrainee(host, "site-a", tmp_path)
        a.rounds(1)
        ended: list[BaseException] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))

        def full(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device", str(path))

        with monkeypatch.context() as patch:
            patch.setattr("shoal.diloco.archive.write_file", full)
            training = threading.Thread(target=a.rounds, args=(1,), daemon=True)
            training.start()
            host.thread.join(20)
        assert isinstance(ended[0], OSError) and ended[0].errno == 28
        host.start()
        training.join(30)
        assert len(a.history) == 2 and host.meeting.agreed.digest == a.site.agreed.digest
        lines = [json.loads(line) for line in (tmp_path / "meet" / "rounds.jsonl").read_text().splitlines()]
        assert lines[-1]["round"] == 1 and lines[-1]["digest"] == a.history[-1]


def test_a_stranger_gets_the_reason_before_its_connection_is_closed_and_sites_keep_theirs(tmp_path):
    """Unread bytes of a refused body would otherwise reset the connection before the answer is read."""
    with served(tmp_path / "meet", terms()) as host:
        site = RemoteTrainee(host, "site-a", tmp_path)
        site.rounds(1)
        pool = site.remote.node.client._transport._pool  # type: ignore[attr-defined]
        assert any(connection.is_idle() for connection in pool.connections)
        sent = [(b"POST /v1/state", b"{}"), (b"PUT /v1/rounds/0/" + b"0" * 64, bytes(16 << 20))]
        for request, body in sent:
            with socket.create_connection(("127.0.0.1", host.port), timeout=30) as stranger:
                stranger.sendall(request + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                answer = b""
                while piece := stranger.recv(4096):  # until the meeting closes the connection
                    answer += piece
            assert answer.startswith(b"HTTP/1.1 401") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_connections_per_address_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.diloco.serve.CONNECTIONS_PER_ADDRESS", 3)
    with served(tmp_path / "meet", terms()) as host:
        idle = [socket.create_connection(("127.0.0.1", host.port), timeout=20) for _ in range(3)]
        with socket.create_connection(("127.0.0.1", host.port), timeout=20) as fourth:
            assert fourth.recv(1) == b""
        for each in idle:
            each.close()
