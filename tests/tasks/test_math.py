"""The math reward: GSM8K, the three outcomes, and limits."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from shoal.sandbox import CallResult
from shoal.tasks.rewards.math import CPU_S, Math
from shoal.tasks.task import Grade, Task
from tests.fuzzing.answers import answers

GSM8K = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[3] / "shared" / "data") / "gsm8k_test.jsonl"


def grade(reward: Math, gold: str, completion: str) -> Grade:
    return reward.grade([Task("t", "", gold)], [completion])[0]


# --- GSM8K ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solutions() -> list[str]:
    if not GSM8K.exists():
        pytest.skip(f"no {GSM8K}")
    return [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]


@pytest.fixture(scope="module")
def tasks(solutions: list[str]) -> list[Task]:
    return [Task(f"gsm8k/{n}", "", solution.rpartition("####")[2].strip()) for n, solution in enumerate(solutions)]


RIGHT = [
    *("{}", r"Thus \boxed{{{}}}.", r"\boxed{{\${}.00}}", "She has 12 of 7. The answer is {} apples."),
    *("So she makes ${} a week.", "Therefore $3+4={}$.", "**Answer:** {}"),
]


@pytest.mark.parametrize("forms", [RIGHT, *(pytest.param([form], marks=pytest.mark.slow) for form in RIGHT)])
def test_every_gold_answer_and_every_worked_solution_of_gsm8k_scores_1(
    reward: Math, solutions: list[str], tasks: list[Task], forms: list[str]
) -> None:
    answers = [forms[n % len(forms)].format(task.answer) for n, task in enumerate(tasks)]
    for completions in (answers, solutions):
        assert sum(grade.score for grade in reward.grade(tasks, completions)) == len(tasks) == 1319


@pytest.mark.parametrize("form", ["{}", r"\boxed{{{}}}", "The answer is {} apples."])
def test_every_changed_answer_of_gsm8k_scores_0(reward: Math, tasks: list[Task], form: str) -> None:
    numbers = [int(task.answer.replace(",", "")) for task in tasks]
    changes = (lambda n: n + 1, lambda n: -n or 1, lambda n: 10 * n or 10, lambda n: n - n % 10 + (n + 5) % 10)
    for perturbed in ([change(n) for n in numbers] for change in changes):
        grades = reward.grade(tasks, [form.format(n) for n in perturbed])
        assert {(grade.score, grade.outcome) for grade in grades} == {(0, "graded")}


def test_symbolic_comparison_grades_gsm8k_correctly(reward: Math, tasks: list[Task]) -> None:
    """Whole numbers need no symbolic comparison. The forms here make the library compare them anyway."""
    some = tasks[::13]
    for wrong, form in ((0, r"\boxed{{\frac{{{}}}{{1}}+{}}}"), (1, r"\boxed{{{}+{}}}")):
        grades = reward.grade(some, [form.format(task.answer.replace(",", ""), wrong) for task in some])
        assert {(grade.score, grade.outcome) for grade in grades} == {(float(not wrong), "graded")}


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_a_wrong_answer_and_a_missing_answer_have_different_outcomes(reward: Math) -> None:
    completions = [r"\boxed{1/2}", r"\boxed{1/3}", r"\boxed{\text{half}}", "no idea", r"\boxed{\frac{5}{10}}"]
    grades = reward.grade([Task("t", "", "0.5")] * 5, completions)
    outcomes = [(1, "graded"), (0, "graded"), (0, "graded"), (0, "wrong_format"), (1, "graded")]
    assert [(grade.score, grade.outcome) for grade in grades] == outcomes


@pytest.mark.parametrize("gold", ["", "7+" * 600 + "7"], ids=["no answer", "an answer that is too long"])
def test_a_task_without_a_usable_answer_is_a_grader_error(reward: Math, gold: str) -> None:
    assert grade(reward, gold, r"\boxed{5}").outcome == "grader_error"


@pytest.mark.parametrize("gold", ["5", r"\boxed{5}", r"so $x$ is \boxed{5}", "$5$", "#### 5", " 5. "])
def test_gold_answers_may_have_many_formats(reward: Math, gold: str) -> None:
    scores = [grade(reward, gold, text).score for text in ("5", r"\boxed{\frac{10}{2}}", "6", r"\boxed{5.5}")]
    assert scores == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (CallResult("answered", (True, ""), repeatable=True), Grade(1.0)),
        (CallResult("answered", (True, "")), Grade(1.0, repeatable=False)),
        (CallResult("raised", detail="TypeError: x", repeatable=True), Grade(0.0, "grader_error", "TypeError: x")),
        (CallResult("timeout", cpu_s=1.01), "it exceeded the limit of 1 s of CPU time"),
        (CallResult("timeout", cpu_s=0.5), "it exceeded the limit of 60 s"),
        (CallResult("late"), "no time was left for it"),
        (CallResult("memory"), "it exceeded the memory limit"),
        (CallResult("output"), "it wrote more than 1048576 bytes"),
        (CallResult("died", detail="SIGSEGV"), "the grader died: SIGSEGV"),
    ],
)
def test_each_way_a_comparison_ends_has_an_outcome(
    monkeypatch: pytest.MonkeyPatch, call: CallResult, outcome: Grade | str
) -> None:
    reward = Math()
    monkeypatch.setattr(reward.grader, "calls", lambda values: [call] * len(values))
    failed = Grade(0.0, "grader_error", outcome, repeatable=False) if isinstance(outcome, str) else outcome
    assert grade(reward, "1/2", "0.5") == failed


def test_the_same_answer_is_compared_once(reward: Math, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    calls = reward.grader.calls
    monkeypatch.setattr(reward.grader, "calls", lambda values: compared.extend(values) or calls(values))
    grades = reward.grade([Task("t", "", "1/2")] * 6, ["0.5", "0.5", r"\boxed{0.5}", "0.6", "", "1/2"])
    assert ([grade.score for grade in grades], len(compared)) == ([1, 1, 1, 0, 0, 1], 2)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_an_answer_over_its_time_limit_is_stopped_and_the_next_answer_is_graded() -> None:
    hostile = r"\boxed{\int_0^1 e^{x^{x^{x}}} dx}"
    with closing(Math(cpu_s=0.5)) as reward:
        grades = reward.grade([Task("t", "", "x^2")] * 3, [r"\boxed{x \cdot x}", hostile, r"\boxed{x^3/x}"])
    assert [(grade.score, grade.outcome) for grade in grades] == [(1, "graded"), (0, "grader_error"), (1, "graded")]
    assert "0.5 s of CPU time" in grades[1].detail and not grades[1].repeatable


def test_only_the_end_of_a_completion_of_ten_megabytes_is_graded(reward: Math) -> None:
    for filling in ("9", "$", r"\(", r"\boxed{", "answer ", "****", "{", "\\text{", "1,", " ", ". "):
        text = filling * (10_000_000 // len(filling))
        assert grade(reward, "1/2", text + r" \boxed{0.5}").score == 1
        assert grade(reward, "1/2", text).score == 0


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_fuzzed_answer_exceeds_its_limit(count: int) -> None:
    ended, grades, cases = list[CallResult](), list[Grade](), list(answers(0, count))
    with closing(Math(size=2)) as reward:
        calls = reward.grader.calls
        reward.grader.calls = lambda values: ended.extend(calls(values)) or ended[-len(values) :]  # type: ignore[method-assign]
        for batch in (cases[at : at + 50] for at in range(0, count, 50)):
            grades += reward.grade([Task("t", "", gold) for gold, _ in batch], [completion for _, completion in batch])
    assert len(grades) == count
    assert max(call.cpu_s for call in ended) < 1.5 * CPU_S
    assert {grade.score for grade in grades} <= {0, 1}
    assert {call.ending for call in ended} <= {"answered", "timeout", "raised"}
    assert not [grade.detail for grade in grades if "ForbiddenError" in grade.detail]
