"""Rewards of your own: what they see, and that nothing they do ends more than their own call."""

import time
from collections.abc import Iterator

import pytest

from shoal.config.tasks import SandboxSection, SourceSection, TaskSection
from shoal.sandbox import SandboxError, best_tier
from shoal.tasks import Grade, Graders, Task
from shoal.tasks.own import AuthorCode, OwnReward
from shoal.tasks.task import TRUST, GradeError

SOURCE = """
import json, math, os, random, time

def exact(task, completion):
    return completion.strip() == task.answer

def sees(task, completion):
    assert (task.id, task.question, task.source) == ("s/1", "2+2?", "s")
    return task.metadata["level"] / 4 if task.tests == {} else 0

def raises(task, completion): return {}[completion]
def deep(task, completion): return raises(task, completion)
def nan(task, completion): return math.nan
def two(task, completion): return 2
def below(task, completion): return -1e-9
def text(task, completion): return "1.0"
def none(task, completion): pass
def dies(task, completion): os._exit(0)
def sleeps(task, completion): time.sleep(1e6)
def spins(task, completion):
    while True: pass
def floods(task, completion):
    while True: os.write(1, b"x" * 65536)
def hoards(task, completion): return len(bytearray(1 << 40))
def network(task, completion):
    import socket
    return bool(socket.socket())
def reads(task, completion): return os.path.exists("/etc/passwd")
def installed(task, completion):
    import numpy
    return numpy.float32(0.5)
def drawn(task, completion): return random.random()
"""
TASK = Task("s/1", "2+2?", "4", source="s", metadata='{"level": 1}')


def graders(reward: str | dict[str, float], **sandbox: float) -> Graders:
    source = SourceSection(name="s", generator="arithmetic", reward=reward)
    section = TaskSection(sources=[source], sandbox=SandboxSection(**sandbox))  # type: ignore[arg-type]
    return Graders(section, files={"mine.py": SOURCE.encode()})


def grade(reward: str | dict[str, float], *completions: str, **sandbox: float) -> list[Grade]:
    with graders(reward, **sandbox) as graded:
        return graded.grade([TASK] * len(completions), completions)


@pytest.fixture(params=["sandbox", "trusted"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(TRUST, "1" if request.param == "trusted" else "")
    yield best_tier() if request.param == "sandbox" else "trusted"


def test_a_function_sees_the_task_with_its_metadata_parsed_and_scores_each_completion(place: str) -> None:
    right, wrong = grade("mine.py:exact", " 4", "5")
    assert (right.score, right.outcome, right.tier, right.repeatable) == (1.0, "graded", place, True)
    assert (wrong.score, wrong.outcome) == (0.0, "graded")
    assert not right.certain and not wrong.certain, (
        "a plain process sees its machine: who claims another score may be honest"
    )
    assert grade("folder/mine.py:sees", "")[0].score == 0.25


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("raises", "KeyError: 'x' (mine.py, line 11)"),
        ("deep", "KeyError: 'x' (mine.py, line 11)"),
        ("nan", "it returned nan"),
        ("two", "it returned 2.0; scores must be within [0, 1]"),
        ("below", "scores must be within [0, 1]"),
        ("text", "it returned str '1.0' in place of a number"),
        ("none", "it returned NoneType"),
        ("dies", "its process ended"),
    ],
)
def test_a_function_that_fails_is_a_grader_error(place: str, name: str, detail: str) -> None:
    for found in grade(f"mine.py:{name}", "x", "x"):
        assert (found.score, found.outcome, found.repeatable) == (0.0, "grader_error", False)
        assert detail in found.detail


@pytest.mark.parametrize("name", ["sleeps", "spins"])
def test_a_function_that_does_not_end_is_stopped(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tasks.own.WAIT_S", 0.5)
    started = time.monotonic()
    [found] = grade(f"mine.py:{name}", "x", cpu_s=1.0)
    assert found.outcome == "grader_error" and "passed (tasks.sandbox.cpu_s)" in found.detail
    assert time.monotonic() - started < 60


def test_after_a_failure_the_next_completion_is_graded(place: str) -> None:
    with graders({"mine.py:dies": 0.0, "mine.py:exact": 1.0}) as graded:
        for _ in range(2):
            [found] = graded.grade([TASK], ["4"])
            assert found.parts == {"mine.py:dies": 0.0, "mine.py:exact": 1.0}


def test_only_a_trusted_run_reads_the_machines_files_and_imports_what_is_installed(place: str) -> None:
    trusted = place == "trusted"
    assert grade("mine.py:reads", "x")[0].score == float(trusted)
    assert grade("mine.py:installed", "x")[0].score == 0.5 * trusted


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("floods", "it writes more than"),
        ("hoards", "MemoryError"),
        ("network", "PermissionError"),
        ("installed", "ModuleNotFoundError: No module named 'numpy' (mine.py, line 30)"),
        ("installed", f"standard library alone: to import what else is installed, set {TRUST}=1"),
    ],
)
def test_the_sandbox_holds_it(name: str, detail: str) -> None:
    [found] = grade(f"mine.py:{name}", "x")
    assert found.outcome == "grader_error" and detail in found.detail


def test_what_its_process_answers_is_never_built_as_a_set() -> None:
    """These integers have one hash: a real set of them would take a time that is quadratic in their number."""
    source = (
        "import os, sys\n"
        "def answers(task, completion):\n"
        "    channel = sys.modules['channel']\n"
        "    channel.send(b'V' + channel.pack(dict.fromkeys(n * (2**61 - 1) for n in range(1, 2000))))\n"
        "    os._exit(0)\n"
    )
    own = OwnReward(AuthorCode("a.py:answers", {"a.py": source.encode()}, SandboxSection()))
    try:
        [found] = own.grade([TASK], ["x"])
        assert found.outcome == "grader_error" and "a set or a dict" in found.detail
    finally:
        own.close()


def test_random_numbers_are_the_same_in_every_call(place: str) -> None:
    assert len({one.score for one in [*grade("mine.py:drawn", "x", "x"), *grade("mine.py:drawn", "x")]}) == 1


def test_a_completion_of_ten_megabytes(place: str) -> None:
    long, right = grade("mine.py:exact", "4" * 10_000_000, "4")
    assert (long.score, long.outcome, right.score) == (0.0, "graded", 1.0)


def test_a_score_near_the_limit_is_not_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tasks.own.WAIT_S", 1.0)
    source = "import time\ndef slow(task, completion):\n    time.sleep(1.2)\n    return 1"
    own = OwnReward(AuthorCode("slow.py:slow", {"slow.py": source.encode()}, SandboxSection(cpu_s=1.0)))
    try:
        [found] = own.grade([TASK], ["x"])
        assert not found.repeatable
    finally:
        own.close()


def test_the_weighted_mean_of_several_rewards(place: str) -> None:
    [found] = grade({"mine.py:exact": 1.0, "number": 0.25}, "It is 4")
    assert found.score == pytest.approx(0.2)
    assert found.parts == {"mine.py:exact": 0.0, "number": 1.0}
    assert (found.outcome, found.tier) == ("graded", place)


def test_a_reward_that_fails_fails_the_mean() -> None:
    [found] = grade({"mine.py:raises": 0.5, "number": 1.0}, "4")
    assert (found.score, found.outcome, found.repeatable) == (0.0, "grader_error", False)
    assert "KeyError" in found.detail


def test_only_wrong_formats_are_a_wrong_format() -> None:
    assert grade({"mine.py:exact": 0.0, "number": 1.0}, "none")[0].outcome == "wrong_format"
    assert grade({"mine.py:exact": 1.0, "number": 1.0}, "none")[0].outcome == "graded"


@pytest.mark.parametrize("weights", [{}, {"number": 0.0}, {"number": -1.0, "math": 2.0}])
def test_weights_that_make_no_mean_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights of 0 or more"):
        SourceSection(generator="arithmetic", reward=weights)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(task, completion): return 1", "has no attribute 'exact'"),
        ("def exact(:", "SyntaxError: invalid syntax"),
        ("def exact(completion): return 1", "takes 1 positional argument but 2 were given"),
    ],
)
def test_a_file_that_cannot_work_is_named_before_the_run(place: str, source: str, message: str) -> None:
    section = TaskSection(sources=[SourceSection(name="s", generator="arithmetic", reward="mine.py:exact")])
    with Graders(section, files={"mine.py": source.encode()}) as graded, pytest.raises(GradeError, match=message):
        graded.try_out([TASK])


def test_unknown_rewards_and_missing_files_are_named() -> None:
    with pytest.raises(GradeError, match="no reward 'maths'; there are number"):
        graders("maths")
    with pytest.raises(GradeError, match="does not hold other.py"):
        graders("other.py:exact")


def test_what_cannot_start_here_is_known_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tasks.inside.Sandbox", no_sandbox)
    with (
        graders("mine.py:exact") as graded,
        pytest.raises(GradeError, match="no sandbox here; for two reasons") as error,
    ):
        graded.try_out([TASK])
    assert "\n" not in str(error.value)
    with graders("number") as graded:
        graded.try_out([TASK])


@pytest.mark.parametrize("name", ["raises", "nan", "text", "installed"])
def test_a_reward_that_cannot_grade_is_known_before_the_run(name: str) -> None:
    with (
        graders(f"mine.py:{name}") as graded,
        pytest.raises(GradeError, match="source s: its reward fails on a trial, task s/1 .*; fix the reward"),
    ):
        graded.try_out([TASK])


def no_sandbox(*_: object, **__: object) -> None:
    raise SandboxError("no sandbox here\nfor two reasons")


def test_a_failing_machine_gives_no_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that claimed 0 because its own sandbox is broken would be taken for a liar."""
    failures = [1, 2]

    def calls(self: object, values: object) -> object:
        if failures:
            failures.pop()
            raise SandboxError("no memory")
        return real(self, values)  # type: ignore[arg-type]

    real = AuthorCode.calls
    monkeypatch.setattr(AuthorCode, "calls", calls)
    with graders("mine.py:exact") as graded:
        with pytest.raises(GradeError, match="cannot grade: no memory"):
            graded.grade([TASK], ["4"])
        failures.append(1)
        assert graded.grade([TASK], ["4"])[0].score == 1.0  # once is mended by another try
