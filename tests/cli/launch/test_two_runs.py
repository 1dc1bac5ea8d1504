"""Two whole runs at once on one coordinator process: each trains, ends and passes its audit as if it were alone."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from shoal.protocol.discovery import find_runs

from ...servers import free_port
from .test_outgrown_run import PATIENCE_S, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
STEPS = {"first": 2, "second": 3}
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


def test_two_runs_train_at_once_on_one_coordinator(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    done(tmp_path, "prepare", str(TINY))
    for name, steps in STEPS.items():
        settings = [word for one in (*SETTINGS, f"run.steps={steps}") for word in ("--set", one)]
        counts = ("--workers", "1", "--relays", "1", "--validators", "1", "--run", "tiny")
        done(
            tmp_path,
            "pool",
            "init",
            str(TINY),
            "--dir",
            f"runs/{name}",
            "--url",
            f"{url}/runs/{name}",
            *counts,
            *settings,
        )
    coordinator = start(tmp_path, "coordinator", "--runs", "runs", "--port", str(port))
    nodes = {}
    try:
        with httpx.Client(timeout=60) as client:
            while not answers(client, url):
                assert coordinator.poll() is None, logs(tmp_path)
                time.sleep(0.1)
            for name in STEPS:
                for invite in sorted((tmp_path / "runs" / name / "invites").glob("*.invite")):
                    node, role = f"{name}/{invite.stem}", invite.stem.partition("-")[0]
                    (tmp_path / node).mkdir(parents=True)
                    watch = ("--watch", f"{name}/learner/versions") if role == "origin" else ()
                    words = (role, "--dir", node, "--threads", "1", "--join", str(invite), *watch)
                    nodes[node] = start(tmp_path, *words)
            for node, process in nodes.items():
                assert process.wait(PATIENCE_S) == 0, f"{node}: {logs(tmp_path)}"
            states = {offer.place: offer.state for offer in find_runs(url, client).runs.runs}
        assert states == dict.fromkeys(STEPS, "finished")
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait(60) == 0, logs(tmp_path)
    finally:
        for process in (*nodes.values(), coordinator):
            process.kill()
            process.wait()
    for name, steps in STEPS.items():
        assert (tmp_path / "runs" / name / "summary.json").is_file()
        assert len((tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()) == steps
        assert "no broken link" in done(tmp_path, "audit", f"runs/{name}", "--proofs", "1")
    said = next(tmp_path.glob("coordinator*.log")).read_text()
    assert "first: batch of step" in said and "second: batch of step" in said


def answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def logs(folder: Path) -> str:
    """The end of every log there."""
    return "".join(f"\n{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))
