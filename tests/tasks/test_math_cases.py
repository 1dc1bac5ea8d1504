"""The math reward against tables: which part of a completion is the answer, and which answers are equal (`math_cases.txt`).

These comparisons run in this process. `test_math.py` tests how a comparison is bounded and stopped.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.sandbox import CallResult
from shoal.tasks.inside import equality
from shoal.tasks.rewards.answers import MAX_COMPLETION, final_answer
from shoal.tasks.rewards.math import Math
from shoal.tasks.task import Grade, Task

Case = tuple[str, ...]  # score, gold answer, completion
CASES: list[Case] = [
    tuple(line.replace("⏎", "\n").split(" ¦ "))
    for line in Path(__file__).with_name("math_cases.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]
LONG: list[Case] = [
    ("1", "10^{400}", "1" + "0" * 400), ("1", "1" + "0" * 400, "10" + ",000" * 133), ("1", "9" * 900, "9" * 900),
    ("0", "10^{400}", "1" + "0" * 399), ("0", "9" * 900, "9" * 899 + "8"), ("0", "18", "9" * 5000),
]  # fmt: skip
CASES += [(score, gold, rf"\boxed{{{answer}}}") for score, gold, answer in LONG]
# Known errors; each would cost more to fix than it is worth.
KNOWN_ERRORS: list[tuple[str, str, int]] = [
    (r"x^2=1", r"x=\pm 1", 0),  # an equation does not equal its solutions
    ("two", "2", 0),  # numbers in words are not read
    ("10^{30000}", r"10^{29999}\cdot 10", 0),  # numbers of more than MAX_DIGITS digits are not computed
    ("5", "6=5", 1),  # the last side of an equation counts, even if the equation is false
    ("5", r"5\approx 6", 1),  # the first side of an approximation counts
    ("9", r"900\%", 1),  # a percentage may be meant as a share or as a number
    ("9", r"9\%", 1),
    ("N", "n", 1),  # upper and lower case are equal
    (r"\{1,2\}", "(1,2)", 1),  # a pair, an open interval and a list of two look alike
    ("0.5", "0.4999999", 1),  # only six decimals are compared
    ("10^{400}+0.5", "10^{400}", 1),  # only fifteen digits are compared
]


def graded(reward: Math, cases: list[Case]) -> list[Grade]:
    return reward.grade([Task("t", "", gold) for _, gold, _ in cases], [completion for _, _, completion in cases])


@pytest.fixture(scope="module")
def local_reward() -> Math:
    reward = Math()
    reward.grader.calls = lambda values: [compared(*value) for value in values]  # type: ignore[method-assign]
    return reward


@pytest.fixture(scope="module")
def grades(local_reward: Math) -> dict[Case, Grade]:
    return dict(zip(CASES, graded(local_reward, CASES), strict=True))


def compared(gold: str, answer: str) -> CallResult:
    try:
        return CallResult("answered", equality.compare(gold, answer), repeatable=True)
    except Exception as error:  # noqa: BLE001  any error of the library is a grader error
        return CallResult("raised", detail=str(error), repeatable=True)


def test_the_table_is_large_and_has_many_wrong_answers() -> None:
    assert len(set(CASES)) == len(CASES) >= 600
    assert sum(score == "0" for score, _, _ in CASES) >= 200


def test_every_right_answer_scores_and_no_wrong_answer_does(grades: dict[Case, Grade]) -> None:
    assert not [case for case, grade in grades.items() if grade.score != float(case[0])]
    assert not [case for case, grade in grades.items() if grade.outcome == "grader_error"]


@pytest.mark.parametrize(("gold", "answer", "score"), KNOWN_ERRORS)
def test_each_known_error_is_as_listed(local_reward: Math, gold: str, answer: str, score: int) -> None:
    assert graded(local_reward, [("", gold, rf"\boxed{{{answer}}}")])[0].score == score


@pytest.mark.parametrize("form", ["{}", "The answer is {}.", "So it is ${}$."])
def test_an_answer_without_a_box_gets_the_same_grade(local_reward: Math, form: str) -> None:
    numbers = [("18", "18 dollars"), ("1000", "1,000"), ("18", "19"), ("-3", "3")]
    pairs = [(r"\frac{1}{2}", "0.5"), (r"\sqrt{8}", r"2\sqrt{2}"), *numbers]
    grades = graded(local_reward, [("", gold, form.format(answer)) for gold, answer in pairs])
    assert [grade.score for grade in grades] == [1, 1, 1, 1, 0, 0]


def test_the_same_pairs_get_the_same_grades_in_any_order_and_process(grades: dict[Case, Grade]) -> None:
    cases = CASES[::-13]
    with closing(Math(size=2)) as elsewhere:
        graded_again = graded(elsewhere, cases)
    for case, grade in zip(cases, graded_again, strict=True):
        assert replace(grade, tier="", repeatable=True) == grades[case]


# --- the final answer of a completion ---------------------------------------------------------------------------------

ANSWERS: list[tuple[str, str | None]] = [
    # boxed: the last box counts
    (r"So \boxed{42}.", "42"),
    (r"\boxed{1} and \boxed{2}", "1, 2"),
    (r"\boxed{1}, \boxed{2} \text{ and } \boxed{2}", "1, 2"),
    (r"\boxed{1} red ball and \boxed{2} blue ones", "1, 2"),
    (r"\(y_1 = \boxed{a}\) and \(y_2 = \boxed{b}\)", "a, b"),
    (r"\boxed{1} is wrong, so \boxed{2}", "2"),
    (r"First \boxed{1}. Then \boxed{2}", "2"),
    ("\\boxed{1},\n\\boxed{2}", "2"),
    (r"\boxed{255} per month. Final Answer: The final answer is $10,455$. I hope it is correct.", "10,455"),
    (r"\boxed{255}. The final answer is above.", "255"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\frac{{1}}{{2}}}", r"\frac{{1}}{{2}}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\fbox{3}", "3"),
    (r"$$\boxed {7}$$", "7"),
    (r"The answer is 9. \boxed{$8$}", "8"),
    (r"\boxed{8} The answer is 9.", "8"),
    # after thinking
    (r"<think>\boxed{1}</think> so \boxed{2}", "2"),
    ("<think>the answer is 7</think> It is 8.", "8"),
    # after a mark
    ("1 + 1 = 2\n#### 1,000", "1,000"),
    ("The answer is 5 apples, because 2 + 3 is 5 and not 6.", "5"),
    ("The answer is: $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
    ("The final answer is **18**.", "18"),
    ("**Answer:** 18", "18"),
    ("The answer is:\n\n$$x=\\frac{3}{4}$$", r"x=\frac{3}{4}"),
    ("The answer is 3 or 5", "3 or 5"),
    ("The answer is (C).", "(C)"),
    ("answer: Tuesday", "Tuesday"),
    ("My answer is therefore -5.", "-5"),
    ("The answer is $xy+1$.", "xy+1"),
    ("The answer is xy+1.", "xy+1"),
    ("Final Answer: The largest $n$ is 34.", "34"),
    ("Answer: the value of $x$ is $-3$.", "-3"),
    ("Answer: 5 is the largest of the 7 numbers.", "5"),
    ("Answer: $n$ is 34", "34"),
    (r"The answer is \"$12$ and $13$\".", "$12$ and $13$"),
    ("The answer is:\n$$\n\\begin{pmatrix}1\\\\2\n\\end{pmatrix}\n$$", "\\begin{pmatrix}1\\\\2\n\\end{pmatrix}"),
    # mathematics alone
    ("x+1", "x+1"),
    ("(1, 2]", "(1, 2]"),
    (r"$\sqrt{2}$", r"\sqrt{2}"),
    ("018", "018"),
    # the last formula or number in prose
    ("She has 5 apples left, and pays $3.", "$3"),
    ("It costs $5 and then $3 more", "$3"),
    (r"I think \(x=4\) and that is it", "x=4"),
    ("Of 10 people, 1/2 stay", "1/2"),
    ("So it takes 5-3 hours", "3"),  # it is not -3
    ("So 2,74 euros are left", "2,74"),
    ("So the chance is .5 at most", ".5"),
    ("So there are 2^{10} of them", "2^{10}"),
    ("So we get 5x in the end, of 3 terms", "3"),
    ("It costs \\$5 and then \\$3 more", "$3"),
    (r"The matrix is \begin{pmatrix}1&2\\3&4\end{pmatrix}.", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"It is $ \left[\begin{array}{cc}1&2\end{array}\right] $ then.", r"\left[\begin{array}{cc}1&2\end{array}\right]"),
    ("The number is $odd$.", "odd"),
    ("It falls to \u22125 degrees", "\u22125"),
    # no answer
    ("", None),
    (" \n", None),
    ("---", None),
    ("I do not know", None),
    (r"5 \boxed{}", None),
    (r"5 \boxed{", None),
    (r"5 \boxed{6", None),
    (r"5 \boxed 6", None),
    ("5 <think>6</think>", None),
    ("The answer is", None),
]


@pytest.mark.parametrize(("completion", "answer"), ANSWERS)
def test_each_completion_has_the_expected_final_answer(completion: str, answer: str | None) -> None:
    assert final_answer(completion) == answer


def test_only_the_end_of_a_long_completion_is_read() -> None:
    assert final_answer(r"\boxed{1}" + "and so on " * MAX_COMPLETION) is None
    assert final_answer(r"\boxed{1}" + "a " * 5_000_000 + r"\boxed{2}") == "2"
