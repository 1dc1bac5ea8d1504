"""Which reward grades a task: its source's, or its own where the source names none."""

from dataclasses import replace

import pytest

from shoal import tasks
from shoal.config.tasks import SourceSection, TaskSection
from shoal.sandbox import Budget
from shoal.tasks.rewards import graders
from shoal.tasks.rewards.graders import Graders, combine
from shoal.tasks.task import Grade, GradeError

from ..rewards import Always

TASK = tasks.Task(id="some/1", question="?", answer="5", source="some")


@pytest.fixture(autouse=True)
def rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graders, "REWARDS", {"half": lambda *_: Always(0.5), "whole": lambda *_: Always(1.0)})


def section(*rewards: str) -> TaskSection:
    names = ["some", "other"][: len(rewards)]
    pairs = zip(names, rewards, strict=True)
    return TaskSection(sources=[SourceSection(name=name, path=f"{name}.jsonl", reward=one) for name, one in pairs])


@pytest.mark.parametrize("name", ["code", "mine.py:slow", "math", "reasoning_gym"])
def test_every_reward_that_runs_something_runs_nothing_after_the_end_of_the_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    files = {"mine.py": b"def slow(task, completion): return 1.0"}
    with Graders(section(name), files=files, budget=(budget := Budget())) as found:
        reward = found._reward(found.section.source("some"), name)
        for inner in ("code", "grader", "function", "sandbox"):
            reward = getattr(reward, inner, reward)
        assert reward.budget is budget  # type: ignore[attr-defined]


def test_a_task_is_graded_by_the_reward_of_its_source_and_else_by_its_own() -> None:
    asked = [replace(TASK, reward=reward) for reward in ("half", "whole", "half")]
    asked += [replace(one, source="other") for one in asked]
    with Graders(section("", "whole")) as found:
        assert [grade.score for grade in found.grade(asked, [""] * 6)] == [0.5, 1.0, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "own", "message"),
    [
        ("", "", "source some names no reward, and neither does its schema; set its reward"),
        ("", "none", "source some: no reward 'none'; there are half, whole, and functions"),
        ("none", "half", "source some: no reward 'none'; there are half, whole, and functions"),
    ],
)
def test_no_reward_or_an_unknown_one_is_named(reward: str, own: str, message: str) -> None:
    with pytest.raises(GradeError, match=message):
        Graders(section(reward)).grade([replace(TASK, reward=own)], [""])


def test_a_reward_of_weight_0_is_reported_and_changes_nothing() -> None:
    right = Grade(1.0)
    broken = Grade(0.0, "grader_error", "it raised", tier="kernel", repeatable=False)
    found = combine({"a": right, "b": broken}, {"a": 2.0, "b": 0.0})
    assert (found.score, found.outcome, found.certain) == (1.0, "graded", True)
    assert found.parts == {"a": 1.0, "b": 0.0} and "b: it raised" in found.detail
    failed = combine({"a": right, "b": broken}, {"a": 2.0, "b": 0.5})
    assert (failed.score, failed.outcome) == (0.0, "grader_error")
