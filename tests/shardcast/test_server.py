"""The server on loopback sockets: whole files, ranges, what it must not serve, and shards that are still arriving."""

import asyncio
import os
import time

import aiohttp
import pytest
from blake3 import blake3

from shoal.files import NewFile, temporary

from .raw import announced, content, get, health, open_raw, put, request, whole
from .support import SHARD_BYTES, serving, until

SHARD = "/v000007/full/00000.shard"
FILES = ["v000007/full/00001.shard", "v000007/manifest.json", "versions.json"]


# Whole files


async def test_the_server_sends_exactly_the_bytes_of_the_store(tmp_path):
    store = whole(tmp_path)
    for path in (*FILES, "v000007/full/00003.shard", "v000007/delta/00001.shard"):
        status, _, body = await get(store, f"/{path}")
        assert (status, body) == (200, (tmp_path / path).read_bytes())


async def test_a_byte_range_is_answered_with_the_requested_bytes(tmp_path):
    store = whole(tmp_path)
    shard = content()[SHARD_BYTES : 2 * SHARD_BYTES]
    for byte_range, content_range, body in (
        ("10-19", "bytes 10-19/10000", shard[10:20]),
        ("9990-", "bytes 9990-9999/10000", shard[9990:]),
        ("9000-20000", "bytes 9000-9999/10000", shard[9000:]),
    ):
        answer = await get(store, "/v000007/full/00001.shard", headers={"Range": f"bytes={byte_range}"})
        assert (answer[0], answer[1]["Content-Range"], answer[2]) == (206, content_range, body)


@pytest.mark.parametrize(
    "byte_range", ["bytes=5-4", "bytes=-", "bytes=-5", "bytes=a-b", "bytes=0-1,5-6", "lines=1-2", "", "bytes"]
)
@pytest.mark.parametrize("path", FILES)
async def test_a_malformed_or_multiple_range_is_ignored(tmp_path, path, byte_range):
    store = whole(tmp_path)
    status, headers, body = await get(store, f"/{path}", headers={"Range": byte_range})
    assert (status, "Content-Range" in headers, body) == (200, False, (store.path / path).read_bytes())


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("byte_range", ["bytes=5-9", "bytes=99999999-"])
async def test_a_range_in_a_head_request_is_ignored(tmp_path, path, byte_range):
    store = whole(tmp_path)
    status, headers, _ = await get(store, f"/{path}", method="HEAD", headers={"Range": byte_range})
    size_bytes = (store.path / path).stat().st_size
    assert (status, headers["Content-Length"], "Content-Range" in headers) == (200, str(size_bytes), False)


@pytest.mark.parametrize(("shard", "size_bytes"), [("00001", 10_000), ("00003", 4_567)])
async def test_a_range_past_the_end_is_not_satisfiable(tmp_path, shard, size_bytes):
    store = whole(tmp_path)
    store.shard_path(7, "full", 3).unlink()  # this shard has not arrived
    status, headers, _ = await get(store, f"/v000007/full/{shard}.shard", headers={"Range": "bytes=10000-"})
    assert (status, headers["Content-Range"]) == (416, f"bytes */{size_bytes}")


@pytest.mark.parametrize("arrived", [True, False])
async def test_the_etag_of_a_shard_is_its_hash(tmp_path, arrived):
    store, shard = whole(tmp_path), content()[:SHARD_BYTES]
    etag = f'"{blake3(shard).hexdigest()}"'
    if not arrived:
        store.shard_path(7, "full", 0).rename(temporary(store.shard_path(7, "full", 0)))
    part = {"Range": "bytes=10-19"}
    for headers, status, body in (
        ({}, 200, shard),
        (part, 206, shard[10:20]),
        (part | {"If-Range": etag}, 200, shard),  # conditional ranges are not supported
    ):
        answer = await get(store, SHARD, headers=headers)
        assert (answer[0], answer[2]) == (status, body), headers
        assert answer[1]["ETag"] == etag


async def test_caches_may_keep_shards_and_must_revalidate_everything_else(tmp_path):
    """A manifest may change, because an origin that starts over publishes another one under the same name."""
    store = whole(tmp_path)
    assert "immutable" in (await get(store, SHARD))[1]["Cache-Control"]
    for path in ("/versions.json", "/v000007/manifest.json"):
        _, headers, _ = await get(store, path)
        assert headers["Cache-Control"] == "no-cache"
        assert (await get(store, path, headers={"If-None-Match": headers["ETag"]}))[0] == 304


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
async def test_a_path_that_names_no_published_file_is_not_found(tmp_path, path):
    store = whole(tmp_path / "store")
    for folder in (tmp_path, tmp_path / "store", tmp_path / "store/v000007/full"):
        (folder / "secret").write_text("secret")
    (tmp_path / "store/v000007/full/.00000.shard.tmp").write_text("secret")
    put(tmp_path / "store/v000007/full/00004.shard", b"secret")
    started_s = time.monotonic()
    status, _, body = await get(store, path, wait_s=5)
    assert status == 404
    assert b"secret" not in body
    assert time.monotonic() - started_s < 4, "the request waited for a shard that cannot arrive"


async def test_a_part_that_the_version_lacks_is_not_found(tmp_path):
    store = announced(tmp_path, content(), delta=False)
    put(store.shard_path(7, "delta", 0), b"left over")
    assert (await get(store, "/v000007/delta/00000.shard", wait_s=5))[0] == 404


async def test_only_a_get_of_a_stored_version_renews_its_lease(tmp_path):
    store = whole(tmp_path)
    async with serving(store) as url:
        for path in ("manifest.json", "full/00000.shard"):
            assert (await request(f"{url}/v000007/{path}", method="HEAD"))[0] == 200
        for version in range(8, 40):
            await request(f"{url}/v{version:06d}/manifest.json")
        assert store._requested_s == {}
        await request(f"{url}/v000007/manifest.json")
        assert list(store._requested_s) == [7]


async def test_health_reports_versions_and_served_bytes(tmp_path):
    async with serving(whole(tmp_path)) as url:
        for method in ("GET", "GET", "HEAD"):
            await request(url + SHARD, method=method)
        facts = await health(url)
    assert (facts["versions"], facts["served_bytes"], facts["connections_cut"]) == ([7], 20_000, 0)
    assert facts["connections"] >= 1


# Shards that are still arriving


async def test_a_request_for_a_missing_shard_waits_and_then_gets_503(tmp_path):
    store = whole(tmp_path)
    store.shard_path(7, "full", 2).unlink()
    started_s = time.monotonic()
    status, headers, _ = await get(store, "/v000007/full/00002.shard", wait_s=0.3)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert time.monotonic() - started_s > 0.3


async def test_a_shard_is_sent_as_soon_as_it_has_its_final_name(tmp_path):
    store = announced(tmp_path, content())
    async with serving(store) as url:
        requesting = asyncio.create_task(request(f"{url}/v000007/full/00002.shard"))
        await asyncio.sleep(0.2)
        assert not requesting.done()
        put(store.shard_path(7, "full", 2), content()[20_000:30_000])
        assert (await requesting)[2] == content()[20_000:30_000]


async def test_twenty_readers_get_the_bytes_of_a_shard_before_it_is_complete(tmp_path):
    data = content(900_000)
    store = announced(tmp_path, data, shard_bytes=len(data))
    offsets = [0, 1, 499_999, *range(10, 27)]
    arrived: list[int] = []

    async def read(session, url, offset):
        """Read the first half, record that it arrived, and read the rest."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        async with session.get(url + SHARD, headers=headers) as response:
            assert response.status == (206 if offset else 200)
            assert response.content_length == len(data) - offset
            first = await response.content.readexactly(500_000 - offset)
            assert not store.shard_path(7, "full", 0).exists()
            arrived.append(offset)
            return first + await response.read()

    async with serving(store) as url, aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(read(session, url, offset)) for offset in offsets]
        await asyncio.sleep(0.05)  # by now, all readers wait for the first byte
        file = NewFile(store.shard_path(7, "full", 0))
        for start in range(0, 500_000, 100_000):
            file.write(start, data[start : start + 100_000])
            await asyncio.sleep(0.01)
        await until(lambda: len(arrived) == len(offsets))
        file.write(500_000, data[500_000:])
        file.commit()
        file.close()
        for offset, body in zip(offsets, await asyncio.gather(*tasks), strict=True):
            assert body == data[offset:]
        assert (await health(url))["served_bytes"] == sum(len(data) - offset for offset in offsets)


def begin_again(store, file: NewFile) -> None:
    file.truncate()
    file.write(0, b"other bytes" * 5_000)


@pytest.mark.parametrize(
    ("interrupt", "wait_s"),
    [
        (begin_again, 5.0),
        (lambda store, file: file.close(), 5.0),
        (lambda store, file: os.truncate(file.temporary, 0), 5.0),
        (lambda store, file: store.discard(7), 5.0),
        (lambda store, file: None, 0.4),
    ],
    ids=["started again", "abandoned", "truncated", "version dropped", "stopped growing"],
)
async def test_the_response_ends_early_if_a_shard_stops_arriving(tmp_path, interrupt, wait_s):
    data = content(50_000)
    store = announced(tmp_path, data, shard_bytes=len(data))
    file = NewFile(store.shard_path(7, "full", 0))
    file.write(0, data[:20_000])
    async with serving(store, wait_s) as url, aiohttp.ClientSession() as session, session.get(url + SHARD) as response:
        assert await response.content.readexactly(20_000) == data[:20_000]
        interrupt(store, file)
        started_s = time.monotonic()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
        assert time.monotonic() - started_s < 3


async def test_a_shard_is_sent_to_its_end_even_if_its_version_is_dropped(tmp_path):
    data = content(20_000_000)
    store = announced(tmp_path, data, shard_bytes=len(data))
    temporary(store.shard_path(7, "full", 0)).parent.mkdir()
    temporary(store.shard_path(7, "full", 0)).write_bytes(data)
    async with serving(store) as url, aiohttp.ClientSession() as session, session.get(url + SHARD) as response:
        await asyncio.sleep(0.1)
        store.discard(7)
        assert await response.read() == data


@pytest.mark.parametrize("arrived_bytes", [0, 4_000])
async def test_readers_may_leave_before_a_shard_has_arrived(tmp_path, caplog, arrived_bytes):
    store, shard = announced(tmp_path, content()), content()[:SHARD_BYTES]
    file = NewFile(store.shard_path(7, "full", 0))
    if arrived_bytes:
        file.write(0, shard[:arrived_bytes])
    async with serving(store) as url:
        for _ in range(3):
            raw = await open_raw(url, SHARD)
            if arrived_bytes:
                await asyncio.get_running_loop().sock_recv(raw, 100)
            raw.close()
        await asyncio.sleep(0.1)
        file.write(arrived_bytes, shard[arrived_bytes:])
        file.commit()
        await asyncio.sleep(0.2)
        assert (await request(url + SHARD))[2] == shard
        facts = await health(url)
    assert (facts["connections"], facts["served_bytes"]) == (1, SHARD_BYTES)
    assert not caplog.records


async def test_a_head_request_for_an_arriving_shard_returns_its_final_size(tmp_path):
    store = announced(tmp_path, content())
    NewFile(store.shard_path(7, "full", 0)).write(0, b"some")
    status, headers, body = await get(store, SHARD, method="HEAD")
    assert (status, headers["Content-Length"], headers["Cache-Control"], body) == (200, "10000", "no-store", b"")
