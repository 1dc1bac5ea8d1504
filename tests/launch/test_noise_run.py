"""Whole tiny runs whose tokens are drawn with vLLM's noise: by torch workers, and by vLLM where there is one. Slow."""

import os
from pathlib import Path

import pytest

from shoal.engine.vllm.client import PYTHON

from .test_vllm_run import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_honest_workers_are_accepted_and_a_liar_is_slashed(tmp_path: Path, engine: str) -> None:
    if engine == "vllm" and not os.environ.get(PYTHON):
        pytest.skip(f"{PYTHON} names no environment with vLLM (docs/vllm.md)")
    summary = run(
        tmp_path / "run",
        "run.steps=12",
        'sampling.noise="vllm"',
        "workers.count=1",
        f'workers.engines=["{engine}"]',
        'workers.cheat=["wrong_temperature"]',
    )
    assert summary["accepted"]["worker-0"] > 0 and summary["rejected"]["worker-0"] == 0, summary["reject_reasons"]
    assert summary["slashed"] == ["cheater"] and set(summary["reject_reasons"]) == {"sampling"}, summary
