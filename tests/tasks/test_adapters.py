"""What every adapter does: processes that list tasks and score completions, here with small made-up libraries."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks.adapters.library import Library, Scored
from shoal.tasks.task import Grade, Task, TasksNotFoundError

HEAD = """
import json, os, sys
class RefusedError(Exception): pass
"""


def library(folder: Path, code: str) -> Library:
    file = folder / "far.py"
    file.write_text(HEAD + code)
    return Library(name="made_up", file=file, extra="made-up")


def task(entry: Any, setting: Any = None, generator: str = "made_up") -> Task:
    metadata = {"generator": generator, "setting": setting, "entry": entry}
    return Task(id="s/0", question="q", answer="", source="s", metadata=json.dumps(metadata))


def graded(library: Library, tasks: list[Task], completions: list[str], cpu_s: float = 10.0) -> list[Grade]:
    reward = Scored(library, cpu_s=cpu_s)
    try:
        return reward.grade(tasks, completions)
    finally:
        reward.close()


def test_rows_are_what_the_library_yields_and_not_what_it_prints(tmp_path: Path) -> None:
    code = """
def rows(options):
    print("noise"); os.write(1, b"noise")
    for n in range(options["n"]): yield {"question": "line\\nend \\u2028 of it", "answer": str(n)}
"""
    found = library(tmp_path, code).rows({"n": 2})
    assert found == [{"question": "line\nend \u2028 of it", "answer": str(n), "reward": "made_up"} for n in range(2)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import made_up", "made_up needs a library that .* does not have: pip install 'shoal\\[made-up\\]'"),
        ("import other_one", "made_up: No module named 'other_one'"),
        ("def rows(options): raise RefusedError('options.size is wrong')", "made_up: options.size is wrong$"),
        ("def rows(options): raise KeyError('x')", "the library raises KeyError: 'x'"),
        ("def rows(options):\n  yield {'question': 'a'}\n  raise KeyError('late')", "KeyError: 'late'"),
        ("def rows(options):\n  yield {'question': 'a'}\n  os._exit(3)", "ends with status 3"),
        ("def rows(options): os._exit(0)", "no complete list"),
        ("this is no Python", "SyntaxError"),
    ],
)
def test_a_list_is_complete_or_an_error_says_why(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(TasksNotFoundError, match=message):
        library(tmp_path, code).rows({})


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    gone = Library(name="made_up", file=tmp_path / "far.py", extra="made-up", python=str(tmp_path / "python"))
    with pytest.raises(TasksNotFoundError, match="does not start"):
        gone.rows({})


SCORES = """
def prepare(setting):
    global known
    known = json.loads(setting)
def score(value):
    match value["completion"]:
        case "raise": raise ValueError("no such answer")
        case "exit": os._exit(7)
        case "spin":
            while True: pass
    return {"score": float(value["completion"] == value["entry"] + known + value["question"]), "outcome": "graded"}
"""


def test_each_task_is_scored_by_its_entry_and_its_setting(tmp_path: Path) -> None:
    tasks = [task("a", "x"), task("b", "y"), task("a", "x")]
    grades = graded(library(tmp_path, SCORES), tasks, ["axq", "byq", "byq"])
    assert [(grade.score, grade.outcome) for grade in grades] == [(1.0, "graded"), (1.0, "graded"), (0.0, "graded")]


def test_what_a_library_does_to_itself_is_a_grader_error_and_the_next_answer_is_scored(tmp_path: Path) -> None:
    completions = ["raise", "exit", "spin", "axq"]
    grades = graded(library(tmp_path, SCORES), [task("a", "x")] * 4, completions, cpu_s=0.3)
    assert [grade.outcome for grade in grades] == ["grader_error"] * 3 + ["graded"]
    assert "no such answer" in grades[0].detail and grades[0].repeatable
    assert "exit status 7" in grades[1].detail
    assert "0.3 s of CPU time" in grades[2].detail and not grades[2].repeatable
    assert grades[3].score == 1.0


def test_tasks_of_another_source_are_a_grader_error(tmp_path: Path) -> None:
    plain = Task(id="s/1", question="q", answer="4", source="s")
    grades = graded(library(tmp_path, SCORES), [plain, task("a", "x", "another")], ["4", "axq"])
    assert [grade.outcome for grade in grades] == ["grader_error"] * 2
    assert "is not from generator made_up" in grades[0].detail


def test_a_long_completion_is_scored_by_its_end(tmp_path: Path) -> None:
    code = (
        "def prepare(setting): pass\ndef score(value): return {'score': 1.0, 'detail': str(len(value['completion']))}"
    )
    (grade,) = graded(library(tmp_path, code), [task("a")], ["x" * 10_000_000])
    assert grade.detail == "20000"
