"""Environments of your own: what they see and answer, and that nothing they do ends more than their own answer."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import tasks
from shoal.config import Config, ConfigError
from shoal.config.tasks import SourceSection, TaskSection
from shoal.sandbox import Budget
from shoal.tasks import Task
from shoal.tasks.environments import Environment, close, environments_of, try_out
from shoal.tasks.own import FAILED, LONGEST_ANSWER
from shoal.tasks.task import TRUST

from ..turns import config

SOURCE = """
import os, random, time

class Echo:
    calls = 0
    def respond(self, task, seed, turns):
        Echo.calls += 1
        self.mine = getattr(self, "mine", 0) + 1
        return f"{task.question} {task.metadata} {seed} {turns} {self.mine} {random.random()}"

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


@pytest.fixture(params=["sandbox", "trusted"])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST, "1" if request.param == "trusted" else "")


def settings(name: str, **sandbox: Any) -> Config:
    sources = [{"generator": "arithmetic", "environment": f"folder/mine.py:{name}"}]
    return config(tasks={"sources": sources, "sandbox": sandbox})


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes the environment of a class of SOURCE; ends it with the test."""
    all_made: list[Any] = []

    def make(name: str, source: str = SOURCE, **sandbox: Any) -> Environment:
        all_made.append(environments_of(settings(name, **sandbox), {"mine.py": source.encode()}))
        return all_made[-1]["arithmetic"]  # type: ignore[no-any-return]

    yield make
    for environments in all_made:
        close(environments)


@pytest.mark.usefixtures("_place")
def test_it_sees_task_seed_and_turns_and_keeps_nothing(made: Any) -> None:
    echo = made("Echo")
    first = echo.respond(TASK, 7, ["a", "b"])
    assert first.startswith("2 + 3 {'level': 1} 7 ['a', 'b'] 1 0.")
    assert echo.respond(TASK, 7, ["a", "b"]) == first
    assert echo.respond(TASK, 2**63, ["é"]).startswith("2 + 3 {'level': 1} 9223372036854775808 ['é'] 1 0.")
    assert made("Silent").respond(TASK, 7, ["a"]) is None
    assert made("Long").respond(TASK, 0, ["a"]) == "x?" * (LONGEST_ANSWER // 2) + "...", "bounded, and whole text"
    assert echo.tolerated(TASK, 7, ["a"]) is None, "another answer slashes nobody"


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Raises", "KeyError: 'a' (folder/mine.py, line 18)"),
        ("Number", "respond returned int '4' in place of text or None"),
        ("Sleeps", "passed (tasks.sandbox.cpu_s)"),
        ("Dies", "its process ended"),
    ],
)
def test_one_that_fails_is_answered_with_an_error_and_the_log_says_why_once(
    made: Any, caplog: pytest.LogCaptureFixture, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tasks.own.WAIT_S", 0.5)
    environment = made(name, cpu_s=1.0)
    with caplog.at_level(logging.WARNING):
        assert [environment.respond(TASK, 0, ["a"]) for _ in range(2)] == [FAILED] * 2
    assert [why in record.message for record in caplog.records] == [True]


@pytest.mark.usefixtures("_place")
def test_after_the_end_of_a_budget_it_is_not_asked(made: Any) -> None:
    echo, budget = made("Echo"), Budget()
    echo.within(budget)
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
def test_a_file_that_does_not_load_is_known_at_the_start(made: Any, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made("Echo", source)


def test_a_task_set_without_the_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"mine.py:Echo' .*: the task set does not hold mine.py; make it again"):
        environments_of(settings("Echo"), {})


def test_the_environment_on_the_page_on_tasks_travels_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [page] = re.findall(r"^```python\n(# my_env.py\n.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(page)
    source = {"generator": "arithmetic", "environment": "my_env.py:Guess"}
    task_set = tasks.load(TaskSection(sources=[SourceSection(**source)], heldout=64))  # type: ignore[arg-type]
    Path("my_env.py").unlink()  # other machines have the task set alone
    whole = config(tasks={"sources": [source]})
    try_out(whole, task_set)
    environments = environments_of(whole, task_set.files)
    try:
        answers = [environments["arithmetic"].respond(TASK, 0, [said]) for said in ("3", "I say 9", "5", "who knows")]
    finally:
        close(environments)
    assert answers == ["too low", "too high", None, None]


def test_one_that_fails_on_a_trial_is_known_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    source = {"generator": "arithmetic", "environment": "mine.py:Raises"}
    task_set = tasks.load(TaskSection(sources=[SourceSection(**source)], heldout=64))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mine.py:Raises fails on a trial, task arithmetic/.* turn '': KeyError: ''"):
        try_out(config(tasks={"sources": [source]}), task_set)
