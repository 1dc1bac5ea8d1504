"""Malicious servers: they send too much, nonsense, nothing, or a byte at a time."""

import asyncio
import json
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from shoal.shardcast import Client, FetchError, ManifestError, SignedManifest
from shoal.shardcast import manifest as manifest_module
from shoal.shardcast.fetch import BadData, SourceError
from shoal.shardcast.fetch import client as client_module
from shoal.shardcast.fetch import source as source_module
from shoal.shardcast.fetch.download import Sources
from shoal.shardcast.manifest import MAX_LISTING_BYTES, Listing

from .support import (
    OTHER_KEY,
    PUBLIC_KEY,
    SHARD_BYTES,
    access,
    answering,
    between,
    client,
    contents,
    mirroring,
    model_folder,
    origin,
    published,
    relay,
    serving,
    until,
    weights_folder,
)

FLOOD_BYTES = 31 << 20
Talk = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def flood(opening: bytes, item: bytes) -> bytes:
    return opening + item * ((FLOOD_BYTES - len(opening)) // len(item))


VERSIONS = flood(b'{"versions": [', b"1, ") + b"1]}"
LISTS = flood(b'{"versions": [', b"[],") + b"1]}"
MANIFEST = flood(b'{"manifest":[', b"[],") + b"1]}"


@asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[str]:
    """Run a raw TCP server: `talk` gets the requested path and writes the response."""

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await talk(head.split(" ")[1], writer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(visit, "127.0.0.1")
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def plain(body: bytes, size_bytes: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) if size_bytes is None else size_bytes) + body


# Too much


@pytest.mark.parametrize(
    ("listing", "manifest"), [(VERSIONS, b""), (LISTS, b""), (b'{"versions":[9,8,7,6,5]}', MANIFEST)]
)
@pytest.mark.parametrize("sized", [True, False])
async def test_huge_answers_cost_a_reader_little_memory(tmp_path, listing, manifest, sized):
    published(tmp_path, 7)

    async def answer(request):
        if request.path.endswith(".shard"):
            return web.Response(status=404)
        body = listing if request.path == "/versions.json" else manifest
        if sized:
            return web.Response(body=body)
        response = web.StreamResponse()  # this response has chunks and no Content-Length
        with suppress(ConnectionError):
            await response.prepare(request)
            for at in range(0, len(body), 1 << 20):
                await response.write(body[at : at + (1 << 20)])
        return response

    async with serving(tmp_path / "origin") as good, answering(answer) as rogue:
        settings = json.dumps({"tmp_path": str(tmp_path), "urls": [rogue, good], "times": 4})
        script = str(Path(__file__).parent / "process.py")
        reader = await asyncio.create_subprocess_exec(
            sys.executable, script, "reader", settings, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            facts = json.loads((await reader.communicate())[0])
    assert facts["version"] == 7
    assert facts["grew_kib"] < 100 << 10


async def failing(server, *, ask=lambda sources: sources.sources[0].listing(), **limits) -> tuple[Exception, int]:
    """Query a server with `ask`, by default for its listing. Return the error, and the number of bytes received."""
    async with server as url, Sources.open(access(**limits), [url]) as sources:
        with pytest.raises(SourceError) as raised:
            await ask(sources)
        return raised.value, sources.received_bytes


async def test_a_listing_is_read_no_further_than_its_limit():
    async def endless(path, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b" " * 65_536)
            await writer.drain()

    async def announced_length(path, writer):
        writer.write(plain(b" " * 1_000, MAX_LISTING_BYTES + 1))

    for talk, max_bytes in ((endless, 2 * MAX_LISTING_BYTES), (announced_length, 0)):
        error, received_bytes = await failing(talking(talk))
        assert isinstance(error, BadData) and received_bytes <= max_bytes


def test_the_largest_listing_fits():
    full = Listing(versions=tuple(range(999_999_999, 999_989_999, -1)), path=("0123456789abcdef",) * 64)
    assert len(full.model_dump_json()) < MAX_LISTING_BYTES - 1_500  # the rest of the limit is for `newest`


@pytest.mark.parametrize("what", ["headers", "trailers", "interim answers", "a status line", "a chunk's extension"])
async def test_endless_responses_use_little_memory(what):
    openings = {
        "headers": b"HTTP/1.1 200 OK\r\n",
        "trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        "interim answers": b"",
        "a status line": b"HTTP/1.1 200 ",
        "a chunk's extension": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
    }
    more = {"a status line": b"a" * 1_000, "a chunk's extension": b"a" * 1_000}
    more |= {"interim answers": b"HTTP/1.1 100 Continue\r\n\r\n"}

    async def endless(path, writer):
        writer.write(openings[what])
        number = 0
        while True:
            number += 1
            writer.write(more.get(what, b"X-%d: a\r\n" % number))
            await writer.drain()
            await asyncio.sleep(0)

    tracemalloc.start()
    try:
        await failing(talking(endless), answer_timeout_s=0.5)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        b'{"manifest":[1],"key":"%s","signature":"%s"}' % (b"0" * 64, b"0" * 128),
        b'{"manifest":"a","manifest":["b"],"key":"%s","signature":"%s"}' % (b"0" * 64, b"0" * 128),
        b'{"manifest":"\\ud800","key":"%s","signature":"%s"}' % (b"0" * 64, b"0" * 128),
        b'{"manifest":"\xff","key":"%s","signature":"%s"}' % (b"0" * 64, b"0" * 128),
        b'{"manifest":"","key":"%s","signature":"%s"} ' % (b"0" * 64, b"0" * 128),
        b'{"manifest":',
        b"",
    ],
)
def test_a_signed_manifest_in_another_form_is_malformed(body):
    with pytest.raises(ManifestError, match="malformed"):
        SignedManifest.parse(body)


def test_parsing_a_signed_manifest_takes_memory_in_proportion_to_its_size(tmp_path):
    body = b'{"manifest":[%s1],"key":"%s","signature":"%s"}' % (b"[]," * 1_000_000, b"0" * 64, b"0" * 128)
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError) as raised:
            SignedManifest.parse(body)
        assert raised.value.__context__ is None
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


def test_a_manifest_too_large_for_readers_is_not_published(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 500)
    with pytest.raises(ManifestError, match="readers accept at most 500"):
        published(tmp_path, 7)


async def test_a_large_manifest_is_opened_in_a_thread(tmp_path, monkeypatch):
    store = published(tmp_path, 7).store
    opened_by: list[int] = []
    real = SignedManifest.open

    def recording(self, *arguments, **options):
        opened_by.append(threading.get_ident())
        return real(self, *arguments, **options)

    monkeypatch.setattr(SignedManifest, "open", recording)
    async with serving(store) as url, Sources.open(access(), [url]) as sources:
        for limit_bytes in (1 << 20, 100):
            monkeypatch.setattr(source_module, "LARGE_BYTES", limit_bytes)
            await sources.sources[0].manifest(7)
    loop = threading.get_ident()
    assert opened_by[0] == loop and opened_by[1] != loop


async def test_a_server_is_not_queried_again_after_one_bad_manifest(tmp_path):
    """Otherwise it could make the reader download a manifest of maximum size for every version that it lists."""
    forged = SignedManifest.sign(published(tmp_path, 7).store.signed(7).open(PUBLIC_KEY), OTHER_KEY).to_bytes()
    requests: list[str] = []

    async def answer(request):
        requests.append(request.path)
        return web.Response(body=b'{"versions":[9,8,7,6,5]}' if request.path == "/versions.json" else forged)

    async with serving(tmp_path / "origin") as good, answering(answer) as rogue:
        reader = client(tmp_path, rogue, good)
        for _ in range(5):
            assert (await asyncio.to_thread(reader.latest)).version == 7
    assert len(requests) <= 2


async def test_a_relay_does_not_query_again_a_server_that_answers_badly(tmp_path):
    published(tmp_path, 7)
    requests: list[str] = []

    async def answer(request):
        requests.append(request.path)
        return web.Response(body=b'{"versions":')

    async with (
        serving(tmp_path / "origin") as good,
        answering(answer) as rogue,
        mirroring(relay(tmp_path, rogue, good)) as mirror,
    ):
        await until(lambda: mirror.status.versions == [7])
        before = mirror.access.standings[good].answer_s()
        await until(lambda: mirror.access.standings[good].answer_s() != before)
    assert len(requests) == 1


async def test_a_server_that_answered_badly_is_queried_if_no_other_answers(tmp_path):
    published(tmp_path, 7)
    bad = iter([True])

    def change(path, data):
        return b"" if next(bad, False) else data

    async with serving(tmp_path / "origin") as up, between(up, change=change) as once:
        reader = client(tmp_path, once.url)
        with pytest.raises(FetchError, match="malformed"):
            await asyncio.to_thread(reader.latest)
        assert (await asyncio.to_thread(reader.fetch))[1].version == 7


async def test_a_server_with_another_digest_of_the_version_is_not_suspect(tmp_path):
    published(tmp_path, 7)
    async with serving(tmp_path / "origin") as behind:
        reader = client(tmp_path, behind)
        with pytest.raises(FetchError, match="expected 1111"):
            await asyncio.to_thread(reader.fetch, 7, digest="1" * 64)
        assert not reader.access.standings[behind].suspect()


async def test_a_server_cannot_set_cookies_for_others_on_its_host():
    seen: list[str] = []

    async def answer(request):
        seen.append(request.headers.get("Cookie", ""))
        return web.json_response({"versions": []}, headers={"Set-Cookie": "filler=" + "a" * 4_000})

    async with answering(answer) as one, answering(answer) as two:
        urls = [url.replace("127.0.0.1", "localhost") for url in (one, two)]
        async with Sources.open(access(), urls) as sources:
            for source in sources.sources:
                await source.listing()
    assert seen == ["", ""]


# A URL that nobody can connect to

BAD_URLS = ["http://a\\b:80", "http://a..b:80", f"http://{'a' * 64}:80"]


@pytest.mark.parametrize("bad", BAD_URLS)
async def test_a_bad_url_that_the_pool_announces_stops_neither_clients_nor_relays(tmp_path, bad):
    published(tmp_path, 7)
    async with serving(tmp_path / "origin") as up:
        announced = replace(access(), reach="local")
        reader = Client([bad, up], announced, tmp_path / "cache", relays=lambda: [bad, up])
        folder, _ = await asyncio.to_thread(reader.fetch, 7)
        assert contents(folder) == contents(tmp_path / "model7")
        mirror = relay(tmp_path)
        mirror.access, mirror.upstream = announced, lambda: [bad, up]
        async with mirroring(mirror):
            await until(lambda: mirror.status.versions == [7])


async def test_an_unsupported_proxy_costs_only_the_announced_relays_that_need_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy:1080")
    published(tmp_path, 7)
    async with serving(tmp_path / "origin") as up:
        reader = Client(["https://relay.invalid", up], replace(access(), reach="local"), tmp_path / "cache")
        await asyncio.to_thread(reader.fetch, 7)


@pytest.mark.parametrize("make", [client, relay])
def test_a_bad_url_that_the_user_types_is_refused_at_once(tmp_path, make):
    with pytest.raises(FetchError, match="is not the URL of a server: write http://HOST:PORT"):
        make(tmp_path, BAD_URLS[0])


# Nothing, or too slowly


def trickle(store: Path, how: str) -> Talk:
    """Serve genuine listings and manifests, but no complete response with a shard."""

    async def talk(path, writer):
        file = store / path.lstrip("/").partition("?")[0]
        if not file.name.endswith(".shard"):
            writer.write(plain(file.read_bytes()))
            return
        data = file.read_bytes()
        if how == "accepts":
            await asyncio.sleep(3_600)
        elif how == "only headers":
            writer.write(plain(b"", len(data)))
        elif how == "a header byte at a time":
            for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Padding: a\r\n" * 1_000_000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
        elif how == "a byte at a time":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for byte in data:
                writer.write(b"1\r\n%c\r\n" % byte)
                await writer.drain()
                await asyncio.sleep(0.02)
        elif how == "an empty body":
            writer.write(plain(b""))
            return
        elif how == "all but the last byte, each time":
            writer.write(plain(data[:-1], len(data)))
            await writer.drain()
        elif how == "all bytes of a longer body":
            writer.write(plain(data, len(data) + 1))
            await asyncio.sleep(3_600)
        elif how == "all bytes of an endless body":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))
            await asyncio.sleep(3_600)
        writer.close()
        raise ConnectionResetError

    return talk


HOWS = [
    "accepts",
    "only headers",
    "a header byte at a time",
    "a byte at a time",
    "an empty body",
    "all but the last byte, each time",
]
QUICK = {"idle_timeout_s": 0.3, "answer_timeout_s": 0.3, "patience_s": 0.5}


@pytest.mark.parametrize("how", HOWS)
async def test_if_a_server_does_not_deliver_the_fetch_fails_and_names_the_server(tmp_path, how, monkeypatch):
    monkeypatch.setattr(client_module, "STALL_S", 1.0)
    published(tmp_path, 7)
    async with talking(trickle(tmp_path / "origin", how)) as rogue:
        reader = client(tmp_path, rogue, limits=QUICK, timeout_s=25.0)
        with pytest.raises(FetchError) as raised:
            await asyncio.to_thread(reader.fetch)
        assert rogue in str(raised.value)
        assert "deadline" not in str(raised.value), "the fetch ended only at the deadline"


async def test_a_shard_may_take_longer_than_answer_timeout_s(tmp_path):
    published(tmp_path, 7)
    async with serving(tmp_path / "origin") as up, between(up, rate_Bps=10_000) as slow:
        reader = client(tmp_path, slow.url, limits={"answer_timeout_s": 0.5})
        await asyncio.to_thread(reader.fetch)
        assert not reader.progress.complaints


@pytest.mark.parametrize("how", HOWS)
async def test_a_fetch_continues_at_another_server(tmp_path, how):
    published(tmp_path, 7)
    async with talking(trickle(tmp_path / "origin", how)) as rogue, serving(tmp_path / "origin") as good:
        reader = client(tmp_path, rogue, good, limits=QUICK, timeout_s=60.0)
        assert contents((await asyncio.to_thread(reader.fetch))[0]) == contents(tmp_path / "model7")


@pytest.mark.parametrize("how", HOWS)
async def test_a_relay_gives_up_a_version_that_never_arrives(tmp_path, how):
    published(tmp_path, 7)
    async with (
        talking(trickle(tmp_path / "origin", how)) as rogue,
        mirroring(relay(tmp_path, rogue, limits=QUICK, stall_s=1.0)) as mirror,
    ):
        ends = ("made no progress", "every server was tried")
        await until(lambda: any(end in (mirror.status.last_error or "") for end in ends), timeout_s=30)


@pytest.mark.parametrize("how", ["all bytes of a longer body", "all bytes of an endless body"])
async def test_a_shard_is_complete_with_its_last_byte_although_the_response_never_ends(tmp_path, how):
    published(tmp_path, 7)
    async with talking(trickle(tmp_path / "origin", how)) as rogue:
        reader = client(tmp_path, rogue, limits=QUICK)
        assert contents((await asyncio.to_thread(reader.fetch))[0]) == contents(tmp_path / "model7")
        assert not reader.progress.complaints


@pytest.mark.parametrize("requested", [None, 7])
async def test_if_a_version_vanishes_only_a_fetch_of_the_newest_continues(tmp_path, monkeypatch, requested):
    """A fetch of the newest version continues with the next one; a fetch of version 7 is an error."""
    monkeypatch.setattr(client_module, "PARALLEL", 1)
    source = published(tmp_path, 7, keep=1)
    async with serving(tmp_path / "origin", wait_s=0.1) as up, between(up) as slow:
        slow.rate_Bps, slow.hold_after_bytes = 50_000, SHARD_BYTES
        reader = client(tmp_path, slow.url, timeout_s=30.0)
        fetching = asyncio.create_task(asyncio.to_thread(reader.fetch, requested))
        await until(lambda: slow.sent_bytes >= SHARD_BYTES)
        await asyncio.to_thread(source.publish, model_folder(tmp_path / "model8", seed=8), 8)
        slow.hold_after_bytes = float("inf")
        if requested:
            with pytest.raises(FetchError, match="version 7 could not be fetched"):
                await fetching
        else:
            folder, manifest = await fetching
            assert manifest.version == 8 and contents(folder) == contents(tmp_path / "model8")


async def test_planning_a_fetch_ends_at_the_deadline(tmp_path):
    """The manifests of a delta's parents are requested one after the other."""
    source = origin(tmp_path, anchor_every=100)
    for version in (0, 1):
        source.publish(weights_folder(tmp_path / f"model{version}", version), version)
    store = tmp_path / "origin"

    async def talk(path, writer):
        if path.startswith("/v000000"):
            await asyncio.sleep(3_600)
        writer.write(plain((store / path.lstrip("/")).read_bytes()))

    async with talking(talk) as rogue:
        with pytest.raises(FetchError, match="in time"):
            await asyncio.to_thread(client(tmp_path, rogue, timeout_s=1.0).fetch)
