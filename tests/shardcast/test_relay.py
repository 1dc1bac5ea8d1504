import asyncio
import itertools
import json
import os
import random
import shutil
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from shoal.files import temporary
from shoal.shardcast import Access, Relay, ShardStore
from shoal.shardcast.relay import by_preference, owners_of

from .support import (
    OTHER_KEY,
    PUBLIC_KEY,
    SMALL_BYTES,
    Known,
    Stub,
    answering,
    between,
    client,
    contents,
    dead_url,
    flip_bit,
    mirror_of,
    mirroring,
    model_folder,
    origin,
    published,
    relay,
    serving,
    shard,
    stepped,
    until,
    versions_at,
)

WHOLE_BYTES = 37_612  # of one version of `published`


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
    late = published(tmp_path, 7).store.shard_path(7, "full", 3)
    late.rename(tmp_path / "late")
    early = [tmp_path / "relay" / "v000007" / "full" / f"0000{index}.shard" for index in range(3)]

    async def run():
        async with (
            serving(tmp_path / "origin", 5) as up,
            serving(tmp_path / "relay", 5) as down,
            mirroring(relay(tmp_path, up)) as mirror,
        ):
            await until(lambda: all(path.exists() for path in early))
            assert await versions_at(down) == [7]
            assert (mirror.status.mirroring, mirror.status.versions) == (7, [])
            async with aiohttp.ClientSession() as session, session.get(f"{down}/v000007/full/00001.shard") as got:
                assert got.status == 200
            fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, down).fetch))
            await asyncio.sleep(0.2)
            assert not fetching.done()
            (tmp_path / "late").rename(late)
            return await fetching

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model7")


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


def test_upstream_that_goes_and_comes_back_from_a_backup_costs_no_version(tmp_path):
    published(tmp_path, 3)
    backup = mirror_of(tmp_path, "backup")
    published(tmp_path, 7)

    async def run():
        async with serving(tmp_path / "relay") as down:
            mirror = relay(tmp_path, "http://placeholder", longest_pause_s=0.1)
            async with serving(tmp_path / "origin") as up:
                mirror.upstream = lambda: [up]
                task = asyncio.create_task(mirror.mirror())
                await until(lambda: mirror.status.versions == [7, 3])
            await until(lambda: mirror.status.last_error)  # upstream is gone now
            assert up in mirror.status.last_error
            assert await versions_at(down) == [7, 3]
            assert not task.done()
            task.cancel()
            # The same publication: no reason to forget its newer version.
            shutil.rmtree(tmp_path / "origin")
            shutil.copytree(backup, tmp_path / "origin")
            async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
                await until(lambda: mirror.status.versions == [7, 3])
                assert await versions_at(down) == [7, 3]

    asyncio.run(run())


def test_restart_resumes_from_disk_and_heals_what_rotted(tmp_path):
    published(tmp_path, 7)
    shards = [f"v000007/full/0000{i}.shard" for i in range(4)]

    async def run(upstream=None, repaired_bytes=0):
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, upstream or up)) as mirror:
            await until(lambda: mirror.status.versions == [7])
            assert repaired_bytes <= mirror.status.bytes_in < repaired_bytes + SMALL_BYTES
            return [(tmp_path / "relay" / name).stat().st_mtime_ns for name in shards]

    first = asyncio.run(run(repaired_bytes=WHOLE_BYTES))
    assert asyncio.run(run(upstream=dead_url())) == first  # whole: needs no upstream
    flip_bit(tmp_path / "relay" / shards[1])
    half = (tmp_path / "relay" / shards[2]).rename(tmp_path / "relay" / "v000007/full/.00002.shard.tmp")
    os.truncate(half, 6_000)
    again = asyncio.run(run(repaired_bytes=2 * 10_000))
    assert (again[0], again[3]) == (first[0], first[3])
    for name in shards:
        assert (tmp_path / "relay" / name).read_bytes() == (tmp_path / "origin" / name).read_bytes()


def test_a_half_version_that_upstream_dropped_is_dropped(tmp_path):
    published(tmp_path, 7)
    mirror_of(tmp_path, "relay")
    (tmp_path / "relay" / "v000007" / "full" / "00002.shard").unlink()
    (tmp_path / "relay" / "id").unlink()
    published(tmp_path, 8, keep=1)

    async def run():
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: mirror.status.versions == [8] and mirror.store.versions() == [8])

    asyncio.run(run())


def test_upstream_that_lists_nonsense_and_hangs_keeps_nothing_from_the_others(tmp_path):
    manifest = published(tmp_path, 7).store.manifest_path(7)
    asked: set[str] = set()

    async def lying(request):
        return web.json_response({"versions": [*range(999_999_999, 999_999_900, -1), 7]})

    async def true_manifest(request):
        return web.FileResponse(manifest)

    async def hang(request):
        await asyncio.sleep(30)

    async def answer(request):
        if request.path == "/versions.json":
            return await lying(request)
        if request.path == "/v000007/manifest.json":
            return await true_manifest(request)
        asked.add(request.path)
        return await hang(request)

    async def run():
        async with (
            serving(tmp_path / "origin") as up,
            answering(answer) as liar,
            mirroring(relay(tmp_path, liar, up, keep=2, limits={"patience_s": 0.2})) as mirror,
        ):
            await until(lambda: mirror.status.versions == [7])

    asyncio.run(run())
    assert len({path for path in asked if path.endswith("manifest.json")}) <= 2, "as many as it keeps"


def test_relay_of_another_run_drops_what_it_held(tmp_path):
    published(tmp_path, 7)
    mirror_of(tmp_path, "relay")
    store = relay(tmp_path, dead_url()).store
    assert store.versions() == [7]
    other = Relay([dead_url()], store, Access(PUBLIC_KEY, "another"))
    assert other.store.versions() == []
    assert "expected 'another'" in other.status.last_error


def test_a_delta_that_its_origin_lost_is_had_in_the_way_it_is_published_again(tmp_path):
    source = stepped(tmp_path, 0, 1)
    flip_bit(source.store.shard_path(1, "delta", 0))

    async def run():
        async with serving(source.store) as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: "every server was tried" in (mirror.status.last_error or ""))
            again = stepped(tmp_path, 1).publish(tmp_path / "model1", 1)  # a restart: it is whole now
            await until(lambda: mirror.status.versions == [1, 0])
            assert mirror.store.missing(again) == []

    asyncio.run(run())


# Who takes what from whom


def large_folder(path):
    path.mkdir()
    (path / "model").write_bytes(random.Random("large").randbytes(LARGE_BYTES))
    return path


LARGE_BYTES = 300_000  # 30 shards


@asynccontextmanager
async def family(tmp_path, names: str, *upstream: str, **options):
    """Relays that know these servers and each other: (relays, URLs), by name."""
    relays = {name: relay(tmp_path, name=name, **options) for name in names}
    async with AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(serving(one.store)) for name, one in relays.items()}
        for one in relays.values():
            one.upstream = lambda: [*upstream, *urls.values()]
            await stack.enter_async_context(mirroring(one))
        yield relays, urls


async def all_hold(relays, version: int) -> None:
    await until(lambda: all(one.status.versions[:1] == [version] for one in relays.values()))


def test_siblings_take_each_shard_from_the_origin_about_once(tmp_path):
    """Also where one of them hears of the version later: that makes it no bad source."""
    source = origin(tmp_path)
    large_folder(tmp_path / "large")

    async def run():
        async with (
            serving(source.store) as up,
            between(up, rate_Bps=50_000) as counted,
            family(tmp_path, "abc", counted.url) as (relays, _),
        ):
            relays["c"].poll_s = 0.3
            await until(lambda: all(len(one.place.siblings) == 2 for one in relays.values()))
            source.publish(tmp_path / "large", 7)
            await all_hold(relays, 7)
            return counted.sent_bytes

    sent_bytes = asyncio.run(run())
    assert LARGE_BYTES <= sent_bytes < 1.3 * LARGE_BYTES
    for name in "abc":
        store = ShardStore(tmp_path / name)
        assert store.missing(store.signed(7).open(PUBLIC_KEY)) == []


def test_siblings_that_do_not_all_know_each_other_never_wait_in_a_circle():
    ids = [f"{n:016x}" for n in range(4)]
    owned = Counter()
    for entry in map(shard, range(100)):
        owned[owners_of(entry, ids)[0]] += 1
        for unknown in itertools.product(
            *(["", *(id for id in ids if id != own)] for own in ids)
        ):  # to each: none or one
            views = {own: [id for id in ids if id != other] for own, other in zip(ids, unknown, strict=True)}
            asks = {own: owners_of(entry, view)[0] for own, view in views.items()}
            for waited_for in ids:
                for _ in ids:
                    waited_for = asks[waited_for]
                assert asks[waited_for] == waited_for, "nobody in this circle fetches the shard"
    assert min(owned[own] for own in ids) > 100 / 8


def test_a_sibling_whose_listing_comes_late_still_owns_its_shards(tmp_path):
    """A lost packet makes it silent. Were it forgotten, the origin would send its shards to each of the others."""
    source = origin(tmp_path)
    large_folder(tmp_path / "large")

    async def run():
        async with (
            serving(source.store) as up,
            between(up, rate_Bps=20_000) as counted,
            family(tmp_path, "ab", counted.url) as (relays, urls),
            between(urls["a"]) as lossy,
        ):
            relays["b"].upstream = lambda: [counted.url, lossy.url]
            await until(lambda: lossy.url in [one.url for one in relays["b"].place.siblings.values()])
            lost = []
            lossy.silent = lambda path: path.endswith("versions.json") and not (lost or lost.append(path))
            await until(lambda: lost)
            source.publish(tmp_path / "large", 7)
            await all_hold(relays, 7)
            return counted.sent_bytes

    assert asyncio.run(run()) < 1.3 * LARGE_BYTES


def test_a_relay_that_joins_late_takes_most_from_its_siblings(tmp_path):
    source = origin(tmp_path)
    source.publish(large_folder(tmp_path / "large"), 7)

    async def run():
        async with (
            serving(source.store) as up,
            between(up) as counted,
            family(tmp_path, "abc", counted.url) as (
                relays,
                urls,
            ),
        ):
            await all_hold(relays, 7)
            counted.sent_bytes = 0
            async with mirroring(relay(tmp_path, counted.url, *urls.values(), name="late")) as late:
                await until(lambda: late.status.versions == [7])
            return counted.sent_bytes

    assert asyncio.run(run()) < 0.6 * LARGE_BYTES  # a quarter, on average


@pytest.mark.parametrize("death", ["silent", "gone"])
def test_a_sibling_that_dies_in_the_middle_costs_little_time(tmp_path, death):
    source = origin(tmp_path)
    large_folder(tmp_path / "large")

    async def run():
        async with AsyncExitStack() as stack:
            up = await stack.enter_async_context(serving(source.store))
            mirror = relay(tmp_path, name="a", limits={"patience_s": 1.0})
            other = relay(tmp_path, name="b")
            there = await stack.enter_async_context(serving(other.store))
            here = await stack.enter_async_context(serving(mirror.store))
            dying = await stack.enter_async_context(between(there))
            slow = await stack.enter_async_context(between(up, rate_Bps=30_000))
            mirror.upstream = lambda: [slow.url, dying.url]
            other.upstream = lambda: [slow.url, here]
            await stack.enter_async_context(mirroring(mirror))
            task = asyncio.create_task(other.mirror())
            await until(lambda: mirror.place.siblings and other.place.siblings)
            source.publish(tmp_path / "large", 7)
            await until(lambda: dying.sent_bytes > 10_000)
            task.cancel()
            if death == "silent":
                dying.silent = lambda path: True
            else:
                dying.refuse = lambda path: web.Response(status=500)
            taken_bytes = dying.sent_bytes
            slow.rate_Bps = 1e6
            await until(lambda: mirror.status.versions == [7], timeout_s=30)
            return taken_bytes

    assert asyncio.run(run()) < LARGE_BYTES / 2


def test_two_relays_that_know_only_each_other_find_nothing_and_then_the_origin(tmp_path):
    source = origin(tmp_path)
    source.publish(large_folder(tmp_path / "large"), 7)
    known = []

    async def run():
        a, b = relay(tmp_path, name="a"), relay(tmp_path, name="b")
        async with serving(a.store) as url_a, serving(b.store) as url_b:
            a.upstream, b.upstream = (lambda: [url_b, *known]), (lambda: [url_a, *known])
            async with mirroring(a), mirroring(b):
                await asyncio.sleep(0.3)
                assert (a.status.versions, b.status.versions) == ([], [])
                assert not a.place.parents and not b.place.parents
                async with serving(source.store) as up:
                    known.append(up)
                    await all_hold({"a": a, "b": b}, 7)
                # The origin is gone, and they ask each other in vain, until it is back.
                await asyncio.sleep(0.3)
                assert await versions_at(url_a) == await versions_at(url_b) == [7]
                published(tmp_path, 8)
                async with serving(source.store) as up:
                    known[:] = [up]
                    await all_hold({"a": a, "b": b}, 8)
                    await until(lambda: [source.url for source in a.place.parents + b.place.parents] == [up, up])

    asyncio.run(run())


def test_a_relay_asks_neither_itself_nor_one_behind_it(tmp_path):
    """They wait for this very relay: asked for a shard that the origin has damaged, they would answer never."""
    flip_bit(published(tmp_path, 7).store.shard_path(7, "full", 1))

    async def run():
        mirror, behind = (relay(tmp_path, name=name, stall_s=0.5) for name in "ab")
        async with (
            serving(tmp_path / "origin") as up,
            serving(mirror.store, wait_s=0.3) as url,
            between(url) as itself,
            serving(behind.store) as below_url,
            between(below_url) as below,
        ):
            behind.upstream = lambda: [url]
            mirror.upstream = lambda: [up, itself.url, below.url]
            async with mirroring(mirror), mirroring(behind):
                await until(lambda: "every server was tried" in (mirror.status.last_error or ""))
                published(tmp_path, 8)
                await all_hold({"a": mirror, "b": behind}, 8)
            assert (itself.asked, below.asked) == ([], [])

    asyncio.run(run())


def test_nearest_to_the_origin_are_the_parents_however_many_are_known(tmp_path):
    source = published(tmp_path, 7)

    async def run():
        async with AsyncExitStack() as stack:
            up = await stack.enter_async_context(serving(source.store))
            urls = [up]
            for name in "abc":  # each knows only the one before
                above = relay(tmp_path, urls[-1], name=name)
                urls.append(await stack.enter_async_context(serving(above.store)))
                await stack.enter_async_context(mirroring(above))
                await until(lambda above=above: above.status.versions == [7])
            last = relay(tmp_path, *urls[2:], name="last")  # b, behind a; and c, behind b
            await stack.enter_async_context(mirroring(last))
            await until(lambda: last.status.versions == [7])
            assert [source.url for source in last.place.parents] == [urls[2]]
            assert [source.url for source in last.place.siblings.values()] == [urls[3]]

    asyncio.run(run())


def test_a_shard_reaches_the_fourth_server_while_the_first_relay_still_has_half_of_it(tmp_path):
    source = origin(tmp_path, shard_size_bytes=100_000)
    source.publish(large_folder(tmp_path / "large"), 7)

    async def run():
        async with AsyncExitStack() as stack:
            up = await stack.enter_async_context(serving(source.store))
            slow = await stack.enter_async_context(between(up, rate_Bps=100_000))
            mirrors, url = [], slow.url
            for name in "abc":
                mirrors.append(relay(tmp_path, url, name=name))
                url = await stack.enter_async_context(serving(mirrors[-1].store))
                await stack.enter_async_context(mirroring(mirrors[-1]))
            first, last = (one.store.shard_path(7, "full", 0) for one in (mirrors[0], mirrors[-1]))
            await until(lambda: temporary(last).exists() and temporary(last).stat().st_size > 10_000)
            assert not first.exists() and not last.exists()
            slow.rate_Bps = 10e6
            await until(lambda: mirrors[-1].status.versions == [7])
            assert json.loads((mirrors[-1].store.path / "versions.json").read_text())["path"] == [
                source.store.id,
                *(one.store.id for one in mirrors),
            ]

    asyncio.run(run())


def test_relays_spread_over_their_parents_and_keep_to_the_one_they_chose():
    def sources(*speeds_Bps: float | None) -> list[Stub]:
        return [Stub(f"http://{name}", standing=Known(speed)) for name, speed in zip("abc", speeds_Bps, strict=True)]

    ids = [f"{n:016x}" for n in range(300)]

    def firsts(parents: list[Stub]) -> list[str]:
        return [by_preference(own, parents)[0].url[-1] for own in ids]

    alike = firsts(sources(None, None, None))
    assert all(70 <= alike.count(name) <= 130 for name in "abc")
    assert firsts(sources(None, None, None)[::-1]) == alike  # in any order they are known
    unlike = firsts(sources(3e6, 1e6, None))  # what is not known may be as good as the best
    assert 20 <= unlike.count("b") <= 70 < min(unlike.count("a"), unlike.count("c"))
    left = [name for name, before in zip(unlike, alike, strict=True) if before != "b"]
    assert "b" not in left  # who moves goes away from the slow one
    assert len(by_preference(ids[0], sources(None, None, None))) == 3


def test_second_relays_take_from_different_first_ones_and_no_loop_comes_of_it(tmp_path):
    source = origin(tmp_path)
    source.publish(large_folder(tmp_path / "large"), 7)

    async def run():
        async with AsyncExitStack() as stack:
            up = await stack.enter_async_context(serving(source.store))
            first = {}
            for name in "ab":
                one = relay(tmp_path, up, name=name)
                first[await stack.enter_async_context(serving(one.store))] = one
                await stack.enter_async_context(mirroring(one))
            await all_hold({one.store.id: one for one in first.values()}, 7)
            second = {name: relay(tmp_path, *first, name=name) for name in "cdefgh"}
            for one in second.values():
                url = await stack.enter_async_context(serving(one.store))
                for above in first.values():  # they know of those behind them, too
                    above.upstream = lambda known=above.upstream, url=url: [*known(), url]
                await stack.enter_async_context(mirroring(one))
            await all_hold(second, 7)
            taken_from = {
                by_preference(one.store.id, one.place.parents)[0].url for one in second.values()
            }  # both, in 31 of 32 runs
            await until(lambda: all(len(first[url].place.behind) > 0 for url in taken_from))
            for above in first.values():
                assert [parent.url for parent in above.place.parents] == [up]
            for one in second.values():
                chosen = by_preference(one.store.id, one.place.parents)[0].url
                path = json.loads((one.store.path / "versions.json").read_text())["path"]
                assert path == [source.store.id, first[chosen].store.id, one.store.id]
                arrival = one.status.arrival
                assert arrival and list(arrival.rates_Bps) == [chosen]
                assert (arrival.version, arrival.size_bytes > 0, arrival.took_s > 0) == (7, True, True)

    asyncio.run(run())


# Going on


def test_half_a_shard_is_taken_up_after_a_disconnect(tmp_path):
    published(tmp_path, 7, shard_size_bytes=WHOLE_BYTES)

    async def run():
        async with serving(tmp_path / "origin") as up, between(up, cut_after_bytes=12_000) as middle:
            async with mirroring(relay(tmp_path, middle.url)) as mirror:
                await until(lambda: middle.sent_bytes == 12_000 and len(middle.asked) > 2)  # cut, and asked again
                middle.cut_after_bytes = 10**9
                await until(lambda: mirror.status.versions == [7])
            return middle

    middle = asyncio.run(run())
    first, *others = middle.starts()
    assert first == 0 and set(others) == {others[0]}
    assert 6_000 < others[0] <= 12_000  # of what was sent some may have been in a buffer
    assert middle.sent_bytes < 12_000 + WHOLE_BYTES


def test_a_relay_mirrors_a_newer_version_before_what_it_is_a_delta_of(tmp_path):
    """And all of what it needs, though `keep` alone would not."""
    stepped(tmp_path, 0, 1, 2, 3, 4, anchor_every=4, keep=9)

    async def run():
        order = []

        def seen():
            order.extend(version for version in mirror.status.versions if version not in order)
            return len(order) == 5

        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up, keep=2)) as mirror:
            await until(seen)
        return order

    assert asyncio.run(run()) == [4, 3, 2, 1, 0]


def test_an_absurd_path_is_ignored(tmp_path):
    async def answer(request):
        return web.json_response({"versions": [], "path": ["a" * 16] * 64})

    async def run():
        async with answering(answer) as url, mirroring(relay(tmp_path, url)) as mirror:
            await asyncio.sleep(0.2)
            assert mirror.place.parents == []

    asyncio.run(run())
