"""Whole tiny runs whose workers generate several submissions at once, with either engine. Slow."""

import re
from pathlib import Path

import pytest

from .test_vllm_run import run_with_a_liar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_honest_workers_are_accepted_and_a_liar_is_slashed(tmp_path: Path, engine: str) -> None:
    summary = run_with_a_liar(
        tmp_path / "run", engine, "quantized_weights", "workers.in_flight=3", "workers.groups_per_submission=2"
    )
    assert set(summary["reject_reasons"]) == {"proof"}, summary
    assert summary["waste"]["too_late"] == 0
    assert most_at_once((tmp_path / "run" / "logs" / "worker-0.log").read_text()) == 3


def most_at_once(log: str) -> int:
    """How many tasks a worker held that it had not uploaded yet."""
    most, held = 0, set[str]()
    for id, uploaded in re.findall(r"(?:task|submission) (\S+-\d{6})(?::| (is uploaded):)", log):
        held = held - {id} if uploaded else held | {id}
        most = max(most, len(held))
    return most
