"""Which connections a server accepts, closes and resets, and how many it can hold."""

import asyncio
import gzip
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import aiohttp
import psutil
import pytest
from aiohttp import web
from yarl import URL

from shoal.files import temporary
from shoal.shardcast import Guard, connections
from shoal.shardcast.connections import LISTENER, LOG, PATIENCE, ClientConnection, Listener, Patience, network
from shoal.shardcast.server import CONNECTIONS, PER_ADDRESS, app, serve

from .raw import content, health, open_raw, request, whole
from .support import PUBLIC_KEY, RUN, serving

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only on Linux can a server see how many bytes its peer has acknowledged"
)


class Door:
    """A listener, and clients that connect to it."""

    def __init__(self, total: int, patience: Patience = PATIENCE, per_address: int = 100) -> None:
        self.listener = Listener("127.0.0.1", 0, patience, per_address=per_address, total=total)
        self.listener.listen()
        self.clients: list[socket.socket] = []

    def connect(self) -> ClientConnection:
        """Raise ConnectionAbortedError if the listener refuses."""
        self.clients.append(socket.create_connection(self.listener.getsockname(), timeout=10))
        connection, _ = self.listener.accept()
        assert isinstance(connection, ClientConnection)
        return connection

    def close(self) -> None:
        for each in [*self.clients, *self.listener.open.values(), self.listener]:
            each.close()


@pytest.fixture
def door() -> Iterator[Door]:
    opened = Door(total=3)
    yield opened
    opened.close()


# Too many connections


def test_at_the_limit_the_oldest_connection_without_a_request_is_reset(door):
    """If idle connections were kept, a few thousand idle clients could lock out every new node."""
    member, oldest, other = (door.connect() for _ in range(3))
    door.listener.note_request(member.peer)
    with pytest.raises(ConnectionAbortedError):
        door.connect()
    with suppress(ConnectionResetError):
        assert door.clients[1].recv(1) == b"", "the oldest connection without a request was not reset"
    assert oldest in door.listener.open.values(), "a connection that was reset must count until it is closed"
    oldest.close()
    newest = door.connect()
    assert list(door.listener.open.values()) == [member, other, newest]


def test_at_the_limit_a_new_connection_is_refused_if_all_others_sent_requests(door):
    for _ in range(3):
        door.listener.note_request(door.connect().peer)
    with pytest.raises(ConnectionAbortedError):
        door.connect()
    assert (door.listener.refused, door.listener.cut, len(door.listener.open)) == (1, 0, 3)


def test_closed_connections_do_not_count(door):
    for _ in range(10):
        door.connect().close()
    assert not door.listener.open and door.listener.cut == 0


@pytest.mark.parametrize(
    ("guard", "limits"),
    [(Guard(audience=RUN, pool_key=PUBLIC_KEY), (PER_ADDRESS, CONNECTIONS)), (None, (sys.maxsize, sys.maxsize))],
)
async def test_a_server_with_a_guard_limits_its_connections(tmp_path, monkeypatch, guard, limits):
    monkeypatch.setattr(connections, "affordable", lambda wanted: wanted)
    application = app(tmp_path, guard=guard)
    runner, _ = await serve(application)
    listener = application[LISTENER]
    assert (listener.per_address, listener.total) == limits
    await runner.cleanup()


def test_connections_of_one_address_are_bounded():
    with closing(Door(total=100, per_address=3)) as door:
        for _ in range(3):
            door.connect()
        with pytest.raises(ConnectionAbortedError):
            door.connect()
        assert (door.listener.refused, door.listener.cut, len(door.listener.open)) == (1, 0, 3)


def test_connections_are_counted_per_ipv4_address_or_ipv6_network():
    assert network("192.0.2.7") == network("::ffff:192.0.2.7") == "192.0.2.7"
    assert network("2001:db8:1:2::7") == network("2001:db8:1:2:ffff::") == "2001:db8:1:2::"
    assert network("fe80::1%eth0") == "fe80::"


# Idle and slow clients


async def test_a_frozen_server_does_not_blame_clients_for_its_own_delay():
    door = Door(total=3, patience=Patience(headers_s=0.5))
    watching = door.listener.watching(None)
    await anext(watching)
    try:
        connection = door.connect()
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - this blocks the event loop, so the server reads nothing
        await asyncio.sleep(0.1)
        assert connection in door.listener.open.values()
        async with asyncio.timeout(60):
            while connection in door.listener.open.values():
                await asyncio.sleep(0.1)
        assert door.listener.cut == 1, "the client must be reset when its own time is over"
    finally:
        await anext(watching, None)
        door.close()


async def test_a_connection_without_a_complete_request_is_closed(tmp_path):
    loop = asyncio.get_running_loop()
    async with serving(whole(tmp_path), patience=Patience(headers_s=0.3)) as url:
        silent, half = await open_raw(url), await open_raw(url)
        await loop.sock_sendall(half, b"GET /versions.json HTTP/1.1\r\nHost: ")
        for raw in (silent, half):
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(loop.sock_recv(raw, 10), 5) == b""
            raw.close()
        assert (await health(url))["connections_cut"] == 2


async def test_an_idle_connection_is_closed(tmp_path):
    async with serving(whole(tmp_path), patience=Patience(headers_s=0.2, idle_s=0.6)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
        for _ in range(3):
            writer.write(b"GET /versions.json HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await reader.readuntil(b"}")
            await asyncio.sleep(0.3)  # longer than headers_s, which only limits the first request
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert (await health(url))["connections_cut"] == 0


@linux_only
@pytest.mark.parametrize("shard", ["complete", "arriving"])
async def test_a_client_that_reads_nothing_is_reset(tmp_path, caplog, shard):
    store = whole(tmp_path, data=bytes(64 << 20), shard_bytes=64 << 20)  # larger than the kernel's buffers
    if shard == "arriving":
        store.shard_path(7, "full", 0).rename(temporary(store.shard_path(7, "full", 0)))
    async with serving(store, patience=Patience(stall_s=0.5)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port, limit=1000)
        writer.write(b"GET /v000007/full/00000.shard HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.pause_reading()
        started_s = time.monotonic()
        async with asyncio.timeout(30):
            while not (facts := await health(url))["connections_cut"]:
                await asyncio.sleep(0.05)
        assert facts["served_bytes"] == 0 and time.monotonic() - started_s > 0.3
        writer.transport.abort()
        for _ in range(5):  # new sockets reuse the file descriptor of the socket that was reset
            assert (await request(f"{url}/versions.json"))[0] == 200
    assert not caplog.records


def stalls_at(monkeypatch, taken_bytes, until_s: int = 10) -> int | None:
    """Return the second at which a connection counts as stalled if its peer has read `taken_bytes(second)`."""
    patience = Patience(stall_s=2.0, slowest_Bps=1_000)
    listener = Listener("127.0.0.1", 0, patience, per_address=1, total=1)
    ours, theirs = socket.socketpair()
    with closing(listener), closing(theirs), closing(ClientConnection(listener, ("", 0), ours.detach())) as held:
        held.requested, held.moved_s, held.since_s = True, 0.0, 0.0
        for second in range(1, until_s + 1):
            monkeypatch.setattr(connections, "_progress", lambda _, at=second: taken_bytes(at))
            if held.stalled(float(second), patience):
                return second
        return None


def test_a_client_that_reads_too_slowly_or_stops_counts_as_stalled(monkeypatch):
    assert stalls_at(monkeypatch, lambda second: 900 * second) == 2
    assert stalls_at(monkeypatch, lambda second: 1_100 * second) is None
    assert stalls_at(monkeypatch, lambda second: 9_000) == 3  # the peer has read nothing since the first check
    assert stalls_at(monkeypatch, lambda second: None) is None  # the peer has read everything
    assert stalls_at(monkeypatch, lambda second: None if second < 5 else 9_000) == 7


SERVER = """
import asyncio, resource, sys
from pathlib import Path
from shoal.shardcast.connections import Patience
from shoal.shardcast.server import app, serve

async def main():
    _, port = await serve(app(Path(sys.argv[1])), patience=Patience(headers_s=60, stall_s=3.0))
    print(port, flush=True)
    await asyncio.Event().wait()

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
asyncio.run(main())
"""


def start_server(folder, open_files: int) -> tuple[subprocess.Popen, int]:
    """Start a server in a process with this limit on open files. Return the process and its port."""
    command = [sys.executable, "-c", SERVER, str(folder), str(open_files)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, int(server.stdout.readline())


@pytest.mark.slow
@linux_only
async def test_many_idle_and_slow_readers_do_not_slow_a_normal_one(tmp_path):
    data = content(16 << 20)
    store = whole(tmp_path, data=data, shard_bytes=8 << 20)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    server, port = start_server(store.path, min(4096, limits[1]))
    process, url = psutil.Process(server.pid), f"http://127.0.0.1:{port}"

    async def sip(crowd):
        while True:
            for raw in crowd:
                with suppress(OSError):
                    raw.recv(5)
            await asyncio.sleep(0.5)

    try:
        await health(url)
        before_bytes = process.memory_info().rss
        idle = [await open_raw(url) for _ in range(1000)]
        slow = [await open_raw(url, "/v000007/full/00000.shard", receive_bytes=4096) for _ in range(100)]
        sipping = asyncio.create_task(sip(slow))
        await asyncio.sleep(0.5)
        started_s = time.monotonic()
        assert b"".join([(await request(f"{url}/v000007/full/0000{index}.shard"))[2] for index in range(2)]) == data
        assert time.monotonic() - started_s < 5
        assert process.memory_info().rss - before_bytes < 50 << 20
        assert (await health(url))["connections"] > 1100
        async with asyncio.timeout(20):
            while (await health(url))["connections_cut"] < 100:
                await asyncio.sleep(0.2)
        sipping.cancel()
        for raw in idle + slow:
            raw.close()
    finally:
        server.kill()
        server.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# Requests that are not served


async def test_a_request_body_is_not_read(tmp_path):
    """A relay that read such bodies (64 MiB) to the end would serve its honest readers six times slower."""
    async with serving(whole(tmp_path)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
        writer.write(b"POST /versions.json HTTP/1.1\r\nhost: s\r\ncontent-length: 67108864\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"405"
        with pytest.raises(ConnectionError):
            for _ in range(1024):
                writer.write(bytes(1 << 16))
                await writer.drain()


async def test_a_compressed_body_is_not_expanded():
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    application, sent = web.Application(), gzip.compress(bytes(100_000))
    application.router.add_post("/", echo)
    listener = Listener("127.0.0.1", 0, PATIENCE, per_address=9, total=9)
    runner = await connections.started(application, listener)
    try:
        async with aiohttp.ClientSession() as session:
            url, headers = f"http://127.0.0.1:{listener.getsockname()[1]}/", {"Content-Encoding": "gzip"}
            async with session.post(url, data=sent, headers=headers) as response:
                assert await response.read() == sent
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01" * 100, b"GET / HTTP/1.1\r\nx-a: " + bytes(100_000)], ids=["tls", "header"]
)
async def test_a_malformed_request_is_refused_and_not_logged(tmp_path, caplog, sent):
    """If such requests were logged, strangers could fill the log, a hundred kilobytes at a time."""
    async with serving(whole(tmp_path)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
        writer.write(sent + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
    assert not caplog.records


@pytest.mark.parametrize(("error", "logged"), [(aiohttp.ClientConnectionResetError("left"), 0), (KeyError("ours"), 1)])
def test_only_the_servers_own_errors_are_logged(caplog, error, logged):
    LOG.error("Error handling request", exc_info=error)
    assert len(caplog.records) == logged


# Congestion control, open files


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has only one congestion control")
async def test_accepted_connections_use_the_congestion_control_that_health_reports(tmp_path):
    runner, port = await serve(application := app(whole(tmp_path)))
    try:
        raw = await open_raw(f"http://127.0.0.1:{port}", "/versions.json")
        reported = (await health(f"http://127.0.0.1:{port}"))["congestion"]
        accepted = application[LISTENER].open[raw.getsockname()]
        raw.close()
        used = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    finally:
        await runner.cleanup()
    assert used.rstrip(b"\0").decode() == reported
    with socket.socket() as trial, suppress(OSError):  # without BBR, any congestion control is right
        trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        assert reported == "bbr"


@pytest.fixture
def soft_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_accepts_as_many_connections_as_its_file_limit_allows(soft_limit, caplog):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert connections.affordable(4096) == 448
    assert "accepts 448 connections instead of 4096" in caplog.text and "ulimit -n" in caplog.text
    caplog.clear()
    assert connections.affordable(100) == 100
    assert connections.affordable(sys.maxsize) == 448 and not caplog.messages


def test_raise_limit_raises_the_file_limit_to_the_hard_limit(soft_limit):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system has no limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    assert connections.raise_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def test_with_more_idle_connections_than_open_files_the_server_answers_and_logs_no_error(tmp_path):
    (tmp_path / "versions.json").write_text('{"versions":[]}')
    server, port = start_server(tmp_path, 256)
    try:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(300)]
        facts: dict[str, int] = {}
        for _ in range(20):  # retry, because the server refuses connections while it has too many
            with suppress(aiohttp.ClientError, TimeoutError):
                facts = await asyncio.wait_for(health(f"http://127.0.0.1:{port}"), 5)
                break
        assert 1 <= facts["connections"] <= (256 - connections.RESERVED) // 2
        for each in idle:
            each.close()
    finally:
        server.kill()
        _, errors = server.communicate()
    assert errors == ""
