"""A version that is published while its learner writes it: a learner here is a few lines that write, pause and rename."""

import asyncio
import os
import shutil
import threading
import time
from contextlib import contextmanager

import pytest

from shoal.shardcast import growing as growing_module
from shoal.shardcast import origin as origin_module
from shoal.shardcast.fetch import download as download_module
from shoal.shardcast.fetch.sources import Sources
from shoal.shardcast.files import read_layout
from shoal.shardcast.origin import Handover

from .support import (
    PUBLIC_KEY,
    SHARD_BYTES,
    client,
    contents,
    mirroring,
    origin,
    relay,
    serving,
    stepped,
    until,
    weights_folder,
)

WEIGHTS = "model.safetensors"


class Learner:
    """Writes version 1 of `weights_folder`, or another one, into `versions/`."""

    def __init__(self, tmp_path, version=1, *, seed=None, header=True):
        self.watched = tmp_path / "versions"
        self.temporary = self.watched / f".v{version:06d}"
        self.final = self.watched / f"v{version:06d}"
        whole = weights_folder(tmp_path / f"model{version}", version if seed is None else seed)
        self.data = (whole / WEIGHTS).read_bytes()
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        (self.temporary / "config.json").write_text("{}")
        self.file = (self.temporary / f".{WEIGHTS}.tmp").open("wb", buffering=0)
        self.written_bytes = 0
        if header:
            self.write(200)

    def write(self, until_bytes=None):
        self.file.write(self.data[self.written_bytes : until_bytes])
        self.written_bytes = until_bytes or len(self.data)

    def rename(self):
        (self.temporary / f".{WEIGHTS}.tmp").rename(self.temporary / WEIGHTS)
        self.temporary.rename(self.final)

    def finish(self):
        self.write()
        self.rename()


@contextmanager
def following(source, watched):
    """The origin takes up what is being written; gives the handover and a list that the manifest, or None, comes into."""
    writer, came = Handover(source, watched, lambda: False), []

    growing = writer.begun()
    assert growing is not None

    def follow():
        try:
            came.append(writer.follow(growing))
        except Exception as error:  # noqa: BLE001 - shown by the test
            came.append(error)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    yield writer, came
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def drafts_at_once(monkeypatch):
    monkeypatch.setattr(origin_module, "DRAFT_S", 0)


def opened(source, version):
    return source.store.signed(version).open(PUBLIC_KEY)


def wait_for(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("anchor_every", [100, 1])
def test_a_version_written_bit_by_bit_is_the_one_its_folder_would_have_been(tmp_path, anchor_every):
    source = stepped(tmp_path, 0, anchor_every=anchor_every)
    learner = Learner(tmp_path)
    with following(source, learner.watched) as (_, came):
        for at in range(201, len(learner.data), 3_001):
            learner.write(at)
            time.sleep(0.005)
        learner.finish()
    (manifest,) = came
    assert manifest == opened(source, 1) and source.store.missing(manifest) == []
    again = stepped(tmp_path / "again", 0, 1, anchor_every=anchor_every).publish(learner.final, 1)
    same = {"publication": again.publication, "created_s": again.created_s}
    assert manifest.model_copy(update=same) == again and manifest.digest == again.digest
    assert list(manifest.streams) == (["delta"] if anchor_every > 1 else ["full", "delta"])


def test_nothing_is_to_be_done_but_the_last_piece_once_a_delta_is_written(tmp_path, monkeypatch):
    """All else is read, compared and hashed before the writer ends."""
    source = stepped(tmp_path, 0)
    learner = Learner(tmp_path)
    read = []
    real = growing_module.Growing.available

    def available(growing, offset_bytes):
        read.append(offset_bytes)
        return real(growing, offset_bytes)

    monkeypatch.setattr(growing_module.Growing, "available", available)
    with following(source, learner.watched) as (_, came):
        learner.write(len(learner.data) - 10)
        wait_for(lambda: len(learner.data) - 10 in read)
        assert source.published() == [0] and came == []
        learner.finish()
    assert source.published() == [1, 0]
    assert read.count(len(learner.data) - 10) == 1  # one reader compares and hashes


def test_the_tensors_of_what_is_still_written_are_in_its_first_manifest(tmp_path):
    source = origin(tmp_path)
    learner = Learner(tmp_path)
    with following(source, learner.watched) as (_, came):
        learner.write(SHARD_BYTES + 1_000)
        wait_for(lambda: source.published() == [1])
        draft = opened(source, 1)
        assert not draft.complete and not came
        learner.finish()
    layout = read_layout(learner.final / WEIGHTS)
    (weights,) = (file for file in draft.files if file.path == WEIGHTS)
    assert [(t.name, t.dtype, t.shape) for t in weights.tensors] == [(t.name, t.dtype, t.shape) for t in layout.tensors]
    assert weights.tensors


def test_readers_have_the_first_version_but_for_its_end_while_it_is_written(tmp_path):
    source = origin(tmp_path)
    learner = Learner(tmp_path, 0)

    async def run():
        async with serving(source.store) as up, mirroring(relay(tmp_path, up)) as mirror:
            with following(source, learner.watched):
                learner.write(25_000)
                await until(lambda: all(mirror.store.shard_path(0, "full", index).exists() for index in range(2)))
                assert mirror.status.versions == []
                learner.finish()
                await until(lambda: mirror.status.versions == [0])
            return await asyncio.to_thread(client(tmp_path, up).fetch)

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model0")


@pytest.mark.parametrize("version", [0, 1])
def test_a_learner_that_dies_half_way_leaves_nothing_and_its_next_try_is_published(tmp_path, version):
    source = stepped(tmp_path, *range(version))
    before = source.published()
    dying = Learner(tmp_path, version, seed=9)
    with following(source, dying.watched) as (writer, came):
        dying.write(25_000)
        wait_for(lambda: version or source.published() == [0])
        again = Learner(tmp_path, version)  # which removes what is there
    assert came == [None] and "was removed before it was complete" in writer.given_up
    assert source.published() == before and list(source.store.path.glob(f"v{version:06d}")) == []
    with following(source, again.watched) as (_, came):
        again.finish()
    assert source.store.missing(came[0]) == []
    assert came[0].content == stepped(tmp_path / "again", *range(version + 1)).publish(again.final, version).content


@pytest.mark.parametrize("version", [0, 1])
def test_files_of_the_next_try_are_not_taken_for_those_of_the_first(tmp_path, version):
    """The next try has the folder's name, and one of its files is still empty."""
    source = stepped(tmp_path, *range(version))
    dying = Learner(tmp_path, version)
    writer = Handover(source, dying.watched, lambda: False)
    growing = writer.begun()
    again = Learner(tmp_path, version)
    (again.temporary / "config.json").write_text("")
    assert writer.follow(growing) is None and "was removed before it was complete" in writer.given_up
    assert source.published() == list(range(version))


def test_readers_of_what_was_given_up_get_what_is_published_instead(tmp_path):
    """They had begun with it, at a relay and at a client."""
    now_s = iter(range(1, 100))
    source = origin(tmp_path, clock=lambda: float(next(now_s)))
    dying = Learner(tmp_path, 0, seed=9)

    async def run():
        async with serving(source.store) as up, mirroring(relay(tmp_path, up)) as mirror:
            with following(source, dying.watched):
                dying.write(25_000)
                fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, up, wait_s=5).fetch, 0))
                record = tmp_path / "cache" / ".v000000.full" / "record"
                await until(lambda: mirror.store.shard_path(0, "full", 1).exists() and record.exists())
                again = Learner(tmp_path, 0)
            with following(source, again.watched):
                again.finish()
            await until(lambda: mirror.status.versions == [0])
            assert mirror.store.missing(opened(source, 0)) == []
            return await fetching

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model0")


def test_a_reader_that_asks_for_a_shard_too_late_fetches_what_was_published_instead(tmp_path, monkeypatch):
    """It gets a shard of the new version before it looks at the manifest again."""
    now_s = iter(range(1, 100))
    source = origin(tmp_path, clock=lambda: float(next(now_s)))
    dying = Learner(tmp_path, 0, seed=9)
    asked, published, real, grown = threading.Event(), threading.Event(), Sources.shard, download_module._grown

    async def late(sources, version, part, incoming, **more):
        if incoming.shard.index == 1 and not published.is_set():
            asked.set()
            await asyncio.to_thread(published.wait, 30)
        await real(sources, version, part, incoming, **more)

    async def blind(sources, offer):
        return offer if asked.is_set() else await grown(sources, offer)

    monkeypatch.setattr(Sources, "shard", late)
    monkeypatch.setattr(download_module, "_grown", blind)

    async def run():
        async with serving(source.store) as up:
            with following(source, dying.watched):
                dying.write(25_000)
                fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, up, wait_s=5).fetch, 0))
                await asyncio.to_thread(asked.wait, 30)
                again = Learner(tmp_path, 0)
            with following(source, again.watched):
                again.finish()
            published.set()
            return await fetching

    assert contents(asyncio.run(run())[0]) == contents(tmp_path / "model0")


@pytest.mark.parametrize("harm", ["written to", "replaced", "another file", "longer"])
def test_what_is_not_as_it_was_read_is_given_up(tmp_path, harm, monkeypatch):
    source = stepped(tmp_path, 0)
    read, real = threading.Event(), growing_module.Growing._written_s

    def written_s(growing, size_bytes):
        try:
            return real(growing, size_bytes)
        finally:
            read.set()

    monkeypatch.setattr(growing_module.Growing, "_written_s", written_s)
    learner = Learner(tmp_path)
    with following(source, learner.watched) as (writer, came):
        learner.write(25_000)
        if harm == "longer":
            learner.data += b"x"
        learner.write()
        assert read.wait(60)
        if harm == "written to":
            os.pwrite(learner.file.fileno(), b"other", 1_000)
        elif harm == "replaced":
            shutil.copy(learner.temporary / f".{WEIGHTS}.tmp", tmp_path / "copy")
            (tmp_path / "copy").rename(learner.temporary / f".{WEIGHTS}.tmp")
        elif harm == "another file":
            (learner.temporary / "tokenizer.json").write_text("{}")
        learner.rename()
    assert came == [None]
    assert writer.given_up and source.published() == [0]
    assert writer.begun() is None
    if harm != "longer":  # which is not a safetensors file
        assert contents(learner.final)[WEIGHTS] != b""
        manifest = source.publish(learner.final, 1)  # as it is now
        assert source.store.missing(manifest) == []


def test_a_writer_that_is_stuck_is_named_and_not_waited_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(growing_module, "STALL_S", 0.2)
    source = stepped(tmp_path, 0)
    learner = Learner(tmp_path)
    with following(source, learner.watched) as (writer, came):
        learner.write(25_000)
    assert came == [None] and "v000001 has not grown for" in writer.given_up
    assert writer.begun() is None
    learner.finish()
    assert source.publish(learner.final, 1).complete


def test_a_file_without_all_of_its_header_is_looked_at_again(tmp_path):
    source = stepped(tmp_path, 0)
    learner = Learner(tmp_path, header=False)
    writer = Handover(source, learner.watched, lambda: False)
    for written_bytes in (1, 5, 40):
        learner.write(written_bytes)
        assert writer.begun() is None
    learner.write(200)
    growing = writer.begun()
    assert growing is not None and growing.size_bytes(WEIGHTS) == len(learner.data)


def test_a_file_that_grows_under_its_own_name_is_left_alone(tmp_path):
    """As who writes in any order would have it."""
    source = stepped(tmp_path, 0)
    learner = Learner(tmp_path)
    learner.write(25_000)
    (learner.temporary / f".{WEIGHTS}.tmp").rename(learner.temporary / WEIGHTS)
    assert Handover(source, learner.watched, lambda: False).begun() is None


def test_an_origin_that_is_stopped_waits_for_no_writer(tmp_path):
    source = stepped(tmp_path, 0)
    learner = Learner(tmp_path)
    learner.write(25_000)
    writer = Handover(source, learner.watched, lambda: True)
    assert writer.follow(writer.begun()) is None
    assert source.published() == [0]


def test_weights_unlike_those_before_are_an_anchor_all_the_same(tmp_path):
    source = stepped(tmp_path, 0)
    learner = Learner(tmp_path)
    learner.data = learner.data[:5_000] + os.urandom(len(learner.data) - 5_000)
    with following(source, learner.watched) as (_, came):
        learner.finish()
    assert "full" in came[0].streams
    assert source.store.missing(came[0]) == []
