"""The arithmetic against runs whose raw figures are committed, at the speeds of their CPUs' own benchmarks."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.speed import plan

from shoal.cli.preflight.estimate import BUNDLED, attention_flops, dense_flops, sizes_of, work_of
from shoal.config import load
from shoal.learner import report

ROOT = Path(__file__).parents[3]


ROWS = list(plan.rows())  # computed again


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.run}: {row.what}")
def test_planned_is_within_a_quarter_of_measured(row: Any) -> None:
    assert row.planned == pytest.approx(row.measured, rel=0.25)


def test_steps_and_memory_of_all_three_are_compared() -> None:
    kinds = defaultdict(set)
    for row in ROWS:
        config = next((name for name in ("tiny", "quickstart", "gsm8k") if row.run.startswith(name)), "gsm8k")
        kinds[config].add(row.what)
    for name in ("tiny", "quickstart", "gsm8k"):
        assert kinds[name] >= {"step_s", "memory_bytes"}, name


def test_the_committed_comparison_is_this_one() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["compared"]
    assert [(one["run"], one["what"], one["ratio"]) for one in committed] == [
        (row.run, row.what, pytest.approx(row.ratio, abs=0.001)) for row in ROWS
    ]


def test_flops_are_those_that_the_learner_reports() -> None:
    sizes = BUNDLED["bundled:smollm2-135m-instruct"]
    does = work_of(load(ROOT / "configs" / "quickstart.toml"), prompt=26, length=12)
    shape = report.Shape(body=sizes.body, head=sizes.head, layers=sizes.layers, width=sizes.width)
    flops = dense_flops(sizes, does) + attention_flops(sizes, does)
    assert flops == report.forward_flops(shape, does.prompt, [does.length] * does.completions)


def test_bundled_sizes_are_the_models_own() -> None:

    from shoal.model import sources

    for name, sizes in BUNDLED.items():
        found = sources.read_config(name, fetch=False)
        if "hidden_size" in found:  # it was made on this machine
            assert sizes_of(found) == sizes
