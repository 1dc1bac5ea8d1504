"""Readers are never taken back: by a mirror that is behind, by what they fetched before, by an origin that started over."""

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from shoal.shardcast import Access, FetchError, Origin, PublishError, ShardStore
from shoal.shardcast.alone import publish, watch
from shoal.shardcast.fetch.client import Freshness
from shoal.shardcast.fetch.reach import proxy_for
from shoal.shardcast.manifest import MAX_SHARDS, Listing, Newest, SignedNewest
from shoal.shardcast.server import serve, url_of

from .support import (
    KEY,
    OTHER_KEY,
    PUBLIC_KEY,
    PUBLICATION,
    RUN,
    against,
    client,
    contents,
    mirror_of,
    mirroring,
    model_folder,
    origin,
    published,
    relay,
    serving,
    stepped,
    until,
)


def started_over(tmp_path, *versions: int) -> Origin:
    """The same origin with an empty store, later, with other contents."""
    shutil.rmtree(tmp_path / "origin")
    source = origin(tmp_path, clock=lambda: 100.0)
    for version in versions:
        source.publish(model_folder(tmp_path / f"later{version}", seed=100 + version), version)
    return source


def fetched(tmp_path, version=None, **options):
    return against(lambda url: client(tmp_path, url, **options).fetch(version), tmp_path / "origin")


def test_the_newest_after_starting_over_has_a_lower_number(tmp_path):
    published(tmp_path, 5, 6)
    fetched(tmp_path)
    started_over(tmp_path, 0, 1)
    folder, manifest = fetched(tmp_path)
    assert manifest.version == 1 and contents(folder) == contents(tmp_path / "later1")
    assert not (tmp_path / "cache" / "v000006").exists(), "a mirror of before could be believed again"


def test_a_cached_version_is_used_where_nobody_answers(tmp_path):
    published(tmp_path, 3)
    folder, _ = fetched(tmp_path)
    silent = client(tmp_path, "http://127.0.0.1:1")
    assert silent.fetch(3)[0] == folder and "http://127.0.0.1:1" in silent.progress.complaints


@pytest.mark.parametrize("numbers", [(5, 7), (7, 7)], ids=["lower number", "same number"])
def test_a_stale_mirror_takes_nobody_back(tmp_path, numbers):
    published(tmp_path, numbers[0])
    stale = mirror_of(tmp_path, "stale")
    if numbers[0] == numbers[1]:
        started_over(tmp_path, numbers[1])
    else:
        published(tmp_path, numbers[1])
    newest, _ = fetched(tmp_path)
    expected = contents(newest)
    folder, manifest = against(lambda url: client(tmp_path, url).fetch(), stale)
    assert (manifest.version, contents(folder)) == (numbers[1], expected)


def test_following_never_yields_an_older_version_after_a_newer(tmp_path):
    published(tmp_path, 5)
    stale = mirror_of(tmp_path, "stale")
    source = published(tmp_path, 7)

    async def run():
        seen = []
        async with serving(stale) as behind, serving(source.store) as ahead:

            def follow(urls, count):
                following = watch(urls, tmp_path / "cache", PUBLIC_KEY)
                for _ in range(count):
                    seen.append(next(following)[1].version)
                return following

            await asyncio.to_thread(follow, [ahead], 1)
            await asyncio.to_thread(follow, [behind], 1)
        return seen

    assert asyncio.run(run()) == [7, 7]


def test_statements_have_increasing_serials_whatever_the_clock_says(tmp_path):
    serials, times = [], []
    for clock_s in (100.0, 100.0, 50.0):
        source = origin(tmp_path, clock=lambda clock_s=clock_s: clock_s)
        source.publish(model_folder(tmp_path / f"model{len(times)}", seed=len(times)), len(times))
        stated = source.store.newest.open(PUBLIC_KEY, run=RUN)
        serials.append(stated.serial)
        times.append(stated.as_of_s)
    assert serials == sorted(set(serials)) and times == [100.0, 100.0, 50.0]


def test_a_statement_of_another_key_or_run_says_nothing():
    newest = Newest(run=RUN, publication=PUBLICATION, version=1, serial=2, as_of_s=2.0)
    assert SignedNewest.sign(newest, KEY).open(PUBLIC_KEY, run=RUN) == newest
    assert SignedNewest.sign(newest, OTHER_KEY).open(PUBLIC_KEY, run=RUN) is None
    assert SignedNewest.sign(newest, KEY).open(PUBLIC_KEY, run="other") is None


def test_a_relay_passes_the_statement_on(tmp_path):
    source = stepped(tmp_path, 1)

    async def run():
        async with serving(source.store) as up, mirroring(relay(tmp_path, up)) as mirror:
            await until(lambda: mirror.store.newest is not None)
            return mirror.store

    store = asyncio.run(run())
    said = Listing.model_validate_json((store.path / "versions.json").read_bytes()).newest
    assert said == source.store.newest
    again = ShardStore(store.path)
    again.recover()
    assert again.newest == said


# Stores and folders of others


def test_a_store_has_one_writer(tmp_path):
    code = "import sys, pathlib; from shoal.shardcast import ShardStore; ShardStore(pathlib.Path(sys.argv[1])).lock()"
    store = ShardStore(tmp_path / "store")
    store.lock()
    other = [sys.executable, "-c", code, str(store.path)]
    refused = subprocess.run(other, capture_output=True, text=True)
    assert refused.returncode and f"another origin or relay writes {store.path}" in refused.stderr
    store.lock()  # this process has it already
    store.unlock()
    assert subprocess.run(other).returncode == 0


def test_publishing_once_leaves_the_store_to_others(tmp_path):
    publish(model_folder(tmp_path / "model"), tmp_path / "store", KEY)
    code = "import sys, pathlib; from shoal.shardcast import ShardStore; ShardStore(pathlib.Path(sys.argv[1])).lock()"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")]).returncode == 0


@pytest.mark.parametrize("public", [True, False])
def test_another_user_can_serve_a_public_store_whatever_the_umask(tmp_path, public):
    before = os.umask(0o077)
    try:
        source = Origin(ShardStore(tmp_path / "store", public=public), KEY, run=RUN, anchor_every=1)
        source.publish(model_folder(tmp_path / "model"), 0)
    finally:
        os.umask(before)
    served = [
        tmp_path / "store" / name for name in ("versions.json", "v000000/manifest.json", "v000000/full/00000.shard")
    ]
    files = {stat.S_IMODE(path.stat().st_mode) for path in served}
    folders = {stat.S_IMODE(path.parent.stat().st_mode) for path in served}
    assert (files, folders) == (({0o644}, {0o755}) if public else ({0o600}, {0o700}))


def test_a_folder_that_was_not_fetched_is_never_touched(tmp_path):
    for foreign in ("v000001", "v000000", ".v000001.mine"):
        model_folder(tmp_path / "cache" / foreign, seed=9)
    (tmp_path / "cache" / "video.delta").write_text("mine")
    (tmp_path / "cache" / ".notes.tmp").write_text("mine")
    before = contents(tmp_path / "cache")
    published(tmp_path, 1)
    with pytest.raises(FetchError, match="v000001 is not a fetched version; move it away"):
        fetched(tmp_path)
    published(tmp_path, 5, 6, 7)
    for version in (5, 6, 7):
        fetched(tmp_path, version, keep=1)
    after = contents(tmp_path / "cache")
    assert {name: data for name, data in after.items() if name in before} == before


def test_too_many_shards_are_refused_before_one_is_written(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "weights").open("wb") as file:
        file.truncate(1024 * (MAX_SHARDS + 20_000))
    source = origin(tmp_path, shard_size_bytes=1024)
    with pytest.raises(PublishError, match="120000 shards of 1024.* raise the shard size to 1229 bytes or more"):
        source.publish(folder, 0)
    assert not (source.store.path / "v000000").exists() and source.published() == []


# Addresses


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:80"), ("127.0.0.1", "http://127.0.0.1:80")])
def test_the_url_of_an_ipv6_host_has_brackets(host, url):
    assert url_of(host, 80) == url


def name_proxy(monkeypatch, **variables: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


def test_the_proxy_that_the_environment_names_is_used(monkeypatch):
    name_proxy(monkeypatch, HTTPS_PROXY="http://me:secret@proxy:3128", NO_PROXY="relay.near,10.0.0.1")
    proxy = proxy_for("https://relay.far:8080")
    assert proxy == ("http://me:secret@proxy:3128", "http://proxy:3128")
    for url in ("http://relay.far", "https://relay.near:1", "https://10.0.0.1", "https://127.0.0.1", "https://[::1]:8"):
        assert proxy_for(url) is None


def test_a_proxy_of_another_kind_is_refused_by_name(monkeypatch):
    name_proxy(monkeypatch, ALL_PROXY="socks5://proxy:1080")
    with pytest.raises(FetchError, match="socks5://proxy:1080 for http://relay.far"):
        proxy_for("http://relay.far")


def test_a_version_comes_through_the_proxy(tmp_path, monkeypatch):
    """The proxy here is a server of the store: it is asked for absolute URLs of a host that does not exist."""
    published(tmp_path, 7)

    def act(url):
        name_proxy(monkeypatch, http_proxy=url)
        return client(tmp_path, "http://relay.invalid:8080").fetch()

    folder, _ = against(act, tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")


def test_a_dead_proxy_is_named(tmp_path, monkeypatch):
    name_proxy(monkeypatch, http_proxy="http://127.0.0.1:1")
    with pytest.raises(FetchError, match=r"through the proxy http://127.0.0.1:1, which the environment names"):
        client(tmp_path, "http://relay.invalid:8080").fetch()


def test_serving_an_ipv6_address(tmp_path):
    published(tmp_path, 7)

    async def run():
        from shoal.shardcast import app

        runner, port = await serve(app(ShardStore(tmp_path / "origin")), "::1")
        try:
            return await asyncio.to_thread(client(tmp_path, url_of("::1", port)).fetch)
        finally:
            await runner.cleanup()

    try:
        assert asyncio.run(run())[1].version == 7
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")


# Which version is the newest


def manifest(version: int, created_s: float, publication: str = PUBLICATION) -> SimpleNamespace:
    shards = SimpleNamespace(shards=())
    return SimpleNamespace(run=RUN, publication=publication, version=version, created_s=created_s, content=shards)


def holding(here: SimpleNamespace) -> Freshness:
    """A client that has this version."""
    cache = SimpleNamespace(newest=lambda now_s: here, offer=lambda version: (None, here))
    return Freshness(Access(PUBLIC_KEY, RUN), cache)


@pytest.mark.parametrize(("created_s", "newest"), [(9.0, 5), (10.0, 5), (11.0, 4)])
def test_a_lower_number_counts_only_if_it_was_published_later(created_s, newest):
    """As by an origin that continues from a backup of its store."""
    assert holding(manifest(5, 10.0)).newest([(None, manifest(4, created_s))])[1].version == newest


def test_a_statement_has_a_bounded_length():
    with pytest.raises(ValidationError):
        SignedNewest(statement="x" * 1001, signature="0" * 128)
