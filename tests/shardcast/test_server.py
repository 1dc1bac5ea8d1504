"""The server on real loopback sockets, over stores made by hand."""

import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from yarl import URL

from shoal.files import NewFile, temporary
from shoal.shardcast import connections
from shoal.shardcast.connections import LISTENER, LOG, PATIENCE, Patience, network
from shoal.shardcast.guard import Guard
from shoal.shardcast.manifest import Delta, FileEntry, Manifest, SignedManifest, Stream
from shoal.shardcast.server import app, serve
from shoal.shardcast.store import ShardStore

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
SHARD_BYTES = 10_000
CONTENT_BYTES = 34_567
NO_HASH = "0" * 64
PUBLICATION = "a" * 32


def content(size_bytes: int = CONTENT_BYTES, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def cut(data: bytes, shard_bytes: int) -> list[bytes]:
    return [data[i : i + shard_bytes] for i in range(0, len(data), shard_bytes)]


def stream(data: bytes, shard_bytes: int) -> Stream:
    shards = tuple(blake3(shard).hexdigest() for shard in cut(data, shard_bytes))
    return Stream(size_bytes=len(data), shard_size_bytes=shard_bytes, shards=shards)


def announce(store: ShardStore, version: int, data: bytes, shard_bytes: int = SHARD_BYTES) -> None:
    """The manifest of an anchor with a delta; no shards."""
    manifest = Manifest(
        run="test",
        publication=PUBLICATION,
        version=version,
        files=(FileEntry(path="model.safetensors", size_bytes=len(data)),),
        content=stream(data, shard_bytes),
        anchor=True,
        delta=Delta(parent=version - 1, parent_digest=NO_HASH, stream=stream(data[:15_000], SHARD_BYTES)),
        created_s=1.5,
    )
    store.add_manifest(version, SignedManifest.sign(manifest, KEY))


def put(path: Path, data: bytes) -> None:
    file = NewFile(path)
    file.write(0, data)
    file.commit()
    file.close()


def whole(folder: Path, version: int = 7, data: bytes | None = None, shard_bytes: int = SHARD_BYTES) -> ShardStore:
    """A store that holds all of one version."""
    store, data = ShardStore(folder), content() if data is None else data
    announce(store, version, data, shard_bytes)
    for index, shard in enumerate(cut(data, shard_bytes)):
        put(store.shard_path(version, "full", index), shard)
    for index, shard in enumerate(cut(data[:15_000], SHARD_BYTES)):
        put(store.shard_path(version, "delta", index), shard)
    return store


@asynccontextmanager
async def serving(store: ShardStore | Path, *, wait_s=2.0, guard=None, patience=PATIENCE):
    runner, port = await serve(app(store, wait_s=wait_s, guard=guard), patience=patience, shutdown_s=0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def fetch(url: str, **options):
    """(status, headers, body) of one request whose path is sent exactly as written."""
    method = options.pop("method", "GET")
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(url, encoded=True), **options) as response,
    ):
        return response.status, response.headers, await response.read()


def get(store, path: str, *, wait_s=0.1, **options):
    async def ask():
        async with serving(store, wait_s=wait_s) as url:
            return await fetch(url + path, **options)

    return asyncio.run(ask())


async def until(condition, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.01)


async def health(url: str, **options) -> dict:
    return json.loads((await fetch(f"{url}/healthz", **options))[2])


async def ask_raw(url: str, path: str, *, header: str = "", receive_bytes: int = 0) -> socket.socket:
    """A socket that has asked and reads nothing by itself. `receive_bytes` is its kernel's buffer."""
    raw = socket.socket()
    raw.setblocking(False)
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", URL(url).port))
    if path:
        await loop.sock_sendall(raw, f"GET {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
    return raw


# Whole files


def test_serves_exactly_the_bytes_of_the_store(tmp_path):
    store = whole(tmp_path)
    for path in ("versions.json", "v000007/manifest.json", "v000007/full/00003.shard", "v000007/delta/00001.shard"):
        status, _, body = get(store, "/" + path)
        assert (status, body) == (200, (tmp_path / path).read_bytes())


def test_byte_ranges(tmp_path):
    store = whole(tmp_path)
    shard = content()[SHARD_BYTES : 2 * SHARD_BYTES]
    for wanted, content_range, body in (
        ("10-19", "bytes 10-19/10000", shard[10:20]),
        ("9990-", "bytes 9990-9999/10000", shard[9990:]),
        ("9000-20000", "bytes 9000-9999/10000", shard[9000:]),
    ):
        answer = get(store, "/v000007/full/00001.shard", headers={"Range": f"bytes={wanted}"})
        assert (answer[0], answer[1]["Content-Range"], answer[2]) == (206, content_range, body)


@pytest.mark.parametrize(
    "wanted", ["bytes=5-4", "bytes=-", "bytes=-5", "bytes=a-b", "bytes=0-1,5-6", "lines=1-2", "", "bytes"]
)
@pytest.mark.parametrize("path", ["v000007/full/00001.shard", "v000007/manifest.json", "versions.json"])
def test_a_range_that_is_none_is_ignored(tmp_path, path, wanted):
    store = whole(tmp_path)
    status, headers, body = get(store, f"/{path}", headers={"Range": wanted})
    assert (status, "Content-Range" in headers, body) == (200, False, (store.path / path).read_bytes())


def test_a_range_past_the_end(tmp_path):
    store = whole(tmp_path)
    for shard in ("00001", "00003"):  # the second has not arrived
        store.shard_path(7, "full", 3).unlink(missing_ok=True)
        status, headers, _ = get(store, f"/v000007/full/{shard}.shard", headers={"Range": "bytes=10000-"})
        size_bytes = 10_000 if shard == "00001" else 4_567
        assert (status, headers["Content-Range"]) == (416, f"bytes */{size_bytes}")


@pytest.mark.parametrize("arrived", [True, False])
def test_the_etag_of_a_shard_is_its_hash(tmp_path, arrived):
    store, shard = whole(tmp_path), content()[:SHARD_BYTES]
    etag, path = f'"{blake3(shard).hexdigest()}"', "/v000007/full/00000.shard"
    if not arrived:
        store.shard_path(7, "full", 0).rename(temporary(store.shard_path(7, "full", 0)))
    part = {"Range": "bytes=10-19"}
    for headers, status, body in (
        ({}, 200, shard),
        (part, 206, shard[10:20]),
        (part | {"If-Range": etag}, 200, shard),  # a condition makes it the whole
    ):
        answer = get(store, path, headers=headers)
        assert (answer[0], answer[2]) == (status, body), headers
        assert answer[1]["ETag"] == etag


@pytest.mark.parametrize("path", ["v000007/full/00001.shard", "v000007/manifest.json", "versions.json"])
@pytest.mark.parametrize("wanted", ["bytes=5-9", "bytes=99999999-"])
def test_a_range_is_for_get_alone(tmp_path, path, wanted):
    store = whole(tmp_path)
    status, headers, _ = get(store, f"/{path}", method="HEAD", headers={"Range": wanted})
    size_bytes = (store.path / path).stat().st_size
    assert (status, headers["Content-Length"], "Content-Range" in headers) == (200, str(size_bytes), False)


def test_what_never_changes_may_be_cached_for_good(tmp_path):
    store = whole(tmp_path)
    caching = {path: get(store, path)[1]["Cache-Control"] for path in ("/versions.json", "/v000007/full/00000.shard")}
    assert caching["/versions.json"] == "no-cache"
    assert "immutable" in caching["/v000007/full/00000.shard"]


def test_caches_ask_for_a_manifest_again(tmp_path):
    """Also for a complete one: an origin that starts over publishes another one under the same name."""
    store = whole(tmp_path)

    async def ask():
        async with serving(store) as url:
            _, headers, _ = await fetch(f"{url}/v000007/manifest.json")
            again = await fetch(f"{url}/v000007/manifest.json", headers={"If-None-Match": headers["ETag"]})
            return headers["Cache-Control"], again[0]

    assert asyncio.run(ask()) == ("no-cache", 304)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v000008/manifest.json",
        "/v000008/full/00000.shard",
        "/v7/manifest.json",
        "/v0000007/manifest.json",
        "/v000007/",
        "/v000007/00000.shard",
        "/v000007/full/00004.shard",
        "/v000007/full/99999.shard",
        "/v000007/full/%D9%A0%D9%A0%D9%A0%D9%A0%D9%A0.shard",
        "/v000007/delta/00002.shard",
        "/v000007/other/00000.shard",
        "/v000007/full/.00000.shard.tmp",
        "/v000007/full/secret",
        "/secret",
        "/../secret",
        "/%2e%2e/secret",
        "/v000007/../../secret",
        "/v000007/..%2f..%2fsecret",
        "/v000007%2f..%2f..%2fsecret",
        "/v000007/%2e%2e/%2e%2e/secret",
        "/v000007/full/00000.shard%00",
        "//secret",
        "/readers",
    ],
)
def test_everything_else_is_not_found(tmp_path, path):
    store = whole(tmp_path / "store")
    for folder in (tmp_path, tmp_path / "store", tmp_path / "store/v000007/full"):
        (folder / "secret").write_text("secret")
    (tmp_path / "store/v000007/full/.00000.shard.tmp").write_text("secret")
    put(tmp_path / "store/v000007/full/00004.shard", b"secret")
    started_s = time.monotonic()
    status, _, body = get(store, path, wait_s=5)
    assert status == 404
    assert b"secret" not in body
    assert time.monotonic() - started_s < 4, "waited for something that will never come"


def test_a_part_that_the_version_lacks_is_not_found(tmp_path):
    store = ShardStore(tmp_path)
    manifest = Manifest(
        run="test",
        publication=PUBLICATION,
        version=7,
        files=(FileEntry(path="model", size_bytes=CONTENT_BYTES),),
        content=stream(content(), SHARD_BYTES),
        anchor=True,
        delta=None,
        created_s=1.5,
    )
    store.add_manifest(7, SignedManifest.sign(manifest, KEY))
    put(store.shard_path(7, "delta", 0), b"left over")
    assert get(store, "/v000007/delta/00000.shard", wait_s=5)[0] == 404


def test_a_version_that_is_asked_for_is_kept_and_others_are_not_remembered(tmp_path):
    store = whole(tmp_path)

    async def ask():
        async with serving(store) as url:
            await fetch(f"{url}/v000007/manifest.json")
            for version in range(8, 40):
                await fetch(f"{url}/v{version:06d}/manifest.json")

    asyncio.run(ask())
    assert list(store._requested_s) == [7]


@pytest.mark.parametrize("path", ["manifest.json", "full/00000.shard"])
def test_asking_for_headers_alone_keeps_no_version(tmp_path, path):
    store = whole(tmp_path)

    async def ask():
        async with serving(store) as url:
            assert (await fetch(f"{url}/v000007/{path}", method="HEAD"))[0] == 200

    asyncio.run(ask())
    assert store._requested_s == {}


def test_health_tells_versions_and_bytes_served(tmp_path):
    async def ask():
        async with serving(whole(tmp_path)) as url:
            for method in ("GET", "GET", "HEAD"):
                await fetch(f"{url}/v000007/full/00000.shard", method=method)
            return await health(url)

    facts = asyncio.run(ask())
    assert (facts["versions"], facts["served_bytes"], facts["connections_cut"]) == ([7], 20_000, 0)
    assert facts["connections"] >= 1


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has no choice of congestion control")
def test_accepted_connections_use_the_congestion_control_that_health_tells(tmp_path):
    async def ask():
        runner, port = await serve(application := app(whole(tmp_path)))
        try:
            raw = await ask_raw(f"http://127.0.0.1:{port}", "/versions.json")
            facts = await health(f"http://127.0.0.1:{port}")
            accepted = application[LISTENER].open[raw.getsockname()]
            raw.close()
            return facts["congestion"], accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        finally:
            await runner.cleanup()

    facts, used = asyncio.run(ask())
    assert used.rstrip(b"\0").decode() == facts
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            return  # not to be had here: whatever the system uses is right
    assert facts == "bbr"


# Shards still to come


def test_a_named_shard_that_has_not_begun_is_waited_for_then_503(tmp_path):
    store = whole(tmp_path)
    store.shard_path(7, "full", 2).unlink()
    started_s = time.monotonic()
    status, headers, _ = get(store, "/v000007/full/00002.shard", wait_s=0.3)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert time.monotonic() - started_s > 0.3


def test_a_shard_is_sent_as_soon_as_it_has_its_name(tmp_path):
    store = ShardStore(tmp_path)
    announce(store, 7, content())

    async def ask():
        async with serving(store) as url:
            asked = asyncio.create_task(fetch(f"{url}/v000007/full/00002.shard"))
            await asyncio.sleep(0.2)
            assert not asked.done()
            put(store.shard_path(7, "full", 2), content()[20_000:30_000])
            return await asked

    assert asyncio.run(ask())[2] == content()[20_000:30_000]


def test_twenty_readers_get_the_bytes_of_a_shard_before_it_is_whole(tmp_path):
    store, data = ShardStore(tmp_path), content(900_000)
    announce(store, 7, data, shard_bytes=len(data))
    offsets = [0, 1, 499_999, *range(10, 27)]

    async def read(session, url, offset):
        """Reads what there is of the first half, says so, then the rest."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        async with session.get(f"{url}/v000007/full/00000.shard", headers=headers) as response:
            assert response.status == (206 if offset else 200)
            assert response.content_length == len(data) - offset
            first = await response.content.readexactly(500_000 - offset)
            assert not store.shard_path(7, "full", 0).exists()
            arrived.append(offset)
            return first + await response.read()

    async def ask():
        async with serving(store) as url, aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(read(session, url, offset)) for offset in offsets]
            await asyncio.sleep(0.05)  # they wait for it to begin
            file = NewFile(store.shard_path(7, "full", 0))
            for start in range(0, 500_000, 100_000):
                file.write(start, data[start : start + 100_000])
                await asyncio.sleep(0.01)
            await until(lambda: len(arrived) == len(offsets))
            file.write(500_000, data[500_000:])
            file.commit()
            file.close()
            return await asyncio.gather(*tasks), (await health(url))["served_bytes"]

    arrived: list[int] = []
    bodies, served_bytes = asyncio.run(ask())
    for offset, body in zip(offsets, bodies, strict=True):
        assert body == data[offset:]
    assert served_bytes == sum(len(data) - offset for offset in offsets)


def ends(tmp_path, what, *, wait_s=5.0) -> tuple[int, float]:
    """How many bytes of a shard a reader gets, and for how long it reads, when `what(store, file)` befalls it."""
    store, data = ShardStore(tmp_path), content(50_000)
    announce(store, 7, data, shard_bytes=len(data))
    file = NewFile(store.shard_path(7, "full", 0))
    file.write(0, data[:20_000])

    async def ask():
        async with (
            serving(store, wait_s=wait_s) as url,
            aiohttp.ClientSession() as session,
            session.get(f"{url}/v000007/full/00000.shard") as response,
        ):
            body = await response.content.readexactly(20_000)
            what(store, file)
            started_s = time.monotonic()
            with pytest.raises(aiohttp.ClientPayloadError):
                body += await response.content.read()
            assert body == data[: len(body)]
            return len(body), time.monotonic() - started_s

    return asyncio.run(ask())


def test_a_shard_begun_anew_ends_short(tmp_path):
    def begin_anew(store, file):
        file.truncate()
        file.write(0, b"other bytes" * 5_000)

    assert ends(tmp_path, begin_anew)[0] == 20_000


def test_a_shard_given_up_ends_short(tmp_path):
    assert ends(tmp_path, lambda store, file: file.close())[0] == 20_000


def test_a_shard_cut_in_place_ends_short(tmp_path):
    assert ends(tmp_path, lambda store, file: os.truncate(file.temporary, 0))[0] == 20_000


def test_a_version_dropped_while_it_arrives_ends_short(tmp_path):
    assert ends(tmp_path, lambda store, file: store.discard(7))[0] == 20_000


def test_a_shard_that_stops_growing_ends_short_after_wait_s(tmp_path):
    size_bytes, took_s = ends(tmp_path, lambda store, file: None, wait_s=0.4)
    assert size_bytes == 20_000
    assert 0.3 < took_s < 3


def test_a_whole_shard_is_sent_on_though_its_version_is_dropped(tmp_path):
    store, data = ShardStore(tmp_path), content(20_000_000)
    announce(store, 7, data, shard_bytes=len(data))
    temporary(store.shard_path(7, "full", 0)).parent.mkdir()
    temporary(store.shard_path(7, "full", 0)).write_bytes(data)

    async def ask():
        async with (
            serving(store) as url,
            aiohttp.ClientSession() as session,
            session.get(f"{url}/v000007/full/00000.shard") as response,
        ):
            await asyncio.sleep(0.1)
            store.discard(7)
            return await response.read()

    assert asyncio.run(ask()) == data


def test_readers_may_leave_before_a_shard_has_arrived(tmp_path, caplog):
    store, data = ShardStore(tmp_path), content(50_000)
    announce(store, 7, data, shard_bytes=len(data))
    file = NewFile(store.shard_path(7, "full", 0))
    file.write(0, data[:20_000])

    async def ask():
        async with serving(store) as url:
            for _ in range(3):
                raw = await ask_raw(url, "/v000007/full/00000.shard")
                await asyncio.get_running_loop().sock_recv(raw, 100)
                raw.close()
            await asyncio.sleep(0.1)
            file.write(20_000, data[20_000:])
            return await fetch(f"{url}/v000007/full/00000.shard"), await health(url)

    (status, _, body), facts = asyncio.run(ask())
    assert (status, body, facts["connections"]) == (200, data, 1)
    assert not caplog.records


def test_readers_may_leave_before_a_shard_has_begun(tmp_path, caplog):
    store = whole(tmp_path)
    store.shard_path(7, "full", 0).unlink()

    async def ask():
        async with serving(store) as url:
            (await ask_raw(url, "/v000007/full/00000.shard")).close()
            await asyncio.sleep(0.1)
            put(store.shard_path(7, "full", 0), content()[:SHARD_BYTES])
            await asyncio.sleep(0.2)
            return await health(url)

    facts = asyncio.run(ask())
    assert (facts["connections"], facts["served_bytes"]) == (1, 0)
    assert not caplog.records


def test_the_head_of_an_arriving_shard(tmp_path):
    store = ShardStore(tmp_path)
    announce(store, 7, content())
    NewFile(store.shard_path(7, "full", 0)).write(0, b"some")
    status, headers, body = get(store, "/v000007/full/00000.shard", method="HEAD")
    assert (status, headers["Content-Length"], headers["Cache-Control"], body) == (200, "10000", "no-store", b"")


# Readers that waste a connection


def test_the_body_that_a_reader_sends_is_not_read(tmp_path):
    """A relay that read bodies of 64 MiB to their end served its honest readers six times slower."""

    async def send():
        runner, port = await serve(app(whole(tmp_path)), shutdown_s=0.05)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /versions.json HTTP/1.1\r\nhost: s\r\ncontent-length: 67108864\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"405"
            with pytest.raises(ConnectionError):
                for _ in range(1024):
                    writer.write(bytes(1 << 16))
                    await writer.drain()
        finally:
            await runner.cleanup()

    asyncio.run(send())


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01" * 100, b"GET / HTTP/1.1\r\nx-a: " + bytes(100_000)], ids=["tls", "header"]
)
def test_what_is_not_http_is_refused_and_not_logged(tmp_path, caplog, sent):
    """Otherwise strangers fill the log, a hundred kilobytes at a time."""

    async def run():
        runner, port = await serve(app(whole(tmp_path)), shutdown_s=0.05)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent + b"\r\n\r\n")
            line = await reader.readline()
            writer.close()
            return line
        finally:
            await runner.cleanup()

    assert asyncio.run(run()).split()[1] == b"400"
    assert not caplog.records


@pytest.mark.parametrize(("error", "logged"), [(aiohttp.ClientConnectionResetError("left"), 0), (KeyError("ours"), 1)])
def test_a_reader_that_leaves_is_not_logged_and_a_fault_is(caplog, error, logged):
    LOG.error("Error handling request", exc_info=error)
    assert len(caplog.records) == logged


def endless(tmp_path) -> ShardStore:
    """One shard of 64 MB, more than kernels hold for a reader."""
    return whole(tmp_path, data=bytes(64 << 20), shard_bytes=64 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="what a reader takes is known on Linux only")
@pytest.mark.parametrize("shard", ["whole", "arriving"])
def test_a_reader_that_takes_nothing_is_cut(tmp_path, caplog, shard):
    store = endless(tmp_path)
    if shard == "arriving":
        store.shard_path(7, "full", 0).rename(temporary(store.shard_path(7, "full", 0)))

    async def ask():
        async with serving(store, patience=Patience(stall_s=0.5)) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port, limit=1000)
            writer.write(b"GET /v000007/full/00000.shard HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.transport.pause_reading()
            started_s = time.monotonic()
            while not (facts := await health(url))["connections_cut"]:
                assert time.monotonic() - started_s < 30
                await asyncio.sleep(0.05)
            took_s = time.monotonic() - started_s
            writer.transport.abort()
            for _ in range(5):  # on sockets that get the number of the one that was cut
                assert (await fetch(f"{url}/versions.json"))[0] == 200
            return facts, took_s

    facts, took_s = asyncio.run(ask())
    assert facts["served_bytes"] == 0
    assert took_s > 0.3
    assert not caplog.records


def watched(monkeypatch, taken_bytes, until_s: int = 10) -> int | None:
    """When a connection whose reader has taken `taken_bytes(second)` is found useless, if looked at each second."""
    patience = Patience(stall_s=2.0, slowest_Bps=1_000)
    listener = connections.Listener("127.0.0.1", 0, patience, per_address=1, total=1)
    ours, theirs = socket.socketpair()
    with (
        closing(listener),
        closing(theirs),
        closing(connections.ClientConnection(listener, ("", 0), ours.detach())) as held,
    ):
        held.requested, held.moved_s, held.since_s = True, 0.0, 0.0
        for second in range(1, until_s + 1):
            monkeypatch.setattr(connections, "_progress", lambda _, at=second: taken_bytes(at))
            if held.stalled(float(second), patience):
                return second
        return None


def test_a_reader_slower_than_the_slowest_allowed_is_cut_and_a_faster_one_is_not(monkeypatch):
    assert watched(monkeypatch, lambda second: 900 * second) == 2
    assert watched(monkeypatch, lambda second: 1_100 * second) is None


def test_a_reader_that_stalls_is_cut_and_one_that_has_all_it_asked_for_is_not(monkeypatch):
    assert watched(monkeypatch, lambda second: 9_000) == 3  # taken by the first look, and nothing since
    assert watched(monkeypatch, lambda second: None) is None
    assert watched(monkeypatch, lambda second: None if second < 5 else 9_000) == 7


def test_a_connection_that_does_not_ask_is_closed(tmp_path):
    async def ask():
        loop = asyncio.get_running_loop()
        async with serving(whole(tmp_path), patience=Patience(headers_s=0.3)) as url:
            silent, half = await ask_raw(url, ""), await ask_raw(url, "")
            await loop.sock_sendall(half, b"GET /versions.json HTTP/1.1\r\nHost: ")
            for raw in (silent, half):
                with suppress(ConnectionResetError):
                    assert await asyncio.wait_for(loop.sock_recv(raw, 10), 5) == b""
                raw.close()
            return await health(url)

    assert asyncio.run(ask())["connections_cut"] == 2


def test_an_idle_connection_is_closed(tmp_path):
    async def ask():
        async with serving(whole(tmp_path), patience=Patience(headers_s=0.2, idle_s=0.6)) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
            for _ in range(3):
                writer.write(b"GET /versions.json HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200" in await reader.readuntil(b"}")
                await asyncio.sleep(0.3)  # longer than headers_s: that was for the first request
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            return await health(url)

    assert asyncio.run(ask())["connections_cut"] == 0


def test_connections_of_one_address_and_in_total_are_bounded(tmp_path):
    async def ask(guard):
        async with serving(whole(tmp_path), guard=guard) as url:
            held = [await ask_raw(url, "/versions.json") for _ in range(5)]
            await asyncio.sleep(0.3)
            with pytest.raises(aiohttp.ClientError):
                await health(url)
            for raw in held:
                raw.close()
            await asyncio.sleep(0.3)
            return await health(url)

    for bounds in ({"connections": 3}, {"total_connections": 3}):
        facts = asyncio.run(ask(Guard(audience="test", **bounds)))
        assert facts["connections_refused"] >= 3  # two of the five, and the question
        assert facts["connections"] == 1


def test_one_client_is_an_ipv4_address_or_an_ipv6_network():
    assert network("192.0.2.7") == network("::ffff:192.0.2.7") == "192.0.2.7"
    assert network("2001:db8:1:2::7") == network("2001:db8:1:2:ffff::") == "2001:db8:1:2::"
    assert network("fe80::1%eth0") == "fe80::"


CROWDED = """
import asyncio, sys
from pathlib import Path
from shoal.shardcast.connections import Patience
from shoal.shardcast.guard import Guard
from shoal.shardcast.server import app, serve

async def main():
    guard = Guard(audience="test", connections=5000, total_connections=5000)
    patience = Patience(headers_s=60, stall_s=3.0)
    _, port = await serve(app(Path(sys.argv[1]), guard=guard), patience=patience)
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a reader takes is known on Linux only")
def test_a_crowd_of_idle_and_slow_readers_keeps_nothing_from_a_normal_one(tmp_path):
    data = content(16 << 20)
    store = whole(tmp_path, data=data, shard_bytes=8 << 20)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    server = subprocess.Popen([sys.executable, "-c", CROWDED, str(store.path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    process = psutil.Process(server.pid)

    async def sip(crowd):
        while True:
            for raw in crowd:
                with suppress(OSError):
                    raw.recv(5)
            await asyncio.sleep(0.5)

    async def ask(url):
        await health(url)
        before_bytes = process.memory_info().rss
        idle = [await ask_raw(url, "") for _ in range(1000)]
        slow = [await ask_raw(url, "/v000007/full/00000.shard", receive_bytes=4096) for _ in range(100)]
        sipping = asyncio.create_task(sip(slow))
        await asyncio.sleep(0.5)
        started_s = time.monotonic()
        body = b"".join([(await fetch(f"{url}/v000007/full/0000{index}.shard"))[2] for index in range(2)])
        took_s = time.monotonic() - started_s
        grown_bytes = process.memory_info().rss - before_bytes
        crowd = (await health(url))["connections"]
        while (facts := await health(url))["connections_cut"] < 100:
            assert time.monotonic() - started_s < 20, facts
            await asyncio.sleep(0.2)
        sipping.cancel()
        for raw in idle + slow:
            raw.close()
        return body, took_s, grown_bytes, crowd, facts

    try:
        body, took_s, grown_bytes, crowd, facts = asyncio.run(ask(f"http://127.0.0.1:{int(server.stdout.readline())}"))
    finally:
        server.kill()
        server.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert body == data
    assert took_s < 5
    assert grown_bytes < 50 << 20
    assert crowd > 1100
    assert facts["connections_cut"] == 100
