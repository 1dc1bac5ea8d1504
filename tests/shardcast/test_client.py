"""The client: what it fetches, what it refuses, what it leaves on disk, and how long it waits."""

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Awaitable

import pytest
from aiohttp import web

from shoal.shardcast import Client, FetchError, Manifest, Origin, SignedManifest
from shoal.shardcast.fetch import cache as cache_module
from shoal.shardcast.fetch.cache import PartialShard
from shoal.shardcast.manifest import SIGNATURE_DOMAIN

from .support import (
    KEY,
    OTHER_KEY,
    PUBLIC_KEY,
    SHARD_BYTES,
    SMALL_BYTES,
    access,
    against,
    answering,
    between,
    cached,
    client,
    contents,
    dead_url,
    fetched,
    flip_bit,
    flipped,
    free_port,
    mirror_of,
    model_folder,
    origin,
    plainly,
    published,
    quickly,
    serving,
    until,
)


async def test_fetch_writes_exactly_the_published_files(tmp_path):
    source = published(tmp_path, 7)
    async with quickly(source.store) as url:
        reader = client(tmp_path, url)
        folder, manifest = await asyncio.to_thread(reader.fetch)
    assert folder == tmp_path / "cache" / "v000007" and cached(tmp_path) == ["v000007"]
    assert contents(folder) == contents(tmp_path / "model7")
    report = reader.progress
    assert (manifest.version, report.version, report.reused_bytes, report.complaints) == (7, 7, 0, {})
    assert manifest.size_bytes < report.transferred_bytes < manifest.size_bytes + SMALL_BYTES


async def test_a_forgotten_version_is_verified_again_and_a_damaged_one_fetched_again(tmp_path):
    """A bit that flipped on the disk leaves a file's size and times as they were."""
    async with quickly(published(tmp_path, 7).store) as url:
        reader = client(tmp_path, url)
        folder, manifest = await asyncio.to_thread(reader.fetch, 7)
        path = next(path for path in sorted(folder.iterdir()) if path.stat().st_size)
        before = path.stat()
        with path.open("r+b") as file:
            file.write(flipped(path.read_bytes()))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        await asyncio.to_thread(reader.fetch, 7, digest=manifest.digest)
        assert contents(folder) != contents(tmp_path / "model7"), "an unchanged file is not read again"
        cache_module.forget_verified(folder)
        await asyncio.to_thread(reader.fetch, 7, digest=manifest.digest)
    assert contents(folder) == contents(tmp_path / "model7")


def test_a_folder_in_which_all_files_are_empty_is_fetched(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "empty").touch()
    origin(tmp_path).publish(tmp_path / "model", 0)
    assert contents(fetched(tmp_path, 0)[0]) == {"empty": b""}


def test_latest_is_the_newest_version_of_all_relays(tmp_path):
    published(tmp_path, 7)
    stores = [mirror_of(tmp_path, "behind"), tmp_path / "origin"]
    published(tmp_path, 8)
    assert against(lambda *urls: client(tmp_path, *urls, dead_url()).latest(), *stores).version == 8


def test_latest_is_none_if_nothing_is_published(tmp_path):
    origin(tmp_path)
    assert against(lambda url: client(tmp_path, url).latest(), tmp_path / "origin") is None
    with pytest.raises(FetchError, match="no version is published yet"):
        fetched(tmp_path)


def test_if_no_relay_answers_the_error_gives_the_reason_for_each_url(tmp_path):
    urls = dead_url(), dead_url()
    for act in (client(tmp_path, *urls).latest, client(tmp_path, *urls).fetch):
        with pytest.raises(FetchError, match="Connect") as error:
            act()
        assert all(url in str(error.value) for url in urls)


def test_an_unknown_version_is_an_error(tmp_path):
    published(tmp_path, 7)
    with pytest.raises(FetchError, match=r"manifest of version 9 \(http://.*404"):
        fetched(tmp_path, 9)
    assert cached(tmp_path) == []


def spoil(shard, harm: str) -> None:
    if harm == "flip":
        flip_bit(shard)
    elif harm == "truncate":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shard.unlink()


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
async def test_a_bad_shard_is_fetched_from_another_relay(tmp_path, harm):
    random.seed(1)  # with this seed, the bad relay is queried first
    published(tmp_path, 7)
    for shard in (mirror_of(tmp_path, "bad") / "v000007" / "full").glob("*.shard"):
        spoil(shard, harm)
    async with quickly(tmp_path / "bad") as bad, quickly(tmp_path / "origin") as good:
        reader = client(tmp_path, bad, good)
        folder, _ = await asyncio.to_thread(reader.fetch, 7)
    assert contents(folder) == contents(tmp_path / "model7")
    assert list(reader.progress.complaints) == [bad]


@pytest.mark.parametrize(("harm", "reason"), [("flip", "corrupt"), ("truncate", "too short"), ("delete", "503")])
def test_a_bad_shard_without_another_relay_is_an_error_and_leaves_no_version(tmp_path, harm, reason):
    spoil(published(tmp_path, 7).store.shard_path(7, "full", 2), harm)
    with pytest.raises(FetchError, match=rf"shard 2 \(full\) of version 7 .*http://127.*{reason}"):
        fetched(tmp_path, 7, timeout_s=1.5)
    assert cached(tmp_path) == [".v000007.full"]


async def test_the_next_fetch_reuses_finished_shards(tmp_path):
    spoil(published(tmp_path, 7).store.shard_path(7, "full", 2), "flip")
    with pytest.raises(FetchError):
        await asyncio.to_thread(fetched, tmp_path, 7)
    published(tmp_path, 7)  # publishing version 7 again repairs the shard
    flip_bit(tmp_path / "cache" / ".v000007.full" / "files" / "config.json")  # damages shard 0 in the cache
    async with quickly(tmp_path / "origin") as url:
        reader = client(tmp_path, url)
        folder, _ = await asyncio.to_thread(reader.fetch, 7)
    assert contents(folder) == contents(tmp_path / "model7")
    assert reader.progress.reused_bytes == SHARD_BYTES + 7_612
    assert reader.progress.transferred_bytes < 2 * SHARD_BYTES + SMALL_BYTES


def test_a_partial_download_of_other_weights_is_not_trusted(tmp_path):
    """The file names and sizes are the same, so only the contents tell the weights apart."""
    spoil(published(tmp_path, 7).store.shard_path(7, "full", 2), "flip")
    with pytest.raises(FetchError):
        fetched(tmp_path, 7)
    shutil.rmtree(tmp_path / "origin")
    origin(tmp_path).publish(model_folder(tmp_path / "other", seed=99), 7)
    assert contents(fetched(tmp_path, 7)[0]) == contents(tmp_path / "other")


def test_a_cached_version_needs_no_relay(tmp_path):
    published(tmp_path, 7)
    folder, manifest = fetched(tmp_path, 7)
    again = client(tmp_path, url := dead_url())
    assert again.fetch(7) == (folder, manifest) and url in again.progress.complaints
    assert again.fetch(7, digest=manifest.digest) == (folder, manifest)
    assert (again.progress.transferred_bytes, again.progress.reused_bytes) == (0, manifest.size_bytes)
    with pytest.raises(FetchError):
        again.fetch(7, digest="0" * 64)


async def test_a_cached_newest_version_is_not_fetched_again(tmp_path):
    source = published(tmp_path, 7)
    async with quickly(source.store) as url:
        for _ in range(2):
            reader = client(tmp_path, url)
            await asyncio.to_thread(reader.fetch)
    assert reader.progress.transferred_bytes < SMALL_BYTES


def test_only_the_requested_digest_is_accepted(tmp_path):
    digest = published(tmp_path, 7).publish(tmp_path / "model7", 7).digest
    with pytest.raises(FetchError, match=f"version 7 has digest {digest}, expected {'0' * 64}"):
        fetched(tmp_path, 7, digest="0" * 64)


def test_old_versions_are_dropped_from_the_cache_unless_just_fetched(tmp_path):
    published(tmp_path, 1, 2, 3)
    for version in (1, 2, 3):
        fetched(tmp_path, version, keep=2)
    assert cached(tmp_path) == ["v000002", "v000003"]
    assert len(list((tmp_path / "cache").glob("*.manifest.json"))) == 2
    assert fetched(tmp_path, 1, keep=2)[0].exists()


def test_a_folder_that_was_not_fetched_is_never_touched(tmp_path):
    for foreign in ("v000001", "v000000", ".v000001.own"):
        model_folder(tmp_path / "cache" / foreign, seed=9)
    (tmp_path / "cache" / "video.delta").write_text("own")
    (tmp_path / "cache" / ".notes.tmp").write_text("own")
    before = contents(tmp_path / "cache")
    published(tmp_path, 1)
    with pytest.raises(FetchError, match="v000001 is not a fetched version; move it away"):
        fetched(tmp_path)
    published(tmp_path, 5, 6, 7)
    for version in (5, 6, 7):
        fetched(tmp_path, version, keep=1)
    assert before.items() <= contents(tmp_path / "cache").items()


def signed(manifest: Manifest, **changed) -> SignedManifest:
    return SignedManifest.sign(manifest.model_copy(update=changed), KEY)


def with_path_traversal(manifest: Manifest) -> SignedManifest:
    text = manifest.canonical().decode().replace("config.json", "../../evil")
    return SignedManifest(manifest=text, key=PUBLIC_KEY, signature=KEY.sign(SIGNATURE_DOMAIN + text.encode()).hex())


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda manifest: SignedManifest.sign(manifest, OTHER_KEY), "wrong signer"),
        (lambda manifest: signed(manifest).model_copy(update={"manifest": "{}"}), "bad signature"),
        (lambda manifest: signed(manifest, run="another"), "expected 'test'"),
        (lambda manifest: signed(manifest, version=8), "manifest of version 8, expected 7"),
        (with_path_traversal, "plain relative path"),
    ],
    ids=["other key", "other text", "other run", "other version", "path traversal"],
)
def test_a_forged_manifest_is_refused_and_nothing_is_written(tmp_path, forge, reason):
    store = published(tmp_path, 7).store
    store.manifest_path(7).write_bytes(forge(store.signed(7).open(PUBLIC_KEY)).to_bytes())
    for act in (lambda url: client(tmp_path, url).fetch(7), lambda url: client(tmp_path, url).latest()):
        with pytest.raises(FetchError, match=reason):
            against(act, tmp_path / "origin", serving=plainly)
    assert cached(tmp_path) == []


def test_a_forging_relay_does_no_harm_beside_an_honest_one(tmp_path):
    published(tmp_path, 7)
    forger = Origin(tmp_path / "forged", OTHER_KEY, run="test")
    for version in (7, 9):
        forger.publish(model_folder(tmp_path / "fake", seed=1), version)
    folder, manifest = fetched(tmp_path, at=["forged", "origin"])
    assert manifest.version == 7 and contents(folder) == contents(tmp_path / "model7")


def test_a_disk_that_stores_wrong_bytes_is_detected(tmp_path, monkeypatch):
    published(tmp_path, 7)
    real = PartialShard.write
    with monkeypatch.context() as patch:
        patch.setattr(PartialShard, "write", lambda sink, at, data: real(sink, at, bytes(len(data))))
        with pytest.raises(FetchError, match="does not match its manifest"):
            fetched(tmp_path, 7)
    assert not (tmp_path / "cache" / "v000007").exists()
    assert contents(fetched(tmp_path, 7)[0]) == contents(tmp_path / "model7")


@pytest.mark.parametrize("when", ["write", "allocate"])
def test_the_error_for_a_full_disk_names_the_folder_and_cached_versions_are_kept(tmp_path, monkeypatch, when):
    published(tmp_path, 6, 7)
    fetched(tmp_path, 6)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "write_all" if when == "write" else "_allocate", full)
        with pytest.raises(FetchError, match=r"no space left for .*\.v000007\.full"):
            fetched(tmp_path, 7)
    assert cached(tmp_path) == ([".v000007.full", "v000006"] if when == "write" else ["v000006"])
    assert contents(tmp_path / "cache" / "v000006") == contents(tmp_path / "model6")
    assert contents(fetched(tmp_path, 7)[0]) == contents(tmp_path / "model7")


async def test_of_several_clients_that_share_a_cache_only_one_downloads(tmp_path):
    source = published(tmp_path, 7)
    async with quickly(source.store) as url:
        clients = [client(tmp_path, url) for _ in range(3)]
        await asyncio.gather(*(asyncio.to_thread(each.fetch, 7) for each in clients))
    sizes = sorted(each.progress.transferred_bytes for each in clients)
    assert sizes[1] < SMALL_BYTES < sizes[2]
    assert contents(tmp_path / "cache" / "v000007") == contents(tmp_path / "model7")


def test_if_another_client_holds_the_lock_until_the_deadline_the_error_names_the_lock(tmp_path):
    published(tmp_path, 7)
    holder = client(tmp_path, "http://unused").cache
    with holder.locked(0), pytest.raises(FetchError, match=r"\.lock"):
        fetched(tmp_path, 7, timeout_s=0.3)


async def test_a_redirect_is_not_followed(tmp_path):
    async def redirect(request):
        raise web.HTTPFound("http://127.0.0.1:1/versions.json")

    async with answering(redirect) as url:
        with pytest.raises(FetchError, match="answered 302"):
            await asyncio.to_thread(client(tmp_path, url).latest)


def test_a_client_without_any_server_is_refused(tmp_path):
    with pytest.raises(FetchError, match="no relay is known"):
        Client([], access(), tmp_path)


@pytest.mark.parametrize("ranges", [True, False])
async def test_half_a_shard_is_resumed_after_a_disconnect(tmp_path, ranges):
    published(tmp_path, 7, shard_size_bytes=37_612)
    async with serving(tmp_path / "origin") as url, between(url, cut_after_bytes=12_000) as middle:
        middle.passes_ranges = ranges
        fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, middle.url).fetch, 7))
        await until(lambda: len(middle.requests) > 2)
        middle.cut_after_bytes = 10**9
        assert contents((await fetching)[0]) == contents(tmp_path / "model7")
    first, second, *_, last = middle.starts()
    assert first == 0 and 6_000 < second <= 12_000  # a part of the 12,000 sent bytes may be lost in a buffer
    if ranges:
        assert last == second
        assert middle.sent_bytes == 12_000 + 37_612 - second
    else:
        assert middle.sent_bytes == 12_000 + 37_612


@pytest.mark.parametrize("trouble", ["dead", "without the version", "without shards"])
async def test_one_relay_that_delivers_is_enough(tmp_path, trouble):
    published(tmp_path, 7)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "versions.json").write_text('{"versions":[]}')

    def no_shards(path: str) -> web.Response | None:
        return web.Response(status=500) if ".shard" in path else None

    async with (
        serving(tmp_path / "origin") as up,
        plainly(tmp_path / "empty") as empty,
        between(up, refuse=no_shards) as poor,
    ):
        urls = {"dead": dead_url(), "without the version": empty, "without shards": poor.url}
        reader = client(tmp_path, urls[trouble], up)
        assert contents((await asyncio.to_thread(reader.fetch, 7))[0]) == contents(tmp_path / "model7")


# When the client waits


async def brings_version_7(tmp_path, fetching: Awaitable) -> None:
    folder, _ = await asyncio.wait_for(fetching, 20)
    assert contents(folder) == contents(tmp_path / "model7")


async def test_a_client_waits_for_a_relay_that_starts_later(tmp_path):
    published(tmp_path, 7)
    port = free_port()
    reader = client(tmp_path, f"http://127.0.0.1:{port}", wait_s=10)
    fetching = asyncio.create_task(asyncio.to_thread(reader.fetch))
    await until(lambda: reader.progress.doing == "waiting for a relay")
    async with serving(tmp_path / "origin", port=port):
        await brings_version_7(tmp_path, fetching)


async def test_a_client_waits_for_a_limited_time_for_the_first_version(tmp_path):
    origin(tmp_path)
    async with serving(tmp_path / "origin") as url:
        with pytest.raises(FetchError, match="no version is published yet"):
            await asyncio.to_thread(client(tmp_path, url, wait_s=0.3).fetch)
        reader = client(tmp_path, url, wait_s=10)
        fetching = asyncio.create_task(asyncio.to_thread(reader.fetch))
        await until(lambda: reader.progress.doing == "waiting for a version")
        published(tmp_path, 7)
        await brings_version_7(tmp_path, fetching)


async def test_a_relay_that_joins_during_a_fetch_is_used(tmp_path):
    source = published(tmp_path, 7)
    for shard in mirror_of(tmp_path, "half").glob("v*/full/*.shard"):
        shard.unlink()  # the relay then lists the version but has none of its shards yet
    async with quickly(tmp_path / "half") as half, quickly(source.store) as whole:
        urls = [half]
        reader = client(tmp_path, half, relays=lambda: urls)
        fetching = asyncio.create_task(asyncio.to_thread(reader.fetch))
        await asyncio.sleep(0.5)
        assert not fetching.done()
        urls.append(whole)
        await brings_version_7(tmp_path, fetching)
