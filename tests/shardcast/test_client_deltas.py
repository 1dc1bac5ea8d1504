"""How clients fetch deltas: which route they choose, and what they do if the parent is missing or damaged."""

import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from shoal.shardcast import FetchError, ShardStore
from shoal.shardcast.files import StreamFiles

from .support import (
    SMALL_BYTES,
    against,
    cached,
    client,
    contents,
    fetched,
    flip_bit,
    origin,
    published,
    read_and_written_bytes,
    stepped,
    weights_folder,
)


def reports(tmp_path, *versions, store="origin", **options):
    """Fetch these versions into one cache, each with a new client. Return the clients' progress reports."""

    def act(url):
        results = []
        for version in versions:
            reader = client(tmp_path, url, **options)
            folder, _ = reader.fetch(version)
            assert contents(folder) == contents(tmp_path / f"model{version}")
            results.append(reader.progress)
        return results

    return against(act, tmp_path / store)


def mostly_changed(path, seed: int):
    """Write weights in which 40 % of the words differ from those of the previous seed. The delta between the two is
    then about half as large as the weights."""
    weights_folder(path)
    data = bytearray((path / "model.safetensors").read_bytes())
    for step in range(seed + 1):
        at = len(data) - 40_000 + 4_000 * (step % 6)
        data[at : at + 16_000] = random.Random(step).randbytes(16_000)
    (path / "model.safetensors").write_bytes(data)
    return path


def test_a_client_that_has_the_previous_version_fetches_only_the_delta(tmp_path):
    stepped(tmp_path, 0, 1, 2)
    first, second, third = reports(tmp_path, 0, 1, 2)
    assert [report.parent for report in (first, second, third)] == [None, 0, 1]
    assert second.transferred_bytes < SMALL_BYTES < first.transferred_bytes


def test_a_client_without_a_cached_version_fetches_the_anchor_and_deltas_and_others_only_deltas(tmp_path):
    stepped(tmp_path, *range(7), anchor_every=4, keep=9)
    (report,) = reports(tmp_path, 6)
    assert report.parent is None
    assert 40_000 < report.transferred_bytes < 40_000 + 3 * SMALL_BYTES
    assert cached(tmp_path) == ["v000006"]
    shutil.rmtree(tmp_path / "cache")
    _, report = reports(tmp_path, 1, 6)
    assert report.parent == 1
    assert report.transferred_bytes < 4 * SMALL_BYTES


def test_a_client_that_is_far_behind_takes_the_cheapest_route(tmp_path):
    source = origin(tmp_path, anchor_every=3, keep=9)
    for version in range(5):
        source.publish(mostly_changed(tmp_path / f"model{version}", version), version)
    sizes = [source.publish(tmp_path / f"model{version}", version).streams for version in range(5)]
    assert [list(streams) for streams in sizes[1:]] == [["delta"], ["delta"], ["full", "delta"], ["delta"]]
    assert sum(streams["delta"].size_bytes for streams in sizes[1:4]) > sizes[3]["full"].size_bytes
    for cached_version, parent in ((0, None), (1, 1), (2, 2)):  # for a client with version 0 the anchor is cheaper
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        _, report = reports(tmp_path, cached_version, 4)
        assert report.parent == parent


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in /proc/self/io")
def test_a_chain_of_deltas_reads_and_writes_the_files_once(tmp_path):
    """The server runs in the measured process, and bytes that sendfile sends count as read and as written."""
    source = origin(tmp_path, anchor_every=100, shard_size_bytes=1 << 20, keep=9)
    for version in range(6):
        folder = weights_folder(tmp_path / f"model{version}", version, words=1_000_000, every=5_000)
        size_bytes = source.publish(folder, version).size_bytes

    def counted(act):
        before = read_and_written_bytes()
        act()
        return [(now - then) / size_bytes for now, then in zip(read_and_written_bytes(), before, strict=True)]

    def act(url):
        newcomer = client(tmp_path / "new", url)
        read, written = counted(lambda: newcomer.fetch(5))
        # The server may send all bytes once, and the client may read them once.
        assert read < 2.3, "the bytes of the version were read more than twice"
        # The server may send all bytes once, and the client may write them twice: as received, and as the result.
        assert written < 3.3, "the bytes of the version were written more than three times"
        assert contents(newcomer.cache.folder(5)) == contents(tmp_path / "model5")
        client(tmp_path / "behind", url).fetch(1)
        behind = client(tmp_path / "behind", url)
        read, written = counted(lambda: behind.fetch(5))
        assert read < 1.2 and written < 1.2
        assert contents(behind.cache.folder(5)) == contents(tmp_path / "model5")

    against(act, tmp_path / "origin")


def test_a_process_verifies_an_unmodified_version_once(tmp_path, monkeypatch):
    published(tmp_path, 7)

    def act(url):
        folder, manifest = client(tmp_path, url).fetch(7)
        with monkeypatch.context() as patch:
            patch.setattr(StreamFiles, "match", lambda files, stream: pytest.fail("the files were read again"))
            assert client(tmp_path, url).fetch(7, digest=manifest.digest)[0] == folder
        (folder / "model.safetensors").touch()
        monkeypatch.setattr(StreamFiles, "match", lambda files, stream: read.append(stream) or True)
        client(tmp_path, url).fetch(7, digest=manifest.digest)

    read = []
    against(act, tmp_path / "origin")
    assert len(read) == 1, "the modified version must be verified exactly once more"


def test_a_delta_applies_to_a_version_that_only_the_cache_has(tmp_path):
    stepped(tmp_path, 0, anchor_every=1, keep=1)
    reports(tmp_path, 0)
    stepped(tmp_path, 1, anchor_every=1, keep=1)
    assert not (tmp_path / "origin" / "v000000").exists()
    (report,) = reports(tmp_path, 1)
    assert report.parent == 0
    assert report.transferred_bytes < 2 * SMALL_BYTES


def test_a_delta_whose_parent_nobody_has_is_an_error(tmp_path):
    stepped(tmp_path, 0, 1).store.discard(0)
    with pytest.raises(FetchError, match=r"no relay holds version 0, the parent of version 1 \(http://.*404"):
        fetched(tmp_path)


@pytest.mark.parametrize("comes", ["parent", "parent elsewhere", "anchor"])
def test_a_client_without_a_cached_version_waits_for_a_parent_or_an_anchor(tmp_path, comes):
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


def test_a_client_waits_for_a_limited_time_for_a_parent(tmp_path):
    stepped(tmp_path, 0, 1).store.discard(0)
    started_s = time.monotonic()
    with pytest.raises(
        FetchError, match=r"holds version 0, the parent of version 1 .*waited (0\.[5-9]|[1-9]\d*\.\d) s"
    ):
        fetched(tmp_path, wait_s=0.5)
    assert 0.5 <= time.monotonic() - started_s < 5


@pytest.mark.parametrize("new_client", [True, False])
def test_a_parent_that_was_damaged_in_the_cache_is_not_used(tmp_path, new_client):
    """The result of the delta does not match the manifest, so the client fetches version 1 without the cached parent."""
    stepped(tmp_path, 0, 1)

    def act(url):
        reader = client(tmp_path, url)
        folder, _ = reader.fetch(0)
        flip_bit(folder / "model.safetensors")
        if new_client:
            reader = client(tmp_path, url)
        folder, _ = reader.fetch(1)
        return folder, reader.progress

    folder, report = against(act, tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model1")
    assert report.parent is None
