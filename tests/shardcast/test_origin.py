import json
import os

import pytest

from shoal.shardcast import ManifestError, Origin
from shoal.shardcast.store import NewFile

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
)


def test_publish_cuts_the_files_into_shards_and_lists_the_version(tmp_path):
    source = origin(tmp_path)
    folder = model_folder(tmp_path / "model")
    manifest = source.publish(folder, 7)
    shards = sorted((tmp_path / "origin" / "v000007").glob("*.shard"))
    assert b"".join(shard.read_bytes() for shard in shards) == b"".join(
        data for _, data in sorted(contents(folder).items())
    )
    assert [shard.stat().st_size for shard in shards] == [SHARD_BYTES] * 3 + [7_612]
    assert json.loads((tmp_path / "origin" / "versions.json").read_text()) == {"versions": [7]}
    assert source.store.signed(7).open(PUBLIC_KEY) == manifest


def test_a_whole_version_is_published_once_also_after_a_restart(tmp_path):
    first = published(tmp_path, 7).store.signed(7)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "origin").rglob("*")}
    again = origin(tmp_path).publish(tmp_path / "model7", 7)
    assert again == first.open(PUBLIC_KEY)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "origin").rglob("*")} == before


def test_a_half_version_is_swept_at_restart_and_redone(tmp_path):
    digest = published(tmp_path, 7).publish(tmp_path / "model7", 7).digest
    folder = tmp_path / "origin" / "v000007"
    (folder / "manifest.json").unlink()  # killed before the manifest
    (folder / "00002.shard").rename(folder / ".00002.shard.tmp")
    restarted = origin(tmp_path)
    assert restarted.published() == []
    assert not folder.exists()
    assert restarted.publish(tmp_path / "model7", 7).digest == digest
    assert restarted.published() == [7]
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("listing", ['{"versions":[]}', "", "{"])
def test_the_list_is_rebuilt_at_restart(tmp_path, listing):
    published(tmp_path, 7)
    (tmp_path / "origin" / "versions.json").write_text(listing)
    assert origin(tmp_path).published() == [7]


@pytest.mark.parametrize("harm", ["flip", "delete", "manifest"])
def test_a_damaged_version_is_redone_with_the_same_digest(tmp_path, harm):
    source = published(tmp_path, 7)
    digest = source.publish(tmp_path / "model7", 7).digest
    shard = source.store.shard_path(7, 1)
    if harm == "flip":
        flip_bit(shard)
    elif harm == "delete":
        shard.unlink()
    else:
        source.store.manifest_path(7).write_text("{")
    again = origin(tmp_path).publish(tmp_path / "model7", 7)
    assert again.digest == digest
    assert source.store.damaged(again) == []


def test_only_the_newest_versions_are_kept(tmp_path):
    source = published(tmp_path, 1, 2, 3, 4, keep=2)
    assert source.published() == [4, 3]
    assert sorted(path.name for path in (tmp_path / "origin").iterdir()) == [
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
    with pytest.raises(ManifestError, match="plain name"):
        source.publish(tmp_path / "bad", 1)
    assert source.published() == []
    assert [path.name for path in (tmp_path / "origin").iterdir()] == ["versions.json"]


def test_a_store_of_another_run_or_key_is_refused(tmp_path):
    published(tmp_path, 7)
    with pytest.raises(ValueError, match="its own store"):
        Origin(tmp_path / "origin", KEY, run="another")
    with pytest.raises(ValueError, match="its own store"):
        Origin(tmp_path / "origin", OTHER_KEY, run="test")
    assert (tmp_path / "origin" / "v000007" / "manifest.json").exists()


@pytest.mark.parametrize("commits", range(8))  # 4 shards, the manifest, versions.json twice; 7: not killed
@pytest.mark.parametrize("renamed", [False, True])
def test_killed_at_any_file_loses_nothing_and_goes_on(tmp_path, commits, renamed):
    digest = published(tmp_path, 7).publish(tmp_path / "model7", 7).digest
    model_folder(tmp_path / "model8", seed=8)
    child = os.fork()
    if child == 0:  # a real death: no `finally` runs
        die_at_commit(commits, renamed)
        origin(tmp_path, keep=1).publish(tmp_path / "model8", 8)
        os._exit(0)
    os.waitpid(child, 0)
    restarted = origin(tmp_path)
    assert set(restarted.published()) & {7, 8}, "a published version is lost"
    manifest = restarted.publish(tmp_path / "model8", 8)
    assert restarted.published()[0] == 8
    assert restarted.store.damaged(manifest) == []
    assert not list((tmp_path / "origin").rglob(".*"))
    if 7 in restarted.published():
        assert restarted.publish(tmp_path / "model7", 7).digest == digest


def die_at_commit(count: int, renamed: bool) -> None:
    real, seen = NewFile.commit, 0

    def commit(file: NewFile) -> None:
        nonlocal seen
        if seen == count and not renamed:
            os._exit(9)
        real(file)
        if seen == count:
            os._exit(9)
        seen += 1

    NewFile.commit = commit
