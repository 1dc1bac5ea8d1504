import asyncio
import time

import aiohttp
import pytest
from yarl import URL

from .support import origin, published, serving


def get(tmp_path, path: str, *, wait_s: float = 0.1, **options):
    """(status, headers, body) of one request whose path is sent exactly as written."""

    async def ask():
        async with serving(tmp_path / "origin", wait_s) as url, aiohttp.ClientSession() as session:  # noqa: SIM117
            async with session.get(URL(url + path, encoded=True), **options) as response:
                return response.status, response.headers, await response.read()

    return asyncio.run(ask())


def test_serves_exactly_the_bytes_of_the_store(tmp_path):
    store = published(tmp_path, 7).store
    for path in ("versions.json", "v000007/manifest.json", "v000007/00003.shard"):
        status, _, body = get(tmp_path, "/" + path)
        assert (status, body) == (200, (store.path / path).read_bytes())


def test_an_empty_store_lists_no_versions(tmp_path):
    origin(tmp_path)
    assert get(tmp_path, "/versions.json")[2] == b'{"versions":[]}'


def test_byte_ranges(tmp_path):
    store = published(tmp_path, 7).store
    status, headers, body = get(tmp_path, "/v000007/00001.shard", headers={"Range": "bytes=10-19"})
    assert (status, headers["Content-Range"]) == (206, "bytes 10-19/10000")
    assert body == store.shard_path(7, 1).read_bytes()[10:20]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v000008/manifest.json",
        "/v000008/00000.shard",
        "/v7/manifest.json",
        "/v0000007/manifest.json",
        "/v000007/",
        "/v000007/00004.shard",
        "/v000007/99999.shard",
        "/v000007/.00000.shard.tmp",
        "/v000007/secret",
        "/secret",
        "/../secret",
        "/%2e%2e/secret",
        "/v000007/../../secret",
        "/v000007/..%2f..%2fsecret",
        "/v000007%2f..%2f..%2fsecret",
        "/v000007/%2e%2e/%2e%2e/secret",
        "/v000007/00000.shard%00",
        "//secret",
    ],
)
def test_everything_else_is_not_found(tmp_path, path):
    published(tmp_path, 7)
    for folder in (tmp_path, tmp_path / "origin", tmp_path / "origin" / "v000007"):
        (folder / "secret").write_text("secret")
    (tmp_path / "origin" / "v000007" / ".00000.shard.tmp").write_text("secret")
    started_s = time.monotonic()
    status, _, body = get(tmp_path, path, wait_s=5)
    assert status == 404
    assert b"secret" not in body
    assert time.monotonic() - started_s < 4, "waited for something that will never come"


def test_a_named_shard_that_is_not_there_yet_is_waited_for_then_503(tmp_path):
    published(tmp_path, 7).store.shard_path(7, 2).unlink()
    started_s = time.monotonic()
    status, headers, _ = get(tmp_path, "/v000007/00002.shard", wait_s=0.3)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert time.monotonic() - started_s > 0.3


def test_a_named_shard_is_sent_as_soon_as_it_arrives(tmp_path):
    shard = published(tmp_path, 7).store.shard_path(7, 2)
    data = shard.read_bytes()
    shard.rename(tmp_path / "late")

    async def ask():
        async with serving(tmp_path / "origin", 5) as url, aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.get(f"{url}/v000007/00002.shard"))
            await asyncio.sleep(0.2)
            assert not asked.done()
            (tmp_path / "late").rename(shard)
            async with await asked as response:
                return await response.read()

    assert asyncio.run(ask()) == data


def test_health_tells_versions_and_bytes_served(tmp_path):
    published(tmp_path, 7)

    async def ask():
        async with serving(tmp_path / "origin") as url, aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.get(f"{url}/v000007/00000.shard") as response:
                    await response.read()
            async with session.get(f"{url}/healthz") as response:
                return await response.json()

    assert asyncio.run(ask()) == {"versions": [7], "served_bytes": 20_000}
