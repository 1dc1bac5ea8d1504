"""The page during a real run with a worker that lies: it is seen to be slashed, and no death of a process loses a step."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from benchmarks.byzantine import liars

from shoal.protocol.invite import Address

from .browsing import Watched

CONFIG = Path(__file__).parents[3] / "configs" / "tiny.toml"
DEADLINE_S = 900.0  # on a very busy machine; a quiet one takes about a minute
STEPS = 30
LATER = 5  # steps that must still come after each death
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]
NOTES = """() => {
    globalThis.told = [];
    const trouble = document.getElementById("trouble");
    const note = () => globalThis.told.push(trouble.hidden ? "" : trouble.textContent);
    new MutationObserver(note).observe(trouble, {attributes: true});
}"""


def until(true: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/overview", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def process_of(out: Path, name: str) -> int:
    """The newest process that writes this log of the run."""
    log = out / "logs" / f"{name}.log"
    found = []
    for pid in psutil.pids():
        try:
            if Path(f"/proc/{pid}/fd/1").readlink() == log:
                found.append(pid)
        except OSError:  # it has just ended
            continue
    return max(found)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A run's folder and its dashboard's address."""
    out, port = tmp_path_factory.mktemp("live") / "run", free_port()
    command = [sys.executable, "-m", "shoal", "run", str(CONFIG), "--out", str(out), "--dashboard", str(port)]
    run = subprocess.Popen(
        [*command, "--set", f"run.steps={STEPS}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}"), "the dashboard")
        with liars(run, out, ["older_weights"]):
            yield out, f"http://127.0.0.1:{port}"
    finally:
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=DEADLINE_S)


def trained(page: Any) -> int:
    found = re.search(r"step (\d+) of", page.locator("#progress").inner_text())
    assert found
    return int(found[1])


def drawn(page: Any) -> int:
    """Points of the reward's line."""
    line = page.locator(".card", has_text="Reward and held-out").locator("path.line.c-accent").first
    return len(re.findall("[ML]", line.get_attribute("d") or ""))


def test_a_cheater_is_seen_to_be_slashed_and_no_death_loses_a_step(chromium: Any, live: tuple[Path, str]) -> None:
    out, url = live
    watched = Watched(chromium, url)
    page = watched.open()
    page.set_default_timeout(DEADLINE_S * 1000)
    page.evaluate(NOTES)
    page.wait_for_selector(".answer.bad .said")  # without a reload
    assert page.locator(".answer.bad .said").inner_text() == "Caught"
    page.goto(f"{url}/#nodes")
    page.locator("tr", has_text="cheater").locator(".pill.bad", has_text="slashed").wait_for()
    page.goto(f"{url}/#validation")
    page.locator(".reason", has_text="cheater").first.wait_for()
    page.goto(f"{url}/#timeline")
    page.locator("rect.b-receive").first.wait_for()
    page.locator("rect.b-bad").first.wait_for()
    page.goto(f"{url}/#overview")

    with watching(Address.read(out).url) as elsewhere:
        other = Watched(chromium, elsewhere).open()
        other.set_default_timeout(DEADLINE_S * 1000)
        os.kill(process_of(out, "coordinator"), signal.SIGKILL)
        at = trained(page)
        until(lambda: trained(page) >= min(at + LATER, STEPS), "steps after the coordinator was killed")
        until(lambda: trained(other) >= min(at + LATER, STEPS), "the same steps by the coordinator's address")
        assert drawn(other) == trained(other)

    os.kill(process_of(out, "dashboard"), signal.SIGKILL)
    at = trained(page)
    until(lambda: trained(page) >= min(at + LATER, STEPS), "steps after the dashboard's server was killed")
    told = page.evaluate("globalThis.told")
    assert any("does not answer" in words for words in told), "the page said that it lost its server"
    assert told[-1] == "", "and that it is back"
    until(lambda: trained(page) == STEPS, "the last step")
    until(lambda: drawn(page) == STEPS, "a point for each step: none lost, none twice")


class watching:  # noqa: N801 - reads as a sentence
    """`shoal dashboard URL`, as a process."""

    def __init__(self, coordinator: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "shoal", "dashboard", coordinator, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def __enter__(self) -> str:
        url = f"http://127.0.0.1:{self.port}"
        until(lambda: answers(url), "the dashboard of an address")
        return url

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
