"""The generator `functions`: its texts, its tests, its options."""

import json

import pytest

from shoal.errors import ShoalError
from shoal.tasks.sources.generators import KINDS, functions


def test_kinds_and_constants_give_one_task_each() -> None:
    rows = functions({"kinds": ["add", "repeat"], "largest": 7})
    assert len({row["question"] for row in rows}) == len(rows) == 14
    assert len(functions({"kinds": list(KINDS)})) == len(functions({})) > 300


@pytest.mark.parametrize(
    ("kind", "question", "first"),
    [
        ("add", "Write a Python function f(x) that returns x plus 3.", {"args": [0], "output": 3}),
        (
            "keep_above",
            "Write a Python function f(x) that returns the numbers in the list x that are greater than 3.",
            {"args": [[4, 9, 2]], "output": [4, 9]},
        ),
        (
            "last",
            "Write a Python function f(x) that returns the last 3 characters of the string x.",
            {"args": ["shoal"], "output": "oal"},
        ),
    ],
)
def test_the_tests_are_what_the_text_says(kind: str, question: str, first: object) -> None:
    row = functions({"kinds": [kind], "largest": 3})[-1]
    tests = json.loads(row["tests"])
    assert (row["question"], tests["entry"], tests["cases"][0]) == (question, "f", first)


def test_no_constant_function_passes_a_task() -> None:
    for row in functions({}):
        outputs = [json.dumps(case["output"]) for case in json.loads(row["tests"])["cases"]]
        assert len(set(outputs)) > 1, row["question"]
    assert functions({"kinds": ["remainder"], "largest": 1}) == []  # x % 1 is 0


@pytest.mark.parametrize("options", [{"kinds": ["divide"]}, {"largest": 0}, {"kind": "add"}])
def test_impossible_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ShoalError, match=f"options of generator functions: .*({next(iter(options))}|divide)"):
        functions(options)
