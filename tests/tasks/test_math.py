"""The math reward: GSM8K, the three outcomes, and limits."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from shoal.config.tasks import SandboxSection
from shoal.sandbox import Budget, CallResult
from shoal.tasks.inside import equality
from shoal.tasks.rewards.graders import REWARDS
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


def test_an_answer_that_costs_too_much_is_wrong_and_a_gold_answer_that_does_is_a_grader_error() -> None:
    costly = r"\int_0^1 e^{x^{x^{x}}} dx"
    tasks = [Task("t", "", gold) for gold in ("5", "5", "5", costly, "9+" * 600 + "9")]
    with closing(Math(cpu_s=0.5, size=2)) as reward:
        grades = reward.grade(
            tasks, [rf"\boxed{{{costly}}}", r"\boxed{\binom{10^6}{5\cdot10^5}}", r"\boxed{5}", "5", "5"]
        )
    outcomes = [(grade.score, grade.outcome) for grade in grades]
    assert outcomes == [(0, "graded"), (0, "graded"), (1, "graded"), (0, "grader_error"), (0, "grader_error")]
    assert not grades[0].certain  # another machine may be faster


LITERAL = [
    ("56088", "123*456", 0), ("56088", "56,088", 1), ("56088", "x = 56088", 1), ("56088", r"123\cdot 456 = 56088", 1),
    ("12", r"\gcd(48,36)", 0), ("12", "2^3+4", 0), ("12", r"\frac{24}{2}", 0), ("12", r"12\text{ apples}", 1),
    ("12", "12.0", 1), ("1/3", r"\int_0^1 x^2 dx", 0), ("1/3", r"\frac{1}{3}", 1), ("1/3", "2/6", 0), ("0.5", r"\frac12", 1),
    ("0.5", r"50\%", 1), (r"2\frac12", "2.5", 1), ("1500", r"1.5\times 10^3", 1), ("-7", "-7.0", 1), ("-7", "2-9", 0),
    ("-7", r"\begin{vmatrix}1&2\\5&3\end{vmatrix}", 0), ("5, 6", "6, 5", 1), ("5, 6", "2+3, 6", 0), ("(1,2)", "(1,1+1)", 0),
    (r"2\sqrt3", r"\sqrt{12}", 1), ("x+1", "1+x", 1), ("120", "5!", 0), ("1024", "2^{10}", 0), ("5", r"\log_2 32", 0),
    ("2x", r"\frac{d}{dx}x^2", 1), ("Tuesday", "tuesday", 1),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "score"), LITERAL)
def test_a_literal_answer_is_a_number_if_the_gold_answer_is_one(gold: str, answer: str, score: int) -> None:
    assert equality.compare(gold, answer, "literal")[0] == score
    assert equality.compare(gold, answer)[0]  # without the option, a formula is right, too


def test_the_reward_math_literal_refuses_formulas() -> None:
    with closing(REWARDS["math_literal"](SandboxSection(), Budget())) as reward:
        grades = reward.grade([Task("t", "", "56088")] * 2, [r"\boxed{123*456}", r"\boxed{56088.0}"])
    assert [grade.score for grade in grades] == [0, 1]


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
    assert [(grade.score, grade.outcome) for grade in grades] == [(1, "graded"), (0, "graded"), (1, "graded")]
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
        reward.grader.calls = lambda values: ended.extend(found := calls(values)) or found  # type: ignore[method-assign]
        for batch in (cases[at : at + 50] for at in range(0, count, 50)):
            grades += reward.grade([Task("t", "", gold) for gold, _ in batch], [completion for _, completion in batch])
    assert len(grades) == count
    assert max(call.cpu_s for call in ended) < 1.5 * CPU_S
    assert {grade.score for grade in grades} <= {0, 1}
    assert {call.ending for call in ended} <= {"answered", "timeout", "raised"}
    assert not [grade.detail for grade in grades if "ForbiddenError" in grade.detail]
