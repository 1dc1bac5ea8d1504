"""The store: what is kept and what goes, and what half-written files mean."""

import os
import time

import pytest

from shoal.files import NewFile, temporary
from shoal.shardcast import Origin, ShardStore
from shoal.shardcast.manifest import MAX_VERSIONS, Delta, FileEntry, Manifest, Stream
from shoal.shardcast.store import chain

from .support import (
    KEY,
    PUBLICATION,
    RUN,
    flip_bit,
    published,
    stepped,
)

HASH = "0" * 64


def version(number: int, *, full_bytes: int | None = None, delta_bytes: int | None = None) -> Manifest:
    """One that is a delta of the version before, or an anchor, or both."""
    delta = None
    if delta_bytes is not None:
        delta = Delta(parent=number - 1, parent_digest=HASH, stream=stream(delta_bytes))
    size_bytes = full_bytes or 100
    return Manifest(
        run=RUN,
        publication=PUBLICATION,
        version=number,
        files=(FileEntry(path="a", size_bytes=size_bytes),),
        content=stream(size_bytes),
        anchor=full_bytes is not None,
        delta=delta,
        created_s=1.5,
    )


def stream(size_bytes: int) -> Stream:
    return Stream(size_bytes=size_bytes, shard_size_bytes=1_000, shards=(HASH,) * -(-size_bytes // 1_000))


def holding(path, *manifests: Manifest, **options) -> tuple[ShardStore, dict[int, Manifest]]:
    """A store of manifests without shards."""
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


ANCHORS = [version(number, full_bytes=1_000) for number in range(1, 6)]
CHAIN = [
    version(1, full_bytes=1_000),
    version(2, delta_bytes=100),
    version(3, full_bytes=1_000, delta_bytes=100),
    version(4, delta_bytes=100),
    version(5, delta_bytes=100),
]


@pytest.mark.parametrize(
    ("manifests", "keep", "expected"),
    [
        (ANCHORS, 9, [5, 4, 3, 2, 1]),
        (ANCHORS, 2, [5, 4]),
        (CHAIN, 1, [5, 4, 3]),  # what the newest is a delta of
        (CHAIN, 2, [5, 4, 3]),
        (CHAIN, 3, [5, 4, 3]),  # an anchor is enough, though it is a delta too
        (CHAIN, 4, [5, 4, 3, 2, 1]),
    ],
)
def test_the_newest_are_kept_with_what_they_are_deltas_of(tmp_path, manifests, keep, expected):
    store, held = holding(tmp_path, *manifests, keep=keep)
    store.retain(held)
    assert kept(store) == expected


def test_what_a_reader_asked_for_lately_stays_with_what_it_is_a_delta_of(tmp_path):
    store, held = holding(tmp_path, *CHAIN, keep=1, lease_s=0.2)
    store.lease(2)
    store.retain(held)
    assert kept(store) == [5, 4, 3, 2, 1]
    time.sleep(0.2)
    store.retain(held)
    assert kept(store) == [5, 4, 3]


def test_readers_who_read_everything_for_ever_keep_a_bounded_number_of_versions(tmp_path):
    store, held = holding(tmp_path, *(version(number, full_bytes=1_000) for number in range(30)), keep=3, lease_s=60)
    for number in range(30):
        store.lease(number)
    store.retain(held)
    assert kept(store) == [29, 28, 27, 26, 25, 24]


def test_a_reader_in_the_middle_of_a_file_keeps_what_it_opened(tmp_path):
    source = published(tmp_path, 1, keep=1)
    path = source.store.shard_path(1, "full", 0)
    data = path.read_bytes()
    with path.open("rb") as file:
        published(tmp_path, 2, keep=1)
        assert not path.exists()
        assert file.read() == data


def test_chain_ends_at_an_anchor_or_where_nothing_is_known():
    held = {manifest.version: manifest for manifest in CHAIN}
    assert chain(held, 5) == [5, 4, 3]
    assert chain(held, 1) == [1]
    del held[4]
    assert chain(held, 5) == [5, 4]


def test_missing_names_the_shards_that_are_absent_or_wrong(tmp_path):
    source = stepped(tmp_path, 0, 1, anchor_every=1)
    manifest = source.publish(tmp_path / "model1", 1)
    assert source.store.missing(manifest) == []
    flip_bit(source.store.shard_path(1, "delta", 0))
    flip_bit(source.store.shard_path(1, "full", 1))
    source.store.shard_path(1, "full", 2).unlink()
    longer = source.store.shard_path(1, "full", 3)
    longer.write_bytes(longer.read_bytes() + b"x")
    found = [(part, shard.index) for part, shard in source.store.missing(manifest)]
    assert found == [("delta", 0), ("full", 1), ("full", 2), ("full", 3)]


def test_half_a_version_and_half_a_shard_are_swept(tmp_path):
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


def test_a_store_keeps_its_name_and_tells_how_it_was_reached(tmp_path):
    store = ShardStore(tmp_path / "store")
    store.recover()
    assert ShardStore(tmp_path / "store").id == store.id
    assert b'"path":[]' in (store.path / "versions.json").read_bytes()  # not known yet
    store.reached_via(["a" * 16])
    assert f'"path":["{"a" * 16}","{store.id}"]'.encode() in (store.path / "versions.json").read_bytes()


def test_a_file_that_is_forgotten_ends_for_those_who_read_it(tmp_path):
    file = NewFile(tmp_path / "shard")
    file.write(0, b"wrong")
    with temporary(tmp_path / "shard").open("rb") as reader:
        file.truncate()
        file.write(0, b"right")
        assert reader.read() == b"wrong"
        assert os.fstat(reader.fileno()).st_nlink == 0
    file.commit()
    file.close()
    assert (tmp_path / "shard").read_bytes() == b"right"


def test_more_versions_than_a_list_holds_are_not_listed(tmp_path):
    for number in range(MAX_VERSIONS + 2):
        (tmp_path / f"v{number:06d}").mkdir()
        (tmp_path / f"v{number:06d}" / "manifest.json").touch()
    store = ShardStore(tmp_path)
    store.recover()
    assert store.versions() == list(range(MAX_VERSIONS + 1, 1, -1))
