"""The part that all adapters share: child processes list tasks and score completions.

Here, small fake libraries replace the real libraries.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks import Graders, libraries
from shoal.tasks.libraries import LibraryReward, rows
from shoal.tasks.task import TRUST, Grade, Task, TasksNotFoundError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that registers a library with this code, and returns its name."""
    monkeypatch.delenv(libraries.ENVIRONMENTS, raising=False)
    monkeypatch.delenv(TRUST, raising=False)

    def register(code: str, name: str = "made_up") -> str:
        monkeypatch.setitem(libraries.FILES, name, "import json, os\n" + code)
        return name

    return register


def task(entry: Any, setting: Any = None, generator: str = "made_up") -> Task:
    metadata = {"generator": generator, "setting": setting, "entry": entry}
    return Task(id="s/0", question="q", answer="", source="s", metadata=json.dumps(metadata))


def graded(library: str, tasks: list[Task], completions: list[str]) -> list[Grade]:
    with closing(LibraryReward(library)) as reward:
        return reward.grade(tasks, completions)


def test_rows_are_what_the_library_returns_and_not_what_it_prints(library: Callable[..., str]) -> None:
    code = """
def rows(options):
    print("noise"); os.write(1, b"noise")
    return [{"question": "line\\nend \\u2028 of it", "answer": str(n)} for n in range(options["n"])]
"""
    row = {"question": "line\nend \u2028 of it", "reward": "made_up"}
    assert rows(library(code), {"n": 2}) == [row | {"answer": "0"}, row | {"answer": "1"}]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import made_up", "No module named 'made_up'.*pip install 'shoal\\[made-up\\]'"),
        ("import other_one", "made_up.*No module named 'other_one'"),
        ("def rows(options): raise ValueError('options.size is wrong')", "made_up: options.size is wrong$"),
        ("def rows(options): raise KeyError('x')", "generator made_up: KeyError: 'x'"),
        ("def rows(options): os._exit(3)", "its process ended .exited, exit code 3"),
        ("this is no Python", "SyntaxError"),
    ],
)
def test_a_library_that_fails_to_list_its_tasks_is_an_error(
    library: Callable[..., str], code: str, message: str
) -> None:
    with pytest.raises(TasksNotFoundError, match=message):
        rows(library(code), {})


def test_the_error_names_a_missing_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libraries.PYTHON, "/no/python")
    monkeypatch.setenv(libraries.ENVIRONMENTS, "this")
    with pytest.raises(TasksNotFoundError, match="/no/python"):
        rows("verifiers", {"environment": "this"})


SCORES = """
def prepare(setting):
    global prepared
    prepared = json.loads(setting)
def score(value):
    match value["completion"]:
        case "raise": raise ValueError("no such answer")
        case "exit": os._exit(7)
        case "spin":
            while True: pass
    return {"score": float(value["completion"] == value["entry"] + prepared + value["question"]), "outcome": "graded"}
"""


def test_each_task_is_scored_by_its_entry_and_its_setting(library: Callable[..., str]) -> None:
    tasks = [task("a", "x"), task("b", "y"), task("a", "x")]
    grades = graded(library(SCORES), tasks, ["axq", "byq", "byq"])
    assert [(grade.score, grade.outcome) for grade in grades] == [(1.0, "graded"), (1.0, "graded"), (0.0, "graded")]


def test_a_library_that_fails_is_a_grader_error_and_the_next_answer_is_scored(
    library: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    completions = ["raise", "exit", "spin", "axq"]
    monkeypatch.setattr(libraries, "SCORING", replace(libraries.SCORING, cpu_s=0.3))
    grades = graded(library(SCORES), [task("a", "x")] * 4, completions)
    assert [grade.outcome for grade in grades] == ["grader_error"] * 3 + ["graded"]
    assert "no such answer" in grades[0].detail and grades[0].repeatable
    assert "exit code 7" in grades[1].detail
    assert "0.3 s of CPU time" in grades[2].detail and not grades[2].repeatable
    assert grades[3].score == 1.0


def test_tasks_of_another_source_are_a_grader_error(library: Callable[..., str]) -> None:
    plain = Task(id="s/1", question="q", answer="4", source="s")
    grades = graded(library(SCORES), [plain, task("a", "x", "another")], ["4", "axq"])
    assert [grade.outcome for grade in grades] == ["grader_error"] * 2
    assert "is not from generator made_up" in grades[0].detail


ANY = """
def rows(options): return [{"question": "q", "answer": "a", "metadata": "{}"}]
def prepare(setting): pass
def score(value): return {"score": 1.0, "detail": str(len(value['completion']))}
"""


def test_only_the_end_of_a_long_completion_is_scored(library: Callable[..., str]) -> None:
    [grade] = graded(library(ANY), [task("a")], ["x" * 10_000_000])
    assert grade.detail == "20000"


def test_a_machine_loads_only_the_verifiers_environments_that_its_owner_lists(
    library: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifiers = library(ANY, "verifiers")
    section = TaskSection(sources=[SourceSection(generator="verifiers", options={"environment": "this"})])
    needs_this = task("a", {"environment": "this"}, "verifiers")
    for listed in ("", "sums", "sums, thistle"):
        monkeypatch.setenv(libraries.ENVIRONMENTS, listed)
        with pytest.raises(TasksNotFoundError, match=r"'this'.*SHOAL_VERIFIERS_ENVIRONMENTS=this"):
            rows(verifiers, {"environment": "this"})
        with pytest.raises(TasksNotFoundError, match="allows"):
            graded(verifiers, [needs_this], ["x"])
        with pytest.raises(TasksNotFoundError, match=f"allows {listed or 'none'}"):
            Graders(section)
    monkeypatch.setenv(libraries.ENVIRONMENTS, "sums, this")
    assert len(rows(verifiers, {"environment": "this"})) == 1
    [grade] = graded(verifiers, [needs_this], ["x"])
    assert grade.score == 1.0 and not grade.certain, "a grade must not be certain if its reward may use services"
    monkeypatch.delenv(libraries.ENVIRONMENTS)
    monkeypatch.setenv(TRUST, "1")
    Graders(section).close()
