"""A coordinator's machine is lost in mid-run. A copy that was taken while it ran goes on elsewhere, under the same name."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ...servers import free_port
from .test_outgrown_run import PATIENCE_S, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
STEPS = 5
SETTINGS = [
    "coordinator.prompts_per_step=8",
    "workers.groups_per_submission=4",
    "evaluator.n=16",
    "evaluator.batch=16",
    "tasks.heldout=16",
]


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """A command whose output goes to a log of its own."""
    with (folder / f"{'-'.join(word.replace('/', '_') for word in words[:4])[:120]}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal", *words], cwd=folder, text=True, stdout=log, stderr=subprocess.STDOUT
        )


def done(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shoal", *words]
    return finished(subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))


def answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def logs(folder: Path) -> str:
    """The end of every log there."""
    return "".join(f"\n{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))


def test_a_copy_of_a_lost_coordinator_completes_the_run(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = [word for one in (*SETTINGS, f"run.steps={STEPS}") for word in ("--set", one)]
    counts = ("--workers", "1", "--relays", "1", "--validators", "1", "--run", "tiny")
    done(tmp_path, "sft")
    done(tmp_path, "pool", "init", str(TINY), "--dir", "pool", "--url", url, *counts, *settings)
    coordinator = start(tmp_path, "coordinator", "--dir", "pool")
    nodes: dict[str, subprocess.Popen[str]] = {}
    try:
        with httpx.Client(timeout=60) as client:
            while not answers(client, url):
                assert coordinator.poll() is None, logs(tmp_path)
                time.sleep(0.1)
            for invite in sorted((tmp_path / "pool" / "invites").glob("*.invite")):
                kept = shutil.copy(invite, tmp_path)  # on the node's own machine
                role = invite.stem.partition("-")[0]
                watch = ("--watch", "learner/versions") if role == "origin" else ()
                words = (role, "--dir", invite.stem, "--threads", "1", "--join", kept, *watch)
                nodes[invite.stem] = start(tmp_path, *words)
            deadline_s = time.monotonic() + PATIENCE_S
            while client.get(f"{url}/v1/status").json()["trained"] < 1:
                assert time.monotonic() < deadline_s, logs(tmp_path)
                time.sleep(0.05)
            # These two would be ahead of the copy: a learner by a step, a validator by a head that it co-signed.
            frozen = [nodes["learner"], nodes["validator-0"]]
            for process in frozen:
                process.send_signal(signal.SIGSTOP)
            done(tmp_path, "pool", "backup", "pool", "elsewhere")
            coordinator.kill()
            coordinator.wait()
            shutil.rmtree(tmp_path / "pool")
            coordinator = start(tmp_path, "coordinator", "--dir", "elsewhere")
            for process in frozen:
                process.send_signal(signal.SIGCONT)
            for node, process in nodes.items():
                assert process.wait(PATIENCE_S) == 0, f"{node}: {logs(tmp_path)}"
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait(60) == 0, logs(tmp_path)
    finally:
        for process in (*nodes.values(), coordinator):
            process.kill()
            process.wait()
    assert len((tmp_path / "elsewhere" / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert "no broken link" in done(tmp_path, "audit", "elsewhere", "--proofs", "1")
