"""Which servers a relay takes shards from: its parents, its siblings, and never servers downstream of it."""

import asyncio
import itertools
import json
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from shoal.files import temporary
from shoal.shardcast import ShardStore
from shoal.shardcast.relay import by_preference, owners_of

from .support import (
    PUBLIC_KEY,
    Known,
    Stub,
    answering,
    between,
    flip_bit,
    mirroring,
    origin,
    published,
    relay,
    serving,
    shard,
    until,
    versions_at,
)

LARGE_BYTES = 300_000  # 30 shards


def large_folder(path):
    path.mkdir()
    (path / "model").write_bytes(random.Random("large").randbytes(LARGE_BYTES))
    return path


@asynccontextmanager
async def family(tmp_path, names: str, *upstream: str, **options):
    """Run a relay for each letter of `names`. All know `upstream` and each other. Yield the relays and URLs by name."""
    relays = {name: relay(tmp_path, name=name, **options) for name in names}
    async with AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(serving(each.store)) for name, each in relays.items()}
        for each in relays.values():
            each.upstream = lambda: [*upstream, *urls.values()]
            await stack.enter_async_context(mirroring(each))
        yield relays, urls


async def all_hold(relays, version: int) -> None:
    await until(lambda: all(each.status.versions[:1] == [version] for each in relays.values()))


async def test_siblings_fetch_each_shard_from_the_origin_about_once(tmp_path):
    """This holds even if one of them hears of the version later than the others."""
    source = origin(tmp_path)
    large_folder(tmp_path / "large")
    async with (
        serving(source.store) as up,
        between(up, rate_Bps=50_000) as counted,
        family(tmp_path, "abc", counted.url) as (relays, _),
    ):
        relays["c"].poll_s = 0.3
        await until(lambda: all(len(each.place.siblings) == 2 for each in relays.values()))
        source.publish(tmp_path / "large", 7)
        await all_hold(relays, 7)
        sent_bytes = counted.sent_bytes
    assert LARGE_BYTES <= sent_bytes < 1.3 * LARGE_BYTES
    for name in "abc":
        store = ShardStore(tmp_path / name)
        assert store.missing(store.signed(7).open(PUBLIC_KEY)) == []


def test_siblings_that_do_not_all_know_each_other_never_deadlock():
    ids = [f"{n:016x}" for n in range(4)]
    owned = Counter()
    for entry in map(shard, range(100)):
        owned[owners_of(entry, ids)[0]] += 1
        # each may lack one of the others in its list
        for unknown in itertools.product(*(["", *(id for id in ids if id != own)] for own in ids)):
            views = {own: [id for id in ids if id != other] for own, other in zip(ids, unknown, strict=True)}
            owners = {own: owners_of(entry, view)[0] for own, view in views.items()}
            for owner in ids:
                for _ in ids:
                    owner = owners[owner]
                assert owners[owner] == owner, "no relay of this circle would fetch the shard"
    assert min(owned[own] for own in ids) > 100 / 8


async def test_a_sibling_whose_listing_is_late_still_owns_its_shards(tmp_path):
    """A lost packet delays a listing. If others took over at once, the origin would send each of them the same shards."""
    source = origin(tmp_path)
    large_folder(tmp_path / "large")
    async with (
        serving(source.store) as up,
        between(up, rate_Bps=20_000) as counted,
        family(tmp_path, "ab", counted.url) as (relays, urls),
        between(urls["a"]) as lossy,
    ):
        relays["b"].upstream = lambda: [counted.url, lossy.url]
        await until(lambda: lossy.url in [each.url for each in relays["b"].place.siblings.values()])
        lost = []
        lossy.silent = lambda path: path.endswith("versions.json") and not (lost or lost.append(path))
        await until(lambda: lost)
        source.publish(tmp_path / "large", 7)
        await all_hold(relays, 7)
        assert counted.sent_bytes < 1.3 * LARGE_BYTES


async def test_a_relay_that_joins_late_fetches_most_from_its_siblings(tmp_path):
    source = origin(tmp_path)
    source.publish(large_folder(tmp_path / "large"), 7)
    async with (
        serving(source.store) as up,
        between(up) as counted,
        family(tmp_path, "abc", counted.url) as (relays, urls),
    ):
        await all_hold(relays, 7)
        counted.sent_bytes = 0
        async with mirroring(relay(tmp_path, counted.url, *urls.values(), name="late")) as late:
            await until(lambda: late.status.versions == [7])
        assert counted.sent_bytes < 0.6 * LARGE_BYTES  # on average, it fetches a quarter from the origin


@pytest.mark.parametrize("death", ["silent", "gone"])
async def test_a_sibling_that_dies_during_a_transfer_costs_little_time(tmp_path, death):
    source = origin(tmp_path)
    large_folder(tmp_path / "large")
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
        assert taken_bytes < LARGE_BYTES / 2


async def test_two_relays_that_know_only_each_other_start_to_fetch_when_they_learn_of_the_origin(tmp_path):
    source = origin(tmp_path)
    source.publish(large_folder(tmp_path / "large"), 7)
    known = []
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
            # The origin is down, and they query each other in vain until it is back.
            await asyncio.sleep(0.3)
            assert await versions_at(url_a) == await versions_at(url_b) == [7]
            published(tmp_path, 8)
            async with serving(source.store) as up:
                known[:] = [up]
                await all_hold({"a": a, "b": b}, 8)
                await until(lambda: [source.url for source in a.place.parents + b.place.parents] == [up, up])


async def test_a_relay_fetches_neither_from_itself_nor_from_relays_downstream(tmp_path):
    """Relays downstream wait for this relay, so they would never deliver a shard that is damaged at the origin."""
    flip_bit(published(tmp_path, 7).store.shard_path(7, "full", 1))

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
        assert (itself.requests, below.requests) == ([], [])


async def test_the_servers_nearest_to_the_origin_are_the_parents(tmp_path):
    source = published(tmp_path, 7)
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(serving(source.store))
        urls = [up]
        for name in "abc":  # each relay knows only the server before it
            above = relay(tmp_path, urls[-1], name=name)
            urls.append(await stack.enter_async_context(serving(above.store)))
            await stack.enter_async_context(mirroring(above))
            await until(lambda above=above: above.status.versions == [7])
        last = relay(tmp_path, *urls[2:], name="last")  # b is behind a, and c is behind b
        await stack.enter_async_context(mirroring(last))
        await until(lambda: last.status.versions == [7])
        assert [source.url for source in last.place.parents] == [urls[2]]
        assert [source.url for source in last.place.siblings.values()] == [urls[3]]


async def test_a_shard_passes_through_a_chain_of_relays_while_it_arrives(tmp_path):
    source = origin(tmp_path, shard_size_bytes=100_000)
    source.publish(large_folder(tmp_path / "large"), 7)
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(serving(source.store))
        slow = await stack.enter_async_context(between(up, rate_Bps=100_000))
        mirrors, url = [], slow.url
        for name in "abc":
            mirrors.append(relay(tmp_path, url, name=name))
            url = await stack.enter_async_context(serving(mirrors[-1].store))
            await stack.enter_async_context(mirroring(mirrors[-1]))
        first, last = (each.store.shard_path(7, "full", 0) for each in (mirrors[0], mirrors[-1]))
        await until(lambda: temporary(last).exists() and temporary(last).stat().st_size > 10_000)
        assert not first.exists() and not last.exists()
        slow.rate_Bps = 10e6
        await until(lambda: mirrors[-1].status.versions == [7])
        assert json.loads((mirrors[-1].store.path / "versions.json").read_text())["path"] == [
            source.store.id,
            *(each.store.id for each in mirrors),
        ]


def test_relays_spread_over_their_parents_and_keep_their_choice():
    def sources(*speeds_Bps: float | None) -> list[Stub]:
        return [Stub(f"http://{name}", standing=Known(speed)) for name, speed in zip("abc", speeds_Bps, strict=True)]

    ids = [f"{n:016x}" for n in range(300)]

    def firsts(parents: list[Stub]) -> list[str]:
        return [by_preference(own, parents)[0].url[-1] for own in ids]

    alike = firsts(sources(None, None, None))
    assert all(70 <= alike.count(name) <= 130 for name in "abc")
    assert firsts(sources(None, None, None)[::-1]) == alike  # the order of the list does not matter
    unlike = firsts(sources(3e6, 1e6, None))  # an unmeasured parent may be as good as the best
    assert 20 <= unlike.count("b") <= 70 < min(unlike.count("a"), unlike.count("c"))
    left = [name for name, before in zip(unlike, alike, strict=True) if before != "b"]
    assert "b" not in left  # only relays of the slow parent move
    assert len(by_preference(ids[0], sources(None, None, None))) == 3


async def test_relays_of_the_second_level_spread_over_the_first_without_loops(tmp_path):
    source = origin(tmp_path)
    source.publish(large_folder(tmp_path / "large"), 7)
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(serving(source.store))
        first = {}
        for name in "ab":
            each = relay(tmp_path, up, name=name)
            first[await stack.enter_async_context(serving(each.store))] = each
            await stack.enter_async_context(mirroring(each))
        await all_hold({each.store.id: each for each in first.values()}, 7)
        second = {name: relay(tmp_path, *first, name=name) for name in "cdefgh"}
        for each in second.values():
            url = await stack.enter_async_context(serving(each.store))
            for above in first.values():  # the first level also knows the relays downstream
                above.upstream = lambda known=above.upstream, url=url: [*known(), url]
            await stack.enter_async_context(mirroring(each))
        await all_hold(second, 7)
        # Six relays each choose one of two parents at random, so in 31 of 32 runs both parents are chosen.
        taken_from = {by_preference(each.store.id, each.place.parents)[0].url for each in second.values()}
        await until(lambda: all(len(first[url].place.behind) > 0 for url in taken_from))
        for above in first.values():
            assert [parent.url for parent in above.place.parents] == [up]
        for each in second.values():
            chosen = by_preference(each.store.id, each.place.parents)[0].url
            path = json.loads((each.store.path / "versions.json").read_text())["path"]
            assert path == [source.store.id, first[chosen].store.id, each.store.id]
            arrival = each.status.arrival
            assert arrival and list(arrival.rates_Bps) == [chosen]
            assert (arrival.version, arrival.size_bytes > 0, arrival.took_s > 0) == (7, True, True)


async def test_a_path_that_is_too_long_is_ignored(tmp_path):
    async def answer(request):
        return web.json_response({"versions": [], "path": ["a" * 16] * 64})

    async with answering(answer) as url, mirroring(relay(tmp_path, url)) as mirror:
        await asyncio.sleep(0.2)
        assert mirror.place.parents == []
