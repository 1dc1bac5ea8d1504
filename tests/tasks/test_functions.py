"""The generator `functions`: its texts and its tests."""

import json

import pytest

from shoal.errors import ShoalError
from shoal.tasks.sources.generators import functions


def test_each_kind_and_constant_gives_one_task_and_no_constant_function_passes_it() -> None:
    rows = functions({})
    assert len({row["question"] for row in rows}) == len(rows) > 300
    for row in rows:
        outputs = [json.dumps(case["output"]) for case in json.loads(row["tests"])["cases"]]
        assert len(set(outputs)) > 1, row["question"]
    with pytest.raises(ShoalError, match="generator functions has no option kind"):
        functions({"kind": "add"})


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("Write a Python function f(x) that returns x plus 3.", {"args": [0], "output": 3}),
        (
            "Write a Python function f(x) that returns the numbers in the list x that are greater than 3.",
            {"args": [[4, 9, 2]], "output": [4, 9]},
        ),
        (
            "Write a Python function f(x) that returns the last 3 characters of the string x.",
            {"args": ["shoal"], "output": "oal"},
        ),
    ],
)
def test_the_tests_are_what_the_text_says(question: str, first: object) -> None:
    [row] = [row for row in functions({}) if row["question"] == question]
    tests = json.loads(row["tests"])
    assert (row["question"], tests["entry"], tests["cases"][0]) == (question, "f", first)
