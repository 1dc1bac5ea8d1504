"""The rewards `math`, `number` and `code` against tables of answers, written after public reports about graders.

Each row has the `expected` score, whether that expectation is `firm` (it can be defended), and the score `at_bbd2e358`,
before the rewards were rewritten.
"""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.sandbox import ProgramLimits, best_tier
from shoal.tasks.rewards.answers import Number
from shoal.tasks.rewards.code import Code
from shoal.tasks.rewards.math import Math
from shoal.tasks.task import Grade, Task

from .test_math_cases import compared

# False positives and false negatives of the firm rows, before and now.
FIGURES = {"math": ((71, 70), (0, 0)), "number": ((10, 8), (0, 0)), "code": ((1, 11), (0, 0))}
# Arguable rows that are decided otherwise than in the table.
DECIDED = {
    (r"45^\circ", r"\boxed{\frac{\pi}{4}}"): "degrees are not converted to radians, outside of sine and cosine",
    ("15:00", r"\boxed{3:00\text{ pm}}"): "times of day are not converted",
    ("5", r"\boxed{5'}"): "a prime after a number, as in 5 feet or 5 minutes, does not count",
    ("(5,2)", r"\boxed{\{5,2\}}"): "the brackets around two numbers do not count",
    (r"x=k\pi, k\in\mathbb{Z}", r"\boxed{x=k\pi}"): "the range of a parameter counts",
    ("B", r"\boxed{\textbf{(B)}\ 12}"): "a choice is its letter alone",
    ("B", r"\boxed{\text{B: }12}"): "the same",
    ("C", r"\boxed{\text{(C) }7}"): "the same",
    ("A", "Option A"): "prose without a mark, a formula or a number has no answer",
    ("42", r"\boxed42"): "a box without braces is not complete",
    ("x+1", r"\boxed{(x+1)^{10^4}/(x+1)^{9999}}"): "an answer that takes too long to compute is wrong",
    ("3+4i", r"\boxed{\sqrt{7+24i+0}^{2}-4-20i}"): "the values are equal: the gold answer is (7+24i)-4-20i",
}


# These answers are compared in a process with a limit, and the others in this one.
COSTLY = (
    r"\zeta(2)^{\zeta(3)^{99999}}",
    r"\binom{10^6}{5\cdot10^5}",
    r"(x+1)^{10^4}/(x+1)^{9999}",
    r"e^{\pi\sqrt{163}}",
)


def rows(name: str) -> list[dict[str, Any]]:
    text = (Path(__file__).parent / "grading" / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def wrong(table: Sequence[dict[str, Any]], scores: Sequence[float]) -> tuple[int, int]:
    """Return the false positives and false negatives among the firm rows."""
    pairs = Counter((row["expected"], score) for row, score in zip(table, scores, strict=True) if row["firm"])
    return pairs[0, 1.0], pairs[1, 0.0]


def check(name: str, grades: Sequence[Grade]) -> None:
    table = rows(name)
    before = wrong(table, [row["at_bbd2e358"] for row in table])
    now = wrong(table, [grade.score for grade in grades])
    failed = [row for row, grade in zip(table, grades, strict=True) if row["firm"] and grade.score != row["expected"]]
    assert (before, now) == FIGURES[name], failed
    assert not [
        row for row, grade in zip(table, grades, strict=True) if grade.outcome == "grader_error" and row["firm"]
    ]


def test_math() -> None:
    table = rows("math")
    with closing(Math()) as reward:
        calls = reward.grader.calls
        reward.grader.calls = lambda values: [  # type: ignore[method-assign]
            compared(*value) if value[1] not in COSTLY else calls([value])[0] for value in values
        ]
        grades = reward.grade([Task("t", "", row["gold"]) for row in table], [row["completion"] for row in table])
    check("math", grades)
    arguable = {
        (row["gold"], row["completion"])
        for row, grade in zip(table, grades, strict=True)
        if not row["firm"] and grade.score != row["expected"]
    }
    assert arguable == DECIDED.keys()


def test_number() -> None:
    table = rows("number")
    check("number", Number().grade([Task("t", "", row["gold"]) for row in table], [row["completion"] for row in table]))


def test_code() -> None:
    table = rows("code")
    tasks = [Task("t", "", "", tests=json.dumps(row["tests"])) for row in table]
    with closing(Code(ProgramLimits(cpu_s=3.0, wall_s=60.0), best_tier(), size=2)) as reward:
        grades = reward.grade(tasks, [row["completion"] for row in table])
    check("code", grades)
