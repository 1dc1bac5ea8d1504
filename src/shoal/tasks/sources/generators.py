"""The generators `arithmetic` and `functions`: verifiable tasks for a small model and a short run.

`arithmetic` makes small sums. A sum's text does not depend on the other options, so a sum held out in
one run (by a hash of its text) is held out in every run with as many held-out tasks.
`functions` asks for small Python functions. A task's text and tests depend only on its kind and its constant, the tests
are computed from the expression that the text describes, and no function that ignores its argument passes them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.tasks.task import TasksNotFoundError


def arithmetic(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return every sum of two operands from `operand_min` (0) to `operand_max` (29). Raises TasksNotFoundError."""
    given: dict[str, Any] = {"operand_min": 0, "operand_max": 29, **options}
    low, high = given["operand_min"], given["operand_max"]
    if len(given) != 2 or type(low) is not int or type(high) is not int or not 0 <= low <= high:
        raise TasksNotFoundError(
            f"options of generator arithmetic are {dict(options)}: give whole numbers, 0 <= operand_min <= operand_max"
        )
    operands = range(low, high + 1)
    return [{"question": f"{a} + {b}", "answer": str(a + b), "reward": "number"} for a in operands for b in operands]


# --- functions --------------------------------------------------------------------------------------------------------

LARGEST = 50  # constant in a task
NUMBERS: list[Any] = [0, 1, 5, -3, 12]
LISTS: list[Any] = [[4, 9, 2], [7, 7, 1, 12], [3], [-5, 10, 6, 0, 8]]
WORDS: list[Any] = ["shoal", "a", "Reef", "tide pool"]

# Text with {n} for the constant, the function to write, and the arguments of its tests.
KINDS: dict[str, tuple[str, Callable[[Any, int], Any], list[Any]]] = {
    "add": ("returns x plus {n}", lambda x, n: x + n, NUMBERS),
    "subtract": ("returns x minus {n}", lambda x, n: x - n, NUMBERS),
    "multiply": ("returns x times {n}", lambda x, n: x * n, NUMBERS),
    "square_plus": ("returns the square of x plus {n}", lambda x, n: x * x + n, NUMBERS),
    "twice_plus": ("returns twice x plus {n}", lambda x, n: 2 * x + n, NUMBERS),
    "remainder": ("returns the remainder of x divided by {n}", lambda x, n: x % n, NUMBERS),
    "is_multiple": ("returns True if x is divisible by {n}, else False", lambda x, n: x % n == 0, NUMBERS),
    "is_greater": ("returns True if x is greater than {n}, else False", lambda x, n: x > n, NUMBERS),
    "larger": ("returns the larger of x and {n}", lambda x, n: max(x, n), NUMBERS),
    "smaller": ("returns the smaller of x and {n}", lambda x, n: min(x, n), NUMBERS),
    "distance": ("returns the absolute difference of x and {n}", lambda x, n: abs(x - n), NUMBERS),
    "sum_plus": ("returns the sum of the list x plus {n}", lambda x, n: sum(x) + n, LISTS),
    "count_above": (
        "returns how many numbers in the list x are greater than {n}",
        lambda x, n: sum(v > n for v in x),
        LISTS,
    ),
    "keep_above": (
        "returns the numbers in the list x that are greater than {n}",
        lambda x, n: [v for v in x if v > n],
        LISTS,
    ),
    "scale": ("returns the list x with every number multiplied by {n}", lambda x, n: [v * n for v in x], LISTS),
    "shift": ("returns the list x with {n} added to every number", lambda x, n: [v + n for v in x], LISTS),
    "append": ("returns the list x with {n} appended to it", lambda x, n: [*x, n], LISTS),
    "contains": ("returns True if {n} is in the list x, else False", lambda x, n: n in x, LISTS),
    "repeat": ("returns the string x repeated {n} times", lambda x, n: x * n, WORDS),
    "first": ("returns the first {n} characters of the string x", lambda x, n: x[:n], WORDS),
    "last": ("returns the last {n} characters of the string x", lambda x, n: x[-n:], WORDS),
    "longer": ("returns True if the string x has more than {n} characters, else False", lambda x, n: len(x) > n, WORDS),
}


def functions(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a task for every kind and constant up to `LARGEST`. Raises TasksNotFoundError."""
    if options:
        raise TasksNotFoundError(f"generator functions has no option {next(iter(options))}")
    return [row for kind in KINDS for n in range(1, LARGEST + 1) if (row := _row(kind, n))]


def _row(kind: str, n: int) -> dict[str, str] | None:
    """None if all outputs are equal: a constant would pass."""
    text, function, arguments = KINDS[kind]
    cases = [{"args": [argument], "output": function(argument, n)} for argument in arguments]
    if all(case["output"] == cases[0]["output"] for case in cases):
        return None
    return {
        "question": f"Write a Python function f(x) that {text.format(n=n)}.",
        "tests": json.dumps({"kind": "functional", "entry": "f", "cases": cases}),
        "reward": "code",
    }
