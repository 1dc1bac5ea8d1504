"""The documented nginx in front of an origin: it sends what is finished, only that, and passes the rest on."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from shoal.files import temporary
from shoal.shardcast import ShardStore

from .support import client, contents, free_port, published, serving

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
CONFIG = Path(__file__).parents[2] / "deploy" / "proxy" / "shardcast.conf"
PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")


async def asked(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=named) as response:
        return response.status, dict(response.headers), await response.read()


@contextmanager
def nginx(store: Path, server: str) -> Iterator[int]:
    """An nginx with the documented settings, in front of this server; yields its port."""
    port, site = free_port(), CONFIG.read_text()
    for old, new in {
        "listen 80;": f"listen 127.0.0.1:{port};",
        "127.0.0.1:8080": server.removeprefix("http://"),
        "/srv/shardcast": str(store),
    }.items():
        assert site.count(old) == 1
        site = site.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        around = f"daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}\nhttp {{ access_log off;\n"
        around += "".join(f"{name}_temp_path {folder}/{name};\n" for name in PATHS)
        user = f"user {psutil.Process().username()};\n" if os.geteuid() == 0 else ""
        config = Path(folder) / "nginx.conf"
        config.write_text(f"{user}{around}{site}}}\n")
        process = subprocess.Popen([str(NGINX), "-e", f"{folder}/log", "-c", str(config)])
        try:
            yield port
        finally:
            process.terminate()
            process.wait(10)


def through_nginx(store: ShardStore, act):
    async def answers(url: str) -> bool:
        try:
            return (await asked(f"{url}/healthz"))[0] == 200
        except aiohttp.ClientError:
            return False

    async def run():
        async with serving(store) as server:
            with nginx(store.path, server) as port:
                url = f"http://127.0.0.1:{port}"
                for _ in range(200):
                    if await answers(url):
                        return await act(url)
                    await asyncio.sleep(0.05)
                raise AssertionError("nginx did not start")

    return asyncio.run(run())


def test_a_version_comes_through_nginx_and_python_sends_no_shard(tmp_path):
    source = published(tmp_path, 7)

    async def act(url):
        folder, _ = await asyncio.to_thread(client(tmp_path, url).fetch)
        assert contents(folder) == contents(tmp_path / "model7")
        return await asked(f"{url}/healthz")

    _, _, health = through_nginx(source.store, act)
    assert b'"served_bytes": ' in health
    assert int(health.split(b'"served_bytes": ')[1].split(b",")[0].split(b"}")[0]) < 3_000, "lists and manifests alone"


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


def test_nothing_else_of_the_folder_is_served(tmp_path):
    store = published(tmp_path, 7).store
    (store.path / "v000007" / "full" / "notes.txt").write_text("private")

    async def act(url):
        paths = ["id", ".lock", "v000007/full/notes.txt", "v000007/full/", ".latest/v000007/config.json", "%2e%2e/x"]
        return [(await asked(f"{url}/{path}"))[0] for path in paths]

    assert through_nginx(store, act) == [404] * 6
