"""The example notebook: its cells, run in order in an empty folder, do what its text says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first-run.ipynb"


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
def test_the_notebook_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code())],
        cwd=tmp_path,
        env=os.environ | {"SHOAL_STEPS": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    second = re.search(r"step  2: reward 0\.\d+, after +(\d+\.\d) s", done.stdout)
    assert second and float(second[1]) < 900, "seconds, not the clock"
    assert "what sets the pace" in done.stdout and "no broken link" in done.stdout
    assert (tmp_path / "runs" / "first" / "reward.png").stat().st_size > 1000
