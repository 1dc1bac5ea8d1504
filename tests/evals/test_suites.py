"""Each suite with a few rows written by hand in the public set's own columns: read, asked and graded."""

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
from shoal.evals.completions import EvalError
from shoal.evals.evaluate import Entry, asked_of
from shoal.evals.samplers import Sampling
from shoal.evals.suites import SUITES
from shoal.tasks.rewards.graders import Graders
from shoal.tasks.task import Grade, Task, TasksNotFoundError

AIME = {
    "id": 60,
    "problem": "Find $2^{10} \\bmod 1000$.",
    "solution": "...",
    "answer": "24",
    "url": "u",
    "year": "2024",
}
MATH = {
    "problem": "Half of $x$?",
    "solution": "",
    "answer": "\\frac{x}{2}",
    "subject": "A",
    "level": 1,
    "unique_id": "t/1",
}
GSM8K = {"question": "Tom has 1,000 apples and eats 2. How many are left?", "answer": "He eats 2.\n#### 998"}
GPQA = {
    "Question": "Which is a fish?",
    "Correct Answer": "a herring",
    "Incorrect Answer 1": "a whale",
    "Incorrect Answer 2": "a seal",
    "Incorrect Answer 3": "a gull",
    "Record ID": "r",
}
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
IFEVAL = {
    "key": 1001,
    "prompt": "Write one line without commas.",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
}
ROWS: dict[str, dict[str, Any]] = {
    "AIME24": AIME,
    "AIME25": {"problem": "Find $5^2$.", "answer": "25", "solution": ""},
    "MATH-500": MATH,
    "GSM8K": GSM8K,
    "GPQA-diamond": GPQA,
    "LiveCodeBench": LIVE,
    "HumanEval": HUMANEVAL,
    "MBPP": MBPP,
    "IFEval": IFEVAL,
}


def write(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or (ROWS[name],)))
    return str(path)


def grade(name: str, path: str, completion: str) -> Grade:
    suite = SUITES[name]
    [task] = suites.read(suite, path)
    (source, _), *_ = suites.sources(suite, path)
    with Graders(TaskSection(sources=[source])) as graders:
        return graders.grade([task], [completion])[0]


def test_every_suite_has_rows_here() -> None:
    assert set(ROWS) == set(SUITES)


@pytest.mark.parametrize("name", list(ROWS))
def test_rows_become_tasks_and_prompts(name: str, tmp_path: Path) -> None:
    suite = SUITES[name]
    [task] = suites.read(suite, write(tmp_path, name))
    assert task.id.startswith(f"{name}/")
    assert task.source == name
    [asked] = asked_of(Entry(suite, [task], 1, Sampling(0, 8)), 0)
    assert task.question in asked.message
    assert "{question}" not in asked.message
    assert bool(task.answer) == (suite.reward in ("math", "choice") or name in ("HumanEval", "MBPP"))
    assert bool(task.tests) == (suite.reward == "code")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("AIME24", "so \\boxed{24}", "so \\boxed{25}"),
        ("AIME25", "\\boxed{25}", "\\boxed{24}"),
        ("MATH-500", "\\boxed{0.5x}", "\\boxed{x}"),
        ("GSM8K", "\\boxed{998}", "\\boxed{99}"),
        ("LiveCodeBench", "```python\nprint(2 * int(input()))\n```", "```python\nprint(int(input()) + 1)\n```"),
        ("HumanEval", "    return 2 * x\n", "    return 3 * x\n"),
        ("MBPP", "```python\ndef double(x):\n    return x + x\n```", "```python\ndef double(x):\n    return x\n```"),
    ],
)
def test_right_answers_score_one_and_wrong_ones_zero(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    if SUITES[name].reward == "code" and not has_code():
        pytest.skip("the code reward is not there yet")
    path = write(tmp_path, name)
    assert grade(name, path, right).score == 1
    found = grade(name, path, wrong)
    assert (found.score, found.outcome) == (0, "graded")


def has_code() -> bool:
    from shoal.tasks.rewards import graders

    return "code" in getattr(graders, "SANDBOXED", {})


def test_an_instruction_is_graded_by_the_library(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'shoal[evals]'")
    path = write(tmp_path, "IFEval")
    assert grade("IFEval", path, "Fish swim.").score == 1
    assert grade("IFEval", path, "Fish, they swim.").score == 0


def test_choices_are_shuffled_by_the_question_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "GPQA-diamond")
    [task] = suites.read(SUITES["GPQA-diamond"], path)
    assert f"{task.answer}) a herring" in task.question
    for letter in "ABCD":
        assert grade("GPQA-diamond", path, f"Answer: {letter}").score == float(letter == task.answer)
    assert grade("GPQA-diamond", path, "a herring").outcome == "wrong_format"
    rows = [GPQA | {"Question": f"Which is fish number {number}?"} for number in range(40)]
    letters = [task.answer for task in suites.read(SUITES["GPQA-diamond"], write(tmp_path, "", *rows))]
    assert set(letters) == set("ABCD")


def test_part_of_a_suite_is_the_same_in_any_order_of_rows(tmp_path: Path) -> None:
    rows = [GSM8K | {"question": f"{GSM8K['question']} ({number})"} for number in range(20)]
    some = suites.read(SUITES["GSM8K"], write(tmp_path, "", *rows), 5)
    assert suites.read(SUITES["GSM8K"], write(tmp_path, "", *rows[::-1]), 5) == some
    assert suites.read(SUITES["GSM8K"], write(tmp_path, "", *rows))[:5] == some
    assert suites.digest(some) != suites.digest(some[::-1])
    with pytest.raises(EvalError, match="20 tasks, fewer than --n 21"):
        suites.read(SUITES["GSM8K"], write(tmp_path, "", *rows), 21)


def test_a_task_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    assert len(suites.read(SUITES["GSM8K"], write(tmp_path, "", GSM8K, GSM8K))) == 1


def test_a_folder_gives_the_suites_split_and_a_packed_file_is_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps(GSM8K | {"question": f"{split}?"}) + "\n")
    assert [task.question for task in suites.read(SUITES["GSM8K"], str(tmp_path))] == ["test?"]
    one: list[Task] = suites.read(SUITES["GSM8K"], str(tmp_path / "test.jsonl.gz"))
    assert [task.question for task in one] == ["test?"]


def test_the_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TasksNotFoundError, match=r"could not be fetched.*path"):
        suites.read(SUITES["AIME24"])


def test_suites_are_found_by_name() -> None:
    assert [suite.name for suite in suites.find("gsm8k, MATH-500")] == ["GSM8K", "MATH-500"]
    with pytest.raises(EvalError, match="no suite 'mmlu'; there are AIME24"):
        suites.find("mmlu")
    with pytest.raises(EvalError, match="each suite once"):
        suites.find("GSM8K,gsm8k")
