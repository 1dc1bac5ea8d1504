"""The services of deploy/compose.yaml, started without a container runtime, train a run and end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import composed, sites

PROGRAMS = ("ip", "unshare", "setpriv", "mount")


def missing() -> str:
    """Return why this machine cannot give the services a network of their own; "" if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"needs {', '.join(absent)}"
    env = os.environ | {"PATH": path}
    made = subprocess.run(
        [*sites.APART, "sh", "-ec", composed.NETWORK], env=env, capture_output=True, text=True, check=False
    )
    return "" if made.returncode == 0 else f"no namespaces here: {made.stderr.strip()[-200:]}"


def test_variables_have_defaults_and_can_be_given() -> None:
    assert composed.services()["learner"]["command"].endswith("--threads 2")
    assert composed.services({"THREADS": "7"})["learner"]["command"].endswith("--threads 7")


@pytest.mark.slow
@pytest.mark.timeout(2 * sites.DEADLINE_S)
def test_the_composed_services_train_a_tiny_run(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    argv = [sys.executable, "-m", "tests.cli.launch.composed", str(tmp_path)]
    done = subprocess.run(argv, cwd=sites.ROOT, capture_output=True, text=True, check=False)
    logs = {log.stem: log.read_text(errors="replace") for log in tmp_path.glob("*.log")}
    log_ends = "".join(f"\n{name}: {text[-500:]}" for name, text in logs.items())
    assert done.returncode == 0, done.stderr[-2000:] + log_ends
    ended = json.loads((tmp_path / "result.json").read_text())
    assert set(ended) == set(composed.services()) - {"init"} and set(ended.values()) == {0}, log_ends
    assert len((tmp_path / "data" / "pool" / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert "no broken link" in logs["audit"]
    assert (tmp_path / "data" / "learner" / "model" / "config.json").exists()
