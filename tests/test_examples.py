"""The examples do what they state: one step by hand, a learning loop, and the notebook."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.model.load import load_model

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "first-run.ipynb"


def printed(name: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_one_step_accepts_the_honest_worker_and_catches_both_liars() -> None:
    assert len((EXAMPLES / "one_step.py").read_text().splitlines()) <= 150
    lines = printed("one_step.py")
    assert lines[0] == "honest  accepted"
    assert lines[1].startswith("greedy  sampling: ") and lines[2].startswith("4 bits  proof: ")
    delta_bytes, full_bytes = map(int, re.findall(r"\d+", lines[5]))
    assert delta_bytes < full_bytes / 2 and lines[6].startswith("fetched version 1: every byte is what ")


def test_the_loop_trains_a_model_that_the_library_loads() -> None:
    *steps, last = printed("grpo.py", "2", "coordinator.prompts_per_step=4")
    assert [line.partition(":")[0] for line in steps] == ["step  1", "step  2"]
    assert load_model(Path(last.split()[-1])).config.model_type == "llama"


def code() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_plain_python_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not [cell for cell in notebook["cells"] if cell.get("outputs")]
    for number, cell in enumerate(code()):
        compile(cell, f"cell {number}", "exec")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs_to_its_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code())],
        cwd=tmp_path,
        env=os.environ | {"SHOAL_STEPS": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    second = re.search(r"step  2: reward 0\.\d+, after +(\d+\.\d) s", done.stdout)
    assert second and float(second[1]) < 900, "the printed time must count from the start"
    assert "time      about" in done.stdout and "no broken link" in done.stdout
    assert (tmp_path / "runs" / "first" / "reward.png").stat().st_size > 1000
