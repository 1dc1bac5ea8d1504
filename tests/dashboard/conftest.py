"""A finished run for all tests of this folder, with hostile texts in it, and a server that shows it."""

import asyncio
import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.dashboard.server import LOOPBACK, Dashboard
from shoal.dashboard.watched import WatchedFolder
from tests.cli.audit.recorded import record_run

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
Serving = Callable[..., str]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's name, a node's report, a sample and a verdict hold markup; another verdict names a token; alice staked."""
    folder = record_run(tmp_path_factory.mktemp("watched"))
    database = sqlite3.connect(folder / "coordinator" / "pool.sqlite")
    database.execute("UPDATE nodes SET name = ? WHERE name = 'bob'", [MARKUP[:60]])
    stats = json.dumps({"doing": MARKUP[:80], "tokens": 5, "busy_s": 1.0, "waiting_s": 1.0})
    database.execute("UPDATE nodes SET stats = ?, url = 'http://10.1.2.3:99' WHERE name = 'alice'", [stats])
    for key, body in database.execute("SELECT key, body FROM history WHERE kind = 'sample'").fetchall():
        sample = json.loads(body) | {"task": MARKUP, "prompt": MARKUP, "completion": MARKUP}
        database.execute("UPDATE history SET body = ? WHERE kind = 'sample' AND key = ?", [json.dumps(sample), key])
    database.execute(
        "UPDATE submissions SET verdict = json_set(verdict, '$.missed', json('[[1, 0, 0.7]]')) WHERE seq = 1"
    )
    database.execute(
        "INSERT INTO transfers (node, version, from_s, to_s, size_bytes)"
        " SELECT key, 1, (SELECT started_s FROM run), (SELECT started_s FROM run) + 2, 700 FROM nodes WHERE name = 'alice'"
    )
    key = database.execute("SELECT key FROM nodes WHERE name = 'alice'").fetchone()[0]
    staked = json.dumps({"key": key, "amount": 500}, separators=(",", ":"))
    database.execute(
        "INSERT INTO ledger (seq, time_s, kind, body, previous, digest, signature)"
        " SELECT max(seq) + 1, max(time_s), 'staked', ?, '', '', '' FROM ledger",
        [staked],
    )
    rows = database.execute("SELECT seq, verdict FROM submissions WHERE state = 'rejected'").fetchall()
    for seq, verdict in rows:
        told = json.loads(verdict) | {"detail": f"{MARKUP} http://10.1.2.3:99 {'ab' * 32}"}
        database.execute("UPDATE submissions SET verdict = ? WHERE seq = ?", [json.dumps(told), seq])
    database.commit()
    database.close()
    return folder


@pytest.fixture
def two_sites(finished: Path, tmp_path: Path) -> Path:
    """The same run, trained at two sites. The second has a name with markup, and no part in the last step."""
    folder = shutil.copytree(finished, tmp_path / "sites")
    database = sqlite3.connect(folder / "coordinator" / "pool.sqlite")
    rows = database.execute("SELECT key, body FROM history WHERE kind = 'step' ORDER BY seq").fetchall()
    for number, (key, body) in enumerate(rows):
        told = {"sites/kept": 2.0}
        for name, kept in (("site-0", 1.0), (MARKUP[:20], float(number < len(rows) - 1))):
            told |= {f"sites/{name}/{what}": kept for what in ("kept", "loss", "computed_s", "synced_s", "sent_bytes")}
        database.execute("UPDATE history SET body = ? WHERE key = ?", [json.dumps(json.loads(body) | told), key])
    database.commit()
    database.close()
    return folder


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Starts servers in a thread; each call returns the address of one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(folder: Path, public: bool, hosts: tuple[str, ...], compare: list[Path]) -> str:
        others = [WatchedFolder(other) for other in compare]
        for other in others:
            other.look()
        dashboard = Dashboard(WatchedFolder(folder), [*others], public=public)
        runner = web.AppRunner(dashboard.app(hosts), shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def serve(
        folder: Path, *, public: bool = False, hosts: tuple[str, ...] = LOOPBACK, compare: Sequence[Path] = ()
    ) -> str:
        return asyncio.run_coroutine_threadsafe(start(folder, public, hosts, list(compare)), loop).result(30)

    yield serve
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Debian's browser. Skips without it; `make browser` installs it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed: make browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
