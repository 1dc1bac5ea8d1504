import asyncio
import errno
import random
import shutil
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from shoal.shardcast import Client, FetchError, Origin, ShardStore, SignedManifest
from shoal.shardcast.fetch import cache as cache_module
from shoal.shardcast.fetch.cache import PartialShard
from shoal.shardcast.fetch.source import Standing
from shoal.shardcast.files import StreamFiles
from shoal.shardcast.manifest import SIGNATURE_DOMAIN, Listing

from . import virtual
from .support import (
    KEY,
    OTHER_KEY,
    PUBLIC_KEY,
    SHARD_BYTES,
    SMALL_BYTES,
    Stub,
    access,
    against,
    answering,
    between,
    cached,
    choosing,
    client,
    contents,
    dead_url,
    flip_bit,
    free_port,
    mirror_of,
    model_folder,
    origin,
    plainly,
    published,
    quickly,
    read_and_written_bytes,
    serving,
    stepped,
    until,
    weights_folder,
)


def test_fetch_brings_exactly_the_published_files(tmp_path):
    published(tmp_path, 7)
    getter = client(tmp_path, "http://placeholder")

    def act(url):
        getter.urls = [url]
        return getter.fetch()

    folder, manifest = against(act, tmp_path / "origin")
    assert folder == tmp_path / "cache" / "v000007"
    assert contents(folder) == contents(tmp_path / "model7")
    assert manifest.version == 7
    assert cached(tmp_path) == ["v000007"]
    report = getter.progress
    assert (report.version, report.reused_bytes, report.complaints) == (7, 0, {})
    assert manifest.size_bytes < report.transferred_bytes < manifest.size_bytes + SMALL_BYTES


def test_a_model_of_only_empty_files(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "empty").touch()
    origin(tmp_path).publish(tmp_path / "model", 0)
    folder, _ = against(lambda url: client(tmp_path, url).fetch(0), tmp_path / "origin")
    assert contents(folder) == {"empty": b""}


def test_latest_is_the_newest_over_all_relays(tmp_path):
    published(tmp_path, 7)
    mirror_of(tmp_path, "behind")
    published(tmp_path, 8)
    newest = against(
        lambda *urls: client(tmp_path, *urls, dead_url()).latest(), tmp_path / "behind", tmp_path / "origin"
    )
    assert newest.version == 8


def test_latest_is_none_when_nothing_is_published(tmp_path):
    origin(tmp_path)
    assert against(lambda url: client(tmp_path, url).latest(), tmp_path / "origin") is None
    with pytest.raises(FetchError, match="no version is published yet"):
        against(lambda url: client(tmp_path, url).fetch(), tmp_path / "origin")


def test_no_relay_at_all_names_every_url_and_why(tmp_path):
    urls = dead_url(), dead_url()
    for act in (client(tmp_path, *urls).latest, client(tmp_path, *urls).fetch):
        with pytest.raises(FetchError) as error:
            act()
        assert all(url in str(error.value) for url in urls)
        assert "Connect" in str(error.value)


def test_unknown_version(tmp_path):
    published(tmp_path, 7)
    with pytest.raises(FetchError, match=r"manifest of version 9 \(http://.*404"):
        against(lambda url: client(tmp_path, url).fetch(9), tmp_path / "origin")
    assert cached(tmp_path) == []


@pytest.mark.parametrize("harm", ["flip", "truncate", "lengthen", "delete"])
def test_a_bad_shard_is_fetched_from_another_relay(tmp_path, harm):
    random.seed(1)  # the bad one is asked first
    published(tmp_path, 7)
    mirror_of(tmp_path, "bad")
    for shard in (tmp_path / "bad" / "v000007" / "full").glob("*.shard"):
        spoil(shard, harm)
    getter = client(tmp_path, "http://placeholder")

    def act(*urls):
        getter.urls = list(urls)
        return getter.fetch(7), urls[0]

    (folder, _), bad_url = against(act, tmp_path / "bad", tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")
    assert list(getter.progress.complaints) == [bad_url]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [("flip", "corrupt"), ("truncate", "too short"), ("lengthen", "longer"), ("delete", "503")],
)
def test_a_bad_shard_and_no_other_relay_names_both_and_leaves_no_version(tmp_path, harm, reason):
    spoil(published(tmp_path, 7).store.shard_path(7, "full", 2), harm)
    seen = []

    def act(url):
        seen.append(url)
        return client(tmp_path, url, timeout_s=1.5).fetch(7)

    with pytest.raises(FetchError) as error:
        against(act, tmp_path / "origin")
    assert "shard 2 (full) of version 7" in str(error.value)
    assert seen[0] in str(error.value)
    assert reason in str(error.value)
    assert cached(tmp_path) == [".v000007.full"]


def spoil(shard, harm: str) -> None:
    if harm == "flip":
        flip_bit(shard)
    elif harm == "truncate":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif harm == "lengthen":
        shard.write_bytes(shard.read_bytes() + b"x")
    else:
        shard.unlink()


def test_the_next_fetch_takes_up_the_shards_that_are_done(tmp_path):
    spoil(published(tmp_path, 7).store.shard_path(7, "full", 2), "flip")
    with pytest.raises(FetchError):
        against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    published(tmp_path, 7)  # repaired
    files = tmp_path / "cache" / ".v000007.full" / "files"
    flip_bit(files / "config.json")  # shard 0 rotted meanwhile
    getter = client(tmp_path, "http://placeholder")

    def act(url):
        getter.urls = [url]
        return getter.fetch(7)

    folder, _ = against(act, tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")
    assert getter.progress.reused_bytes == SHARD_BYTES + 7_612
    assert getter.progress.transferred_bytes < 2 * SHARD_BYTES + SMALL_BYTES


def test_a_partial_of_other_weights_of_the_same_layout_is_not_believed(tmp_path):
    spoil(published(tmp_path, 7).store.shard_path(7, "full", 2), "flip")
    with pytest.raises(FetchError):
        against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    shutil.rmtree(tmp_path / "origin")
    origin(tmp_path).publish(model_folder(tmp_path / "other", seed=99), 7)
    folder, _ = against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "other")


def test_a_cached_version_needs_no_relay(tmp_path):
    published(tmp_path, 7)
    folder, manifest = against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    again = client(tmp_path, dead_url())
    assert again.fetch(7) == again.fetch(7, digest=manifest.digest) == (folder, manifest)
    assert (again.progress.transferred_bytes, again.progress.reused_bytes) == (0, manifest.size_bytes)
    with pytest.raises(FetchError):
        again.fetch(7, digest="0" * 64)


def test_newest_version_in_the_cache_is_not_fetched_again(tmp_path):
    published(tmp_path, 7)

    def act(url):
        client(tmp_path, url).fetch()
        second = client(tmp_path, url)
        second.fetch()
        return second.progress

    assert against(act, tmp_path / "origin").transferred_bytes < SMALL_BYTES


def test_only_the_demanded_digest_is_accepted(tmp_path):
    digest = published(tmp_path, 7).publish(tmp_path / "model7", 7).digest
    with pytest.raises(FetchError, match=f"version 7 has digest {digest}, expected {'0' * 64}"):
        against(lambda url: client(tmp_path, url).fetch(7, digest="0" * 64), tmp_path / "origin")


def test_old_versions_leave_the_cache(tmp_path):
    published(tmp_path, 1, 2, 3)

    def act(url):
        for version in (1, 2, 3):
            client(tmp_path, url, keep=2).fetch(version)

    against(act, tmp_path / "origin")
    assert cached(tmp_path) == ["v000002", "v000003"]
    assert len(list((tmp_path / "cache").glob("*.manifest.json"))) == 2


def test_an_old_version_asked_for_is_not_dropped_at_once(tmp_path):
    published(tmp_path, 1, 2, 3)

    def act(url):
        return [client(tmp_path, url, keep=2).fetch(version)[0].exists() for version in (2, 3, 1)]

    assert against(act, tmp_path / "origin") == [True, True, True]


@pytest.mark.parametrize("forgery", ["signer", "signature", "run", "version", "traversal"])
def test_a_forged_manifest_is_refused_and_nothing_is_written(tmp_path, forgery):
    store = published(tmp_path, 7).store
    signed = store.signed(7)
    if forgery == "signer":
        signed = SignedManifest.sign(signed.open(PUBLIC_KEY), OTHER_KEY)
    elif forgery == "signature":
        signed = signed.model_copy(update={"manifest": signed.manifest.replace("config", "conpig")})
    elif forgery == "run":
        signed = SignedManifest.sign(signed.open(PUBLIC_KEY).model_copy(update={"run": "another"}), KEY)
    elif forgery == "version":
        signed = SignedManifest.sign(signed.open(PUBLIC_KEY).model_copy(update={"version": 8}), KEY)
    else:
        text = signed.manifest.replace("config.json", "../../evil")
        signature = KEY.sign(SIGNATURE_DOMAIN + text.encode()).hex()
        signed = SignedManifest(manifest=text, key=PUBLIC_KEY, signature=signature)
    store.manifest_path(7).write_bytes(signed.to_bytes())
    reason = {
        "signer": "wrong signer",
        "signature": "bad signature",
        "run": "expected 'test'",
        "version": "manifest of version 8, expected 7",
        "traversal": "plain relative path",
    }[forgery]
    for act in (lambda url: client(tmp_path, url).fetch(7), lambda url: client(tmp_path, url).latest()):
        with pytest.raises(FetchError, match=reason):
            against(act, tmp_path / "origin", serving=plainly)
    assert cached(tmp_path) == []


def test_a_forging_relay_beside_an_honest_one_changes_nothing(tmp_path):
    published(tmp_path, 7)
    forger = Origin(tmp_path / "forged", OTHER_KEY, run="test")
    forger.publish(model_folder(tmp_path / "fake", seed=1), 7)
    forger.publish(model_folder(tmp_path / "fake", seed=1), 9)
    folder, manifest = against(lambda *urls: client(tmp_path, *urls).fetch(), tmp_path / "forged", tmp_path / "origin")
    assert manifest.version == 7
    assert contents(folder) == contents(tmp_path / "model7")


def test_a_disk_that_takes_other_bytes_than_it_was_given_is_found_out(tmp_path, monkeypatch):
    published(tmp_path, 7)
    real = PartialShard.write
    monkeypatch.setattr(PartialShard, "write", lambda sink, at, data: real(sink, at, bytes(len(data))))
    with pytest.raises(FetchError, match="does not match its manifest"):
        against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    assert not (tmp_path / "cache" / "v000007").exists()
    monkeypatch.undo()
    folder, _ = against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")


@pytest.mark.parametrize("when", ["write", "allocate"])
def test_a_full_disk_names_the_folder(tmp_path, monkeypatch, when):
    published(tmp_path, 7)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "write_all" if when == "write" else "_allocate", full)
    with pytest.raises(FetchError, match=r"no space left for .*\.v000007\.full"):
        against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    assert cached(tmp_path) == ([".v000007.full"] if when == "write" else [])
    monkeypatch.undo()
    folder, _ = against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")


def test_two_clients_of_one_cache_download_once(tmp_path):
    published(tmp_path, 7)
    clients = []

    def act(url):
        clients.extend(client(tmp_path, url) for _ in range(3))
        threads = [threading.Thread(target=one.fetch, args=(7,)) for one in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    against(act, tmp_path / "origin")
    sizes = sorted(one.progress.transferred_bytes for one in clients)
    assert sizes[1] < SMALL_BYTES < sizes[2]
    assert contents(tmp_path / "cache" / "v000007") == contents(tmp_path / "model7")


def test_a_lock_that_is_never_freed_is_named_at_the_deadline(tmp_path):
    published(tmp_path, 7)
    holder = client(tmp_path, "http://unused").cache
    with holder.locked(0), pytest.raises(FetchError, match=r"\.lock"):
        against(lambda url: client(tmp_path, url, timeout_s=0.3).fetch(7), tmp_path / "origin")


def test_a_redirect_is_not_followed(tmp_path):
    async def away(request):
        raise web.HTTPFound("http://127.0.0.1:1/versions.json")

    async def run():
        async with answering(away) as url:
            with pytest.raises(FetchError, match="answered 302"):
                await asyncio.to_thread(client(tmp_path, url).latest)

    asyncio.run(run())


def test_a_client_without_any_server_is_refused(tmp_path):
    with pytest.raises(FetchError, match="no relay is known"):
        Client([], access(), tmp_path)


# Deltas


def fetched(tmp_path, *versions, store="origin", **options):
    """What one client after the other, on one cache, reported of these versions; all were right."""

    def act(url):
        reports = []
        for version in versions:
            one = client(tmp_path, url, **options)
            folder, _ = one.fetch(version)
            assert contents(folder) == contents(tmp_path / f"model{version}")
            reports.append(one.progress)
        return reports

    return against(act, tmp_path / store)


def shaken(path, seed: int):
    """Weights of which two words in five are others than in the seed before: their delta has about half their size."""
    weights_folder(path)
    data = bytearray((path / "model.safetensors").read_bytes())
    for step in range(seed + 1):
        at = len(data) - 40_000 + 4_000 * (step % 6)
        data[at : at + 16_000] = random.Random(step).randbytes(16_000)
    (path / "model.safetensors").write_bytes(data)
    return path


def test_a_client_that_has_the_version_before_fetches_the_delta_alone(tmp_path):
    stepped(tmp_path, 0, 1, 2)
    first, second, third = fetched(tmp_path, 0, 1, 2)
    assert [one.parent for one in (first, second, third)] == [None, 0, 1]
    assert second.transferred_bytes < SMALL_BYTES < first.transferred_bytes


def test_a_newcomer_fetches_the_anchor_and_the_deltas_after_it(tmp_path):
    stepped(tmp_path, *range(7), anchor_every=4, keep=9)
    (report,) = fetched(tmp_path, 6)
    assert report.parent is None
    assert 40_000 < report.transferred_bytes < 40_000 + 3 * SMALL_BYTES
    assert cached(tmp_path) == ["v000006"]


def test_a_client_that_is_far_behind_fetches_all_deltas_where_they_are_cheapest(tmp_path):
    stepped(tmp_path, *range(7), anchor_every=4, keep=9)
    _, report = fetched(tmp_path, 1, 6)
    assert report.parent == 1
    assert report.transferred_bytes < 4 * SMALL_BYTES


def test_a_client_that_is_far_behind_fetches_the_anchor_where_that_is_cheapest(tmp_path):
    source = origin(tmp_path, anchor_every=3, keep=9)
    for version in range(5):
        source.publish(shaken(tmp_path / f"model{version}", version), version)
    sizes = [source.publish(tmp_path / f"model{version}", version).streams for version in range(5)]
    assert [list(streams) for streams in sizes[1:]] == [["delta"], ["delta"], ["full", "delta"], ["delta"]]
    assert sum(streams["delta"].size_bytes for streams in sizes[1:4]) > sizes[3]["full"].size_bytes
    _, far = fetched(tmp_path, 0, 4)
    assert far.parent is None
    shutil.rmtree(tmp_path / "cache")
    _, between = fetched(tmp_path, 1, 4)
    assert between.parent == 1, "the anchor before the last delta would be cheaper only without that delta"
    shutil.rmtree(tmp_path / "cache")
    _, near = fetched(tmp_path, 2, 4)
    assert near.parent == 2


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in /proc/self/io")
def test_a_chain_of_deltas_reads_and_writes_the_files_once(tmp_path):
    """The server is in this process: sendfile counts as read and written."""
    source = origin(tmp_path, anchor_every=100, shard_size_bytes=1 << 20, keep=9)
    for version in range(6):
        folder = weights_folder(tmp_path / f"model{version}", version, words=1_000_000, every=5_000)
        size_bytes = source.publish(folder, version).size_bytes

    def counted(act):
        had = read_and_written_bytes()
        act()
        return [(now - before) / size_bytes for now, before in zip(read_and_written_bytes(), had, strict=True)]

    def act(url):
        newcomer = client(tmp_path / "new", url)
        read, written = counted(lambda: newcomer.fetch(5))
        assert read < 2.3 and written < 3.3, "sent, then read; sent, received, then written"
        assert contents(newcomer.cache.folder(5)) == contents(tmp_path / "model5")
        client(tmp_path / "behind", url).fetch(1)
        behind = client(tmp_path / "behind", url)
        read, written = counted(lambda: behind.fetch(5))
        assert read < 1.2 and written < 1.2
        assert contents(behind.cache.folder(5)) == contents(tmp_path / "model5")

    against(act, tmp_path / "origin")


def test_what_this_process_verified_is_not_read_again_by_its_next_client(tmp_path, monkeypatch):
    published(tmp_path, 7)

    def act(url):
        folder, manifest = client(tmp_path, url).fetch(7)
        with monkeypatch.context() as patch:
            patch.setattr(StreamFiles, "match", lambda files, stream: pytest.fail("read again"))
            assert client(tmp_path, url).fetch(7, digest=manifest.digest)[0] == folder
        (folder / "model.safetensors").touch()
        monkeypatch.setattr(StreamFiles, "match", lambda files, stream: read.append(stream) or True)
        client(tmp_path, url).fetch(7, digest=manifest.digest)

    read = []
    against(act, tmp_path / "origin")
    assert len(read) == 1, "somebody may have written to it"


class Published(Stub):
    """A server of a store without a network, that takes its time to answer."""

    def __init__(self, url, store, takes_s):
        super().__init__(url, standing=Standing(virtual.now_s))
        self.store, self.takes_s = store, takes_s

    async def listing(self):
        await asyncio.sleep(self.takes_s)
        return Listing(versions=tuple(self.store.versions()))

    async def manifest(self, version):
        await asyncio.sleep(self.takes_s)
        signed = self.store.signed(version)
        return signed, signed.open(PUBLIC_KEY)

    async def shard(self, version, part, incoming):
        await asyncio.sleep(self.takes_s)
        incoming.take(self.store.shard_path(version, part, incoming.shard.index).read_bytes())


@pytest.mark.parametrize("asked", [None, 1])
def test_a_relay_that_hangs_costs_a_fetch_at_most_three_tenths_of_a_second(tmp_path, asked):
    """In virtual time, whichever relay each question and shard is for first: one delta, ten clients that know nothing."""
    store = stepped(tmp_path, 0, 1).store
    took_s = []
    for number in range(10):
        reader = client(tmp_path / str(number), "http://hangs", "http://quick")
        for version, hangs_s in ((0, 0.01), (asked, 60.0)):
            stubs = Published("http://hangs", store, hangs_s), Published("http://quick", store, 0.01)

            @asynccontextmanager
            async def sources(stubs=stubs):
                yield choosing(*stubs, patience_s=30)

            reader._sources = sources
            started_s = virtual.now_s()
            folder, _ = virtual.run(reader._fetch_version(version, None, deadline_s=1e9))
        took_s.append(virtual.now_s() - started_s)
        assert contents(folder) == contents(tmp_path / "model1")
    assert max(took_s) < 0.3


def test_a_delta_of_what_only_the_cache_still_has(tmp_path):
    stepped(tmp_path, 0, anchor_every=1, keep=1)
    fetched(tmp_path, 0)
    stepped(tmp_path, 1, anchor_every=1, keep=1)
    assert not (tmp_path / "origin" / "v000000").exists()
    (report,) = fetched(tmp_path, 1)
    assert report.parent == 0
    assert report.transferred_bytes < 2 * SMALL_BYTES


def test_a_delta_of_what_nobody_has_says_so(tmp_path):
    stepped(tmp_path, 0, 1).store.discard(0)
    with pytest.raises(FetchError, match=r"no relay holds version 0, the parent of version 1 \(http://.*404"):
        against(lambda url: client(tmp_path, url).fetch(), tmp_path / "origin")


@pytest.mark.parametrize("comes", ["parent", "parent elsewhere", "anchor"])
def test_a_newcomer_waits_for_what_the_newest_version_is_a_delta_of(tmp_path, comes):
    source = stepped(tmp_path, 0, 1)
    shutil.copytree(source.store.path, tmp_path / "fresh")
    shutil.copytree(source.store.path, tmp_path / "other")
    ShardStore(tmp_path / "fresh").discard(0)
    for version in (0, 1):
        ShardStore(tmp_path / "other").discard(version)

    def arrive():
        if comes == "anchor":
            signed = stepped(tmp_path, 2, anchor_every=1).store.signed(2)
            shutil.copytree(source.store.folder(2) / "full", tmp_path / "other" / "v000002" / "full")
            ShardStore(tmp_path / "other").add_manifest(2, signed)
        else:
            to = ShardStore(tmp_path / ("fresh" if comes == "parent" else "other"))
            shutil.copytree(source.store.folder(0) / "full", to.folder(0) / "full")
            to.add_manifest(0, source.store.signed(0))

    def act(fresh, other):
        timer = threading.Timer(0.5, arrive)
        timer.start()
        try:
            return client(tmp_path, fresh, other, wait_s=10).fetch()
        finally:
            timer.join()

    folder, _ = against(act, tmp_path / "fresh", tmp_path / "other")
    assert contents(folder) == contents(tmp_path / ("model2" if comes == "anchor" else "model1"))


def test_the_wait_for_a_parent_has_an_end_that_names_it(tmp_path):
    stepped(tmp_path, 0, 1).store.discard(0)
    started_s = time.monotonic()
    with pytest.raises(
        FetchError, match=r"holds version 0, the parent of version 1 .*waited (0\.[5-9]|[1-9]\d*\.\d) s"
    ):
        against(lambda url: client(tmp_path, url, wait_s=0.5).fetch(), tmp_path / "origin")
    assert 0.5 <= time.monotonic() - started_s < 5


@pytest.mark.parametrize("noticed", ["before", "after"])
def test_a_parent_that_rotted_in_the_cache_is_gone_without(tmp_path, noticed):
    """Before the delta is applied by another client; afterwards by the one that has already read it back."""
    stepped(tmp_path, 0, 1)

    def act(url):
        one = client(tmp_path, url)
        folder, _ = one.fetch(0)
        flip_bit(folder / "model.safetensors")
        if noticed == "before":
            one = client(tmp_path, url)
        folder, _ = one.fetch(1)
        return folder, one.progress

    folder, report = against(act, tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model1")
    assert report.parent is None


# Going on


@pytest.mark.parametrize("ranges", [True, False])
def test_half_a_shard_is_taken_up_after_a_disconnect(tmp_path, ranges):
    published(tmp_path, 7, shard_size_bytes=37_612)

    async def run():
        async with serving(tmp_path / "origin") as url, between(url, cut_after_bytes=12_000) as middle:
            middle.passes_ranges = ranges
            fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, middle.url).fetch, 7))
            await until(lambda: len(middle.asked) > 2)
            middle.cut_after_bytes = 10**9
            folder, _ = await fetching
            assert contents(folder) == contents(tmp_path / "model7")
            return middle

    middle = asyncio.run(run())
    first, second, *_, last = middle.starts()
    assert first == 0 and 6_000 < second <= 12_000  # of what was sent some may have been in a buffer
    if ranges:
        assert last == second
        assert middle.sent_bytes == 12_000 + 37_612 - second
    else:
        assert middle.sent_bytes == 12_000 + 37_612


# Fallback, and waiting


def test_the_fallback_is_not_asked_while_a_relay_delivers(tmp_path):
    published(tmp_path, 7)

    async def run():
        async with serving(tmp_path / "origin") as up, between(up) as last_resort, between(up) as good:
            await asyncio.to_thread(client(tmp_path, good.url, fallback=[last_resort.url]).fetch)
            return last_resort.asked, len(good.asked)

    assert asyncio.run(run()) == ([], 4)


@pytest.mark.parametrize("trouble", ["none known", "dead", "without the version", "without shards"])
def test_the_fallback_delivers_while_no_relay_does(tmp_path, trouble):
    published(tmp_path, 7)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "versions.json").write_text('{"versions":[]}')

    async def run():
        async with (
            serving(tmp_path / "origin") as up,
            plainly(tmp_path / "empty") as empty,
            between(up, refuse=lambda path: web.Response(status=500) if ".shard" in path else None) as poor,
        ):
            urls = {
                "none known": [],
                "dead": [dead_url()],
                "without the version": [empty],
                "without shards": [poor.url],
            }
            getter = client(tmp_path, *urls[trouble], fallback=[up])
            return await asyncio.to_thread(getter.fetch, 7)

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model7")


def test_the_fallback_is_left_again_when_the_relay_is_well(tmp_path):
    source = origin(tmp_path, shard_size_bytes=1_000)
    source.publish(model_folder(tmp_path / "model7"), 7)

    async def run():
        async with (
            serving(source.store) as up,
            between(up, rate_Bps=20_000) as last_resort,
            between(up, rate_Bps=20_000) as relay,
        ):
            relay.refuse = lambda path: web.Response(status=500) if ".shard" in path else None
            fetching = asyncio.create_task(
                asyncio.to_thread(client(tmp_path, relay.url, fallback=[last_resort.url], parallel=2).fetch)
            )
            await until(lambda: last_resort.sent_bytes >= 5_000)
            relay.refuse = lambda path: None
            await fetching
            return relay.sent_bytes

    assert asyncio.run(run()) > 5_000


def test_a_relay_that_comes_up_later_is_waited_for(tmp_path):
    published(tmp_path, 7)
    port = free_port()

    async def run():
        getter = client(tmp_path, f"http://127.0.0.1:{port}", wait_s=10)
        fetching = asyncio.create_task(asyncio.to_thread(getter.fetch))
        await until(lambda: getter.progress.doing == "waiting for a relay")
        async with serving(tmp_path / "origin", port=port):
            return await fetching

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model7")


def test_the_first_version_is_waited_for_and_the_wait_has_an_end(tmp_path):
    origin(tmp_path)

    async def run():
        async with serving(tmp_path / "origin") as url:
            with pytest.raises(FetchError, match="no version is published yet"):
                await asyncio.to_thread(client(tmp_path, url, wait_s=0.3).fetch)
            getter = client(tmp_path, url, wait_s=10)
            fetching = asyncio.create_task(asyncio.to_thread(getter.fetch))
            await until(lambda: getter.progress.doing == "waiting for a version")
            published(tmp_path, 7)
            return await fetching

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model7")


def test_a_relay_that_joins_during_a_fetch_is_used(tmp_path):
    source = published(tmp_path, 7)
    mirror_of(tmp_path, "half")
    for shard in (tmp_path / "half").glob("v*/full/*.shard"):
        shard.unlink()  # it knows the version and has nothing of it yet

    async def scenario():
        async with quickly(tmp_path / "half") as half, quickly(source.store) as whole:
            known = [half]
            reader = Client([half], access(), tmp_path / "cache", relays=lambda: known, timeout_s=20)
            fetching = asyncio.create_task(asyncio.to_thread(reader.fetch))
            await asyncio.sleep(0.5)
            assert not fetching.done()
            known.append(whole)
            folder, _ = await asyncio.wait_for(fetching, 10)
            assert contents(folder) == contents(tmp_path / "model7")

    asyncio.run(scenario())
