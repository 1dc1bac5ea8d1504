"""A whole tiny run with one vLLM and one torch worker, and with liars that compute with vLLM. Slow; needs vLLM."""

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
    "run.steps=16",
    'workers.engines=["vllm", "torch"]',
    'workers.cheat=["quantized_weights", "forged_reward", "wrong_temperature"]',  # the first and the last with vLLM
    "evaluator.n=16",
    "evaluator.batch=16",
    "tasks.heldout=16",
    "learner.checkpoint_every=16",
]


@pytest.mark.skipif(not os.environ.get(PYTHON), reason=f"{PYTHON} names no environment with vLLM (docs/vllm.md)")
def test_vllm_and_torch_workers_share_a_run_and_liars_are_slashed(tmp_path: Path) -> None:
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
    assert summary["accepted"]["worker-0"] > 0 and summary["accepted"]["worker-1"] > 0, summary
    assert summary["rejected"].get("worker-0", 0) == summary["rejected"].get("worker-1", 0) == 0
    assert set(summary["slashed"]) == {"cheater-0", "cheater-1", "cheater-2"}, summary["reject_reasons"]
