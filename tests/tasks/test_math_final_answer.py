"""Which part of a completion is its answer: one at most, the last boxed one first."""

import pytest

from shoal.tasks.rewards.math.final_answer import CONSIDERED, final_answer

ANSWERS = [
    # boxed: the last one counts
    (r"So \boxed{42}.", "42"),
    (r"\boxed{1} and \boxed{2}", "2"),
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
    ("So it takes 5-3 hours", "3"),  # not -3
    ("It falls to \u22125 degrees", "\u22125"),
]


@pytest.mark.parametrize(("completion", "answer"), ANSWERS)
def test_the_answer_of_a_completion(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    "completion",
    [
        "",
        " \n",
        "---",
        "I do not know",
        r"5 \boxed{}",
        r"5 \boxed{",
        r"5 \boxed{6",
        r"5 \boxed 6",
        "5 <think>6</think>",
        "The answer is",
    ],
)
def test_no_answer(completion: str) -> None:
    assert final_answer(completion) is None


def test_only_the_end_of_a_long_completion_is_considered() -> None:
    assert final_answer(r"\boxed{1}" + "and so on " * CONSIDERED) is None
    assert final_answer(r"\boxed{1}" + "a " * 5_000_000 + r"\boxed{2}") == "2"
