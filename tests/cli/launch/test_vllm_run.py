"""Whole tiny runs with dishonest workers: on torch, on vLLM, on both, and with several submissions at once."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.trust.byzantine import liars

from shoal.engine.vllm.client import PYTHON

from ..support import sets
from .runs import start, summary_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NEEDS_VLLM = pytest.mark.skipif(
    not os.environ.get(PYTHON), reason=f"{PYTHON} names no environment with vLLM (docs/operate.md)"
)
ENGINES = pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=NEEDS_VLLM)])

SMALL = ["evaluator.n=16", "tasks.heldout=16", "validator.count=2"]


def run(out: Path, *settings: str, lies: Sequence[str], engine: str = "vllm") -> dict[str, Any]:
    """Run with these settings, and with liars that generate with `engine`. Return the summary."""
    started = start(out, *sets(*SMALL, *settings))
    with liars(started, out, lies, engine):
        printed, _ = started.communicate(timeout=1700)
    assert started.returncode == 0, printed[-4000:]
    return summary_of(out)


def run_with_a_liar(out: Path, engine: str, liar: str, *settings: str) -> dict[str, Any]:
    """Run 12 steps with one honest worker and one liar. Assert that only the liar is slashed. Return the summary."""
    honest = ("run.steps=12", "workers.count=1", f'workers.engines=["{engine}"]')
    summary = run(out, *honest, *settings, lies=[liar], engine=engine)
    assert summary["accepted"]["worker-0"] > 0 and summary["rejected"]["worker-0"] == 0, summary["reject_reasons"]
    assert summary["slashed"] == ["cheater"], summary
    return summary


@NEEDS_VLLM
def test_a_run_on_vllm_trains_and_its_liars_are_slashed(tmp_path: Path) -> None:
    summary = run(
        tmp_path / "run",
        "run.steps=12",
        "workers.count=1",
        'workers.engines=["vllm"]',
        lies=["quantized_weights", "wrong_temperature"],
    )
    assert summary["accepted"]["worker-0"] > 0 and summary["rejected"]["worker-0"] == 0, summary["reject_reasons"]
    assert set(summary["slashed"]) == {"cheater-0", "cheater-1"}, summary["reject_reasons"]
    assert set(summary["reject_reasons"]) == {"proof", "sampling"}


@NEEDS_VLLM
def test_vllm_and_torch_workers_feed_one_run_and_the_liar_among_them_is_slashed(tmp_path: Path) -> None:
    summary = run(
        tmp_path / "run",
        "run.steps=40",  # vLLM starts later and must still get work
        'workers.engines=["vllm", "torch"]',
        lies=["quantized_weights"],
    )
    assert min(summary["accepted"][name] for name in ("worker-0", "worker-1")) > 0, summary["accepted"]
    assert summary["rejected"] == {"worker-0": 0, "worker-1": 0, "cheater": summary["rejected"]["cheater"]}
    assert summary["slashed"] == ["cheater"] and summary["accepted"]["cheater"] == 0


@ENGINES
def test_several_submissions_at_once_are_accepted_and_a_liar_is_slashed(tmp_path: Path, engine: str) -> None:
    summary = run_with_a_liar(
        tmp_path / "run", engine, "quantized_weights", "workers.in_flight=3", "workers.groups_per_submission=2"
    )
    assert set(summary["reject_reasons"]) == {"proof"}, summary
    assert summary["waste"]["too_late"] == 0
    assert max_in_flight((tmp_path / "run" / "logs" / "worker-0.log").read_text()) == 3


def max_in_flight(log: str) -> int:
    """Return the largest number of tasks that a worker held at once before uploading them."""
    highest, in_flight = 0, set[str]()
    for id, uploaded in re.findall(r"(?:task|submission) (\S+-\d{6})(?::| (is uploaded):)", log):
        in_flight = in_flight - {id} if uploaded else in_flight | {id}
        highest = max(highest, len(in_flight))
    return highest
