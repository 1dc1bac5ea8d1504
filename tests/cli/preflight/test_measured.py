"""The estimate from a CPU's measured speeds agrees with committed measurements of runs on that CPU."""

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


ROWS = list(plan.rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.run}: {row.what}")
def test_the_estimate_is_within_a_quarter_of_the_measurement(row: Any) -> None:
    assert row.planned == pytest.approx(row.measured, rel=0.25)


def test_steps_and_memory_of_three_configs_are_compared() -> None:
    kinds = defaultdict(set)
    for row in ROWS:
        config = next((name for name in ("tiny", "quickstart", "gsm8k") if row.run.startswith(name)), "gsm8k")
        kinds[config].add(row.what)
    for name in ("tiny", "quickstart", "gsm8k"):
        assert kinds[name] >= {"step_s", "memory_bytes"}, name


def test_the_committed_comparison_is_current() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["compared"]
    assert [(row["run"], row["what"], row["ratio"]) for row in committed] == [
        (row.run, row.what, pytest.approx(row.ratio, abs=0.001)) for row in ROWS
    ]


def test_flops_equal_those_that_the_learner_reports() -> None:
    sizes = BUNDLED["bundled:smollm2-135m-instruct"]
    work = work_of(load(ROOT / "configs" / "quickstart.toml"), prompt=26, length=12)
    shape = report.Shape(body=sizes.body, head=sizes.head, layers=sizes.layers, width=sizes.width)
    flops = dense_flops(sizes, work) + attention_flops(sizes, work)
    assert flops == report.forward_flops(shape, work.prompt, [work.length] * work.completions)


def test_bundled_sizes_equal_those_of_the_models() -> None:
    from shoal.model import sources

    for name, sizes in BUNDLED.items():
        config = sources.read_config(name, fetch=False)
        if "hidden_size" in config:  # the model was made on this machine
            assert sizes_of(config) == sizes
