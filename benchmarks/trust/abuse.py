"""Measure how abuse of a coordinator slows honest nodes: a real process on loopback, under one attack after another.

    python -m benchmarks.trust.abuse [--seconds 10] [--heartbeats 20] [--out benchmarks/results/abuse.json]

Each attack lasts --seconds, at a bounded rate and over a bounded number of connections. Strangers use other addresses
(127.0.0.2 and up). Attacking members use the honest nodes' address. The honest nodes are also measured before the first
attack and after the last. A result holds, per attack: p50 and p99 of honest heartbeats in ms, their failures, the
coordinator's largest resident memory in MiB, its CPU seconds per second, its open files, the growth of its folder in MiB,
and how the attack's requests ended. The coordinator has the history and ledger of a run of some hundred steps.

For an older commit: PYTHONPATH=CHECKOUT/src python -m benchmarks.trust.abuse

`attacks` lists the attacks. Other load on the machine changes the times, but not memory and open files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import sqlite3
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.common.machine import ROOT, about, save
from benchmarks.common.process import SHOAL, running, wait_until
from benchmarks.common.signed import signed_request
from benchmarks.trust.attacker import HUGE_BYTES, Attack, Attacker, Then, a_byte_a_second, all_of_it
from shoal.coordinator.folder import KEY, create_invite
from shoal.ledger.connection import SqliteConnection
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity
from shoal.protocol.invite import FILE, Invite
from shoal.protocol.messages import VERSION, Role
from shoal.protocol.signing import SignedAuth

CONFIG = ROOT / "configs" / "tiny.toml"
TIMEOUT_S = 10.0  # of one honest heartbeat; a real node waits 30 s
STEPS, SAMPLES, ENTRIES = 500, 512, 5_000  # what the coordinator has recorded before the attacks
MEMBER_RATE = 39.0  # requests per second, just below what a member is allowed


@dataclass
class Site:
    host: str
    port: int
    invite: Invite  # any invite of the coordinator; it names the coordinator's key and run
    members: list[Identity]  # honest members
    insider: Identity  # a registered member that attacks

    @classmethod
    def at(cls, invite: Invite, insider: Identity) -> Self:
        parts = urlsplit(invite.url)
        return cls(parts.hostname or "", parts.port or 80, invite, [], insider)

    def client(self, identity: Identity) -> httpx.AsyncClient:
        url = f"http://{self.host}:{self.port}"
        return httpx.AsyncClient(base_url=url, auth=SignedAuth(identity, self.invite.run), timeout=TIMEOUT_S)

    async def ask(self, method: str, path: str, message: dict[str, Any] | bytes) -> dict[str, Any]:
        """Send a request as the insider. Return the response."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        async with self.client(self.insider) as client:
            figures: dict[str, Any] = (await client.request(method, path, content=body)).json()
        return figures

    def request(self, identity: Identity, method: str, path: str, body: bytes, **changed: str) -> bytes:
        """Return the bytes of a signed request."""
        return signed_request(identity, self.invite.run, self.host, path, body, method=method, **changed)


HISTORY = b"GET /v1/history?after=0 HTTP/1.1\r\nhost: c\r\n\r\n"


def attacks(site: Site, seconds: float) -> dict[str, Attack]:
    """Return every attack by name."""
    stranger = Identity.generate()
    forged = site.request(stranger, "POST", "/v1/heartbeat", b"{}", signature=f"shoal=:{'A' * 86}==:")
    registration = json.dumps({"protocol": VERSION, "invite": site.invite.signed.model_dump_json()}).encode()
    fake = json.dumps(
        {
            "protocol": VERSION,
            "invite": site.invite.signed.model_copy(update={"signature": "0" * 128}).model_dump_json(),
        }
    ).encode()

    def attack(
        data: Callable[[], bytes],
        *,
        rate: float,
        at_once: int,
        outside: bool = True,
        then: Then | None = None,
        **more: bool,
    ) -> Attack:
        return lambda: Attacker(site.host, site.port, seconds, rate, at_once, outside, **more).run(data, then)

    async def other_files() -> Counter[str]:
        """Announce one file and send others, 256 KiB each."""
        ended, deadline_s = Counter[str](), time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            answer = await site.ask("POST", "/v1/heartbeat", {"policy_version": 0, "wants_task": True})
            if not (task := answer.get("assignment")):
                ended["no task"] += 1
                await asyncio.sleep(0.5)
                continue
            finished = {"submission": task["id"], "hash": "0" * 64}
            await site.ask("POST", "/v1/heartbeat", {"policy_version": 0, "finished": finished})
            while time.monotonic() < deadline_s:
                began_s = time.monotonic()
                error = str((await site.ask("PUT", task["upload_path"], secrets.token_bytes(256 << 10))).get("error"))
                known = "not the file that was announced" in error
                ended["another file" if known else error[:60]] += 1
                if not known:
                    break
                await asyncio.sleep(max(1 / MEMBER_RATE - (time.monotonic() - began_s), 0))
        return ended

    def announced(identity: Identity, path: str) -> bytes:
        return site.request(identity, "PUT", path, b"", **{"content-length": str(HUGE_BYTES)})

    return {
        "idle connections": attack(lambda: b"", rate=300, at_once=3000),
        "slow-loris headers": attack(lambda: b"GET /v1/run HTTP/1.1\r\nx-a: ", rate=100, at_once=1000, then=a_byte_a_second),
        "oversize bodies": attack(lambda: announced(stranger, "/v1/submissions/x"), rate=20, at_once=20, then=all_of_it),
        "oversize bodies of a member": attack(
            lambda: announced(site.insider, "/v1/submissions/x"), rate=20, at_once=20, outside=False, then=all_of_it
        ),
        "slow bodies of a member": attack(
            lambda: site.request(site.insider, "POST", "/v1/heartbeat", b"{}", **{"content-length": "4000"}),
            rate=50, at_once=100, outside=False, then=a_byte_a_second,
        ),
        "garbage signatures": attack(lambda: forged, rate=200, at_once=200),
        "registrations of strangers": attack(
            lambda: site.request(Identity.generate(), "POST", "/v1/register", fake), rate=200, at_once=200
        ),
        "registrations with a spent invite": attack(
            lambda: site.request(Identity.generate(), "POST", "/v1/register", registration), rate=200, at_once=200
        ),
        "heartbeats of one member": attack(
            lambda: site.request(site.insider, "POST", "/v1/heartbeat", b"{}"), rate=200, at_once=100, outside=False
        ),
        "status and metrics": attack(lambda: b"GET /metrics HTTP/1.1\r\nhost: c\r\n\r\n", rate=200, at_once=100),
        "other files than announced by a member": other_files,
        "history pages": attack(lambda: HISTORY, rate=50, at_once=100, reads=True),
        "slow readers of history": attack(lambda: HISTORY, rate=100, at_once=250, holds=True),
    }  # fmt: skip


async def beat(client: httpx.AsyncClient, stop: asyncio.Event, took_s: list[float]) -> int:
    """Send a heartbeat per second over one connection, as an honest node does. Return how many failed."""
    failed = 0
    async with client:
        while not stop.is_set():
            started_s = time.monotonic()
            try:
                failed += (await client.post("/v1/heartbeat", content=b"{}")).status_code != 200
            except httpx.TransportError:
                failed += 1
            took_s.append(time.monotonic() - started_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(1.0 - (time.monotonic() - started_s), 0))
    return failed


async def watch(process: psutil.Process, stop: asyncio.Event) -> tuple[int, int]:
    """Return the largest resident memory in bytes and the largest number of open files."""
    rss_bytes = files = 0
    while not stop.is_set():
        rss_bytes, files = max(rss_bytes, process.memory_info().rss), max(files, process.num_fds())
        await asyncio.sleep(0.1)
    return rss_bytes, files


def on_disk(folder: Path) -> int:
    """Return the bytes of a folder whose files may vanish meanwhile."""
    size_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += path.stat().st_size if path.is_file() else 0
    return size_bytes


async def measure(
    site: Site, process: psutil.Process, folder: Path, seconds: float, attack: str = ""
) -> dict[str, Any]:
    """Measure honest heartbeats, with an attack from another process or without one."""
    stop, took_s = asyncio.Event(), list[float]()
    clients = [site.client(member) for member in site.members]  # made first, because this blocks the event loop
    cpu_s, started_s, before_bytes = sum(process.cpu_times()[:2]), time.monotonic(), on_disk(folder)
    beating = [asyncio.create_task(beat(client, stop, took_s)) for client in clients]
    watching = asyncio.create_task(watch(process, stop))
    ended = await attack_in_a_process(site, seconds, attack) if attack else {}
    if not attack:
        await asyncio.sleep(seconds)
    stop.set()
    failed, (rss_bytes, files) = sum(await asyncio.gather(*beating)), await watching
    busy = (sum(process.cpu_times()[:2]) - cpu_s) / (time.monotonic() - started_s)
    took_s.sort()
    return {
        "heartbeats": len(took_s),
        "failed": failed,
        "p50_ms": round(1e3 * took_s[len(took_s) // 2], 1),
        "p99_ms": round(1e3 * took_s[min(len(took_s) * 99 // 100, len(took_s) - 1)], 1),
        "rss_mib": round(rss_bytes / 2**20, 1),
        "cpu": round(busy, 2),
        "open_files": files,
        "disk_mib": round((on_disk(folder) - before_bytes) / 2**20, 1),
        "attack_ended": ended,
    }


async def attack_in_a_process(site: Site, seconds: float, attack: str) -> dict[str, int]:
    """Run the attack in its own process, so that it takes no time from the honest nodes."""
    command = [sys.executable, "-m", __spec__.name, "--attack", attack, "--seconds", str(seconds)]
    pipe = asyncio.subprocess.PIPE
    attacker = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    known = {
        "protocol": VERSION,
        "invite": site.invite.encode(),
        "key": site.insider.private_key.private_bytes_raw().hex(),
    }
    answer, _ = await attacker.communicate(json.dumps(known).encode())
    figures: dict[str, int] = json.loads(answer)
    return figures


def attack_here(name: str, seconds: float) -> None:
    known = json.loads(sys.stdin.read())
    insider = Identity(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(known["key"])))
    site = Site.at(Invite.decode(known["invite"]), insider)
    sys.stdout.write(json.dumps(dict(asyncio.run(attacks(site, seconds)[name]()).most_common())))


def fill(folder: Path) -> None:
    """Fill the coordinator's folder as a run does: metrics of its steps, samples, ledger entries."""
    numbers, written = random.Random(0), string.ascii_letters + ' \n"'
    entry = {
        "worker": "a" * 64,
        "submission": f"{'a' * 16}-000001",
        "step": 1,
        "version": 1,
        "tokens": 9_000,
        "groups": 4,
    }
    sample = {"task": "t", "reward": 1.0, "tokens": 800, "submission": f"{'a' * 16}-000001", "group": 0, "worker": "w"}
    with contextlib.closing(sqlite3.connect(folder / "pool.sqlite", isolation_level=None, timeout=30)) as database:
        ledger = Ledger(SqliteConnection(database), Identity.load(folder / KEY))
        database.execute("BEGIN IMMEDIATE")
        for step in range(STEPS):
            metrics = {"step": step} | {f"reward/source-{number}/mean": numbers.random() for number in range(60)}
            put(database, "step", str(step), metrics)
        for number in range(SAMPLES):
            texts = {name: "".join(numbers.choices(written, k=1_500)) for name in ("prompt", "completion")}
            put(database, "sample", f"a/{number}", sample | texts | {"policy_version": number})
        for _ in range(ENTRIES):
            ledger.append("accepted", entry | {"accepted": secrets.token_hex(32)})
        database.execute("COMMIT")


def put(database: sqlite3.Connection, kind: str, key: str, body: dict[str, Any]) -> None:
    database.execute("INSERT INTO history (kind, key, body) VALUES (?, ?, ?)", (kind, key, json.dumps(body)))


async def publish(site: Site, folder: Path) -> None:
    """Publish version 0, so that workers get tasks."""
    origin = Site(site.host, site.port, site.invite, [], Identity.generate())
    await join(origin, folder, origin.insider, "origin", "origin")
    await origin.ask("POST", "/v1/policies", {"version": 0, "digest": "d" * 64, "size_bytes": 1})


async def join(site: Site, folder: Path, identity: Identity, name: str, role: Role = "worker") -> Invite:
    invite = await asyncio.to_thread(create_invite, folder, role, name, None, 1.0)
    body = json.dumps({"protocol": VERSION, "invite": invite.signed.model_dump_json()}).encode()
    async with site.client(identity) as client:
        answer = await client.post("/v1/register", content=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{name} could not join: {answer.text}")
    return invite


async def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "coordinator"
        log = Path(made) / "log"
        command = [*SHOAL, "coordinator", CONFIG, "--dir", folder, "--threads", "1"]
        with log.open("w") as errors, running(command, stdout=subprocess.DEVNULL, stderr=errors) as server:
            wait_until((folder / FILE).exists, "coordinator", log, server)
            invite = await asyncio.to_thread(create_invite, folder, "worker", "insider", None, 1.0)
            site = Site.at(invite, Identity.generate())
            site.members = [Identity.generate() for _ in range(arguments.heartbeats)]
            site.invite = await join(site, folder, site.insider, "attacker")
            for number, member in enumerate(site.members):
                await join(site, folder, member, f"honest-{number}")
            await publish(site, folder)
            await asyncio.to_thread(fill, folder)
            process = psutil.Process(server.pid)
            results = {"quiet": await measure(site, process, folder, arguments.seconds)}
            for name in [name for name in attacks(site, 0) if arguments.only in name]:
                results[name] = await measure(site, process, folder, arguments.seconds, name)
                sys.stdout.write(f"{name} {json.dumps(results[name])}\n")
                sys.stdout.flush()
            results["quiet again"] = await measure(site, process, folder, arguments.seconds)
            logged = log.read_text()
            tracebacks = logged.count("Traceback")
            if tracebacks:
                sys.stdout.write(logged[-6000:])
    settings = {"seconds": arguments.seconds, "heartbeats_per_s": arguments.heartbeats, "load": os.getloadavg()[0]}
    sys.stdout.write(f"quiet {results['quiet']}\nquiet again {results['quiet again']}\n")
    sys.stdout.write(f"tracebacks of the coordinator: {tracebacks}\n")
    if arguments.out:
        save(arguments.out, about() | {"settings": settings, "tracebacks": tracebacks, "results": results})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure how abuse of a coordinator slows honest nodes.")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each attack")
    parser.add_argument("--heartbeats", type=int, default=20, help="honest nodes, each with a heartbeat per second")
    parser.add_argument("--only", default="", help="run only attacks whose name contains this")
    parser.add_argument("--attack", help="for internal use: run this attack on the site on stdin")
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args()
    if parsed.attack:
        attack_here(parsed.attack, parsed.seconds)
    else:
        asyncio.run(main(parsed))
