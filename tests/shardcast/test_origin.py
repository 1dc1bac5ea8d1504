"""The origin: which versions it publishes and keeps, which are anchors or deltas, and how it resumes after a kill."""

import json
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from shoal.files import NewFile
from shoal.shardcast import Manifest, ManifestError, Origin, PublishError, delta
from shoal.shardcast.alone import serve_origin
from shoal.shardcast.manifest import MAX_SHARDS
from shoal.shardcast.origin import shard_bytes

from .support import (
    KEY,
    OTHER_KEY,
    PUBLIC_KEY,
    SHARD_BYTES,
    contents,
    flip_bit,
    model_folder,
    origin,
    published,
    read_and_written_bytes,
    stepped,
    weights_folder,
)


def test_publish_cuts_the_files_into_shards_and_lists_the_version(tmp_path):
    source = origin(tmp_path)
    folder = model_folder(tmp_path / "model")
    manifest = source.publish(folder, 7)
    shards = sorted((tmp_path / "origin" / "v000007" / "full").glob("*.shard"))
    assert b"".join(shard.read_bytes() for shard in shards) == b"".join(
        data for _, data in sorted(contents(folder).items())
    )
    assert [shard.stat().st_size for shard in shards] == [SHARD_BYTES] * 3 + [7_612]
    listing = json.loads((tmp_path / "origin" / "versions.json").read_text())
    assert listing.pop("newest")["signature"]
    assert listing == {"versions": [7], "path": [source.store.id]}
    assert source.store.signed(7).open(PUBLIC_KEY) == manifest


def test_a_complete_version_is_published_once_even_after_a_restart(tmp_path):
    first = published(tmp_path, 7).store.signed(7)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "origin" / "v000007").rglob("*")}
    listing = (tmp_path / "origin" / "versions.json").read_bytes()
    again = origin(tmp_path).publish(tmp_path / "model7", 7)
    assert again == first.open(PUBLIC_KEY)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "origin" / "v000007").rglob("*")} == times
    assert (tmp_path / "origin" / "versions.json").read_bytes() == listing


@pytest.mark.parametrize("harm", ["flip", "delete", "manifest"])
def test_a_damaged_version_is_published_again_with_the_same_digest(tmp_path, harm):
    source = published(tmp_path, 7)
    digest = source.publish(tmp_path / "model7", 7).digest
    shard = source.store.shard_path(7, "full", 1)
    if harm == "flip":
        flip_bit(shard)
    elif harm == "delete":
        shard.unlink()
    else:
        source.store.manifest_path(7).write_text("{")
    again = origin(tmp_path).publish(tmp_path / "model7", 7)
    assert again.digest == digest
    assert source.store.missing(again) == []


def test_only_the_newest_versions_are_kept(tmp_path):
    source = published(tmp_path, 1, 2, 3, 4, keep=2)
    assert source.published() == [4, 3]
    assert sorted(path.name for path in (tmp_path / "origin").iterdir()) == [
        ".latest",
        ".lock",
        "id",
        "v000003",
        "v000004",
        "versions.json",
    ]
    with pytest.raises(ValueError, match="older than the 2 kept"):
        source.publish(tmp_path / "model1", 1)


def test_unpublishable_folders_are_refused_and_leave_nothing(tmp_path):
    source = origin(tmp_path)
    (tmp_path / "bad").mkdir()
    with pytest.raises(ManifestError, match="no files"):
        source.publish(tmp_path / "bad", 1)
    (tmp_path / "bad" / "we\nird").write_text("x")
    with pytest.raises(ManifestError, match="plain relative path"):
        source.publish(tmp_path / "bad", 1)
    assert source.published() == []
    assert sorted(path.name for path in (tmp_path / "origin").iterdir()) == [".lock", "id", "versions.json"]


def test_a_store_of_another_run_or_key_is_refused(tmp_path):
    published(tmp_path, 7)
    with pytest.raises(ValueError, match="its own store"):
        Origin(tmp_path / "origin", KEY, run="another")
    with pytest.raises(ValueError, match="its own store"):
        Origin(tmp_path / "origin", OTHER_KEY, run="test")
    assert (tmp_path / "origin" / "v000007" / "manifest.json").exists()


# Deltas and anchors


def parts(source: Origin) -> dict[int, list[str]]:
    """The parts of each version."""
    return {version: list(opened(source, version).streams) for version in sorted(source.published())}


def opened(source: Origin, version: int) -> Manifest:
    signed = source.store.signed(version)
    assert signed is not None
    return signed.open(PUBLIC_KEY)


def test_every_third_version_is_an_anchor_and_all_have_deltas(tmp_path):
    source = stepped(tmp_path, *range(8), anchor_every=3, keep=9)
    deltas, both = ["delta"], ["full", "delta"]
    assert parts(source) == {0: ["full"], 1: deltas, 2: deltas, 3: both, 4: deltas, 5: deltas, 6: both, 7: deltas}
    for version in range(1, 8):
        manifest = opened(source, version)
        assert manifest.delta.parent == version - 1
        assert manifest.delta.parent_digest == opened(source, version - 1).digest
        assert manifest.delta.stream.size_bytes < manifest.size_bytes / 10


def test_a_delta_turns_its_parent_into_the_version(tmp_path):
    manifest = opened(stepped(tmp_path, 0, 1), 1)
    shards = sorted((tmp_path / "origin/v000001/delta").glob("*.shard"))
    (tmp_path / "delta").write_bytes(b"".join(shard.read_bytes() for shard in shards))
    link = delta.Link(tmp_path / "delta", tuple((file.path, file.size_bytes) for file in manifest.files))
    delta.apply(tmp_path / "model0", [link], tmp_path / "made")
    assert contents(tmp_path / "made") == contents(tmp_path / "model1")


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in /proc/self/io")
@pytest.mark.parametrize("anchor_every", [100, 1])
def test_publishing_reads_the_version_and_its_parent_once_and_writes_only_anchors(tmp_path, anchor_every):
    words = 3_000_000  # so many that the 64 KiB which the search for private keys reads are negligible
    source = origin(tmp_path, anchor_every=anchor_every, shard_size_bytes=1 << 20)
    for version in range(3):
        weights_folder(tmp_path / f"model{version}", version, words=words, every=5_000)
    source.publish(tmp_path / "model0", 0)
    for version in (1, 2):
        before_read, before_written = read_and_written_bytes()
        size_bytes = source.publish(tmp_path / f"model{version}", version).size_bytes
        read, written = read_and_written_bytes()
        assert read - before_read < 2.1 * size_bytes, "more was read than the version and its parent once"
        assert written - before_written < (0.1 if anchor_every > 1 else 1.1) * size_bytes


def test_version_numbers_may_be_skipped(tmp_path):
    assert opened(stepped(tmp_path, 0, 5), 5).delta.parent == 0


def test_a_version_whose_delta_is_more_than_half_its_size_is_an_anchor(tmp_path):
    source = stepped(tmp_path, 0)
    path = weights_folder(tmp_path / "model1") / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:10_000] + random.randbytes(len(data) - 10_000))  # three words in four differ
    manifest = source.publish(tmp_path / "model1", 1)
    assert manifest.size_bytes / 2 < manifest.delta.stream.size_bytes < manifest.size_bytes
    assert list(manifest.streams) == ["full", "delta"]


def test_a_delta_that_saves_nothing_is_not_published(tmp_path):
    assert parts(published(tmp_path, 0, 1, anchor_every=100)) == {0: ["full"], 1: ["full"]}


def test_deltas_continue_after_a_restart(tmp_path):
    stepped(tmp_path, 0, 1)
    assert parts(stepped(tmp_path, 2)) == {0: ["full"], 1: ["delta"], 2: ["delta"]}


@pytest.mark.parametrize("restarted", [False, True])
def test_no_delta_is_made_from_files_that_changed_after_publication(tmp_path, restarted):
    source = stepped(tmp_path, 0)
    if restarted:
        source = stepped(tmp_path)
    path = tmp_path / "model0" / "model.safetensors"  # where possible, the store's file is a hard link to this one
    with path.open("r+b") as file:
        file.seek(1_000)
        file.write(b"changed in place")
    source.publish(weights_folder(tmp_path / "model1", 1), 1)
    assert parts(source)[1] == ["full"]


def test_a_delta_is_made_even_if_the_parents_files_were_replaced_after_publication(tmp_path):
    source = stepped(tmp_path, 0)
    path = tmp_path / "model0" / "model.safetensors"
    path.unlink()
    path.write_text("another file under the same name")
    source.publish(weights_folder(tmp_path / "model1", 1), 1)
    assert parts(source)[1] == ["delta"]


@pytest.mark.parametrize("lost", ["version", "manifest"])
def test_the_next_version_is_an_anchor_if_the_parent_is_lost(tmp_path, lost):
    source = stepped(tmp_path, 0, 1, 2)
    if lost == "manifest":
        source.store.manifest_path(1).write_text("{")
    else:
        source.store.discard(1)
    assert "full" in parts(stepped(tmp_path, 3))[3]


def test_a_damaged_delta_is_published_again_with_the_same_digest(tmp_path):
    source = stepped(tmp_path, 0, 1)
    digest = opened(source, 1).digest
    flip_bit(source.store.shard_path(1, "delta", 0))
    again = stepped(tmp_path, 1)
    assert opened(again, 1).digest == digest
    assert again.store.missing(opened(again, 1)) == []


def test_parents_of_kept_versions_are_kept(tmp_path):
    source = stepped(tmp_path, *range(7), anchor_every=4, keep=1)
    assert source.published() == [6, 5, 4]
    stepped(tmp_path, 7, 8, anchor_every=4, keep=1)
    assert source.published() == [8]


# Killed processes


# Nine commits are made: 2 lists, 4 shards, the manifest, 2 lists. So with 9 the process is not killed.
@pytest.mark.parametrize("commits", range(10))
@pytest.mark.parametrize("renamed", [False, True])
def test_an_origin_killed_at_any_commit_loses_nothing_and_resumes(tmp_path, commits, renamed):
    digest = published(tmp_path, 7).publish(tmp_path / "model7", 7).digest
    model_folder(tmp_path / "model8", seed=8)
    killed_while(lambda: origin(tmp_path, keep=1).publish(tmp_path / "model8", 8), commits, renamed)
    restarted = origin(tmp_path)
    check_resumed(restarted, tmp_path)
    if 7 in restarted.published():
        assert restarted.publish(tmp_path / "model7", 7).digest == digest


# Six commits are made: 2 lists, the delta, the manifest, 2 lists. So with 6 the process is not killed.
@pytest.mark.parametrize("commits", range(7))
@pytest.mark.parametrize("renamed", [False, True])
def test_an_origin_killed_at_any_commit_of_a_delta_loses_nothing_and_resumes(tmp_path, commits, renamed):
    digest = opened(stepped(tmp_path, 7), 7).digest
    weights_folder(tmp_path / "model8", 8)
    killed_while(lambda: stepped(tmp_path, 8, keep=1), commits, renamed)
    restarted = stepped(tmp_path)
    check_resumed(restarted, tmp_path)
    assert opened(restarted, 7).digest == digest
    assert "delta" in opened(restarted, 8).streams
    restarted.publish(weights_folder(tmp_path / "model9", 9), 9)
    assert "delta" in parts(restarted)[9]


def killed_while(act, commits: int, renamed: bool) -> None:
    """Run `act` in a process that dies at one of its renames."""
    child = os.fork()
    if child == 0:  # it ends with `os._exit`, because that runs no clean-up of the tests
        die_at_commit(commits, renamed)
        act()
        os._exit(0)
    os.waitpid(child, 0)


def check_resumed(restarted: Origin, tmp_path) -> None:
    assert set(restarted.published()) & {7, 8}, "a published version was lost"
    manifest = restarted.publish(tmp_path / "model8", 8)
    assert restarted.published()[0] == 8
    assert restarted.store.missing(manifest) == []
    assert [path.name for path in (tmp_path / "origin").rglob(".*") if path.name != ".lock"] == [".latest"]


def die_at_commit(count: int, renamed: bool) -> None:
    real, seen = NewFile.commit, 0

    def commit(file: NewFile, *, durable: bool = True) -> None:
        nonlocal seen
        if seen == count and not renamed:
            os._exit(9)
        real(file, durable=durable)
        if seen == count:
            os._exit(9)
        seen += 1

    NewFile.commit = commit


@pytest.mark.parametrize(
    ("size_bytes", "expected"), [(0, 64 << 10), (273 << 20, 18 << 16), (1 << 20, 64 << 10), (100 << 30, 16 << 20)]
)
def test_a_version_has_about_256_shards_within_bounds(size_bytes, expected):
    assert shard_bytes(size_bytes, None) == expected


def test_too_many_shards_are_refused_before_any_is_written(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "weights").open("wb") as file:
        file.truncate(1024 * (MAX_SHARDS + 20_000))
    source = origin(tmp_path, shard_size_bytes=1024)
    with pytest.raises(PublishError, match="120000 shards of 1024.* raise the shard size to 1229 bytes or more"):
        source.publish(folder, 0)
    assert not (source.store.path / "v000000").exists() and source.published() == []


@pytest.mark.parametrize("newer", [True, False])
async def test_a_version_that_its_writer_removed_is_skipped_if_there_is_a_newer_one(tmp_path, monkeypatch, newer):
    watched, source = tmp_path / "versions", origin(tmp_path)
    for version in (0, 1) if newer else (0,):
        model_folder(watched / f"v{version:06d}", seed=version)
    publish, stop, events = source.publish, threading.Event(), []

    def removed(folder, version):
        if version == 0:
            shutil.rmtree(folder)
        return publish(folder, version)

    def say(event):
        events.append(event)
        if "version" in event:
            stop.set()

    monkeypatch.setattr(source, "publish", removed)
    serving = serve_origin(watched, source, ("127.0.0.1", 0), stop, say)
    if newer:
        await serving
        assert [event.get("version") for event in events] == [None, 1]
    else:
        with pytest.raises(FileNotFoundError):
            await serving
