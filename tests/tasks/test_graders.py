"""Which reward grades a task, and the reward `number`."""

import math
from dataclasses import replace

import pytest

from shoal import tasks
from shoal.config.tasks import SourceSection, TaskSection
from shoal.sandbox import Budget
from shoal.tasks.rewards import graders
from shoal.tasks.rewards.answers import Number
from shoal.tasks.rewards.graders import Graders, combine
from shoal.tasks.task import Grade, GradeError

from ..rewards import Always

TASK = tasks.Task(id="some/1", question="?", answer="5", source="some")


@pytest.fixture
def _rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graders, "REWARDS", {"half": lambda *_: Always(0.5), "whole": lambda *_: Always(1.0)})


def section(*rewards: str) -> TaskSection:
    pairs = zip(["some", "other"], rewards, strict=False)
    return TaskSection(sources=[SourceSection(name=name, path="x.jsonl", reward=reward) for name, reward in pairs])


@pytest.mark.parametrize("name", ["code", "mine.py:slow", "math", "reasoning_gym"])
def test_a_reward_that_runs_code_gets_the_budget(name: str) -> None:
    files = {"mine.py": b"def slow(task, completion): return 1.0"}
    with Graders(section(name), files=files, budget=(budget := Budget())) as rewards:
        reward = rewards._reward(rewards.section.source("some"), name)
        for inner in ("code", "grader", "sandbox"):
            reward = getattr(reward, inner, reward)
        assert reward.budget is budget  # type: ignore[attr-defined]


def test_a_failing_reward_is_logged_once_because_its_text_goes_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    words = replace(TASK, answer="five")  # its text quotes the answer
    with Graders(section("number")) as rewards:
        for task in (words, words, TASK, words, replace(TASK, answer="six")):
            rewards.grade([task], ["5"])
    assert [record.getMessage() for record in caplog.records] == [
        f'a reward failed: "the task\'s answer {answer} holds no number"' for answer in ("'five'", "'six'")
    ]


@pytest.mark.usefixtures("_rewards")
def test_a_task_is_graded_with_its_own_reward_only_if_its_source_names_none() -> None:
    some = [replace(TASK, reward=reward) for reward in ("half", "whole", "half")]
    some += [replace(task, source="other") for task in some]
    with Graders(section("", "whole")) as rewards:
        assert [grade.score for grade in rewards.grade(some, [""] * 6)] == [0.5, 1.0, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.usefixtures("_rewards")
@pytest.mark.parametrize(
    ("reward", "own", "message"),
    [
        ("", "", "source some names no reward, and neither does its schema; set its reward"),
        ("", "none", "source some: no reward 'none'; there are half, whole and file.py:function"),
        ("none", "half", "source some: no reward 'none'; there are half, whole and file.py:function"),
    ],
)
def test_the_error_names_a_missing_or_unknown_reward(reward: str, own: str, message: str) -> None:
    with pytest.raises(GradeError, match=message):
        Graders(section(reward)).grade([replace(TASK, reward=own)], [""])


def test_a_reward_of_weight_0_is_reported_and_changes_nothing() -> None:
    right = Grade(1.0)
    broken = Grade(0.0, "grader_error", "it raised", tier="kernel", repeatable=False)
    combined = combine({"a": right, "b": broken}, {"a": 2.0, "b": 0.0})
    assert (combined.score, combined.outcome, combined.certain) == (1.0, "graded", True)
    assert combined.parts == {"a": 1.0, "b": 0.0} and "b: it raised" in combined.detail
    failed = combine({"a": right, "b": broken}, {"a": 2.0, "b": 0.5})
    assert (failed.score, failed.outcome) == (0.0, "grader_error")


@pytest.mark.parametrize("score", [1.0000000000000002, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("reward", ["odd", {"odd": 1.0, "whole": 1.0}])
def test_a_score_outside_of_0_to_1_is_a_grader_error(
    score: float, reward: str | dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception would let one completion end every validator, and a weighted mean would hide the score."""
    monkeypatch.setattr(graders, "REWARDS", {"odd": lambda *_: Always(score), "whole": lambda *_: Always(1.0)})
    source = SourceSection(name="some", path="x.jsonl", reward=reward)
    with Graders(TaskSection(sources=[source])) as rewards:
        [grade] = rewards.grade([TASK], ["5"])
    assert (grade.score, grade.outcome) == (0.0, "grader_error")
    assert "scores must be within [0, 1]" in grade.detail


# --- the reward `number` ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "answer", "grade"),
    [
        ("70000", "So he made $70,000.", 1),
        ("70000", "70000", 1),
        ("70000", "#### 70,000", 1),
        ("70000", "70,000.00 dollars", 1),
        ("70000", r"\boxed{\$70{,}000}", 1),
        ("70000", r"\boxed{70000} in 2 years", 1),  # the box counts, not the last number
        ("70000", r"\boxed{2}, no, \boxed{70000}", 1),  # the last box counts
        ("70000", r"\boxed{x} or 70000", 1),  # a box without a number does not count
        ("70000", "70,0000", 0),
        ("70000", "70 000", 0),
        ("70000", "70000 or 5", 0),  # the last number counts
        ("18", "eighteen", 0),
        ("18", "", 0),
        ("18", "\u0661\u0668", 0),  # digits of another script
        ("18", "9" * 10_000, 0),  # more digits than int() accepts
        ("18", "18.0000000000000000000000000001", 0),  # numbers are compared exactly, not as floats
        ("18", "16+2=18", 1),
        ("3", "8-5=3", 1),
        ("5", "8-5", 1),  # this minus is an operator, not a sign
        ("-5", "a loss of -5", 1),
        ("-5", "-$5", 1),
        ("-5", "\u22125", 1),
        ("5", ".5", 0),
        ("0.5", ".50", 1),
        ("0", "-0.0", 1),
        ("5", "1, 2, 5,", 1),
    ],
)
def test_the_last_number_is_the_answer(expected: str, answer: str, grade: float) -> None:
    [result] = Number().grade([tasks.Task("", "", expected)], [answer])
    assert result.score == grade and len(result.detail) < 200
    has_digit = any(character in "0123456789" for character in answer)
    assert result.outcome == ("graded" if has_digit else "wrong_format")


@pytest.mark.parametrize("completion", ["5", "five", ""])
@pytest.mark.parametrize("answer", ["", "Paris"])
def test_a_task_whose_answer_has_no_number_is_a_grader_error(answer: str, completion: str) -> None:
    [grade] = Number().grade([tasks.Task("", "", answer)], [completion])
    assert (grade.score, grade.outcome) == (0.0, "grader_error")
    assert grade.detail == f"the task's answer {answer!r} holds no number"
