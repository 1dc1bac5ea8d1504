import asyncio
import errno
import json
import shutil
import threading
import time
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from shoal.shardcast import Client, FetchError, Origin, SignedManifest, public_key_hex, serve
from shoal.shardcast import partial as partial_module
from shoal.shardcast.manifest import SIGNATURE_DOMAIN

from .support import (
    KEY,
    OTHER_KEY,
    PUBLIC_KEY,
    SHARD_BYTES,
    client,
    contents,
    dead_url,
    flip_bit,
    model_folder,
    origin,
    published,
    serving,
)


def against(act, *stores, wait_s: float = 0.1):
    """Serves the stores and runs act(*urls) in a thread, as workers do."""

    async def run():
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving(store, wait_s)) for store in stores]
            return await asyncio.to_thread(act, *urls)

    return asyncio.run(run())


def cached(tmp_path) -> list[str]:
    folder = tmp_path / "cache"
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []


def test_fetch_brings_exactly_the_published_files(tmp_path):
    published(tmp_path, 7)
    getter = client(tmp_path, "placeholder")

    def act(url):
        getter.urls = [url]
        return getter.fetch()

    folder, manifest = against(act, tmp_path / "origin")
    assert folder == tmp_path / "cache" / "v000007"
    assert contents(folder) == contents(tmp_path / "model7")
    assert manifest.version == 7
    assert cached(tmp_path) == ["v000007"]
    report = getter.last_report
    assert (report.version, report.reused_bytes, report.complaints) == (7, 0, ())
    assert manifest.size_bytes < report.transferred_bytes < manifest.size_bytes + 3_000


def test_a_model_of_only_empty_files(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "empty").touch()
    origin(tmp_path).publish(tmp_path / "model", 0)
    folder, _ = against(lambda url: client(tmp_path, url).fetch(0), tmp_path / "origin")
    assert contents(folder) == {"empty": b""}


def test_latest_is_the_newest_over_all_relays(tmp_path):
    published(tmp_path, 7)
    shutil.copytree(tmp_path / "origin", tmp_path / "behind")
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


def test_a_dead_relay_in_the_list_is_tolerated(tmp_path):
    published(tmp_path, 7)
    folder, _ = against(lambda url: client(tmp_path, dead_url(), url).fetch(7), tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")


@pytest.mark.parametrize("harm", ["flip", "truncate", "lengthen", "delete"])
def test_a_bad_shard_is_fetched_from_another_relay(tmp_path, harm):
    published(tmp_path, 7)
    shutil.copytree(tmp_path / "origin", tmp_path / "bad")
    for shard in (tmp_path / "bad" / "v000007").glob("*.shard"):
        spoil(shard, harm)
    getter = client(tmp_path, "placeholder")

    def act(*urls):
        getter.urls = list(urls)
        return getter.fetch(7), urls[0]

    (folder, _), bad_url = against(act, tmp_path / "bad", tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")
    assert [bad_url in complaint for complaint in getter.last_report.complaints] == [True]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [("flip", "corrupt"), ("truncate", "ended after"), ("lengthen", "longer"), ("delete", "503")],
)
def test_a_bad_shard_and_no_other_relay_names_both_and_leaves_no_version(tmp_path, harm, reason):
    spoil(published(tmp_path, 7).store.shard_path(7, 2), harm)
    seen = []

    def act(url):
        seen.append(url)
        return client(tmp_path, url, timeout_s=1.5).fetch(7)

    with pytest.raises(FetchError) as error:
        against(act, tmp_path / "origin")
    assert "shard 2 of version 7" in str(error.value)
    assert seen[0] in str(error.value)
    assert reason in str(error.value)
    assert cached(tmp_path) == [".v000007.partial"]


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
    spoil(published(tmp_path, 7).store.shard_path(7, 2), "flip")
    with pytest.raises(FetchError):
        against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    published(tmp_path, 7)  # repaired
    done = (tmp_path / "cache" / ".v000007.partial" / "done").read_text().split()
    assert sorted(done) == ["0", "1", "3"]
    files = tmp_path / "cache" / ".v000007.partial" / "files"
    flip_bit(files / "config.json")  # shard 0 rotted meanwhile: it is recorded, and still not believed
    getter = client(tmp_path, "placeholder")

    def act(url):
        getter.urls = [url]
        return getter.fetch(7)

    folder, _ = against(act, tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")
    assert getter.last_report.reused_bytes == SHARD_BYTES + 7_612
    assert getter.last_report.transferred_bytes < 2 * SHARD_BYTES + 3_000


def test_a_partial_of_another_manifest_is_started_over(tmp_path):
    spoil(published(tmp_path, 7).store.shard_path(7, 2), "flip")
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
    assert (again.last_report.transferred_bytes, again.last_report.reused_bytes) == (0, manifest.size_bytes)
    with pytest.raises(FetchError):
        again.fetch(7, digest="0" * 64)


def test_newest_version_in_the_cache_is_not_fetched_again(tmp_path):
    published(tmp_path, 7)

    def act(url):
        client(tmp_path, url).fetch()
        second = client(tmp_path, url)
        second.fetch()
        return second.last_report

    assert against(act, tmp_path / "origin").transferred_bytes < 3_000


def test_an_incomplete_folder_in_the_cache_is_fetched_again(tmp_path):
    published(tmp_path, 7)

    def act(url):
        folder, _ = client(tmp_path, url).fetch(7)
        (folder / "config.json").write_text("shorter")
        return client(tmp_path, url).fetch(7)

    assert contents(against(act, tmp_path / "origin")[0]) == contents(tmp_path / "model7")


def test_only_the_demanded_digest_is_accepted(tmp_path):
    digest = published(tmp_path, 7).publish(tmp_path / "model7", 7).digest
    with pytest.raises(FetchError, match=f"version 7 is {digest}, not {'0' * 64}"):
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
        "traversal": "climbs out",
    }[forgery]
    for act in (lambda url: client(tmp_path, url).fetch(7), lambda url: client(tmp_path, url).latest()):
        with pytest.raises(FetchError, match=reason):
            against(act, tmp_path / "origin")
    assert cached(tmp_path) == []


def test_a_forging_relay_beside_an_honest_one_changes_nothing(tmp_path):
    published(tmp_path, 7)
    forger = Origin(tmp_path / "forged", OTHER_KEY, run="test")
    forger.publish(model_folder(tmp_path / "fake", seed=1), 7)
    forger.publish(model_folder(tmp_path / "fake", seed=1), 9)
    folder, manifest = against(lambda *urls: client(tmp_path, *urls).fetch(), tmp_path / "forged", tmp_path / "origin")
    assert manifest.version == 7
    assert contents(folder) == contents(tmp_path / "model7")


def test_shards_that_match_while_the_whole_does_not(tmp_path):
    store = published(tmp_path, 7).store
    wrong = json.loads(store.signed(7).manifest) | {"hash": "0" * 64}
    text = json.dumps(wrong, sort_keys=True, separators=(",", ":"))
    signed = SignedManifest(manifest=text, key=PUBLIC_KEY, signature=KEY.sign(SIGNATURE_DOMAIN + text.encode()).hex())
    store.manifest_path(7).write_bytes(signed.to_bytes())
    with pytest.raises(FetchError, match="does not match its manifest"):
        against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    assert cached(tmp_path) == []


@pytest.mark.parametrize("when", ["write", "allocate"])
def test_a_full_disk_names_the_folder(tmp_path, monkeypatch, when):
    published(tmp_path, 7)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(partial_module, "write_all" if when == "write" else "_allocate", full)
    with pytest.raises(FetchError, match=r"no space left for .*\.v000007\.partial"):
        against(lambda url: client(tmp_path, url).fetch(7), tmp_path / "origin")
    assert cached(tmp_path) == ([".v000007.partial"] if when == "write" else [])
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
    sizes = sorted(one.last_report.transferred_bytes for one in clients)
    assert sizes[1] < 3_000 < sizes[2]
    assert contents(tmp_path / "cache" / "v000007") == contents(tmp_path / "model7")


def test_a_lock_that_is_never_freed_is_named_at_the_deadline(tmp_path):
    published(tmp_path, 7)
    holder = client(tmp_path, "unused").cache
    with holder.locked(0), pytest.raises(FetchError, match=r"\.lock"):
        against(lambda url: client(tmp_path, url, timeout_s=0.3).fetch(7), tmp_path / "origin")


async def drip(request: web.Request) -> web.StreamResponse:
    """Sends a byte now and then, for ever: no idle timeout ever strikes."""
    response = web.StreamResponse(headers={"Content-Length": str(SHARD_BYTES)})
    await response.prepare(request)
    while True:
        await response.write(b"x")
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("limits", [{"timeout_s": 3}, {"patience_s": 0.3}])
def test_a_dripping_relay_takes_little_of_the_time(tmp_path, limits):
    store = published(tmp_path, 7).store

    async def versions(request):
        return web.FileResponse(store.path / "versions.json")

    async def manifest(request):
        return web.FileResponse(store.manifest_path(7))

    async def run():
        slow = web.Application()
        slow.add_routes(
            [
                web.get("/versions.json", versions),
                web.get("/v000007/manifest.json", manifest),
                web.get("/{any:.*}", drip),
            ]
        )
        runner, port = await serve(slow)
        try:
            async with serving(tmp_path / "origin") as good:
                getter = client(tmp_path, f"http://127.0.0.1:{port}", good, **limits)
                return await asyncio.to_thread(getter.fetch)
        finally:
            await runner.cleanup()

    started_s = time.monotonic()
    folder, _ = asyncio.run(run())
    assert contents(folder) == contents(tmp_path / "model7")
    assert time.monotonic() - started_s < 3.5


def test_a_silent_relay_runs_into_the_deadline_and_is_named(tmp_path):
    async def hang(request):
        await asyncio.sleep(30)

    async def run():
        silent = web.Application()
        silent.add_routes([web.get("/{any:.*}", hang)])
        runner, port = await serve(silent)
        url = f"http://127.0.0.1:{port}"
        try:
            with pytest.raises(FetchError, match=url):
                await asyncio.to_thread(client(tmp_path, url, timeout_s=0.5).latest)
            with pytest.raises(FetchError, match=f"{url}: sent nothing for too long"):
                await asyncio.to_thread(client(tmp_path, url, answer_timeout_s=0.3).latest)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_a_redirect_is_not_followed(tmp_path):
    async def away(request):
        raise web.HTTPFound("http://127.0.0.1:1/versions.json")

    async def run():
        relay = web.Application()
        relay.add_routes([web.get("/{any:.*}", away)])
        runner, port = await serve(relay)
        try:
            with pytest.raises(FetchError, match="answered 302"):
                await asyncio.to_thread(client(tmp_path, f"http://127.0.0.1:{port}").latest)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_a_client_without_relays_is_refused(tmp_path):
    with pytest.raises(FetchError, match="no relay is known"):
        Client([], public_key=public_key_hex(KEY), cache=tmp_path)
