import asyncio
import errno
import shutil

import aiohttp
from aiohttp import web

from shoal.shardcast import serve
from shoal.shardcast import store as store_module

from .support import (
    OTHER_KEY,
    client,
    contents,
    dead_url,
    flip_bit,
    mirroring,
    model_folder,
    origin,
    published,
    relay,
    serving,
    until,
)


async def versions_at(url: str) -> list[int]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/versions.json") as response:
        return (await response.json())["versions"]


def test_origin_to_relay_to_client_is_bit_exact(tmp_path):
    source = published(tmp_path, 7)

    async def run():
        async with (
            serving(tmp_path / "origin") as up,
            serving(tmp_path / "relay") as down,
            mirroring(relay(tmp_path, up)) as mirror,
        ):
            await until(lambda: mirror.status.versions == [7])
            assert mirror.status.bytes_in > 37_000
            return await asyncio.to_thread(client(tmp_path, down).fetch)

    folder, manifest = asyncio.run(run())
    assert contents(folder) == contents(tmp_path / "model7")
    assert manifest == source.publish(tmp_path / "model7", 7)


def test_a_chain_of_relays_delivers(tmp_path):
    published(tmp_path, 7)

    async def run():
        async with (
            serving(tmp_path / "origin") as up,
            serving(tmp_path / "a") as a,
            serving(tmp_path / "b") as b,
            mirroring(relay(tmp_path, up, name="a")),
            mirroring(relay(tmp_path, a, name="b")) as last,
        ):
            await until(lambda: last.status.versions == [7])
            return await asyncio.to_thread(client(tmp_path, b).fetch)

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model7")


def test_early_shards_are_served_before_late_ones_exist(tmp_path):
    late = published(tmp_path, 7).store.shard_path(7, 3)
    late.rename(tmp_path / "late")
    early = [tmp_path / "relay" / "v000007" / f"0000{index}.shard" for index in range(3)]

    async def run():
        async with (
            serving(tmp_path / "origin", 5) as up,
            serving(tmp_path / "relay", 5) as down,
            mirroring(relay(tmp_path, up)) as mirror,
        ):
            await until(lambda: all(path.exists() for path in early))
            assert await versions_at(down) == [7]
            assert (mirror.status.mirroring, mirror.status.versions) == (7, [])
            async with aiohttp.ClientSession() as session, session.get(f"{down}/v000007/00001.shard") as got:
                assert got.status == 200
            fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, down).fetch))
            await asyncio.sleep(0.2)
            assert not fetching.done()
            (tmp_path / "late").rename(late)
            return await fetching

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model7")


def test_a_corrupt_shard_upstream_is_taken_from_the_other_upstream_and_recorded(tmp_path):
    published(tmp_path, 7)
    shutil.copytree(tmp_path / "origin", tmp_path / "bad")
    for index in range(4):
        flip_bit(tmp_path / "bad" / "v000007" / f"0000{index}.shard")

    async def run():
        async with (
            serving(tmp_path / "bad") as bad,
            serving(tmp_path / "origin") as good,
            mirroring(relay(tmp_path, bad, good)) as mirror,
        ):
            await until(lambda: mirror.status.versions == [7])
            assert bad in mirror.status.last_error
            assert "corrupt" in mirror.status.last_error

    asyncio.run(run())
    for index in range(4):
        name = f"v000007/0000{index}.shard"
        assert (tmp_path / "relay" / name).read_bytes() == (tmp_path / "origin" / name).read_bytes()


def test_a_corrupt_shard_with_no_other_upstream_is_never_stored(tmp_path):
    flip_bit(published(tmp_path, 7).store.shard_path(7, 1))

    async def run():
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: mirror.status.last_error and "every source was tried" in mirror.status.last_error)
            assert "shard 1 of version 7" in mirror.status.last_error
            assert mirror.status.versions == []

    asyncio.run(run())
    assert not (tmp_path / "relay/v000007/00001.shard").exists()
    assert not list((tmp_path / "relay/v000007").glob(".*"))


def test_a_manifest_of_another_signer_is_not_announced(tmp_path):
    source = origin(tmp_path)
    source.key = OTHER_KEY
    source.publish(model_folder(tmp_path / "model"), 7)

    async def run():
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: mirror.status.last_error)
            assert "wrong signer" in mirror.status.last_error

    asyncio.run(run())
    assert not (tmp_path / "relay" / "v000007").exists()


def test_newest_version_first_and_only_keep_are_held(tmp_path):
    source = published(tmp_path, 1, 2, 3, 4)

    async def run():
        order = []
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up, keep=2)) as mirror:

            def whole(versions):
                order.extend(version for version in mirror.status.versions if version not in order)
                return mirror.status.versions == versions

            await until(lambda: whole([4, 3]))
            source.publish(model_folder(tmp_path / "model5", seed=5), 5)
            await until(lambda: whole([5, 4]))
        return order

    assert asyncio.run(run()) == [4, 3, 5]
    assert sorted(p.name for p in (tmp_path / "relay").glob("v0*")) == ["v000004", "v000005"]


def test_upstream_that_goes_and_comes_back_empty_costs_no_version(tmp_path):
    published(tmp_path, 7)

    async def run():
        async with serving(tmp_path / "relay") as down:
            mirror = relay(tmp_path, "placeholder", longest_pause_s=0.1)
            async with serving(tmp_path / "origin") as up:
                mirror.upstream = [up]
                task = asyncio.create_task(mirror.mirror())
                await until(lambda: mirror.status.versions == [7])
            await until(lambda: mirror.status.last_error)  # upstream is gone now
            assert up in mirror.status.last_error
            assert await versions_at(down) == [7]
            assert not task.done()
            task.cancel()
            # The origin came back from an old backup: no reason to forget a newer version.
            shutil.rmtree(tmp_path / "origin")
            published(tmp_path, 3)
            async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
                await until(lambda: mirror.status.versions == [7, 3])
                assert await versions_at(down) == [7, 3]

    asyncio.run(run())


def test_restart_resumes_from_disk_and_heals_what_rotted(tmp_path):
    published(tmp_path, 7)
    shards = [f"v000007/0000{i}.shard" for i in range(4)]

    async def run(upstream=None, repaired_bytes=0):
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, upstream or up)) as mirror:
            await until(lambda: mirror.status.versions == [7])
            assert repaired_bytes <= mirror.status.bytes_in < repaired_bytes + 3_000
            return [(tmp_path / "relay" / name).stat().st_mtime_ns for name in shards]

    first = asyncio.run(run(repaired_bytes=37_612))
    assert asyncio.run(run(upstream=dead_url())) == first  # whole: needs no upstream
    flip_bit(tmp_path / "relay" / shards[1])
    (tmp_path / "relay" / shards[2]).rename(tmp_path / "relay" / "v000007" / ".00002.shard.tmp")
    again = asyncio.run(run(repaired_bytes=20_000))
    assert (again[0], again[3]) == (first[0], first[3])
    for name in shards:
        assert (tmp_path / "relay" / name).read_bytes() == (tmp_path / "origin" / name).read_bytes()


def test_a_half_version_that_upstream_dropped_is_dropped(tmp_path):
    published(tmp_path, 7)
    shutil.copytree(tmp_path / "origin", tmp_path / "relay")
    (tmp_path / "relay" / "v000007" / "00002.shard").unlink()
    shutil.rmtree(tmp_path / "origin")
    published(tmp_path, 8)

    async def run():
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: mirror.status.versions == [8] and mirror.store.versions() == [8])

    asyncio.run(run())


def test_a_full_disk_is_reported_and_survived(tmp_path, monkeypatch):
    published(tmp_path, 7)
    real = store_module.write_all
    full = True

    def write_all(fd, data, offset_bytes):
        if full and len(data) > 5_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data, offset_bytes)

    monkeypatch.setattr(store_module, "write_all", write_all)

    async def run():
        nonlocal full
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: mirror.status.last_error)
            assert "No space left" in mirror.status.last_error
            full = False
            await until(lambda: mirror.status.versions == [7])

    asyncio.run(run())


def test_upstream_that_lists_nonsense_and_hangs_keeps_nothing_from_the_others(tmp_path):
    manifest = published(tmp_path, 7).store.manifest_path(7)

    async def lying(request):
        return web.json_response({"versions": [*range(999_999_999, 999_999_900, -1), 7]})

    async def true_manifest(request):
        return web.FileResponse(manifest)

    async def hang(request):
        await asyncio.sleep(30)

    async def run():
        liar = web.Application()
        liar.add_routes([web.get("/versions.json", lying), web.get("/v000007/manifest.json", true_manifest)])
        liar.add_routes([web.get("/{any:.*}", hang)])
        runner, port = await serve(liar)
        url = f"http://127.0.0.1:{port}"
        async with (
            serving(tmp_path / "origin") as up,
            mirroring(relay(tmp_path, url, up, patience_s=0.2)) as mirror,
        ):
            await until(lambda: mirror.status.versions == [7])
        await runner.cleanup()

    asyncio.run(run())


def test_relay_of_another_run_drops_what_it_held(tmp_path):
    published(tmp_path, 7)
    shutil.copytree(tmp_path / "origin", tmp_path / "relay")
    other = relay(tmp_path, dead_url())
    assert other.store.versions() == [7]
    other = type(other)([dead_url()], tmp_path / "relay", public_key=other.public_key, run="another")
    assert other.store.versions() == []
    assert "expected 'another'" in other.status.last_error
