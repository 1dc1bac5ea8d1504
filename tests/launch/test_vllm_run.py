"""A whole tiny run whose worker generates with vLLM, and with liars that do so too. Slow; needs vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engine.vllm.client import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"
SETTINGS = [
    "run.steps=12",
    "workers.count=1",  # a torch worker starts sooner, and might do all the work
    'workers.engines=["vllm"]',
    'workers.cheat=["quantized_weights", "wrong_temperature"]',
    "evaluator.n=16",
    "evaluator.batch=16",
    "tasks.heldout=16",
    "learner.checkpoint_every=12",
]


@pytest.mark.skipif(not os.environ.get(PYTHON), reason=f"{PYTHON} names no environment with vLLM (docs/vllm.md)")
def test_a_run_on_vllm_trains_and_its_liars_are_slashed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", str(TINY), "--out", str(out), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accepted"]["worker-0"] > 0 and summary["rejected"]["worker-0"] == 0, summary["reject_reasons"]
    assert set(summary["slashed"]) == {"cheater-0", "cheater-1"}, summary["reject_reasons"]
    assert set(summary["reject_reasons"]) == {"proof", "sampling"}
