"""What a newcomer copies: the example of your own problems and rewards works, and every config in the docs is one."""

import re
import tomllib
from pathlib import Path

import pytest

from shoal import tasks
from shoal.config import load, parse

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own"
BLOCKS = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "tasks.md").read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_a_config(path: Path) -> None:
    assert load(path).tasks.sources


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_config_on_the_page_on_tasks_is_one(block: str) -> None:
    assert parse(tomllib.loads(block))


def test_problems_and_rewards_of_ones_own_are_30_lines_and_score() -> None:
    lines = [line for name in ("my.toml", "my_rewards.py") for line in (OWN / name).read_text().splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= 30
    settings = load(OWN / "my.toml").tasks
    found = tasks.load(settings)
    assert (len(found.train), len(found.heldout)) == (336, 64)
    task = next(task for task in found.train if int(task.answer) > 1)
    said = [task.answer, str(int(task.answer) - 1), "none"]
    with tasks.Graders(settings, files=found.files) as graders:
        exact, near, other = graders.grade([task] * 3, said)
    assert (exact.score, near.score, other.score) == pytest.approx((1.0, 0.3, 0.0))
    assert {grade.outcome for grade in (exact, near, other)} == {"graded"}
