"""A dry run of `benchmarks/gpu.sh` does every step on a CPU, to show that the script will work on a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def test_the_script_names_existing_tests_and_benchmarks() -> None:
    text = SCRIPT.read_text()
    tests = re.findall(r"\btests/[\w/.]+", text)
    modules = [name.replace(".", "/") + ".py" for name in re.findall(r"-m (benchmarks[\w.]+)", text)]
    assert tests and modules
    assert [path for path in tests + modules if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_the_dry_run_measures_every_part(tmp_path: Path) -> None:
    environment = os.environ | {"BIN": str(Path(sys.executable).parent)}
    script = [str(SCRIPT), "--dry-run", str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=900, check=False)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, result["steps"]
    assert {"check", "proofs", "parts", "ranks", "calibrate", "run"} == set(result["steps"])
    assert result["ranks"]["ranks"] == 2
    speeds = [result["parts"]["learner"], result["parts"]["worker"]["torch"], result["parts"]["validator"]]
    assert all(part["tokens_per_s"] > 0 for part in [*speeds, result["ranks"]["learner"]])
    assert set(result["calibration"]["worst"]) == {"torch"}
    assert result["run"]["steps"] == 1
