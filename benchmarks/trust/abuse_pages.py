"""Measure how an abusive client of `shoal serve` slows the others: a real process on loopback, one attack after another.

    python -m benchmarks.trust.abuse_pages [--seconds 10] [--only NAME ...] [--out benchmarks/results/abuse_pages.json]
    python -m benchmarks.trust.abuse_pages --tree ../before     the processes run another checkout's code

For each attack of `ROWS`, a new process is measured without an attack and then under the attack. It gets SIGTERM during
the attack. Each result has, for both measurements: p50 and p99 of each honest request in ms, and how many requests
failed or took longer than TIMEOUT_S; the process's largest resident memory in MiB and the bytes in its folder; how the
attack's requests ended; and the seconds from SIGTERM to the process's end. An attack has a bounded number of connections.
It ends after --seconds, or after its own time.

The model is random, with two layers and SmolLM2's tokenizer and positions, so that texts and proofs have a realistic length.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.machine import RESULTS, ROOT, about, commit, save
from benchmarks.common.process import serving
from shoal.model import sources
from shoal.model.load import load_tokenizer, save_model

RESULT = RESULTS / "abuse_pages.json"
STOP_S, TIMEOUT_S = 60.0, 30.0
PAUSE_S = 0.1  # between two honest requests of one kind
FILL_S = 90.0
KEYS = {"honest": "sk-" + "h" * 24, "greedy": "sk-" + "g" * 24}
PASSWORD = "correct horse battery"
Json = dict[str, Any]


@dataclass
class Site:
    """A process of `shoal serve`."""

    url: str
    process: subprocess.Popen[str]
    folder: Path
    session: aiohttp.ClientSession
    ended: Counter[str] = field(default_factory=Counter)  # the attack's requests, by outcome

    async def ask(self, method: str, path: str, *, within_s: float = TIMEOUT_S, **more: Any) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(within_s)
        async with self.session.request(method, self.url + path, timeout=timeout, **more) as response:
            return response.status, await response.read()

    async def attack(self, method: str, path: str, *, within_s: float = TIMEOUT_S, **more: Any) -> int:
        """Send one request of an attack. Return its status, or 0 if it got no response."""
        try:
            status, _ = await self.ask(method, path, within_s=within_s, **more)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.ended[type(error).__name__] += 1
            return 0
        self.ended[str(status)] += 1
        return status


Probe = Callable[[Site], Awaitable[None]]
Attack = Callable[[Site], Coroutine[Any, Any, None]]


# --- the process -------------------------------------------------------------------------------------------------------


def model_folder(parent: Path) -> Path:
    """Return the folder of a random model with SmolLM2's tokenizer. The first call makes it."""
    folder = parent / "model"
    if not folder.exists():
        tokenizer = load_tokenizer(sources.resolve(sources.SMOLLM2))
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        save_model(LlamaForCausalLM(config), tokenizer, folder)
    return folder


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def health(site: Site) -> None:
    status, _ = await site.ask("GET", "/health")
    assert status == 200, status


async def completion(site: Site) -> None:
    body = {"model": "model", "messages": [{"role": "user", "content": "one and two"}], "max_tokens": 4}
    status, _ = await site.ask("POST", "/v1/chat/completions", json=body, headers=bearer("honest"))
    assert status == 200, status


async def login(site: Site) -> None:
    """Log in with a wrong name, which costs as much as a right one. A new address each time avoids rate limits."""
    address = f"127.0.{secrets.randbelow(250)}.{1 + secrets.randbelow(250)}"
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as own:
        body = {"name": f"nobody-{secrets.token_hex(8)}", "password": PASSWORD}
        async with own.post(f"{site.url}/chat/login", json=body) as response:
            assert response.status == 401, response.status


@dataclass
class Person:
    site: Site
    headers: dict[str, str]

    @classmethod
    async def enter(cls, site: Site) -> "Person":
        body = {"name": f"eve-{secrets.token_hex(4)}", "password": PASSWORD}
        async with site.session.post(f"{site.url}/chat/register", json=body) as response:
            cookies = "; ".join(f"{name}={morsel.value}" for name, morsel in response.cookies.items())
            return cls(site, {"X-CSRF-Token": (await response.json())["csrf"], "Cookie": cookies})

    async def begin(self) -> str:
        _, body = await self.site.ask("POST", "/chat/conversations", json={}, headers=self.headers)
        return str(json.loads(body)["id"])


async def long_texts(site: Site) -> None:
    """Send requests of 4 MB, four at a time, with one key."""
    await texts(site, 4_000_000)


async def longest_texts(site: Site) -> None:
    """Send the same requests with the longest texts that could still fit the model's positions."""
    await texts(site, 650_000)


async def texts(site: Site, characters: int) -> None:
    text = "word and 12 " * (characters // 120)
    messages = [{"role": "user", "content": text}] * 10
    body = json.dumps({"model": "model", "messages": messages, "max_tokens": 1})
    headers = bearer("greedy") | {"Content-Type": "application/json"}
    await together(4, lambda: site.attack("POST", "/v1/chat/completions", data=body, headers=headers))


async def filled_conversations(site: Site) -> None:
    """Create 60 conversations, then fill them, eight requests at a time. A message is stored even if its reply fails."""
    person = await Person.enter(site)
    ids = [await person.begin() for _ in range(60)]
    headers = person.headers | {"Content-Type": "application/json"}
    body = json.dumps({"content": "x" * 100_000, "models": ["absent"]})
    left = [id for id in ids for _ in range(41)]

    async def fill() -> None:
        while left:
            await site.attack("POST", f"/chat/conversations/{left.pop()}/replies", data=body, headers=headers)

    await asyncio.gather(*(fill() for _ in range(8)))


async def read_conversations(site: Site) -> None:
    """Read one conversation of 4 MB over 32 connections at the same time."""
    person = await Person.enter(site)
    id = await person.begin()
    for _ in range(38):
        body = {"content": "x" * 100_000, "models": ["absent"]}
        await site.ask("POST", f"/chat/conversations/{id}/replies", json=body, headers=person.headers)
    path = f"/chat/conversations/{id}"
    await together(32, lambda: site.attack("GET", path, headers=person.headers))


async def together(count: int, request: Callable[[], Awaitable[int]]) -> None:
    """Repeat the request forever, `count` at a time."""

    async def again() -> None:
        while await request() or not await asyncio.sleep(PAUSE_S):
            pass

    await asyncio.gather(*(again() for _ in range(count)))


PROBES: dict[str, Probe] = {"health": health, "completion": completion, "login": login}
ROWS: dict[str, tuple[Attack, float]] = {  # with the time limit of an attack that ends by itself; 0: --seconds
    "long texts": (long_texts, 0),
    "longest texts": (longest_texts, 0),
    "filled conversations": (filled_conversations, FILL_S),
    "read conversations": (read_conversations, 0),
}


# --- measuring ---------------------------------------------------------------------------------------------------------


async def measure(name: str, folder: Path, environment: dict[str, str], seconds: float) -> Json:
    starts, longest_s = ROWS[name]
    (folder / "api.keys").write_text("".join(f"{user} {key}\n" for user, key in KEYS.items()))
    command = ["serve", model_folder(folder.parent), "--dir", folder, "--port", "0", "--threads", "1"]
    with serving(*command, env=environment) as (process, url):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
            site = Site(url, process, folder, session)
            quiet = await honest(site, asyncio.sleep(seconds))
            attack = asyncio.create_task(starts(site))
            attacked = await honest(site, within(attack, longest_s or seconds))
            begun_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_S)
            ended_s = round(time.monotonic() - begun_s, 2) if process.poll() is not None else None
            attack.cancel()
            await asyncio.gather(attack, return_exceptions=True)
    return {"quiet": quiet, "attack": attacked, "requests": dict(site.ended), "sigterm_s": ended_s}


async def within(attack: asyncio.Task[None], seconds: float) -> None:
    """Wait until the attack ends or its time is up. Raise its error."""
    done, _ = await asyncio.wait([attack], timeout=seconds)
    for one in done:
        one.result()


async def honest(site: Site, duration: Awaitable[None]) -> Json:
    """Send honest requests until `duration` ends."""
    over = asyncio.ensure_future(duration)
    memory = asyncio.create_task(largest_bytes(site.process.pid, over))
    figures = await asyncio.gather(*(probed(site, probe, over) for probe in PROBES.values()))
    await over
    stored = sum(path.stat().st_size for path in site.folder.rglob("*") if path.is_file())
    return dict(zip(PROBES, figures, strict=True)) | {
        "memory_mib": round(await memory / (1 << 20)),
        "stored_bytes": stored,
    }


async def probed(site: Site, probe: Probe, over: asyncio.Future[None]) -> Json:
    took_ms, failed = list[float](), Counter[str]()
    while not over.done():
        begun_s = time.perf_counter()
        try:
            await probe(site)
        except (aiohttp.ClientError, TimeoutError, OSError, AssertionError) as error:
            failed[f"{type(error).__name__} {error}"[:60].strip()] += 1
        took_ms.append(1e3 * (time.perf_counter() - begun_s))
        await asyncio.sleep(PAUSE_S)
    p50, p99 = np.percentile(took_ms, [50, 99])
    return {"p50_ms": round(p50, 1), "p99_ms": round(p99, 1), "asked": len(took_ms), "failed": dict(failed)}


async def largest_bytes(pid: int, over: asyncio.Future[None]) -> int:
    process, largest = psutil.Process(pid), 0
    while not over.done():
        largest = max(largest, process.memory_info().rss)
        await asyncio.sleep(PAUSE_S)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose code the processes run")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    result: Json = {
        **about(),
        "commit": commit(tree),
        "load_average_before": os.getloadavg(),
        "rows": {},
    }
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryDirectory() as parent:
        for number, name in enumerate(arguments.only):
            folder = Path(parent) / str(number)
            folder.mkdir()
            row = asyncio.run(measure(name, folder, environment, arguments.seconds))
            result["rows"][name] = row
            sys.stdout.write(f"{name}: {json.dumps(row)}\n")
            sys.stdout.flush()
    save(arguments.out, result)


if __name__ == "__main__":
    main()
