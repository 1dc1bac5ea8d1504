"""Readers never go back to an older version on a lagging mirror, nor to a publication that its origin abandoned."""

import asyncio
import shutil
import time
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from shoal.shardcast import Access, FetchError, ShardStore
from shoal.shardcast.alone import watch
from shoal.shardcast.fetch.client import Freshness
from shoal.shardcast.manifest import CURRENT_S, Listing, Newest, SignedNewest, latest

from .support import (
    KEY,
    OTHER_KEY,
    PUBLIC_KEY,
    PUBLICATION,
    RUN,
    between,
    client,
    contents,
    fetched,
    mirror_of,
    mirroring,
    model_folder,
    origin,
    plainly,
    published,
    relay,
    serving,
    stepped,
    until,
)

DAY_S = 24 * 3600.0


def ahead() -> float:
    return time.time() + 2 * DAY_S


CLOCKS = pytest.mark.parametrize("first_clock", [time.time, ahead], ids=["right clock", "clock was ahead"])


def start_over(tmp_path, *versions: int) -> None:
    """Restart the origin with an empty store and other contents."""
    shutil.rmtree(tmp_path / "origin")
    source = origin(tmp_path, clock=time.time)
    for version in versions:
        source.publish(model_folder(tmp_path / f"later{version}", seed=100 + version), version)


# Relays


@pytest.mark.parametrize(
    ("before", "after"),
    [((0,), (0,)), ((5, 6), (0, 1)), ((5, 6, 7, 8, 9), (0,)), ((0,), (0, 1))],
    ids=["same number", "lower", "store full", "higher"],
)
@CLOCKS
async def test_a_relay_drops_an_abandoned_publication(tmp_path, before, after, first_clock):
    published(tmp_path, *before, clock=first_clock)
    newest = max(after)
    async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up)) as mirror:
        await until(lambda: mirror.status.versions == sorted(before, reverse=True))
        start_over(tmp_path, *after)
        manifests = [tmp_path / name / f"v{newest:06d}" / "manifest.json" for name in ("origin", "relay")]
        await until(lambda: manifests[1].is_file() and manifests[0].read_bytes() == manifests[1].read_bytes())
        await until(lambda: mirror.status.versions == sorted(after, reverse=True))
        assert mirror.store.versions() == sorted(after, reverse=True)
        async with serving(mirror.store) as url:
            for version in (None, newest):
                folder, _ = await asyncio.to_thread(client(tmp_path, url).fetch, version)
                assert contents(folder) == contents(tmp_path / f"later{newest}")


async def test_an_upstream_that_replays_an_abandoned_publication_is_ignored(tmp_path):
    published(tmp_path, 0, 1, clock=time.time)
    mirror_of(tmp_path, "stale")
    start_over(tmp_path, 0)
    requests = []

    def record(path, data):
        requests.append(path)
        return data

    async with (
        serving(tmp_path / "origin") as up,
        serving(tmp_path / "stale") as stale,
        mirroring(relay(tmp_path, up, stale)) as mirror,
    ):
        await until(lambda: mirror.status.versions == [0])
        async with between(stale, change=record) as middle:
            mirror.upstream = lambda: [middle.url]
            await until(lambda: requests.count("/versions.json") > 10)
        assert mirror.store.versions() == [0]
        async with serving(mirror.store) as url:
            folder, _ = await asyncio.to_thread(client(tmp_path, url).fetch)
            assert contents(folder) == contents(tmp_path / "later0")


async def test_a_relay_passes_on_the_origins_statement_of_the_newest_version(tmp_path):
    source = stepped(tmp_path, 1)
    async with serving(source.store) as up, mirroring(relay(tmp_path, up)) as mirror:
        await until(lambda: mirror.store.newest is not None)
        store = mirror.store
    listing = Listing.model_validate_json((store.path / "versions.json").read_bytes())
    assert listing.newest == source.store.newest
    again = ShardStore(store.path)
    again.recover()
    assert again.newest == listing.newest


# Clients


@pytest.mark.parametrize(("before", "after"), [((0,), (0,)), ((5, 6), (0, 1))], ids=["same number", "lower"])
@pytest.mark.parametrize("by_number", [False, True])
@CLOCKS
def test_a_client_drops_an_abandoned_publication(tmp_path, before, after, by_number, first_clock):
    published(tmp_path, *before, clock=first_clock)
    fetched(tmp_path)
    start_over(tmp_path, *after)
    folder, manifest = fetched(tmp_path, after[-1] if by_number else None)
    assert manifest.version == after[-1] and contents(folder) == contents(tmp_path / f"later{after[-1]}")
    assert not (tmp_path / "cache" / "v000006").exists(), "the abandoned version is still cached"


@CLOCKS
@pytest.mark.parametrize("newcomer", [True, False])
def test_the_origin_counts_more_than_a_mirror_of_its_abandoned_publication(tmp_path, newcomer, first_clock):
    published(tmp_path, 8, 9, clock=first_clock)
    mirror_of(tmp_path, "stale")
    if not newcomer:
        fetched(tmp_path, at=["stale"])
    start_over(tmp_path, 0)
    folder, manifest = fetched(tmp_path, at=["stale", "origin"])
    assert manifest.version == 0 and contents(folder) == contents(tmp_path / "later0")


@pytest.mark.parametrize("version", [None, 0])
def test_a_server_that_mixes_the_new_statement_with_the_old_version_is_refused(tmp_path, version):
    """A cache in front of the server mixes them if it keeps manifests longer than lists."""
    published(tmp_path, 0, clock=time.time)
    mixed = mirror_of(tmp_path, "mixed")
    start_over(tmp_path, 0)
    shutil.copyfile(tmp_path / "origin" / "versions.json", mixed / "versions.json")
    with pytest.raises(FetchError, match=r"before the origin started over|no version is published yet"):
        fetched(tmp_path, version, at=["mixed"])


def test_a_cached_version_of_an_abandoned_publication_is_not_returned(tmp_path):
    published(tmp_path, 0, clock=time.time)
    fetched(tmp_path)
    start_over(tmp_path, 3)
    with pytest.raises(FetchError, match="does not hold v000000"):
        fetched(tmp_path, 0)


@pytest.mark.parametrize("versions", [(5, 7), (7, 7)], ids=["lower number", "same number"])
def test_no_client_goes_back_to_a_stale_mirror(tmp_path, versions):
    published(tmp_path, versions[0], clock=time.time)
    mirror_of(tmp_path, "stale")
    if versions[0] == versions[1]:
        start_over(tmp_path, versions[1])
    else:
        published(tmp_path, versions[1], clock=time.time)
    expected = contents(fetched(tmp_path)[0])
    folder, manifest = fetched(tmp_path, at=["stale"])
    assert (manifest.version, contents(folder)) == (versions[1], expected)


async def test_watch_never_yields_an_older_version_after_a_newer_one(tmp_path):
    published(tmp_path, 5)
    stale = mirror_of(tmp_path, "stale")
    source = published(tmp_path, 7)
    async with serving(stale) as behind, serving(source.store) as newest:
        for url in (newest, behind):
            _, manifest = await asyncio.to_thread(next, watch([url], tmp_path / "cache", PUBLIC_KEY))
            assert manifest.version == 7


@pytest.mark.parametrize(("created_s", "newest"), [(9.0, 5), (10.0, 5), (11.0, 4)])
def test_a_version_with_a_lower_number_is_the_newest_only_if_it_was_published_later(created_s, newest):
    """An origin that continues from a backup of its store publishes a lower number."""

    def manifest(version: int, created_s: float) -> SimpleNamespace:
        return SimpleNamespace(run=RUN, publication=PUBLICATION, version=version, created_s=created_s)

    here = manifest(5, 10.0)
    cache = SimpleNamespace(newest=lambda now_s: here, offer=lambda version: (None, here))
    fresh = Freshness(Access(PUBLIC_KEY, RUN), cache)
    assert fresh.newest([(None, manifest(4, created_s))])[1].version == newest


# Origins


def test_readers_follow_an_origin_whose_clock_is_corrected(tmp_path):
    published(tmp_path, 0, clock=ahead)
    published(tmp_path, 1, clock=time.time)
    assert fetched(tmp_path)[1].version == 1


def test_a_restart_continues_the_publication_and_an_empty_store_starts_another(tmp_path):
    first = published(tmp_path, 0, clock=lambda: 5.0)
    again = published(tmp_path, 0, clock=lambda: 4.0)
    manifest = again.publish(model_folder(tmp_path / "model1", seed=1), 1)
    assert manifest.publication == again.publication == first.publication
    assert manifest.created_s > 5.0, "a version must be later than its predecessor, whatever the clock says"
    shutil.rmtree(tmp_path / "origin")
    other = published(tmp_path, 1, clock=lambda: 6.0)
    assert other.publication != first.publication
    same = other.publish(tmp_path / "model1", 1)
    assert (same.created_s, same.digest) == (6.0, manifest.digest), "the same version must keep its time and digest"


def test_a_version_with_the_same_files_is_fetched_by_its_digest_from_either_publication(tmp_path):
    manifest = published(tmp_path, 0, clock=time.time).publish(tmp_path / "model0", 0)
    fetched(tmp_path)
    shutil.rmtree(tmp_path / "origin")
    published(tmp_path, 0, clock=time.time)
    reader = client(tmp_path, "http://127.0.0.1:1")
    assert reader.fetch(0, digest=manifest.digest)[1].digest == manifest.digest


def test_a_store_of_an_older_format_is_refused(tmp_path):
    published(tmp_path, 0)
    path = tmp_path / "origin" / "v000000" / "manifest.json"
    path.write_text(path.read_text().replace('\\"format\\":5', '\\"format\\":3'))
    with pytest.raises(ValueError, match="the manifest has format 3; this version of Shoal reads format 5"):
        origin(tmp_path)


# Statements


def test_statements_have_increasing_serials_whatever_the_clock_says(tmp_path):
    serials, times = [], []
    for version, clock_s in enumerate((100.0, 100.0, 50.0)):
        source = published(tmp_path, version, clock=lambda clock_s=clock_s: clock_s)
        newest = source.store.newest.open(PUBLIC_KEY, run=RUN)
        serials.append(newest.serial)
        times.append(newest.as_of_s)
    assert serials == sorted(set(serials)) and times == [100.0, 100.0, 50.0]


def stated(publication: str, as_of_s: float, serial: int = 1) -> Newest:
    return Newest(run=RUN, publication=publication * 32, version=0, serial=serial, as_of_s=as_of_s)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (stated("a", 10.0), stated("a", 5.0, serial=2)),  # within one publication, the serial decides
        (stated("a", 10.0), stated("b", 11.0)),
        (stated("a", 1e6 + 2 * CURRENT_S), stated("b", 1e6 - CURRENT_S)),  # the origin's clock was ahead
        (stated("a", 1e6 - CURRENT_S), stated("b", 1e6 + CURRENT_S)),  # the reader's clock is a little slow
        (stated("a", 1e6 + 2 * CURRENT_S), stated("b", 1e6 + 3 * CURRENT_S)),  # the reader's clock is very slow
    ],
)
def test_latest_returns_the_statement_to_believe(wrong, right):
    assert latest(wrong, right, 1e6) == latest(right, wrong, 1e6) == right
    assert latest(None, right, 1e6) == latest(right, None, 1e6) == right and latest(None, None, 1e6) is None


def test_a_statement_counts_if_it_is_signed_by_the_origin_for_this_run_and_has_a_higher_serial():
    access = Access(PUBLIC_KEY, RUN)
    newest = Newest(run=RUN, publication=PUBLICATION, version=3, serial=3, as_of_s=5.0)
    for key, run in ((OTHER_KEY, RUN), (KEY, "other")):
        access.heard(SignedNewest.sign(newest.model_copy(update={"run": run}), key))
        assert access.newest is None
    for serial, version in ((3, 3), (2, 9), (4, 2)):
        access.heard(SignedNewest.sign(newest.model_copy(update={"serial": serial, "version": version}), KEY))
    assert access.newest.version == 2
    with pytest.raises(ValidationError):
        SignedNewest(statement="x" * 1001, signature="0" * 128)


# Caches between a reader and a server


async def test_shards_of_another_publication_have_other_urls(tmp_path):
    """Otherwise a cache would return a shard of the old publication, because caches keep what a shard's URL returned."""
    paths = []
    published(tmp_path, 0)
    for publication in range(2):
        if publication:
            start_over(tmp_path, 0)
            shutil.rmtree(tmp_path / "cache")
        async with serving(tmp_path / "origin") as up, between(up) as middle:
            await asyncio.to_thread(client(tmp_path, middle.url).fetch)
            paths.append({path for path, _ in middle.requests})
    assert len(paths[0]) == len(paths[1]) == 4 and not paths[0] & paths[1]


def test_a_plain_file_server_is_enough(tmp_path):
    published(tmp_path, 0, clock=time.time)
    folder, _ = fetched(tmp_path, 0, serving=plainly)
    assert contents(folder) == contents(tmp_path / "model0")
