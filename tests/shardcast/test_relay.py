"""One relay: what it mirrors and in which order, what it keeps, and how it resumes."""

import asyncio
import os
import shutil

import aiohttp
from aiohttp import web

from shoal.shardcast import Access, Relay

from .support import (
    PUBLIC_KEY,
    SMALL_BYTES,
    answering,
    between,
    client,
    contents,
    dead_url,
    flip_bit,
    mirror_of,
    mirroring,
    model_folder,
    published,
    relay,
    serving,
    stepped,
    until,
    versions_at,
)

WHOLE_BYTES = 37_612  # the size of one version made by `published`


async def test_a_relay_serves_a_shard_before_it_has_the_later_shards(tmp_path):
    late = published(tmp_path, 7).store.shard_path(7, "full", 3)
    late.rename(tmp_path / "late")
    early = [tmp_path / "relay" / "v000007" / "full" / f"0000{index}.shard" for index in range(3)]
    async with (
        serving(tmp_path / "origin", 5) as up,
        serving(tmp_path / "relay", 5) as down,
        mirroring(relay(tmp_path, up)) as mirror,
    ):
        await until(lambda: all(path.exists() for path in early))
        assert await versions_at(down) == [7]
        assert (mirror.status.mirroring, mirror.status.versions) == (7, [])
        async with aiohttp.ClientSession() as session, session.get(f"{down}/v000007/full/00001.shard") as answer:
            assert answer.status == 200
        fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, down).fetch))
        await asyncio.sleep(0.2)
        assert not fetching.done()
        (tmp_path / "late").rename(late)
        assert contents((await fetching)[0]) == contents(tmp_path / "model7")


async def test_a_relay_mirrors_the_newest_version_first_and_keeps_only_keep_versions(tmp_path):
    source = published(tmp_path, 1, 2, 3, 4)
    order = []
    async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up, keep=2)) as mirror:

        def whole(versions):
            order.extend(version for version in mirror.status.versions if version not in order)
            return mirror.status.versions == versions

        await until(lambda: whole([4, 3]))
        source.publish(model_folder(tmp_path / "model5", seed=5), 5)
        await until(lambda: whole([5, 4]))
    assert order == [4, 3, 5]
    assert sorted(p.name for p in (tmp_path / "relay").glob("v0*")) == ["v000004", "v000005"]


async def test_a_relay_keeps_its_versions_if_upstream_is_restored_from_a_backup(tmp_path):
    published(tmp_path, 3)
    backup = mirror_of(tmp_path, "backup")
    published(tmp_path, 7)
    async with serving(tmp_path / "relay") as down:
        mirror = relay(tmp_path, "http://placeholder", longest_pause_s=0.1)
        async with serving(tmp_path / "origin") as up:
            mirror.upstream = lambda: [up]
            task = asyncio.create_task(mirror.mirror())
            await until(lambda: mirror.status.versions == [7, 3])
        await until(lambda: mirror.status.last_error)  # upstream is down now
        assert up in mirror.status.last_error
        assert await versions_at(down) == [7, 3]
        assert not task.done()
        task.cancel()
        # The publication is the same, so the newer version stays.
        shutil.rmtree(tmp_path / "origin")
        shutil.copytree(backup, tmp_path / "origin")
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: mirror.status.versions == [7, 3])
            assert await versions_at(down) == [7, 3]


async def test_a_restart_resumes_from_disk_and_repairs_damaged_shards(tmp_path):
    published(tmp_path, 7)
    shards = [f"v000007/full/0000{i}.shard" for i in range(4)]

    async def run(upstream=None, repaired_bytes=0):
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, upstream or up)) as mirror:
            await until(lambda: mirror.status.versions == [7])
            assert repaired_bytes <= mirror.status.bytes_in < repaired_bytes + SMALL_BYTES
            return [(tmp_path / "relay" / name).stat().st_mtime_ns for name in shards]

    first = await run(repaired_bytes=WHOLE_BYTES)
    assert await run(upstream=dead_url()) == first  # a complete version needs no upstream
    flip_bit(tmp_path / "relay" / shards[1])
    half = (tmp_path / "relay" / shards[2]).rename(tmp_path / "relay" / "v000007/full/.00002.shard.tmp")
    os.truncate(half, 6_000)
    again = await run(repaired_bytes=2 * 10_000)
    assert (again[0], again[3]) == (first[0], first[3])
    for name in shards:
        assert (tmp_path / "relay" / name).read_bytes() == (tmp_path / "origin" / name).read_bytes()


async def test_an_incomplete_version_that_upstream_dropped_is_dropped(tmp_path):
    published(tmp_path, 7)
    mirror_of(tmp_path, "relay")
    (tmp_path / "relay" / "v000007" / "full" / "00002.shard").unlink()
    (tmp_path / "relay" / "id").unlink()
    published(tmp_path, 8, keep=1)
    async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
        await until(lambda: mirror.status.versions == [8] and mirror.store.versions() == [8])


async def test_an_upstream_that_lists_bogus_versions_and_hangs_delays_nothing(tmp_path):
    manifest = published(tmp_path, 7).store.manifest_path(7)
    requests: set[str] = set()

    async def answer(request):
        if request.path == "/versions.json":
            return web.json_response({"versions": [*range(999_999_999, 999_999_900, -1), 7]})
        if request.path == "/v000007/manifest.json":
            return web.FileResponse(manifest)
        requests.add(request.path)
        return await asyncio.sleep(30, web.Response())

    async with (
        serving(tmp_path / "origin") as up,
        answering(answer) as liar,
        mirroring(relay(tmp_path, liar, up, keep=2, limits={"patience_s": 0.2})) as mirror,
    ):
        await until(lambda: mirror.status.versions == [7])
    manifests = [path for path in requests if path.endswith("manifest.json")]
    assert len(manifests) <= 2, "the relay requested more versions than it keeps"


def test_a_relay_of_another_run_drops_what_it_stored(tmp_path):
    published(tmp_path, 7)
    mirror_of(tmp_path, "relay")
    store = relay(tmp_path, dead_url()).store
    assert store.versions() == [7]
    other = Relay([dead_url()], store, Access(PUBLIC_KEY, "another"))
    assert other.store.versions() == []
    assert "expected 'another'" in other.status.last_error


async def test_a_damaged_delta_is_fetched_once_the_origin_publishes_it_again(tmp_path):
    source = stepped(tmp_path, 0, 1)
    flip_bit(source.store.shard_path(1, "delta", 0))
    async with serving(source.store) as up, mirroring(relay(tmp_path, up)) as mirror:
        await until(lambda: "every server was tried" in (mirror.status.last_error or ""))
        again = stepped(tmp_path, 1).publish(tmp_path / "model1", 1)  # the restarted origin repairs its delta
        await until(lambda: mirror.status.versions == [1, 0])
        assert mirror.store.missing(again) == []


async def test_half_a_shard_is_resumed_after_a_disconnect(tmp_path):
    published(tmp_path, 7, shard_size_bytes=WHOLE_BYTES)
    async with (
        serving(tmp_path / "origin") as up,
        between(up, cut_after_bytes=12_000) as middle,
        mirroring(relay(tmp_path, middle.url)) as mirror,
    ):
        # The answer was cut, and the rest was requested.
        await until(lambda: middle.sent_bytes == 12_000 and len(middle.requests) > 2)
        middle.cut_after_bytes = 10**9
        await until(lambda: mirror.status.versions == [7])
    first, *others = middle.starts()
    assert first == 0 and set(others) == {others[0]}
    assert 6_000 < others[0] <= 12_000  # some sent bytes may be lost in a buffer
    assert middle.sent_bytes < 12_000 + WHOLE_BYTES


async def test_a_relay_mirrors_a_version_and_then_all_its_parents_whatever_keep_is(tmp_path):
    stepped(tmp_path, 0, 1, 2, 3, 4, anchor_every=4, keep=9)
    order = []

    def seen():
        order.extend(version for version in mirror.status.versions if version not in order)
        return len(order) == 5

    async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up, keep=2)) as mirror:
        await until(seen)
    assert order == [4, 3, 2, 1, 0]
