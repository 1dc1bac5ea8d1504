"""Whole runs whose processes are killed, frozen, cut off and slowed: a short `benchmarks.pool.churn`, and a slow worker."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.pool.churn.network import missing

from ..support import wait_until
from .runs import DEADLINE_S, children, start, summary_of, trained_steps

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "results" / "churn.json"
ROLES = {"coordinator", "learner", "origin", "relay", "validator", "worker"}
pytestmark = pytest.mark.timeout(3 * DEADLINE_S)


def check(result: dict[str, Any]) -> None:
    assert not any(result["wrong"].values()), result["wrong"]
    groups = result["groups"]
    assert groups["useful"] == groups["trained"] + groups["stale"] + groups["left_over"]
    assert set(result["submissions"]) <= {"accepted", "open", "stale", "uploaded", "validating", "expired"}


@pytest.mark.slow
def test_two_minutes_of_churn_lose_nothing_and_penalise_nobody(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    command = [sys.executable, "-m", "benchmarks.pool.churn", "--minutes", "2", "--every", "10"]
    command += ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    check(json.loads((tmp_path / "result.json").read_text()))


def test_the_committed_churn_of_replicated_roles_has_faults_in_no_other_role() -> None:
    result = json.loads(RESULT.with_name("churn-workers.json").read_text())
    check(result)
    assert len(result["faults"]) >= 0.9 * result["churned_s"] / 20
    assert {fault["role"] for fault in result["faults"]} == {"relay", "validator", "worker"}


def test_the_committed_churn_includes_every_kind_of_fault_and_every_role() -> None:
    result = json.loads(RESULT.read_text())
    check(result)
    assert result["churned_s"] >= 15 * 60
    assert len(result["faults"]) >= 0.9 * result["churned_s"] / 20
    happened = {(fault["role"], fault["kind"]) for fault in result["faults"]}
    assert {role for role, _ in happened} == ROLES
    assert {kind for _, kind in happened} == {"kill", "freeze", "cut", "slow"}
    assert len(happened) >= 23, (
        "of the 24 pairs of role and fault, only the one named in docs/results.md may be missing"
    )
    names = {name for name in result["restarts"] if name != "evaluator"}
    assert {role: sum(name.partition("-")[0] == role for name in names) for role in ROLES} == {
        **dict.fromkeys(("coordinator", "learner", "origin"), 1),
        **dict.fromkeys(("relay", "validator"), 2),
        "worker": 8,
    }


@pytest.mark.slow
def test_a_worker_ten_times_slower_is_credited_and_not_penalised(tmp_path: Path) -> None:
    """tests/coordinator/test_arrivals.py measures that no step waits for such a worker, and how much is wasted."""
    out = tmp_path / "run"
    swarm = start(out, "--set", "workers.count=3", "--set", "run.steps=30")
    wait_until(lambda: trained_steps(out) >= 1, DEADLINE_S, "a step")
    slow, ended = children(out)["worker-2"], threading.Event()

    def crawl() -> None:
        while not ended.is_set():
            try:
                os.kill(slow, signal.SIGSTOP)
                time.sleep(0.18)
                os.kill(slow, signal.SIGCONT)
            except ProcessLookupError:
                return
            time.sleep(0.02)

    crawling = threading.Thread(target=crawl)
    crawling.start()
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    ended.set()
    crawling.join()
    assert swarm.returncode == 0, printed
    summary = summary_of(out)
    assert not any(summary["rejected"].values())
    assert summary["accepted"]["worker-2"] >= 1
    with sqlite3.connect(out / "coordinator" / "pool.sqlite") as pool:
        states = dict(pool.execute("SELECT name, suspensions FROM nodes WHERE role = 'worker'"))
        credited = dict(
            pool.execute(
                "SELECT name, count(*) FROM submissions JOIN nodes ON key = worker WHERE credit = 'credited' GROUP BY name"
            )
        )
    assert set(states.values()) == {0}
    assert credited["worker-2"] == summary["accepted"]["worker-2"]
