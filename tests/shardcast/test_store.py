"""The store: which versions it keeps, how it recovers, its lock and its permissions."""

import os
import stat
import subprocess
import sys
import time

import pytest

from shoal.files import temporary
from shoal.shardcast import Origin, ShardStore
from shoal.shardcast.alone import publish
from shoal.shardcast.manifest import MAX_VERSIONS, Delta, FileEntry, Manifest, Stream
from shoal.shardcast.store import chain

from .support import KEY, PUBLICATION, RUN, flip_bit, model_folder, published, stepped

HASH = "0" * 64


def version(number: int, *, anchor: bool = False, delta: bool = False) -> Manifest:
    stream = Stream(size_bytes=100, shard_size_bytes=1_000, shards=(HASH,))
    return Manifest(
        run=RUN,
        publication=PUBLICATION,
        version=number,
        files=(FileEntry(path="a", size_bytes=100),),
        content=stream,
        anchor=anchor,
        delta=Delta(parent=number - 1, parent_digest=HASH, stream=stream) if delta else None,
        created_s=1.5,
    )


def holding(path, *manifests: Manifest, **options) -> tuple[ShardStore, dict[int, Manifest]]:
    """Return a store with these manifests and no shards."""
    origin = Origin(ShardStore(path, **{"lease_s": 0, **options}), KEY, run=RUN)
    for manifest in manifests:
        origin.store.folder(manifest.version).mkdir()
        origin.store.manifest_path(manifest.version).write_text("{}")
    origin.store.recover()
    return origin.store, {manifest.version: manifest for manifest in manifests}


def kept(store: ShardStore) -> list[int]:
    folders = sorted((int(path.name[1:]) for path in store.path.glob("v*[0-9]")), reverse=True)
    assert folders == store.versions()
    return folders


ANCHORS = [version(number, anchor=True) for number in range(1, 6)]
CHAIN = [
    version(1, anchor=True),
    version(2, delta=True),
    version(3, anchor=True, delta=True),
    version(4, delta=True),
    version(5, delta=True),
]


@pytest.mark.parametrize(
    ("manifests", "keep", "expected"),
    [
        (ANCHORS, 9, [5, 4, 3, 2, 1]),
        (ANCHORS, 2, [5, 4]),
        (CHAIN, 1, [5, 4, 3]),  # the newest version needs its parents
        (CHAIN, 2, [5, 4, 3]),
        (CHAIN, 3, [5, 4, 3]),  # an anchor needs no parent, even if it has a delta
        (CHAIN, 4, [5, 4, 3, 2, 1]),
    ],
)
def test_the_newest_versions_are_kept_with_their_parents(tmp_path, manifests, keep, expected):
    store, held = holding(tmp_path, *manifests, keep=keep)
    store.retain(held)
    assert kept(store) == expected


def test_a_leased_version_is_kept_with_its_parents(tmp_path):
    store, held = holding(tmp_path, *CHAIN, keep=1, lease_s=0.2)
    store.lease(2)
    store.retain(held)
    assert kept(store) == [5, 4, 3, 2, 1]
    time.sleep(0.2)
    store.retain(held)
    assert kept(store) == [5, 4, 3]


def test_leases_keep_only_a_bounded_number_of_versions(tmp_path):
    store, held = holding(tmp_path, *(version(number, anchor=True) for number in range(30)), keep=3, lease_s=60)
    for number in range(30):
        store.lease(number)
    store.retain(held)
    assert kept(store) == [29, 28, 27, 26, 25, 24]


def test_a_reader_can_finish_a_file_of_a_dropped_version(tmp_path):
    source = published(tmp_path, 1, keep=1)
    path = source.store.shard_path(1, "full", 0)
    data = path.read_bytes()
    with path.open("rb") as file:
        published(tmp_path, 2, keep=1)
        assert not path.exists()
        assert file.read() == data


def test_a_chain_ends_at_an_anchor_or_an_unknown_version():
    held = {manifest.version: manifest for manifest in CHAIN}
    assert chain(held, 5) == [5, 4, 3]
    assert chain(held, 1) == [1]
    del held[4]
    assert chain(held, 5) == [5, 4]


def test_missing_returns_absent_and_wrong_shards(tmp_path):
    source = stepped(tmp_path, 0, 1, anchor_every=1)
    manifest = source.publish(tmp_path / "model1", 1)
    assert source.store.missing(manifest) == []
    flip_bit(source.store.shard_path(1, "delta", 0))
    flip_bit(source.store.shard_path(1, "full", 1))
    source.store.shard_path(1, "full", 2).unlink()
    longer = source.store.shard_path(1, "full", 3)
    longer.write_bytes(longer.read_bytes() + b"x")
    assert [(part, shard.index) for part, shard in source.store.missing(manifest)] == [
        ("delta", 0),
        ("full", 1),
        ("full", 2),
        ("full", 3),
    ]


def test_incomplete_versions_and_files_are_removed(tmp_path):
    store = published(tmp_path, 7).store
    half, listing = temporary(store.shard_path(7, "full", 9)), temporary(store.path / "versions.json")
    for path in (half, listing, temporary(store.manifest_path(7))):
        path.write_text("half")
    (store.path / ".v000006.gone" / "full").mkdir(parents=True)
    (store.path / "v000008" / "full").mkdir(parents=True)
    again = ShardStore(tmp_path / "origin")
    again.recover()
    assert again.versions() == [7]
    assert sorted(path.name for path in again.path.rglob(".*")) == [".latest", ".lock"]
    assert not (again.path / "v000008").exists()


def test_a_store_keeps_its_id_and_lists_its_path_from_the_origin(tmp_path):
    store = ShardStore(tmp_path / "store")
    store.recover()
    assert ShardStore(tmp_path / "store").id == store.id
    assert b'"path":[]' in (store.path / "versions.json").read_bytes()  # the store does not know its path yet
    store.reached_via(["a" * 16])
    assert f'"path":["{"a" * 16}","{store.id}"]'.encode() in (store.path / "versions.json").read_bytes()


def test_only_the_newest_max_versions_are_listed(tmp_path):
    for number in range(MAX_VERSIONS + 2):
        (tmp_path / f"v{number:06d}").mkdir()
        (tmp_path / f"v{number:06d}" / "manifest.json").touch()
    store = ShardStore(tmp_path)
    store.recover()
    assert store.versions() == list(range(MAX_VERSIONS + 1, 1, -1))


def lock_elsewhere(store) -> subprocess.CompletedProcess[str]:
    code = "import sys, pathlib; from shoal.shardcast import ShardStore; ShardStore(pathlib.Path(sys.argv[1])).lock()"
    return subprocess.run([sys.executable, "-c", code, str(store)], capture_output=True, text=True)


def test_a_store_has_one_writer(tmp_path):
    store = ShardStore(tmp_path / "store")
    store.lock()
    refused = lock_elsewhere(store.path)
    assert refused.returncode and f"another origin or relay writes {store.path}" in refused.stderr
    store.lock()  # no error, because this process already holds the lock
    store.unlock()
    assert lock_elsewhere(store.path).returncode == 0


def test_publishing_once_unlocks_the_store(tmp_path):
    publish(model_folder(tmp_path / "model"), tmp_path / "store", KEY)
    assert lock_elsewhere(tmp_path / "store").returncode == 0


@pytest.mark.parametrize(("public", "file_mode", "folder_mode"), [(True, 0o644, 0o755), (False, 0o600, 0o700)])
def test_every_user_may_read_a_public_store_whatever_the_umask(tmp_path, public, file_mode, folder_mode):
    before = os.umask(0o077)
    try:
        source = Origin(ShardStore(tmp_path / "store", public=public), KEY, run=RUN, anchor_every=1)
        source.publish(model_folder(tmp_path / "model"), 0)
    finally:
        os.umask(before)
    for name in ("versions.json", "v000000/manifest.json", "v000000/full/00000.shard"):
        path = tmp_path / "store" / name
        assert stat.S_IMODE(path.stat().st_mode) == file_mode
        assert stat.S_IMODE(path.parent.stat().st_mode) == folder_mode
