"""Which part of a completion is its answer: one at most, the last boxed one first."""

import pytest

from shoal.tasks.rewards.math import CONSIDERED, final_answer

ANSWERS = [
    # boxed: the last one counts
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
    ("So it takes 5-3 hours", "3"),  # not -3
    ("So 2,74 euros are left", "2,74"),
    ("So the chance is .5 at most", ".5"),
    ("So there are 2^{10} of them", "2^{10}"),
    ("So we get 5x in the end, of 3 terms", "3"),
    ("It costs \\$5 and then \\$3 more", "$3"),
    (r"The matrix is \begin{pmatrix}1&2\\3&4\end{pmatrix}.", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"It is $ \left[\begin{array}{cc}1&2\end{array}\right] $ then.", r"\left[\begin{array}{cc}1&2\end{array}\right]"),
    ("The number is $odd$.", "odd"),
    ("It falls to \u22125 degrees", "\u22125"),
]


@pytest.mark.parametrize(("completion", "answer"), ANSWERS)
def test_the_answer_of_a_completion(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


NOTHING = [
    "",
    " \n",
    "---",
    "I do not know",
    r"5 \boxed{}",
    r"5 \boxed{",
    r"5 \boxed{6",
    r"5 \boxed 6",
    "5 <think>6</think>",
]


@pytest.mark.parametrize("completion", [*NOTHING, "The answer is"])
def test_no_answer(completion: str) -> None:
    assert final_answer(completion) is None


def test_only_the_end_of_a_long_completion_is_considered() -> None:
    assert final_answer(r"\boxed{1}" + "and so on " * CONSIDERED) is None
    assert final_answer(r"\boxed{1}" + "a " * 5_000_000 + r"\boxed{2}") == "2"
