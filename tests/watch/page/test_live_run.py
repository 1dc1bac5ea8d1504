"""The page during a real run with a cheating worker. It shows the slashing and every step, even after processes die."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.trust.byzantine import liars

from shoal.protocol.invite import Address
from tests.cli.launch.runs import children
from tests.servers import free_port

from .browsing import Watched

CONFIG = Path(__file__).parents[3] / "configs" / "tiny.toml"
DEADLINE_S = 900.0  # enough for a very busy machine; a quiet one needs about a minute
STEPS = 30
LATER = 5  # number of steps that must be trained after each kill
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.2)


def responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/overview", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, "subprocess.Popen[str]"]]:
    """A run's folder, its dashboard's address, and its process."""
    out, port = tmp_path_factory.mktemp("live") / "run", free_port()
    command = [sys.executable, "-m", "shoal", "run", str(CONFIG), "--out", str(out), "--dashboard", str(port)]
    run = subprocess.Popen(
        [*command, "--set", f"run.steps={STEPS}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until(lambda: responds(f"http://127.0.0.1:{port}"), "the dashboard")
        with liars(run, out, ["older_weights"]):
            yield out, f"http://127.0.0.1:{port}", run
    finally:
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=DEADLINE_S)


def trained(page: Any) -> int:
    match = re.search(r"(\d+) of", page.locator("#progress").inner_text())
    assert match
    return int(match[1])


def drawn(page: Any) -> int:
    """Return the number of points in the line of the reward."""
    line = page.locator(".card", has_text="Reward and held-out").locator("path.line.c-accent").first
    return len(re.findall("[ML]", line.get_attribute("d") or ""))


def test_the_page_shows_a_slashed_cheater_and_no_kill_loses_a_step(
    chromium: Any, live: tuple[Path, str, "subprocess.Popen[str]"]
) -> None:
    out, url, run = live
    watched = Watched(chromium, url)
    page = watched.open()
    page.set_default_timeout(DEADLINE_S * 1000)
    page.wait_for_selector(".answer.bad .headline")  # appears without a reload
    assert page.locator(".answer.bad .headline").inner_text() == "Caught"
    page.goto(f"{url}/#nodes")
    page.locator("tr", has_text="cheater").locator(".pill.bad", has_text="slashed").wait_for()
    page.goto(f"{url}/#validation")
    page.locator(".reason", has_text="cheater").first.wait_for()
    page.goto(f"{url}/#timeline")
    page.locator("rect.b-receive").first.wait_for()
    page.locator("rect.b-bad").first.wait_for()
    page.goto(f"{url}/#overview")

    with dashboard_of(Address.read(out).url) as elsewhere:
        other = Watched(chromium, elsewhere).open()
        other.set_default_timeout(DEADLINE_S * 1000)
        os.kill(children(out)["coordinator"], signal.SIGKILL)
        at = trained(page)
        until(lambda: trained(page) >= min(at + LATER, STEPS), "steps after the coordinator was killed")
        until(lambda: trained(other) >= min(at + LATER, STEPS), "the same steps through the coordinator's URL")
        assert drawn(other) == trained(other)

    run.send_signal(signal.SIGSTOP)  # now the run cannot restart the dashboard before the page polls it
    os.kill(children(out)["dashboard"], signal.SIGKILL)
    page.locator("#notice", has_text="does not respond").wait_for()
    run.send_signal(signal.SIGCONT)
    at = trained(page)
    until(lambda: trained(page) >= min(at + LATER, STEPS), "steps after the dashboard's server was killed")
    page.locator("#notice").wait_for(state="hidden")
    until(lambda: trained(page) == STEPS, "the last step")
    until(lambda: drawn(page) == STEPS, "one point per step")


@contextmanager
def dashboard_of(coordinator: str) -> Iterator[str]:
    """Run `shoal dashboard URL` as a process."""
    port = free_port()
    command = [sys.executable, "-m", "shoal", "dashboard", coordinator, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: responds(f"http://127.0.0.1:{port}"), "the dashboard of a URL")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
