"""Fixtures: a finished run that contains hostile texts, and dashboard servers."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.watch.page.server import LOOPBACK, Dashboard
from shoal.watch.run import FolderRun
from tests.cli.audit.recorded import record_run

from .browsing import launch_chromium

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
Serving = Callable[..., str]


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Apply `change` to each line of a file of JSON lines."""
    lines = [json.dumps(change(json.loads(line))) for line in path.read_text().splitlines()]
    path.write_text("".join(line + "\n" for line in lines))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run in which a node's name, a node's report, a sample and a verdict hold markup."""
    folder = record_run(tmp_path_factory.mktemp("watched"))
    state = json.loads((folder / "state.json").read_text())
    for node in state["status"]["nodes"]:
        if node["name"] == "bob":
            node["name"] = MARKUP[:60]
        if node["name"] == "alice":
            node["stats"] = {"doing": MARKUP[:80], "tokens": 5, "busy_s": 1.0, "waiting_s": 1.0}
            node["url"] = "http://10.1.2.3:99"
    (folder / "state.json").write_text(json.dumps(state))
    rewrite(folder / "rollouts.jsonl", lambda line: line | {"task": MARKUP, "prompt": MARKUP, "completion": MARKUP})

    def hostile(line: dict[str, Any]) -> dict[str, Any]:
        if line["kind"] != "submission":
            return line
        line["worker"] = line["worker"].replace("bob", MARKUP[:60])
        if line["state"] == "rejected":
            line["detail"] = f"{MARKUP} http://10.1.2.3:99 {'ab' * 32}"
        return line

    rewrite(folder / "work.jsonl", hostile)
    start_s = state["status"]["started_s"]
    download = {"kind": "download", "number": 1, "node": "alice", "role": "worker", "version": 1, "bytes": 700}
    with (folder / "work.jsonl").open("a") as file:
        file.write(json.dumps(download | {"from_s": start_s, "to_s": start_s + 2}) + "\n")
    return folder


@pytest.fixture
def two_sites(finished: Path, tmp_path: Path) -> Path:
    """Copy the run as if two sites had trained it. The second site's name is markup, and it missed the last step."""
    folder = shutil.copytree(finished, tmp_path / "sites")

    def at_sites(step: dict[str, Any]) -> dict[str, Any]:
        sites = {"sites/kept": 2.0}
        for name, kept in (("site-0", 1.0), (MARKUP[:20], float(step["step"] < 2))):
            sites |= {
                f"sites/{name}/{figure}": kept for figure in ("kept", "loss", "computed_s", "synced_s", "sent_bytes")
            }
        return step | sites

    rewrite(folder / "metrics.jsonl", at_sites)
    return folder


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Return a function that starts a server in a thread and returns its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(folder: Path, hosts: tuple[str, ...], compare: list[Path]) -> str:
        others = [FolderRun(other) for other in compare]
        for other in others:
            other.refresh()
        dashboard = Dashboard(FolderRun(folder), others)
        runner = web.AppRunner(dashboard.app(hosts), shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def serve(folder: Path, *, hosts: tuple[str, ...] = LOOPBACK, compare: Sequence[Path] = ()) -> str:
        return asyncio.run_coroutine_threadsafe(start(folder, hosts, list(compare)), loop).result(30)

    yield serve
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with launch_chromium() as browser:
        yield browser
