"""User environments: what they see and answer, and that they affect only their own answer."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal import tasks
from shoal.config import Config, ConfigError
from shoal.config.tasks import SourceSection, TaskSection
from shoal.sandbox import Budget
from shoal.tasks import Task
from shoal.tasks.environments import Environment, close, environments_of, try_out
from shoal.tasks.task import TRUST
from shoal.tasks.user_code import FAILED, MAX_ANSWER

from ..turns import config

SOURCE = """
import os, random, time

class Echo:
    calls = 0
    def respond(self, task, seed, turns):
        Echo.calls += 1
        self.count = getattr(self, "count", 0) + 1
        return f"{task.question} {task.metadata} {seed} {turns} {self.count} {random.random()}"

class Silent(Echo):
    def respond(self, task, seed, turns): return None

class Long:
    def respond(self, task, seed, turns): return "x\\ud800" * 10_000

class Raises:
    def respond(self, task, seed, turns): return {}[turns[-1]]
class Number:
    def respond(self, task, seed, turns): return 4
class Sleeps:
    def respond(self, task, seed, turns): time.sleep(1e6)
class Dies:
    def respond(self, task, seed, turns): os._exit(0)
"""
TASK = Task("arithmetic/0", "2 + 3", "5", "arithmetic", metadata='{"level": 1}')
DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"


def settings(name: str, **sandbox: Any) -> Config:
    sources = [{"generator": "arithmetic", "environment": f"folder/mine.py:{name}"}]
    return config(tasks={"sources": sources, "sandbox": sandbox})


@pytest.fixture
def start() -> Iterator[Any]:
    """Return a function that starts the environment of a class of SOURCE, until the end of the test."""
    started: list[Any] = []

    def start(name: str, source: str = SOURCE, **sandbox: Any) -> Environment:
        started.append(environments_of(settings(name, **sandbox), {"mine.py": source.encode()}))
        return started[-1]["arithmetic"]  # type: ignore[no-any-return]

    yield start
    for environments in started:
        close(environments)


@pytest.mark.usefixtures("tier")
def test_an_environment_sees_task_seed_and_turns_and_keeps_no_state(start: Any) -> None:
    echo = start("Echo")
    first = echo.respond(TASK, 7, ["a", "b"])
    assert first.startswith("2 + 3 {'level': 1} 7 ['a', 'b'] 1 0.")
    assert echo.respond(TASK, 7, ["a", "b"]) == first
    assert echo.respond(TASK, 2**63, ["é"]).startswith("2 + 3 {'level': 1} 9223372036854775808 ['é'] 1 0.")
    assert start("Silent").respond(TASK, 7, ["a"]) is None
    assert start("Long").respond(TASK, 0, ["a"]) == "x?" * (MAX_ANSWER // 2) + "...", (
        "it must be bounded and valid text"
    )
    assert not echo.repeatable, "a different answer must slash nobody"


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Raises", "KeyError: 'a' (folder/mine.py, line 18)"),
        ("Number", "respond returned int '4' instead of text or None"),
        ("Sleeps", "it exceeded the limit of 1.5 s (tasks.sandbox.cpu_s)"),
        ("Dies", "its process ended"),
    ],
)
def test_an_environment_that_fails_answers_with_an_error_and_logs_the_reason_once(
    start: Any, caplog: pytest.LogCaptureFixture, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tasks.user_code.WAIT_S", 0.5)
    environment = start(name, cpu_s=1.0)
    with caplog.at_level(logging.WARNING):
        assert [environment.respond(TASK, 0, ["a"]) for _ in range(2)] == [FAILED] * 2
    assert [why in record.message for record in caplog.records] == [True]


@pytest.mark.usefixtures("tier")
def test_an_environment_is_not_called_after_the_end_of_a_budget(start: Any) -> None:
    echo, budget = start("Echo"), Budget()
    echo.set_budget(budget)
    budget.start(0)
    assert echo.respond(TASK, 7, ["a"]) == FAILED
    budget.stop()
    assert echo.respond(TASK, 7, ["a"]) != FAILED


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torch", f"cannot run on this machine: ModuleNotFoundError: .* set {TRUST}=1"),
        ("import numpy", f"cannot run on this machine: ModuleNotFoundError: .* set {TRUST}=1"),
        ("Echo = 1 / 0", "ZeroDivisionError: division by zero .folder/mine.py, line 1."),
        ("def Echo(): pass", "it is not a class"),
        ("class Other: pass", "has no attribute 'Echo'"),
        ("class Echo(:", "SyntaxError"),
    ],
)
def test_a_file_that_does_not_load_fails_at_the_start(start: Any, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start("Echo", source)
    with pytest.raises(ConfigError, match=r"mine.py:Echo' .*: the task set does not hold mine.py; build the set again"):
        environments_of(settings("Echo"), {})


def task_set_of(source: dict[str, str]) -> tasks.TaskSet:
    return tasks.load(TaskSection(sources=[SourceSection(**source)], heldout=64))  # type: ignore[arg-type]


def test_the_environment_on_the_page_on_tasks_works_on_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [page] = re.findall(r"^```python\n(# my_env.py\n.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(page)
    rows = [{"question": f"Which number am I? ({n})", "answer": str(n), "metadata": {"number": n}} for n in range(99)]
    Path("numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": "numbers.jsonl", "environment": "my_env.py:Guess"}
    task_set = task_set_of(source)
    Path("my_env.py").unlink()  # other machines have only the task set
    settings = config(tasks={"sources": [source]})
    try_out(settings, task_set)
    environments = environments_of(settings, task_set.files)
    try:
        task = replace(TASK, source="numbers", metadata='{"number": 5}')
        answers = [environments["numbers"].respond(task, 0, [turn]) for turn in ("3", "I say 9", "5", "who knows")]
    finally:
        close(environments)
    assert answers == ["too low", "too high", None, None]


def test_a_trial_names_an_environment_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    source = {"generator": "arithmetic", "environment": "mine.py:Raises"}
    task_set = task_set_of(source)
    with pytest.raises(
        ConfigError, match=r"mine.py:Raises fails in a trial on task arithmetic/.* turn '': KeyError: ''"
    ):
        try_out(config(tasks={"sources": [source]}), task_set)


def test_a_trial_names_an_environment_that_asks_for_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("class Peeks:\n    def respond(self, task, seed, turns): return task.answer\n")
    source = {"generator": "arithmetic", "environment": "mine.py:Peeks"}
    with pytest.raises(ConfigError, match=r"no attribute 'answer'.*\(it sees only question, source, metadata"):
        try_out(config(tasks={"sources": [source]}), task_set_of(source))
