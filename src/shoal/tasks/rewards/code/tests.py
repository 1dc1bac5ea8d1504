"""The unit tests of a code task, read from `Task.tests`.

Invariant: either tests in one of three known shapes or a TestsError that says what is wrong; never a guess. Called
by `reward.py`; `sources.schemas` writes the JSON.

    {"kind": "stdin", "cases": [{"input": text, "output": text}, ...]}
    {"kind": "functional", "entry": "f", "cases": [{"args": [...], "output": value}, ...]}
    {"kind": "asserts", "entry": "f", "code": text: `def check(candidate)` or assert lines, "prompt": text before programs}
"""

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.errors import ShoalError

Cases = TypeVar("Cases", "Stdin", "Functional")


class TestsError(ShoalError):
    """A task whose tests cannot be run; the message says why."""

    __test__ = False  # nothing for pytest


@dataclass(frozen=True)
class Stdin:
    cases: list[tuple[str, str]]  # input, expected output


@dataclass(frozen=True)
class Functional:
    entry: str  # a function, or a method of a class `Solution`
    cases: list[tuple[list[Any], Any]]  # arguments, expected value
    prompt: str = ""


@dataclass(frozen=True)
class Asserts:
    entry: str
    code: str
    prompt: str = ""


Tests = Stdin | Functional | Asserts


def read_tests(text: str) -> Tests:
    """Raises TestsError."""
    if not text:
        raise TestsError('the task has no tests: say which column holds them, fields = { tests = "..." }')
    try:
        tests = json.loads(text)
        if not isinstance(tests, dict):
            raise TestsError(f'the task\'s tests are {text[:40]}, not an object with "kind": see docs/tasks.md, Fields')
        kind = tests["kind"]
        if kind == "stdin":
            return _with_cases(Stdin([(_text(case["input"]), _text(case["output"])) for case in tests["cases"]]))
        if kind == "functional":
            cases = [(list(case["args"]), case["output"]) for case in tests["cases"]]
            return _with_cases(Functional(_text(tests["entry"]), cases, _text(tests.get("prompt", ""))))
        if kind == "asserts":
            return Asserts(_text(tests["entry"]), _text(tests["code"]), _text(tests.get("prompt", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TestsError(f"the task's tests cannot be read ({type(error).__name__}: {error})") from error
    raise TestsError(f"the task's tests are of kind {str(kind)[:40]!r}; known: stdin, functional, asserts")


def _with_cases(tests: "Cases") -> "Cases":
    if not tests.cases:
        raise TestsError("the task's tests have no cases")
    return tests


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value
