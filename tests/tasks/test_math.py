"""The math reward: GSM8K, its three outcomes, and limits that answers cannot outlast."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.sandbox import CallResult
from shoal.tasks.rewards.math import CPU_S, Math
from shoal.tasks.task import Grade, Task
from tests.fuzzing.answers import answers

GSM8K = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[3] / "shared" / "data") / "gsm8k_test.jsonl"


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    made = Math()
    yield made
    made.close()


def grade(reward: Math, gold: str, completion: str) -> Grade:
    [found] = reward.grade([Task("t", "", gold)], [completion])
    return found


# --- GSM8K ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solutions() -> list[str]:
    if not GSM8K.exists():
        pytest.skip(f"no {GSM8K}")
    return [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]


def golds(solutions: list[str]) -> list[Task]:
    return [Task(f"gsm8k/{n}", "", solution.rpartition("####")[2].strip()) for n, solution in enumerate(solutions)]


RIGHT = [
    "{}", r"Thus \boxed{{{}}}.", r"\boxed{{\${}.00}}", "She has 12 of 7. The answer is {} apples.",
    "So she makes ${} a week.",
    "Therefore $3+4={}$.", "**Answer:** {}",
]  # fmt: skip


@pytest.mark.parametrize("forms", [RIGHT, *(pytest.param([form], marks=pytest.mark.slow) for form in RIGHT)])
def test_every_gold_answer_and_every_worked_solution_of_gsm8k_scores_1(
    reward: Math, solutions: list[str], forms: list[str]
) -> None:
    tasks = golds(solutions)
    answers = [forms[n % len(forms)].format(task.answer) for n, task in enumerate(tasks)]
    for completions in (answers, solutions):
        assert sum(one.score for one in reward.grade(tasks, completions)) == len(tasks) == 1319


@pytest.mark.parametrize("form", ["{}", r"\boxed{{{}}}", "The answer is {} apples."])
def test_no_perturbed_answer_of_gsm8k_scores(reward: Math, solutions: list[str], form: str) -> None:
    tasks = golds(solutions)
    numbers = [int(task.answer.replace(",", "")) for task in tasks]
    changes = (lambda n: n + 1, lambda n: -n or 1, lambda n: 10 * n or 10, lambda n: n - n % 10 + (n + 5) % 10)
    for perturbed in ([change(n) for n in numbers] for change in changes):
        grades = reward.grade(tasks, [form.format(n) for n in perturbed])
        assert (sum(one.score for one in grades), {one.outcome for one in grades}) == (0, {"graded"})


def test_gsm8k_by_symbolic_comparison(reward: Math, solutions: list[str]) -> None:
    """Whole numbers are compared at sight; here each goes through the library."""
    tasks = golds(solutions)[::13]
    for wrong, form in ((0, r"\boxed{{\frac{{{}}}{{1}}+{}}}"), (1, r"\boxed{{{}+{}}}")):
        grades = reward.grade(tasks, [form.format(task.answer.replace(",", ""), wrong) for task in tasks])
        assert {(one.score, one.outcome) for one in grades} == {(float(not wrong), "graded")}


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_outcomes_stay_apart(reward: Math) -> None:
    completions = [r"\boxed{1/2}", r"\boxed{1/3}", r"\boxed{\text{half}}", "no idea", r"\boxed{\frac{5}{10}}"]
    grades = reward.grade([Task("t", "", "0.5")] * 5, completions)
    outcomes = [(1, "graded"), (0, "graded"), (0, "graded"), (0, "wrong_format"), (1, "graded")]
    assert [(one.score, one.outcome) for one in grades] == outcomes


def test_a_task_without_an_answer_is_a_grader_error(reward: Math) -> None:
    assert grade(reward, "", r"\boxed{5}").outcome == "grader_error"
    assert grade(reward, "7+" * 600 + "7", r"\boxed{5}").outcome == "grader_error"  # too long to be read


@pytest.mark.parametrize("gold", ["5", r"\boxed{5}", r"so $x$ is \boxed{5}", "$5$", "#### 5", " 5. "])
def test_gold_answers_come_in_many_wrappings(reward: Math, gold: str) -> None:
    found = [grade(reward, gold, text).score for text in ("5", r"\boxed{\frac{10}{2}}", "6", r"\boxed{5.5}")]
    assert found == [1, 1, 0, 0]


def ended(monkeypatch: pytest.MonkeyPatch, call: CallResult) -> Grade:
    reward = Math()
    monkeypatch.setattr(reward.grader, "calls", lambda values: [call] * len(values))
    return grade(reward, "1/2", "0.5")


def test_how_a_comparison_ends_becomes_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, CallResult("answered", (True, ""), repeatable=True)) == Grade(1.0)
    assert ended(monkeypatch, CallResult("answered", (True, ""))) == Grade(1.0, repeatable=False)
    raised = ended(monkeypatch, CallResult("raised", detail="TypeError: x", repeatable=True))
    assert raised == Grade(0.0, "grader_error", "TypeError: x")
    slow = ended(monkeypatch, CallResult("timeout", cpu_s=1.01))
    assert slow == Grade(0.0, "grader_error", "the limit of 1 s of CPU time passed", repeatable=False)
    assert ended(monkeypatch, CallResult("timeout", cpu_s=0.5)).detail == "the limit of 60 s passed"
    for call in (CallResult("late"), CallResult("memory"), CallResult("output"), CallResult("died", detail="SIGSEGV")):
        found = ended(monkeypatch, call)
        assert (found.score, found.outcome, found.repeatable) == (0, "grader_error", False)


def test_the_same_answer_is_compared_once(reward: Math, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    calls = reward.grader.calls
    monkeypatch.setattr(reward.grader, "calls", lambda values: asked.extend(values) or calls(values))
    grades = reward.grade([Task("t", "", "1/2")] * 6, ["0.5", "0.5", r"\boxed{0.5}", "0.6", "", "1/2"])
    assert ([one.score for one in grades], len(asked)) == ([1, 1, 1, 0, 0, 1], 2)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_an_answer_that_burns_its_time_is_ended_and_the_next_one_graded() -> None:
    reward = Math(cpu_s=0.5)
    try:
        hostile = r"\boxed{\int_0^1 e^{x^{x^{x}}} dx}"
        found = reward.grade([Task("t", "", "x^2")] * 3, [r"\boxed{x \cdot x}", hostile, r"\boxed{x^3/x}"])
        assert [(one.score, one.outcome) for one in found] == [(1, "graded"), (0, "grader_error"), (1, "graded")]
        assert "0.5 s of CPU time" in found[1].detail and not found[1].repeatable
    finally:
        reward.close()


def test_ten_megabytes_are_no_problem(reward: Math) -> None:
    for filling in ("9", "$", r"\(", r"\boxed{", "answer ", "****", "{", "\\text{", "1,", " ", ". "):
        text = filling * (10_000_000 // len(filling))
        assert grade(reward, "1/2", text + r" \boxed{0.5}").score == 1
        assert grade(reward, "1/2", text).score == 0


def fuzz(count: int) -> None:
    reward, ended, grades = Math(size=2), list[CallResult](), list[Grade]()
    calls = reward.grader.calls
    reward.grader.calls = lambda values: ended.extend(calls(values)) or ended[-len(values) :]  # type: ignore[method-assign]
    cases = list(answers(0, count))
    for batch in (cases[at : at + 50] for at in range(0, count, 50)):
        grades += reward.grade([Task("t", "", gold) for gold, _ in batch], [completion for _, completion in batch])
    reward.close()
    assert len(grades) == count
    assert max(call.cpu_s for call in ended) < 1.5 * CPU_S
    assert {one.score for one in grades} <= {0, 1}
    assert {call.ending for call in ended} <= {"answered", "timeout", "raised"}
    assert not [one.detail for one in grades if "ForbiddenError" in one.detail]


def test_no_fuzzed_answer_outlasts_its_limit() -> None:
    fuzz(50)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_none_of_ten_thousand_fuzzed_answers_outlasts_its_limit() -> None:
    fuzz(10_000)
