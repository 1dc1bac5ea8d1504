"""Load one coordinator with up to 10,000 simulated workers. Measure heartbeats per second, latency and memory.

    python -m benchmarks.pool.scale --out benchmarks/results/scale.json

The coordinator is a real `shoal coordinator` process on SQLite or PostgreSQL, with real HTTP on loopback. Each simulated
worker is a key that registers with its own invite. Its heartbeats are signed before timing starts (requests.py), so the
client is not the bottleneck. They go over `--connections` connections, each from its own address and kept open.

Measured in turn, for each number of workers:

    register    200 new workers register, each as soon as a connection is free; the others are put into the database
    idle        heartbeats that request no task (the worker generates or uploads), as fast as responses come
    waiting     heartbeats that request a task while there is none (the worker waits)
    one_each    idle heartbeats, each over a new connection
    due         idle heartbeats at the rate at which this many workers send them, for `--seconds`; the latency counts from
                when a heartbeat was due, and grows if the coordinator cannot keep up
    status      GET /v1/status, which every view polls: milliseconds and bytes

`cpu_ms` is the coordinator's own CPU time per response. Unlike the other figures, it hardly depends on the machine's other
load. PostgreSQL syncs as it does by default (`fsync` on, one server on this machine).
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common.machine import ROOT, about, save
from benchmarks.common.process import running, wait_until
from benchmarks.common.signed import signed_request
from benchmarks.pool.scale.requests import Sent, body_of, identities, send
from shoal import config as config_module
from shoal.coordinator.folder import open_tables
from shoal.coordinator.nodes import Nodes
from shoal.protocol.identity import Identity
from shoal.protocol.invite import FILE, make_invite, run_id
from shoal.protocol.messages import VERSION, PolicyVersion, Role

START_S = 60.0
PREPARED = 12_000  # requests: signing them takes one or two seconds, and they are valid for a minute
MEASURED = 200  # registrations
NODE_BEATS_S = 1.0
STATS = {"doing": "generating for step 7", "tokens": 123456, "busy_s": 1234.5, "waiting_s": 67.8, "rss_bytes": 1 << 31}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--databases", nargs="+", choices=["sqlite", "postgres"], default=["sqlite", "postgres"])
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each measurement")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--profile", type=Path, help="write the coordinator's profile (cProfile) there")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    result: dict[str, Any] = {
        **about(),
        "load": os.getloadavg(),
        "connections": arguments.connections,
    }
    for name in arguments.databases:
        with database(name) as url, tempfile.TemporaryDirectory(prefix="shoal-scale-") as folder:
            result[name] = asyncio.run(measure(Path(folder), url, arguments))
        if arguments.out:
            save(arguments.out, result)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


@contextmanager
def database(name: str) -> Iterator[str]:
    """Yield the database's URL, or "" for SQLite."""
    if name == "sqlite":
        yield ""
        return
    from tests.servers import postgres_server

    with postgres_server() as url:
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:  # the test server starts with fsync off
            connection.execute("ALTER SYSTEM SET fsync = on")
            connection.execute("SELECT pg_reload_conf()")
        yield url


async def measure(folder: Path, url: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = [f"coordinator.database={url}", "run.steps=100"]
    config = config_module.load(ROOT / "configs" / "tiny.toml", chosen)
    (folder / "config.toml").write_text(config_module.dumps(config))
    coordinator = Identity.load_or_create(folder / "pool" / "identity.pem")
    run = run_id("scale", coordinator.public)
    with listening(folder, run, arguments.profile) as (process, address):
        pool = Pool(address, run, coordinator, process, arguments, folder / "pool")
        await pool.begin()
        return [await pool.of(count) for count in arguments.workers]


@contextmanager
def listening(folder: Path, run: str, profile: Path | None) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, *(["-m", "cProfile", "-o", profile] if profile else []), "-m", "shoal"]
    command += ["coordinator", folder / "config.toml", "--dir", folder / "pool", "--run", run]
    command += ["--port", "0", "--no-report", "--threads", "1"]
    with (folder / "log").open("wb") as log, running(command, stdout=log, stderr=log) as process:
        address = folder / "pool" / FILE
        wait_until(address.exists, "coordinator", folder / "log", process)
        yield psutil.Process(process.pid), json.loads(address.read_text())["url"]


class Pool:
    """The simulated members of one coordinator."""

    def __init__(
        self,
        url: str,
        run: str,
        coordinator: Identity,
        process: psutil.Process,
        arguments: argparse.Namespace,
        folder: Path,
    ) -> None:
        self.url, self.run, self.coordinator, self.process, self.arguments = url, run, coordinator, process, arguments
        self.folder = folder
        self.workers: list[Identity] = []

    async def begin(self) -> None:
        """Join as the origin and publish version 0, so that workers can get tasks."""
        (origin,) = identities(1)
        policy = PolicyVersion(version=0, digest="0" * 64, size_bytes=1000).model_dump()
        for path, body in (("/v1/register", self._joining("origin", "origin")), ("/v1/policies", body_of(policy))):
            sent = await send(self.url, [self._signed(origin, path, body)], connections=1, per_s=None)
            if set(sent.statuses) != {"200"}:
                raise RuntimeError(f"{path}: {sent.statuses}")

    async def of(self, count: int) -> dict[str, Any]:
        figures: dict[str, Any] = {"workers": count, "register": await self._register(count - len(self.workers))}
        figures["idle"] = await self._timed(self._beats(wants_task=False))
        figures["waiting"] = await self._timed(self._beats(wants_task=True))
        figures["one_each"] = await self._timed(self._beats(wants_task=False), reuse=False)
        per_s = count / NODE_BEATS_S
        beats = self._beats(wants_task=False, most=int(per_s * self.arguments.seconds))
        figures["due"] = {"due_per_s": per_s} | await self._timed(beats, per_s=per_s)
        figures["status"] = self._status()
        figures["rss_mb"] = round(self.process.memory_info().rss / 1e6, 1)
        sys.stderr.write(json.dumps(figures) + "\n")
        return figures

    async def _register(self, count: int) -> dict[str, Any]:
        """Add `count` workers. The first MEASURED register over HTTP, which is timed. The others go into the database."""
        new, first = identities(count), len(self.workers)
        known, rest = new[:MEASURED], new[MEASURED:]
        joining = [
            self._signed(key, "/v1/register", self._joining("worker", f"w{number}"))
            for number, key in enumerate(known, start=first)
        ]
        figures = await self._timed(joining, seconds=3600.0)
        if set(figures["statuses"]) != {"200"}:
            raise RuntimeError(f"workers could not register: {figures['statuses']}")
        tables = open_tables(self.folder)
        with tables.transaction():
            for number, key in enumerate(rest, start=first + len(known)):
                Nodes(tables).add(key.public, f"w{number}", "worker", None, f"invite {number}", time.time())
        tables.close()
        self.workers += new
        return figures

    def _beats(self, *, wants_task: bool, most: int = PREPARED) -> list[bytes]:
        """Return heartbeats of all workers in turn, enough for `--seconds`."""
        body = body_of({"policy_version": 0, "wants_task": wants_task, "stats": STATS})
        return [
            self._signed(self.workers[n % len(self.workers)], "/v1/heartbeat", body)
            for n in range(min(most, PREPARED, int(1500 * self.arguments.seconds)))
        ]

    async def _timed(
        self, prepared: list[bytes], *, per_s: float | None = None, reuse: bool = True, seconds: float = 0.0
    ) -> dict[str, Any]:
        before, client = self.process.cpu_times(), time.process_time()
        sending = send(
            self.url,
            Until(prepared, seconds or self.arguments.seconds),
            connections=self.arguments.connections,
            per_s=per_s,
            reuse=reuse,
        )
        sent: Sent = await sending
        after = self.process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        each = {"cpu_ms": round(1000 * cpu_s / max(len(sent.seconds), 1), 3)}
        return sent.row() | each | {"client_cpu_s": round(time.process_time() - client, 2)}

    def _status(self) -> dict[str, Any]:
        begun_s = time.perf_counter()
        answer = httpx.get(f"{self.url}/v1/status", timeout=START_S)
        return {"ms": round(1000 * (time.perf_counter() - begun_s)), "bytes": len(answer.content)}

    def _joining(self, role: Role, name: str) -> bytes:
        expires_s = int(time.time()) + 3600
        invite = make_invite(self.coordinator, url=self.url, run=self.run, role=role, name=name, expires_s=expires_s)
        url = "http://127.0.0.1:9" if role == "origin" else None
        return body_of({"invite": invite.signed.model_dump_json(), "url": url, "protocol": VERSION})

    def _signed(self, key: Identity, path: str, body: bytes) -> bytes:
        return signed_request(key, self.run, self.url.removeprefix("http://"), path, body)


class Until:
    """Iterates over requests until the time is up."""

    def __init__(self, prepared: list[bytes], seconds: float) -> None:
        self.prepared, self.seconds = prepared, seconds

    def __iter__(self) -> Iterator[bytes]:
        until_s = time.perf_counter() + self.seconds
        for data in self.prepared:
            if time.perf_counter() > until_s:
                return
            yield data


if __name__ == "__main__":
    main()
