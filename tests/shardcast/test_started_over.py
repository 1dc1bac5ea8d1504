"""An origin that starts over with an empty store: its readers get the new publication, whatever clocks and mirrors say."""

import asyncio
import shutil
import time

import pytest

from shoal.shardcast import FetchError
from shoal.shardcast.fetch.source import Access
from shoal.shardcast.manifest import CURRENT_S, Newest, SignedNewest, latest

from .support import (
    KEY,
    PUBLIC_KEY,
    PUBLICATION,
    RUN,
    against,
    between,
    client,
    contents,
    mirror_of,
    mirroring,
    model_folder,
    origin,
    plainly,
    published,
    relay,
    serving,
    until,
)

DAY_S = 24 * 3600.0


def ahead() -> float:
    return time.time() + 2 * DAY_S


def start_over(tmp_path, *versions: int, clock=time.time) -> None:
    """The same origin with an empty store and other contents."""
    shutil.rmtree(tmp_path / "origin")
    source = origin(tmp_path, clock=clock)
    for version in versions:
        source.publish(model_folder(tmp_path / f"later{version}", seed=100 + version), version)


def replaced(tmp_path, before, after, *, first_clock=time.time, **options) -> list[int]:
    """Versions that a relay lists, which mirrored an origin before and after it started over."""
    published(tmp_path, *before, clock=first_clock)

    async def run():
        async with serving(tmp_path / "origin") as up, mirroring(relay(tmp_path, up, **options)) as mirror:
            await until(lambda: mirror.status.versions == sorted(before, reverse=True))
            start_over(tmp_path, *after)
            wanted = [(tmp_path / name / f"v{max(after):06d}" / "manifest.json") for name in ("origin", "relay")]
            await until(lambda: wanted[1].is_file() and wanted[0].read_bytes() == wanted[1].read_bytes())
            await until(lambda: mirror.status.versions == sorted(after, reverse=True))
            return mirror.store.versions()

    return asyncio.run(run())


# Relays


@pytest.mark.parametrize(
    ("before", "after"),
    [((0,), (0,)), ((5, 6), (0, 1)), ((5, 6, 7, 8, 9), (0,)), ((0,), (0, 1))],
    ids=["same number", "lower", "all places taken", "higher"],
)
@pytest.mark.parametrize("first_clock", [time.time, ahead], ids=["right clock", "clock was ahead"])
def test_a_relay_leaves_the_publication_that_its_origin_left(tmp_path, before, after, first_clock):
    assert replaced(tmp_path, before, after, first_clock=first_clock) == sorted(after, reverse=True)
    newest = max(after)
    for version in (None, newest):
        folder, _ = against(lambda url, version=version: client(tmp_path, url).fetch(version), tmp_path / "relay")
        assert contents(folder) == contents(tmp_path / f"later{newest}")


def test_an_upstream_that_replays_the_publication_of_before_takes_no_relay_back(tmp_path):
    published(tmp_path, 0, 1, clock=time.time)
    mirror_of(tmp_path, "stale")
    start_over(tmp_path, 0)
    asked = []

    def note(path, data):
        asked.append(path)
        return data

    async def run():
        async with (
            serving(tmp_path / "origin") as up,
            serving(tmp_path / "stale") as stale,
            mirroring(relay(tmp_path, up, stale)) as mirror,
        ):
            await until(lambda: mirror.status.versions == [0])
            async with between(stale, change=note) as middle:
                mirror.upstream = lambda: [middle.url]
                await until(lambda: asked.count("/versions.json") > 10)
            assert mirror.store.versions() == [0]

    asyncio.run(run())
    folder, _ = against(lambda url: client(tmp_path, url).fetch(), tmp_path / "relay")
    assert contents(folder) == contents(tmp_path / "later0")


# Clients


@pytest.mark.parametrize("asked", [None, 0])
@pytest.mark.parametrize("first_clock", [time.time, ahead], ids=["right clock", "clock was ahead"])
def test_a_client_leaves_the_publication_that_its_origin_left(tmp_path, asked, first_clock):
    published(tmp_path, 0, clock=first_clock)
    against(lambda url: client(tmp_path, url).fetch(), tmp_path / "origin")
    start_over(tmp_path, 0)
    folder, _ = against(lambda url: client(tmp_path, url).fetch(asked), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "later0")


@pytest.mark.parametrize("first_clock", [time.time, ahead], ids=["right clock", "clock was ahead"])
@pytest.mark.parametrize("newcomer", [True, False])
def test_of_a_stale_mirror_and_the_origin_the_origin_counts(tmp_path, newcomer, first_clock):
    published(tmp_path, 8, 9, clock=first_clock)
    stale = mirror_of(tmp_path, "stale")
    if not newcomer:
        against(lambda url: client(tmp_path, url).fetch(), stale)
    start_over(tmp_path, 0)
    folder, manifest = against(lambda *urls: client(tmp_path, *urls).fetch(), stale, tmp_path / "origin")
    assert manifest.version == 0 and contents(folder) == contents(tmp_path / "later0")


@pytest.mark.parametrize("asked", [None, 0])
def test_a_server_that_mixes_the_new_statement_with_the_old_version_is_refused(tmp_path, asked):
    """As a cache does that keeps a manifest for longer than a list."""
    published(tmp_path, 0, clock=time.time)
    mixed = mirror_of(tmp_path, "mixed")
    start_over(tmp_path, 0)
    shutil.copyfile(tmp_path / "origin" / "versions.json", mixed / "versions.json")
    with pytest.raises(FetchError, match=r"before the origin started over|no version is published yet"):
        against(lambda url: client(tmp_path, url).fetch(asked), mixed)


def test_a_cached_version_of_before_is_not_taken_for_the_number_that_is_asked_for(tmp_path):
    published(tmp_path, 0, clock=time.time)
    against(lambda url: client(tmp_path, url).fetch(), tmp_path / "origin")
    start_over(tmp_path, 3)
    with pytest.raises(FetchError, match="does not hold v000000"):
        against(lambda url: client(tmp_path, url).fetch(0), tmp_path / "origin")


# The limit on age


def test_a_clock_that_was_corrected_needs_no_empty_store(tmp_path):
    published(tmp_path, 0, clock=ahead)
    published(tmp_path, 1, clock=time.time)
    _, manifest = against(lambda url: client(tmp_path, url).fetch(), tmp_path / "origin")
    assert manifest.version == 1


# What an origin keeps


def test_a_restart_continues_the_publication_and_an_empty_store_begins_another(tmp_path):
    first = published(tmp_path, 0, clock=lambda: 5.0)
    again = published(tmp_path, 0, clock=lambda: 4.0)  # and it was published already
    assert again.publication == first.publication
    manifest = again.publish(model_folder(tmp_path / "model1", seed=1), 1)
    assert manifest.publication == first.publication and manifest.created_s > 5.0, "an order, whatever the clock does"
    digest = manifest.digest
    shutil.rmtree(tmp_path / "origin")
    other = published(tmp_path, 1, clock=lambda: 6.0)
    assert other.publication != first.publication
    same = other.publish(tmp_path / "model1", 1)
    assert (same.created_s, same.digest) == (6.0, digest), "the same version has the same name"


def test_a_version_with_the_same_files_is_fetched_by_its_digest_from_either_publication(tmp_path):
    manifest = published(tmp_path, 0, clock=time.time).publish(tmp_path / "model0", 0)
    against(lambda url: client(tmp_path, url).fetch(), tmp_path / "origin")
    shutil.rmtree(tmp_path / "origin")
    published(tmp_path, 0, clock=time.time)
    reader = client(tmp_path, "http://127.0.0.1:1")
    assert reader.fetch(0, digest=manifest.digest)[1].digest == manifest.digest


def test_a_store_of_an_older_format_is_named(tmp_path):
    published(tmp_path, 0)
    path = tmp_path / "origin" / "v000000" / "manifest.json"
    path.write_text(path.read_text().replace('\\"format\\":5', '\\"format\\":3'))
    with pytest.raises(ValueError, match="a manifest of format 3; this version of Shoal reads 5"):
        origin(tmp_path)


# Which statement counts


def stated(publication: str, as_of_s: float, serial: int = 1) -> Newest:
    return Newest(run=RUN, publication=publication * 32, version=0, serial=serial, as_of_s=as_of_s)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (stated("a", 10.0), stated("a", 5.0, serial=2)),  # one publication: the clock was corrected
        (stated("a", 10.0), stated("b", 11.0)),
        (stated("a", 1e6 + 2 * CURRENT_S), stated("b", 1e6 - CURRENT_S)),  # the clock was ahead
        (stated("a", 1e6 - CURRENT_S), stated("b", 1e6 + CURRENT_S)),  # this clock may be a little slow
        (stated("a", 1e6 + 2 * CURRENT_S), stated("b", 1e6 + 3 * CURRENT_S)),  # this clock is very slow
    ],
)
def test_the_statement_to_believe(wrong, right):
    assert latest(wrong, right, 1e6) == latest(right, wrong, 1e6) == right
    assert latest(None, right, 1e6) == latest(right, None, 1e6) == right and latest(None, None, 1e6) is None


def test_a_reader_hears_the_later_statement_of_a_publication_only():
    access = Access(PUBLIC_KEY, RUN)
    newest = Newest(run=RUN, publication=PUBLICATION, version=3, serial=3, as_of_s=5.0)
    for serial, version in ((3, 3), (2, 9), (4, 2)):
        access.heard(SignedNewest.sign(newest.model_copy(update={"serial": serial, "version": version}), KEY))
    assert access.newest.version == 2


# Caches between a reader and a server


def test_a_cache_that_holds_the_shards_of_before_harms_no_reader(tmp_path):
    """Shards are cached for good, by their URL: one with other bytes has another."""
    published(tmp_path, 0)

    def act(url):
        async def run():
            async with between(url) as middle:
                await asyncio.to_thread(client(tmp_path, middle.url).fetch)
                return {path for path, _ in middle.asked}

        return asyncio.run(run())

    before = against(act, tmp_path / "origin")
    start_over(tmp_path, 0)
    shutil.rmtree(tmp_path / "cache")
    after = against(act, tmp_path / "origin")
    assert len(before) == len(after) == 4 and not before & after


def test_plain_files_are_enough(tmp_path):
    published(tmp_path, 0, clock=time.time)
    folder, _ = against(lambda url: client(tmp_path, url).fetch(0), tmp_path / "origin", serving=plainly)
    assert contents(folder) == contents(tmp_path / "model0")
