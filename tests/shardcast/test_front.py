"""nginx with the documented settings, in front of an origin: it sends finished shards and forwards other requests."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from shoal.files import temporary
from shoal.shardcast import ShardStore

from .raw import health, request
from .support import client, contents, free_port, published, serving

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
CONFIG = Path(__file__).parents[2] / "deploy" / "proxy" / "shardcast.conf"
PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")


@contextmanager
def nginx(store: Path, server: str) -> Iterator[int]:
    """Run nginx with the documented settings in front of `server`. Yield nginx's port."""
    port, site = free_port(), CONFIG.read_text()
    for old, new in {
        "listen 80;": f"listen 127.0.0.1:{port};",
        "server 127.0.0.1:8080;": f"server {server.removeprefix('http://')};",
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


@asynccontextmanager
async def behind_nginx(store: ShardStore) -> AsyncIterator[str]:
    async with serving(store) as server:
        with nginx(store.path, server) as port:
            url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(20):
                while not await answers(url):
                    await asyncio.sleep(0.05)
            yield url


async def answers(url: str) -> bool:
    try:
        return (await request(f"{url}/healthz"))[0] == 200
    except aiohttp.ClientError:
        return False


async def test_a_client_fetches_through_nginx_and_python_sends_no_shard(tmp_path):
    async with behind_nginx(published(tmp_path, 7).store) as url:
        folder, _ = await asyncio.to_thread(client(tmp_path, url).fetch)
        assert contents(folder) == contents(tmp_path / "model7")
        served_bytes = (await health(url))["served_bytes"]
        assert 0 < served_bytes < 3_000, "the Python server must send only listings and manifests"


async def test_a_shard_that_is_still_arriving_is_forwarded_as_it_grows(tmp_path):
    store = published(tmp_path, 7).store
    path = store.shard_path(7, "full", 0)
    whole = path.read_bytes()
    path.unlink()
    temporary(path).write_bytes(whole[:4_000])
    async with (
        behind_nginx(store) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v000007/full/00000.shard") as response,
    ):
        first = await response.content.readexactly(4_000)
        temporary(path).write_bytes(whole)
        assert first + await response.content.read() == whole


async def test_nginx_answers_range_requests_as_the_python_server_does(tmp_path):
    store = published(tmp_path, 7).store
    shard = store.shard_path(7, "full", 0).read_bytes()
    part = {"Range": "bytes=10-19"}
    async with behind_nginx(store) as url:
        url = f"{url}/v000007/full/00000.shard?cache=1"
        _, headers, body = await request(url)
        etag = headers["Etag"]
        assert body == shard
        assert (await request(url, headers=part))[::2] == (206, shard[10:20])
        assert (await request(url, headers=part | {"If-Range": etag}))[::2] == (206, shard[10:20])
        assert (await request(url, headers=part | {"If-Range": '"another"'}))[::2] == (200, shard)
        assert (await request(url, headers={"If-None-Match": etag}))[0] == 304
        status, headers, _ = await request(url, method="HEAD", headers=part)
        assert (status, headers["Content-Length"]) == (200, str(len(shard)))


async def test_no_other_file_in_the_folder_is_served(tmp_path):
    store = published(tmp_path, 7).store
    (store.path / "v000007" / "full" / "notes.txt").write_text("private")
    paths = ["id", ".lock", "v000007/full/notes.txt", "v000007/full/", ".latest/v000007/config.json", "%2e%2e/x"]
    async with behind_nginx(store) as url:
        statuses = [(await request(f"{url}/{path}"))[0] for path in paths]
    assert statuses == [*[404] * 5, 400]  # 400 is nginx's own answer to a path that leaves the folder
