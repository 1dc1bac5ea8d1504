"""nginx in front of an origin: it sends what is finished, and only that; and it ends with its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from shoal.files import temporary
from shoal.shardcast import Store, app
from shoal.shardcast.serve import front
from shoal.shardcast.serve.front import FrontError, fronted, nginx

from .support import client, contents, published

needs_nginx = pytest.mark.skipif(nginx() is None, reason="nginx is not installed (Debian: nginx-light)")


async def asked(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=named) as response:
        return response.status, dict(response.headers), await response.read()


def through_nginx(store: Store, act):
    async def run():
        async with fronted(app(store, wait_s=2.0), store.path, "127.0.0.1", 0) as port:
            return await act(f"http://127.0.0.1:{port}")

    return asyncio.run(run())


@needs_nginx
def test_a_version_comes_through_nginx_and_python_sends_no_shard(tmp_path):
    source = published(tmp_path, 7)

    async def act(url):
        folder, _ = await asyncio.to_thread(client(tmp_path, url).fetch)
        assert contents(folder) == contents(tmp_path / "model7")
        return await asked(f"{url}/healthz")

    _, _, health = through_nginx(source.store, act)
    assert b'"served_bytes": ' in health
    assert int(health.split(b'"served_bytes": ')[1].split(b",")[0].split(b"}")[0]) < 3_000, "lists and manifests alone"


@needs_nginx
def test_a_shard_that_still_arrives_comes_as_it_arrives(tmp_path):
    store = published(tmp_path, 7).store
    path = store.shard_path(7, "full", 0)
    whole = path.read_bytes()
    path.unlink()
    temporary(path).write_bytes(whole[:4_000])

    async def act(url):
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url}/v000007/full/00000.shard") as response,
        ):
            first = await response.content.readexactly(4_000)
            temporary(path).write_bytes(whole)
            return first + await response.content.read()

    assert through_nginx(store, act) == whole


@needs_nginx
def test_ranges_are_answered_as_without_nginx(tmp_path):
    store = published(tmp_path, 7).store
    shard = store.shard_path(7, "full", 0).read_bytes()

    async def act(url):
        url = f"{url}/v000007/full/00000.shard?cache=1"
        _, headers, body = await asked(url)
        etag, part = headers["Etag"], "bytes=10-19"
        assert body == shard
        assert (await asked(url, Range=part))[::2] == (206, shard[10:20])
        assert (await asked(url, Range=part, If_Range=etag))[::2] == (206, shard[10:20])
        assert (await asked(url, Range=part, If_Range='"another"'))[::2] == (200, shard)
        assert (await asked(url, If_None_Match=etag))[0] == 304
        status, headers, _ = await asked(url, "HEAD", Range=part)
        assert (status, headers["Content-Length"]) == (200, str(len(shard)))

    through_nginx(store, act)


@needs_nginx
def test_nothing_else_of_the_folder_is_served(tmp_path):
    store = published(tmp_path, 7).store
    (store.path / "v000007" / "full" / "notes.txt").write_text("private")

    async def act(url):
        paths = ["id", ".lock", "v000007/full/notes.txt", "v000007/full/", ".latest/v000007/config.json", "%2e%2e/x"]
        return [(await asked(f"{url}/{path}"))[0] for path in paths]

    assert through_nginx(store, act) == [404] * 6


@needs_nginx
def test_nginx_ends_with_its_parent_even_if_that_is_killed(tmp_path):
    published(tmp_path, 7)
    code = """if True:
        import asyncio, sys, pathlib
        from shoal.shardcast import app
        from shoal.shardcast.serve.front import fronted
        async def run():
            store = pathlib.Path(sys.argv[1])
            async with fronted(app(store), store, "127.0.0.1", 0) as port:
                print(port, flush=True)
                await asyncio.sleep(600)
        asyncio.run(run())
    """
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "origin")], stdout=subprocess.PIPE)
    assert parent.stdout is not None and int(parent.stdout.readline())
    (child,) = psutil.Process(parent.pid).children()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline_s = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_machine_without_nginx_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "nginx", lambda: None)

    async def run():
        async with fronted(app(Path(tmp_path)), tmp_path, "127.0.0.1", 0):
            raise AssertionError

    with pytest.raises(FrontError, match="nginx is not installed; install it"):
        asyncio.run(run())
