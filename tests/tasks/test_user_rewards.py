"""Reward functions written by users: what a function sees, what the sandbox forbids, and that calls are independent."""

import re
import time
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from shoal import tasks
from shoal.config import load, parse
from shoal.config.tasks import SandboxSection, SourceSection, TaskSection
from shoal.sandbox import SandboxError
from shoal.tasks import Grade, Graders, Task
from shoal.tasks.task import TRUST, GradeError
from shoal.tasks.user_code import UserCode, UserReward

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
FAILING = ("raises", "nan", "text", "installed")
TASK = Task("s/1", "2+2?", "4", source="s", metadata='{"level": 1}')


def graders(reward: str | dict[str, float], **sandbox: float) -> Graders:
    source = SourceSection(name="s", generator="arithmetic", reward=reward)
    section = TaskSection(sources=[source], sandbox=SandboxSection(**sandbox))  # type: ignore[arg-type]
    return Graders(section, files={"mine.py": SOURCE.encode()})


def grade(reward: str | dict[str, float], *completions: str, **sandbox: float) -> list[Grade]:
    with graders(reward, **sandbox) as rewards:
        return rewards.grade([TASK] * len(completions), completions)


def grade_with(source: str, cpu_s: float = 5.0) -> Grade:
    """Return the grade that the function `score` in this source gives to a completion."""
    with closing(UserReward(UserCode("a.py:score", {"a.py": source.encode()}, SandboxSection(cpu_s=cpu_s)))) as reward:
        return reward.grade([TASK], ["x"])[0]


def test_a_function_sees_the_task_with_its_metadata_parsed_and_scores_each_completion(tier: str) -> None:
    right, wrong = grade("mine.py:exact", " 4", "5")
    assert (right.score, right.outcome, right.tier, right.repeatable) == (1.0, "graded", tier, True)
    assert (wrong.score, wrong.outcome) == (0.0, "graded")
    uncertain = not right.certain and not wrong.certain
    assert uncertain, "no grade may be certain, because the function may read its machine"
    assert grade("folder/mine.py:sees", "")[0].score == 0.25


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("raises", "KeyError: 'x' (mine.py, line 11)"),
        ("deep", "KeyError: 'x' (mine.py, line 11)"),
        ("nan", "it returned nan"),
        ("two", "it returned 2.0; scores must be within [0, 1]"),
        ("below", "scores must be within [0, 1]"),
        ("text", "it returned str '1.0' instead of a number"),
        ("none", "it returned NoneType"),
        ("dies", "its process ended"),
    ],
)
@pytest.mark.usefixtures("tier")
def test_a_function_that_fails_gives_the_outcome_grader_error(name: str, detail: str) -> None:
    for result in grade(f"mine.py:{name}", "x", "x"):
        assert (result.score, result.outcome, result.repeatable) == (0.0, "grader_error", False)
        assert detail in result.detail


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("name", ["sleeps", "spins"])
def test_an_endless_function_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tasks.user_code.WAIT_S", 0.5)
    started = time.monotonic()
    [result] = grade(f"mine.py:{name}", "x", cpu_s=1.0)
    assert result.outcome == "grader_error" and "(tasks.sandbox.cpu_s)" in result.detail
    assert time.monotonic() - started < 60


@pytest.mark.usefixtures("tier")
def test_the_completion_after_a_failure_is_graded() -> None:
    with graders({"mine.py:dies": 0.0, "mine.py:exact": 1.0}) as rewards:
        for _ in range(2):
            [result] = rewards.grade([TASK], ["4"])
            assert result.parts == {"mine.py:dies": 0.0, "mine.py:exact": 1.0}


def test_only_a_trusted_run_reads_the_machines_files_and_imports_installed_packages(tier: str) -> None:
    trusted = tier == "trusted"
    assert grade("mine.py:reads", "x")[0].score == float(trusted)
    assert grade("mine.py:installed", "x")[0].score == 0.5 * trusted


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("floods", "it wrote more than"),
        ("hoards", "MemoryError"),
        ("network", "PermissionError"),
        ("installed", "ModuleNotFoundError: No module named 'numpy' (mine.py, line 30)"),
        ("installed", f"only Python's standard library: to import other installed packages, set {TRUST}=1"),
    ],
)
def test_the_sandbox_confines_a_function(name: str, detail: str) -> None:
    [result] = grade(f"mine.py:{name}", "x")
    assert result.outcome == "grader_error" and detail in result.detail


def test_an_answer_that_encodes_a_dict_is_refused_before_the_dict_is_built() -> None:
    """The hashes of these integers are equal, so building a dict of them would take time quadratic in their number."""
    source = (
        "import os, sys\n"
        "def score(task, completion):\n"
        "    channel = sys.modules['channel']\n"
        "    channel.send(b'V' + channel.pack(dict.fromkeys(n * (2**61 - 1) for n in range(1, 2000))))\n"
        "    os._exit(0)\n"
    )
    result = grade_with(source)
    assert result.outcome == "grader_error" and "a set or a dict" in result.detail


@pytest.mark.usefixtures("tier")
def test_random_numbers_are_the_same_in_every_call() -> None:
    results = [*grade("mine.py:drawn", "x", "x"), *grade("mine.py:drawn", "x")]
    assert len({result.score for result in results}) == 1


@pytest.mark.usefixtures("tier")
def test_a_completion_of_ten_megabytes_is_graded() -> None:
    long, right = grade("mine.py:exact", "4" * 10_000_000, "4")
    assert (long.score, long.outcome, right.score) == (0.0, "graded", 1.0)


def test_a_score_computed_in_nearly_the_time_limit_is_not_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tasks.user_code.WAIT_S", 1.0)
    source = "import time\ndef score(task, completion):\n    time.sleep(1.2)\n    return 1"
    assert not grade_with(source, cpu_s=1.0).repeatable


def test_several_rewards_give_the_weighted_mean(tier: str) -> None:
    [result] = grade({"mine.py:exact": 1.0, "number": 0.25}, "It is 4")
    assert result.score == pytest.approx(0.2)
    assert result.parts == {"mine.py:exact": 0.0, "number": 1.0}
    assert (result.outcome, result.tier) == ("graded", tier)
    [failed] = grade({"mine.py:raises": 0.5, "number": 1.0}, "4")
    assert (failed.score, failed.outcome, failed.repeatable) == (0.0, "grader_error", False)
    assert "KeyError" in failed.detail
    assert grade({"mine.py:exact": 0.0, "number": 1.0}, "none")[0].outcome == "wrong_format"
    assert grade({"mine.py:exact": 1.0, "number": 1.0}, "none")[0].outcome == "graded"


@pytest.mark.parametrize("weights", [{}, {"number": 0.0}, {"number": -1.0, "math": 2.0}])
def test_reward_weights_that_define_no_mean_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights of at least 0, and one weight above 0"):
        SourceSection(generator="arithmetic", reward=weights)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(task, completion): return 1", "has no attribute 'exact'"),
        ("def exact(:", "SyntaxError: invalid syntax"),
        ("def exact(completion): return 1", "takes 1 positional argument but 2 were given"),
    ],
)
@pytest.mark.usefixtures("tier")
def test_the_trial_before_a_run_names_a_reward_file_that_cannot_work(source: str, message: str) -> None:
    section = TaskSection(sources=[SourceSection(name="s", generator="arithmetic", reward="mine.py:exact")])
    with Graders(section, files={"mine.py": source.encode()}) as rewards, pytest.raises(GradeError, match=message):
        rewards.try_out([TASK])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (f"mine.py:{name}", "source s: its reward fails in a trial on task s/1 .*; fix the reward")
            for name in FAILING
        ),
        ("other.py:exact", "does not hold other.py"),
        ("maths", "no reward 'maths'; there are number"),
    ],
)
def test_the_trial_before_a_run_names_a_reward_that_cannot_grade(name: str, message: str) -> None:
    with pytest.raises(GradeError, match=message), graders(name) as rewards:
        rewards.try_out([TASK])


def test_the_trial_before_a_run_reports_a_missing_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sandbox(*_: object, **__: object) -> None:
        raise SandboxError("no sandbox here\nfor two reasons")

    monkeypatch.setattr("shoal.tasks.inside.Sandbox", no_sandbox)
    with (
        pytest.raises(GradeError, match="no sandbox here; for two reasons") as error,
        graders("mine.py:exact") as rewards,
    ):
        rewards.try_out([TASK])
    assert "\n" not in str(error.value)
    with graders("number") as rewards:
        rewards.try_out([TASK])


def test_a_machine_whose_sandbox_fails_gives_no_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that reported 0 because its own sandbox fails would look like a liar, so grading must raise an error."""
    failures = [1, 2]

    def calls(self: object, values: object) -> object:
        if failures:
            failures.pop()
            raise SandboxError("no memory")
        return real(self, values)  # type: ignore[arg-type]

    real = UserCode.calls
    monkeypatch.setattr(UserCode, "calls", calls)
    with graders("mine.py:exact") as rewards:
        with pytest.raises(GradeError, match="cannot grade: no memory"):
            rewards.grade([TASK], ["4"])
        failures.append(1)
        assert rewards.grade([TASK], ["4"])[0].score == 1.0, "the second try must succeed after one failure"


# --- configs in examples/ and docs/tasks.md ---------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own"
BLOCKS = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "tasks.md").read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_a_valid_config(path: Path) -> None:
    assert load(path).tasks.sources


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_config_in_the_docs_page_on_tasks_is_valid(block: str) -> None:
    assert parse(tomllib.loads(block))


def test_the_example_with_own_problems_and_rewards_gives_scores_and_has_at_most_30_lines() -> None:
    lines = [line for name in ("my.toml", "my_rewards.py") for line in (OWN / name).read_text().splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= 30
    settings = load(OWN / "my.toml").tasks
    loaded = tasks.load(settings)
    assert (len(loaded.train), len(loaded.heldout)) == (336, 64)
    task = next(task for task in loaded.train if int(task.answer) > 1)
    with Graders(settings, files=loaded.files) as rewards:
        grades = rewards.grade([task] * 3, [task.answer, str(int(task.answer) - 1), "none"])
    assert [grade.score for grade in grades] == pytest.approx([1.0, 0.3, 0.0])
    assert {grade.outcome for grade in grades} == {"graded"}
