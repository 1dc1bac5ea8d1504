"""Each code suite with a few rows written by hand in the public set's own columns: read, asked and graded."""

import base64
import gzip
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from shoal.config.tasks import TaskSection
from shoal.evals import suites
from shoal.evals.suites import SUITES, TABLE, EvalError
from shoal.tasks.rewards.graders import Graders
from shoal.tasks.task import TasksNotFoundError

PRIVATE = [{"input": "2\n", "output": "4\n", "testtype": "stdin"}]
LIVE = {
    "question_title": "Double",
    "question_content": "Print twice the number.",
    "question_id": "1",
    "platform": "atcoder",
    "contest_date": "2024-01-01",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
    "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode(),
    "metadata": "{}",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(2) == 4"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
ROWS: dict[str, dict[str, Any]] = {"LiveCodeBench": LIVE, "HumanEval": HUMANEVAL, "MBPP": MBPP}


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_code_suite_has_rows_here() -> None:
    assert set(ROWS) == {suite.name for suite in TABLE if not suite.task}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("LiveCodeBench", "```python\nprint(2 * int(input()))\n```", "```python\nprint(int(input()) + 1)\n```"),
        ("HumanEval", "    return 2 * x\n", "    return 3 * x\n"),
        ("MBPP", "```python\ndef double(x):\n    return x + x\n```", "```python\ndef double(x):\n    return x\n```"),
    ],
)
def test_rows_are_asked_and_graded_in_the_sandbox(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    suite, path = SUITES[name.lower()], write(tmp_path, ROWS[name])
    [task] = suites.read(suite, path)
    suites.write_task(suite, [task], tmp_path)
    [asked] = [json.loads(line) for line in (tmp_path / f"shoal_{name.lower()}.jsonl").read_text().splitlines()]
    assert task.question in asked["message"] and "{question}" not in asked["message"]
    (source, _), *_ = suites.sources(suite, path)
    with Graders(TaskSection(sources=[source])) as graders:
        one, other = graders.grade([task, task], [right, wrong])
    assert one.score == 1
    assert (other.score, other.outcome) == (0, "graded")


def test_part_of_a_suite_is_the_same_in_any_order_of_rows(tmp_path: Path) -> None:
    rows = [MBPP | {"text": f"{MBPP['text']} ({number})"} for number in range(20)]
    some = suites.read(SUITES["mbpp"], write(tmp_path, *rows), 5)
    assert suites.read(SUITES["mbpp"], write(tmp_path, *rows[::-1]), 5) == some
    assert suites.read(SUITES["mbpp"], write(tmp_path, *rows))[:5] == some
    with pytest.raises(EvalError, match="20 tasks, fewer than --n 21"):
        suites.read(SUITES["mbpp"], write(tmp_path, *rows), 21)


def test_a_task_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    assert len(suites.read(SUITES["mbpp"], write(tmp_path, MBPP, MBPP))) == 1


def test_a_folder_gives_the_suites_split_and_a_packed_file_is_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps(MBPP | {"text": f"{split}?"}) + "\n")
    [task] = suites.read(SUITES["mbpp"], str(tmp_path))
    assert "test?" in task.question
    assert suites.read(SUITES["mbpp"], str(tmp_path / "test.jsonl.gz")) == [task]


def test_the_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TasksNotFoundError, match=r"could not be fetched.*path"):
        suites.read(SUITES["humaneval"])


def test_suites_are_found_by_name_and_other_names_are_tasks_of_lm_eval() -> None:
    assert [suite.name for suite in suites.find("gsm8k, MATH-500")] == ["GSM8K", "MATH-500"]
    [other] = suites.find("drop")
    assert (other.task, other.k, other.temperature) == ("drop", 1, 0)
    with pytest.raises(EvalError, match="each suite once"):
        suites.find("GSM8K,gsm8k")
