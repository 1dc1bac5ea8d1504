"""HumanEval, where its file is: `HumanEval.jsonl.gz` in the folder that SHOAL_DATA names, or in ../shared/data.

Canonical solutions pass and mutated ones fail; the mutants are those of `benchmarks/humaneval.py`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shoal.sandbox import TIERS, ProgramLimits, best_tier, problem
from shoal.tasks.rewards.code import Code

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SHOAL_DATA") or ROOT.parent / "shared" / "data") / "HumanEval.jsonl.gz"
EVERY = 14  # of the problems, where not all are asked for
pytestmark = pytest.mark.skipif(not DATA.is_file(), reason=f"no {DATA}: set SHOAL_DATA to its folder")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import humaneval

    yield humaneval


def expect(benchmark: ModuleType, rows: list[dict[str, str]], tier: str) -> None:
    mutants = [source for _, source in map(benchmark.mutant, rows)]
    tasks = [benchmark.task(row) for row in rows]
    code = Code(ProgramLimits(), tier)
    try:
        right = code.grade(tasks, [row["canonical_solution"] for row in rows])
        wrong = code.grade(tasks, mutants)
    finally:
        code.close()
    assert [(task.id, one) for task, one in zip(tasks, right, strict=True) if one.score != 1] == []
    assert [
        (task.id, one) for task, one in zip(tasks, wrong, strict=True) if one.score or one.outcome != "graded"
    ] == []
    assert {one.tier for one in right} == {tier}


def test_some_canonical_solutions_pass_and_mutated_ones_fail(benchmark: ModuleType) -> None:
    expect(benchmark, benchmark.read(DATA)[::EVERY], best_tier())


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_all_canonical_solutions_pass_and_all_mutated_ones_fail(benchmark: ModuleType, tier: str) -> None:
    if reason := problem(tier):  # type: ignore[arg-type]
        pytest.skip(reason)
    rows = benchmark.read(DATA)
    assert len(rows) == 164
    expect(benchmark, rows, tier)
