"""If bits flip, relays lie, disks are full or processes are killed, a fetch returns the published files or fails."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from shoal import files as files_module
from shoal.shardcast import FetchError, SignedManifest

from .support import (
    OTHER_KEY,
    PUBLIC_KEY,
    against,
    between,
    cached,
    client,
    contents,
    fetched,
    flip_bit,
    flipped,
    free_port,
    full_disk,
    mirror_of,
    mirroring,
    model_folder,
    origin,
    published,
    relay,
    serving,
    until,
    versions_at,
    weights_folder,
)

FULL_SHARDS, DELTA_SHARDS = 5, 2
EVERY_SHARD = [
    *((0, "full", index) for index in range(FULL_SHARDS)),
    *((1, "delta", index) for index in range(DELTA_SHARDS)),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    source = origin(path, shard_size_bytes=1_700, anchor_every=9)
    weights_folder(path / "model0", words=4_000)
    file = weights_folder(path / "model1", words=4_000) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-6_000] + random.Random(1).randbytes(2_500) + data[-3_500:])
    for version in (0, 1):
        streams = source.publish(path / f"model{version}", version).streams
    assert [len(stream.shards) for stream in streams.values()] == [DELTA_SHARDS]
    return path


@pytest.fixture
def two_versions(tmp_path, prepared):
    """The stores `origin` and `bad` hold version 0 in full and version 1 as a delta, each cut into several shards."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    shutil.copytree(prepared / "origin", tmp_path / "bad")


def fetch_both(tmp_path, *urls, **options):
    """Fetch version 0, then version 1 as a delta, and check their files."""
    for version in (0, 1):
        reader = client(tmp_path, *urls, **options)
        folder, _ = reader.fetch(version)
        assert contents(folder) == contents(tmp_path / f"model{version}")
    return reader.progress


# Flipped bits


@pytest.mark.parametrize(("version", "part", "index"), EVERY_SHARD)
def test_a_bit_flipped_on_a_relays_disk_is_an_error_that_names_the_shard(tmp_path, two_versions, version, part, index):
    flip_bit(tmp_path / "bad" / f"v{version:06d}" / part / f"{index:05d}.shard")
    with pytest.raises(FetchError, match=rf"shard {index} \({part}\) of version {version} .* corrupt"):
        against(lambda url: fetch_both(tmp_path, url), tmp_path / "bad")
    for name in cached(tmp_path):
        if not name.startswith("."):
            assert contents(tmp_path / "cache" / name) == contents(tmp_path / f"model{int(name[1:])}")


def test_bits_flipped_in_every_shard_of_one_relay_do_no_harm_if_another_is_intact(tmp_path, two_versions):
    for version, part, index in EVERY_SHARD:
        flip_bit(tmp_path / "bad" / f"v{version:06d}" / part / f"{index:05d}.shard")
    assert against(lambda *urls: fetch_both(tmp_path, *urls), tmp_path / "bad", tmp_path / "origin").parent == 0


async def test_a_bit_flipped_once_in_each_shard_on_the_way_does_no_harm(tmp_path, two_versions):
    left = [f"/v{version:06d}/{part}/{index:05d}.shard" for version, part, index in EVERY_SHARD]

    def flip_once(path, data):
        if path not in left:
            return data
        left.remove(path)
        return flipped(data)

    async with serving(tmp_path / "origin") as up, between(up, change=flip_once) as middle:
        assert (await asyncio.to_thread(fetch_both, tmp_path, middle.url)).parent == 0
    assert left == []


async def test_a_bit_flipped_in_each_manifest_on_the_way_is_an_error(tmp_path, two_versions):
    def flip_manifests(path, data):
        return flipped(data) if "manifest" in path else data

    async with serving(tmp_path / "origin") as up, between(up, change=flip_manifests) as middle:
        with pytest.raises(FetchError, match="no relay gave a valid manifest"):
            await asyncio.to_thread(fetch_both, tmp_path, middle.url)


async def test_a_relay_behind_one_that_flips_bits_stores_no_wrong_shard(tmp_path, two_versions):
    async with (
        serving(tmp_path / "origin") as up,
        between(up, change=lambda path, data: flipped(data) if ".shard" in path else data) as bad,
    ):
        async with mirroring(relay(tmp_path, bad.url)) as mirror:
            await until(lambda: "every server was tried" in (mirror.status.last_error or ""))
            assert list(mirror.store.path.rglob("[0-9]*.shard")) == []
        async with mirroring(relay(tmp_path, bad.url, up)) as mirror:
            await until(lambda: mirror.status.versions == [1, 0])
            for version in (0, 1):
                signed = mirror.store.signed(version)
                assert mirror.store.missing(signed.open(PUBLIC_KEY)) == []


@pytest.mark.parametrize(
    ("name", "harm"),
    [*(("model.safetensors", harm) for harm in ("flip", "shorten", "lengthen", "delete")), ("config.json", "flip")],
)
def test_a_damaged_cached_file_is_noticed_at_its_next_use(tmp_path, two_versions, harm, name):
    fetched(tmp_path, 0)
    path = tmp_path / "cache" / "v000000" / name
    data = path.read_bytes()
    path.unlink()
    if harm != "delete":
        path.write_bytes({"flip": flipped(data), "shorten": data[:-1], "lengthen": data + b"x"}[harm])
    against(lambda url: fetch_both(tmp_path, url), tmp_path / "origin")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v000000.manifest.json", ""),
        ("v000000.manifest.json", "{"),
        (".v000001.delta/layout", ""),
        (".v000001.delta/layout", "[]"),
    ],
)
def test_a_damaged_manifest_or_layout_in_the_cache_does_no_harm(tmp_path, two_versions, name, text):
    fetched(tmp_path, 0)
    flip_bit(tmp_path / "bad/v000001/delta/00001.shard")
    with pytest.raises(FetchError):  # this fetch leaves half a delta in the cache
        fetched(tmp_path, 1, at=["bad"])
    assert (tmp_path / "cache" / name).exists()
    (tmp_path / "cache" / name).write_text(text)
    folder, _ = fetched(tmp_path, 1)
    assert contents(folder) == contents(tmp_path / "model1")


# Lies


def test_shards_of_another_version_under_a_genuine_manifest_are_refused(tmp_path):
    published(tmp_path, 7, 8)
    mirror_of(tmp_path, "bad")
    shutil.rmtree(tmp_path / "bad/v000008/full")
    shutil.copytree(tmp_path / "bad/v000007/full", tmp_path / "bad/v000008/full")
    with pytest.raises(FetchError, match="corrupt"):
        fetched(tmp_path, 8, at=["bad"])
    folder, _ = fetched(tmp_path, 8, at=["bad", "origin"])
    assert contents(folder) == contents(tmp_path / "model8")


@pytest.mark.parametrize("lie", ["older", "forged"])
async def test_a_relay_does_not_accept_a_false_manifest(tmp_path, lie):
    """As the manifest of version 8, the relay `bad` serves that of version 7, or one signed with another key."""
    published(tmp_path, 7, 8)
    mirror_of(tmp_path, "bad")
    manifest = tmp_path / "bad/v000008/manifest.json"
    if lie == "older":
        shutil.copy(tmp_path / "bad/v000007/manifest.json", manifest)
    else:
        true = SignedManifest.parse(manifest.read_bytes()).open(PUBLIC_KEY)
        manifest.write_bytes(SignedManifest.sign(true, OTHER_KEY).to_bytes())

    async with serving(tmp_path / "bad") as bad, serving(tmp_path / "origin") as up:
        async with mirroring(relay(tmp_path, bad)) as mirror:
            await until(lambda: mirror.status.versions == [7])
            assert ("wrong signer" if lie == "forged" else "expected 8") in mirror.status.last_error
        async with mirroring(relay(tmp_path, bad, up)) as mirror:
            await until(lambda: mirror.status.versions == [8, 7])


# Full disks


async def test_a_relay_with_a_full_disk_continues_to_serve_what_it_has(tmp_path, monkeypatch):
    published(tmp_path, 7)

    mirror = relay(tmp_path)
    async with serving(tmp_path / "origin") as up, serving(mirror.store) as url:
        mirror.upstream = lambda: [up]
        async with mirroring(mirror):
            await until(lambda: mirror.status.versions == [7])
            published(tmp_path, 8)
            with full_disk(monkeypatch, files_module):
                await until(lambda: "No space left" in (mirror.status.last_error or ""))
                folder, _ = await asyncio.to_thread(client(tmp_path, url).fetch, 7)
                assert contents(folder) == contents(tmp_path / "model7")
            await until(lambda: mirror.status.versions == [8, 7])


def test_an_origin_with_a_full_disk_keeps_what_it_has_and_publishes_later(tmp_path, monkeypatch):
    source = published(tmp_path, 7)
    model_folder(tmp_path / "model8", seed=8)
    with full_disk(monkeypatch, files_module), pytest.raises(OSError, match="No space left"):
        source.publish(tmp_path / "model8", 8)
    assert source.published() == [7]
    folder, _ = fetched(tmp_path)
    assert contents(folder) == contents(tmp_path / "model7")
    source.publish(tmp_path / "model8", 8)
    assert source.published() == [8, 7]


# Servers and processes that die


async def test_a_relay_resumes_when_its_upstream_is_back(tmp_path):
    source = origin(tmp_path, shard_size_bytes=2_000)
    source.publish(model_folder(tmp_path / "model7"), 7)
    port = free_port()
    mirror = relay(tmp_path, f"http://127.0.0.1:{port}", stall_s=0.5)
    async with serving(source.store) as up, serving(mirror.store) as down, mirroring(mirror):
        fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, down, wait_s=20).fetch, 7))
        async with between(up, port=port, rate_Bps=10_000) as first:
            await until(lambda: first.sent_bytes > 10_000)
        await until(lambda: "Connect" in (mirror.status.last_error or ""))
        assert not fetching.done()
        async with between(up, port=port) as second:
            folder, _ = await fetching
            assert contents(folder) == contents(tmp_path / "model7")
        # At most one piece of 1,000 bytes per connection is lost and sent again.
        assert first.sent_bytes + second.sent_bytes < 37_612 + 8 * 1_000


class Process:
    """An origin, relay or client in a process of its own (see process.py)."""

    def __init__(self, role: str, tmp_path: Path, **settings) -> None:
        arguments = [role, json.dumps({"tmp_path": str(tmp_path), **settings})]
        script = str(Path(__file__).with_name("process.py"))
        self.process = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE)

    async def next_line(self) -> dict:
        assert self.process.stdout is not None
        return json.loads(await asyncio.to_thread(self.process.stdout.readline))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


LARGE_BYTES = 200_000


@pytest.fixture
def large(tmp_path) -> Path:
    (tmp_path / "model7").mkdir()
    (tmp_path / "model7" / "model").write_bytes(random.Random("large").randbytes(LARGE_BYTES))
    return tmp_path / "model7"


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a role in a process. Kill all these processes at the end of the test."""
    running: list[Process] = []

    def start_role(role: str, **settings) -> Process:
        running.append(Process(role, tmp_path, **settings))
        return running[-1]

    yield start_role
    for process in running:
        process.kill()


async def test_a_killed_client_resumes(tmp_path, large, start):
    source = origin(tmp_path)
    source.publish(large, 7)
    async with serving(source.store) as up, between(up, hold_after_bytes=160_000) as slow:
        first = start("client", urls=[slow.url])
        await until(lambda: slow.sent_bytes >= 160_000, timeout_s=60)
        await asyncio.sleep(0.3)  # in this time the client writes the received bytes
        first.kill()
        slow.hold_after_bytes = inf
        await asyncio.sleep(0.1)  # in this time the last requests of the killed client are counted
        before = len(slow.requests)
        second = start("client", urls=[slow.url])
        report = await second.next_line()
        reused_bytes, fetched_bytes = report["reused_bytes"], slow.requested_bytes(since=before)
    assert contents(tmp_path / "cache" / "v000007") == contents(large)
    assert reused_bytes >= 80_000, "the second client must reuse all shards that were not in transfer"
    assert fetched_bytes <= LARGE_BYTES - 80_000


def stored_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in store.glob("v000007/full/*"))


async def test_a_killed_relay_and_its_reader_resume(tmp_path, large, start):
    source = origin(tmp_path)
    source.publish(large, 7)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serving(source.store) as up, between(up, hold_after_bytes=100_000) as slow:
        first = start("relay", upstream=[slow.url], port=port)
        await first.next_line()
        fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, url, wait_s=30).fetch, 7))
        await until(lambda: stored_bytes(tmp_path / "relay") > 90_000, timeout_s=60)
        first.kill()
        slow.hold_after_bytes = inf
        await asyncio.sleep(0.1)  # in this time the last requests of the killed relay are counted
        before = len(slow.requests)
        (tmp_path / "another").mkdir()
        folder, _ = await asyncio.to_thread(client(tmp_path / "another", url, up).fetch, 7)
        assert contents(folder) == contents(large), "a reader that knows another server must not be affected"
        assert not fetching.done()
        start("relay", upstream=[slow.url], port=port)
        folder, _ = await fetching
        assert contents(folder) == contents(large)
        assert slow.requested_bytes(since=before) <= LARGE_BYTES - 80_000


async def test_relays_resume_after_their_origin_was_killed(tmp_path, large, start):
    port = free_port()
    first = start("origin", folder="model7", version=7, port=port)
    assert await first.next_line() == {"published": 7}
    async with between(f"http://127.0.0.1:{port}", hold_after_bytes=100_000) as slow:
        mirror = relay(tmp_path, slow.url)
        async with serving(mirror.store) as url, mirroring(mirror):
            await until(lambda: slow.sent_bytes > 90_000, timeout_s=60)
            first.kill()
            assert await versions_at(url) == [7]
            slow.hold_after_bytes = inf
            start("origin", folder="model7", version=7, port=port)
            await until(lambda: mirror.status.versions == [7], timeout_s=60)
            folder, _ = await asyncio.to_thread(client(tmp_path, url).fetch, 7)
            assert contents(folder) == contents(large)
            assert slow.sent_bytes <= LARGE_BYTES + 10_000, "only the shards in transfer may be fetched twice"
