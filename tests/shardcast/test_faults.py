"""Everything that may break does: never a wrong weight is loaded, and a fetch ends, or says by name why it cannot."""

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
from shoal.shardcast.fetch import cache as cache_module

from .support import (
    OTHER_KEY,
    PUBLIC_KEY,
    against,
    between,
    cached,
    client,
    contents,
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
    """Version 0 whole, and version 1 as a delta of it, both of several shards, in `origin` and in `bad`."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    shutil.copytree(prepared / "origin", tmp_path / "bad")


def fetch_both(tmp_path, *urls, **options):
    """Version 0, then version 1 with the delta; every weight is the one that was published."""
    for version in (0, 1):
        one = client(tmp_path, *urls, **options)
        folder, _ = one.fetch(version)
        assert contents(folder) == contents(tmp_path / f"model{version}")
    return one.progress


def nothing_wrong_in_the_cache(tmp_path) -> None:
    for name in cached(tmp_path):
        if not name.startswith("."):
            assert contents(tmp_path / "cache" / name) == contents(tmp_path / f"model{int(name[1:])}")


# Bits


@pytest.mark.parametrize(("version", "part", "index"), EVERY_SHARD)
def test_a_bit_flipped_on_a_relays_disk(tmp_path, two_versions, version, part, index):
    flip_bit(tmp_path / "bad" / f"v{version:06d}" / part / f"{index:05d}.shard")
    with pytest.raises(FetchError, match=rf"shard {index} \({part}\) of version {version} .* corrupt"):
        against(lambda url: fetch_both(tmp_path, url), tmp_path / "bad")
    nothing_wrong_in_the_cache(tmp_path)


def test_bits_flipped_in_every_shard_of_one_relay_cost_nothing_but_requests(tmp_path, two_versions):
    for version, part, index in EVERY_SHARD:
        flip_bit(tmp_path / "bad" / f"v{version:06d}" / part / f"{index:05d}.shard")
    assert against(lambda *urls: fetch_both(tmp_path, *urls), tmp_path / "bad", tmp_path / "origin").parent == 0


@pytest.mark.parametrize(("version", "part", "index"), [EVERY_SHARD[0], EVERY_SHARD[4], EVERY_SHARD[-1]])
def test_a_shard_that_is_cut_short_on_a_relays_disk(tmp_path, two_versions, version, part, index):
    path = tmp_path / "bad" / f"v{version:06d}" / part / f"{index:05d}.shard"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FetchError, match=rf"shard {index} \({part}\) of version {version}"):
        against(lambda url: fetch_both(tmp_path, url, timeout_s=3), tmp_path / "bad")
    nothing_wrong_in_the_cache(tmp_path)
    against(lambda *urls: fetch_both(tmp_path, *urls), tmp_path / "bad", tmp_path / "origin")


def through(tmp_path, change, *, others: int = 0):
    """Both versions, fetched through a server that changes what it passes on."""

    async def run():
        async with serving(tmp_path / "origin") as up, between(up) as middle:
            middle.change = change
            return await asyncio.to_thread(fetch_both, tmp_path, middle.url, *others * [up])

    return asyncio.run(run())


def test_a_bit_of_each_shard_flipped_once_on_the_way(tmp_path, two_versions):
    left = [f"/v{version:06d}/{part}/{index:05d}.shard" for version, part, index in EVERY_SHARD]

    def once(path, data):
        if path in left:
            left.remove(path)
            return flipped(data)
        return data

    assert through(tmp_path, once).parent == 0
    assert left == []


@pytest.mark.parametrize("part", ["full", "delta"])
def test_bits_always_flipped_on_the_way(tmp_path, two_versions, part):
    def always(path, data):
        return flipped(data) if f"/{part}/" in path else data

    with pytest.raises(FetchError, match=rf"\({part}\) .* corrupt"):
        through(tmp_path, always)
    nothing_wrong_in_the_cache(tmp_path)
    assert through(tmp_path, always, others=1).parent == 0


def test_bits_flipped_in_what_describes_the_shards(tmp_path, two_versions):
    with pytest.raises(FetchError, match="no relay gave a valid manifest"):
        through(tmp_path, lambda path, data: flipped(data) if "manifest" in path else data)


def test_a_relay_behind_one_that_flips_bits_holds_nothing_wrong(tmp_path, two_versions):
    async def run():
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

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "harm"),
    [*(("model.safetensors", harm) for harm in ("flip", "shorten", "lengthen", "delete")), ("config.json", "flip")],
)
def test_what_happens_to_a_cached_file_is_noticed_at_its_next_use(tmp_path, two_versions, harm, name):
    against(lambda url: client(tmp_path, url).fetch(0), tmp_path / "origin")
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
def test_nonsense_in_the_books_of_the_cache_does_no_harm(tmp_path, two_versions, name, text):
    against(lambda url: client(tmp_path, url).fetch(0), tmp_path / "origin")
    flip_bit(tmp_path / "bad/v000001/delta/00001.shard")
    with pytest.raises(FetchError):  # leaves half a delta
        against(lambda url: client(tmp_path, url).fetch(1), tmp_path / "bad")
    assert (tmp_path / "cache" / name).exists()
    (tmp_path / "cache" / name).write_text(text)
    folder, _ = against(lambda url: client(tmp_path, url).fetch(1), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model1")


# Lies


def test_shards_of_another_version_under_a_true_manifest(tmp_path):
    published(tmp_path, 7, 8)
    mirror_of(tmp_path, "bad")
    shutil.rmtree(tmp_path / "bad/v000008/full")
    shutil.copytree(tmp_path / "bad/v000007/full", tmp_path / "bad/v000008/full")
    with pytest.raises(FetchError, match="corrupt"):
        against(lambda url: client(tmp_path, url).fetch(8), tmp_path / "bad")
    folder, _ = against(lambda *urls: client(tmp_path, *urls).fetch(8), tmp_path / "bad", tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model8")


@pytest.mark.parametrize("lie", ["older", "forged"])
def test_a_relay_is_not_taken_in_by_one_that_lies_about_a_version(tmp_path, lie):
    """`bad` says that an older version is 8, or signs for itself."""
    published(tmp_path, 7, 8)
    mirror_of(tmp_path, "bad")
    manifest = tmp_path / "bad/v000008/manifest.json"
    if lie == "older":
        shutil.copy(tmp_path / "bad/v000007/manifest.json", manifest)
    else:
        true = SignedManifest.parse(manifest.read_bytes()).open(PUBLIC_KEY)
        manifest.write_bytes(SignedManifest.sign(true, OTHER_KEY).to_bytes())

    async def run():
        async with serving(tmp_path / "bad") as bad, serving(tmp_path / "origin") as up:
            async with mirroring(relay(tmp_path, bad)) as mirror:
                await until(lambda: mirror.status.versions == [7])
                assert ("wrong signer" if lie == "forged" else "expected 8") in mirror.status.last_error
            async with mirroring(relay(tmp_path, bad, up)) as mirror:
                await until(lambda: mirror.status.versions == [8, 7])

    asyncio.run(run())


def test_a_relay_that_stays_behind_keeps_nobody_back(tmp_path):
    published(tmp_path, 7)
    mirror_of(tmp_path, "stale")
    published(tmp_path, 8)
    folder, _ = against(lambda *urls: client(tmp_path, *urls).fetch(), tmp_path / "stale", tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model8")


# Disks


def test_a_relay_whose_disk_is_full_goes_on_serving_what_it_has(tmp_path, monkeypatch):
    published(tmp_path, 7)

    async def run():
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

    asyncio.run(run())


def test_an_origin_whose_disk_is_full_keeps_what_it_has_and_goes_on_later(tmp_path, monkeypatch):
    source = published(tmp_path, 7)
    model_folder(tmp_path / "model8", seed=8)
    with full_disk(monkeypatch, files_module), pytest.raises(OSError, match="No space left"):
        source.publish(tmp_path / "model8", 8)
    assert source.published() == [7]
    folder, _ = against(lambda url: client(tmp_path, url).fetch(), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")
    source.publish(tmp_path / "model8", 8)
    assert source.published() == [8, 7]


def test_a_client_whose_disk_is_full_keeps_the_version_it_has(tmp_path, monkeypatch):
    published(tmp_path, 7, 8)
    against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    with full_disk(monkeypatch, cache_module), pytest.raises(FetchError, match="no space left for"):
        against(lambda url: client(tmp_path, url).fetch(8), tmp_path / "origin")
    nothing_wrong_in_the_cache(tmp_path)
    assert "v000007" in cached(tmp_path)
    folder, _ = against(lambda url: client(tmp_path, url).fetch(8), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model8")


# Servers that go


def test_upstream_that_goes_down_in_the_middle_and_comes_back(tmp_path):
    source = origin(tmp_path, shard_size_bytes=2_000)
    source.publish(model_folder(tmp_path / "model7"), 7)
    port = free_port()

    async def run():
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
            return first.sent_bytes + second.sent_bytes

    # What was on its way just then may be lost, at most a piece of each connection.
    assert asyncio.run(run()) < 37_612 + 8 * 1_000


# Processes that are killed


class Process:
    """One role in a process of its own: see process.py."""

    def __init__(self, role: str, tmp_path: Path, **settings) -> None:
        arguments = [role, json.dumps({"tmp_path": str(tmp_path), **settings})]
        script = str(Path(__file__).with_name("process.py"))
        self.process = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE)

    async def said(self) -> dict:
        """Its next line."""
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
    """Starts a role; whatever still runs at the end is killed."""
    running: list[Process] = []

    def begin(role: str, **settings) -> Process:
        running.append(Process(role, tmp_path, **settings))
        return running[-1]

    yield begin
    for process in running:
        process.kill()


def test_a_client_that_is_killed_in_the_middle_goes_on_from_there(tmp_path, large, start):
    source = origin(tmp_path)
    source.publish(large, 7)

    async def run():
        async with serving(source.store) as up, between(up, hold_after_bytes=160_000) as slow:
            first = start("client", urls=[slow.url])
            await until(lambda: slow.sent_bytes >= 160_000, timeout_s=60)
            await asyncio.sleep(0.3)  # it has written what was sent
            first.kill()
            slow.hold_after_bytes = inf
            await asyncio.sleep(0.1)  # requests that the killed one has sent are seen
            asked = len(slow.asked)
            second = start("client", urls=[slow.url])
            report = await second.said()
            return report["reused_bytes"], slow.asked_bytes(since=asked)

    reused_bytes, fetched_bytes = asyncio.run(run())
    assert contents(tmp_path / "cache" / "v000007") == contents(large)
    assert reused_bytes >= 80_000  # of the shards that were on their way nothing, as they are small
    assert fetched_bytes <= LARGE_BYTES - 80_000


def stored_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in store.glob("v000007/full/*"))


def test_a_relay_that_is_killed_in_the_middle_goes_on_and_its_reader_too(tmp_path, large, start):
    source = origin(tmp_path)
    source.publish(large, 7)
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def run():
        async with serving(source.store) as up, between(up, hold_after_bytes=100_000) as slow:
            first = start("relay", upstream=[slow.url], port=port)
            await first.said()
            fetching = asyncio.create_task(asyncio.to_thread(client(tmp_path, url, wait_s=30).fetch, 7))
            await until(lambda: stored_bytes(tmp_path / "relay") > 90_000, timeout_s=60)
            first.kill()
            slow.hold_after_bytes = inf
            await asyncio.sleep(0.1)  # requests that the killed one has sent are seen
            asked = len(slow.asked)
            (tmp_path / "another").mkdir()
            folder, _ = await asyncio.to_thread(client(tmp_path / "another", url, up).fetch, 7)
            assert contents(folder) == contents(large)  # other readers never notice
            assert not fetching.done()
            start("relay", upstream=[slow.url], port=port)
            folder, _ = await fetching
            assert contents(folder) == contents(large)
            return slow.asked_bytes(since=asked)

    assert asyncio.run(run()) <= LARGE_BYTES - 80_000


def test_an_origin_that_is_killed_in_the_middle_goes_on_where_relays_are(tmp_path, large, start):
    port = free_port()

    async def run():
        first = start("origin", folder="model7", version=7, port=port)
        assert await first.said() == {"published": 7}
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
                return slow.sent_bytes

    assert asyncio.run(run()) <= LARGE_BYTES + 10_000  # what was here before is not fetched again
