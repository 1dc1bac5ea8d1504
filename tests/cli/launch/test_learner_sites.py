"""A whole run whose learner has two sites. One site is killed, later the other is frozen, and the run still learns."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..support import wait_until
from .runs import DEADLINE_S, MIN_GAIN, children, gain, start, summary_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]
SITES = ("--set", "learner.sites=2", "--set", "sites.wait_s=40")  # wait_s: longer than any delay on a busy machine
BOTH = ["site-0", "site-1"]


def rounds(out: Path) -> list[dict[str, Any]]:
    path = out / "meet" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_site_is_killed_and_a_site_is_frozen_and_the_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    swarm = start(out, *SITES)
    wait_until(lambda: len(rounds(out)) >= 4, DEADLINE_S, "four rounds")
    os.kill(children(out)["learner"], signal.SIGKILL)  # `shoal run` restarts it
    wait_until(
        lambda: any("site-0" in each["healed"] for each in rounds(out)[1:]), DEADLINE_S, "the killed site to return"
    )
    count = len(rounds(out))
    wait_until(lambda: len(rounds(out)) > count and rounds(out)[-1]["kept"] == BOTH, DEADLINE_S, "a round of both")
    os.kill(children(out)["learner-1"], signal.SIGSTOP)  # like a machine that is lost for good
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    summary = summary_of(out)
    assert (summary["steps"], summary["restarts"]["learner"]) == (24, 1)
    assert gain(summary) > MIN_GAIN
    assert (out / "model" / "model.safetensors").exists()
    assert [each["round"] for each in rounds(out)] == list(range(24))
    assert rounds(out)[-1]["kept"] == ["site-0"]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(step["sites/site-0/computed_s"] > 0 for step in steps) and "sites/site-1/kept" not in steps[-1]
    assert any(step["sites/kept"] == 2.0 and step["sites/site-1/sent_bytes"] > 0 for step in steps)
    assert "sites: 2 of 2 count" in printed and "site-1 away since step" in printed
    assert len(list((out / "meet").glob("state-*"))) == 1  # the run's end removes older states
    last = "versions/v000024/model.safetensors"
    assert (out / "meet" / last).read_bytes() == (out / "learner" / last).read_bytes()
    lost = [name for each in rounds(out) for name in {*each["dealt"]} - {*each["kept"]}]
    assert lost.count("site-1") == 1, "the frozen site must lose its share of exactly one batch"
    audit = [sys.executable, "-m", "shoal", "audit", str(out), "--rerun", "0"]
    done = subprocess.run(audit, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
