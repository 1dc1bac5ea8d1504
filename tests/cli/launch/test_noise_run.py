"""Whole tiny runs whose tokens are drawn with vLLM's noise: by torch workers, and by vLLM where there is one. Slow."""

from pathlib import Path

import pytest

from .test_vllm_run import run_with_a_liar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_honest_workers_are_accepted_and_a_liar_is_slashed(tmp_path: Path, engine: str) -> None:
    summary = run_with_a_liar(tmp_path / "run", engine, "wrong_temperature", 'sampling.noise="vllm"')
    assert set(summary["reject_reasons"]) == {"sampling"}, summary
