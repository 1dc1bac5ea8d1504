"""A server in a thread, over real sockets, with the tiny random llama."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from argon2 import PasswordHasher

from shoal.engine.torch_engine import TorchEngine
from shoal.serve.service import Service, Settings
from shoal.serve.versions import ModelSource, source_of

KEY = "sk-a-key-for-these-tests"
DEADLINE_S = 60.0
CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@dataclass
class Running:
    url: str
    service: Service
    model: str

    def client(self, **more: Any) -> httpx.Client:
        """Without `verify`, every client would first read all of the system's certificates."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, verify=False, **more)

    def api(self) -> httpx.Client:
        return self.client(headers={"Authorization": f"Bearer {KEY}"})


def engine() -> TorchEngine:
    return TorchEngine("float32", "cpu", "fast")


@contextmanager
def serving(
    source: ModelSource | Path,
    folder: Path,
    *,
    ready: bool = True,
    new_engine: Callable[[], TorchEngine] = engine,
    **settings: Any,
) -> Iterator[Running]:
    """The whole application at a free port; with `ready`, once its model is loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "api.keys").write_text(f"tester {KEY}\n")
    found = source if isinstance(source, ModelSource) else source_of(str(source))
    service = Service(found, Settings(folder=folder, **settings), new_engine)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(service.app(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(_listen(runner), loop).result(DEADLINE_S)
        running = Running(f"http://127.0.0.1:{runner.addresses[0][1]}", service, found.name)
        if ready:
            until(lambda: service.versions.newest is not None)
        yield running
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _listen(runner: web.AppRunner) -> None:
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()


def until(true: Any) -> None:
    """Wait for something that must come."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.01)
