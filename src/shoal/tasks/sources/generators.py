"""The generators `arithmetic` and `functions`: verifiable tasks for a small model and a short run.

`arithmetic` makes small sums. A hash of a sum's text decides whether the sum is held out. The options do not change
that text.
`functions` asks for small Python functions. Their tests are computed from the expressions that the questions describe.
A function that ignores its argument fails them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.tasks.task import TasksNotFoundError


def arithmetic(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return every sum of two operands from `operand_min` (0) to `operand_max` (29). Raise TasksNotFoundError."""
    if unknown := sorted(set(options) - {"operand_min", "operand_max"}):
        raise TasksNotFoundError(f"generator arithmetic has no option {unknown[0]}: give operand_min and operand_max")
    low, high = options.get("operand_min", 0), options.get("operand_max", 29)
    if type(low) is not int or type(high) is not int or not 0 <= low <= high:
        raise TasksNotFoundError(
            f"options of generator arithmetic are {dict(options)}: give whole numbers, 0 <= operand_min <= operand_max"
        )
    operands = range(low, high + 1)
    return [{"question": f"{a} + {b}", "answer": str(a + b), "reward": "number"} for a in operands for b in operands]


# --- functions --------------------------------------------------------------------------------------------------------

MAX_CONSTANT = 50
NUMBERS: list[Any] = [0, 1, 5, -3, 12]
LISTS: list[Any] = [[4, 9, 2], [7, 7, 1, 12], [3], [-5, 10, 6, 0, 8]]
WORDS: list[Any] = ["shoal", "a", "Reef", "tide pool"]

# Each kind: its text, with {n} for the constant; the function to write; the arguments of its tests.
KINDS: list[tuple[str, Callable[[Any, int], Any], list[Any]]] = [
    ("returns x plus {n}", lambda x, n: x + n, NUMBERS),
    ("returns x minus {n}", lambda x, n: x - n, NUMBERS),
    ("returns x times {n}", lambda x, n: x * n, NUMBERS),
    ("returns the square of x plus {n}", lambda x, n: x * x + n, NUMBERS),
    ("returns twice x plus {n}", lambda x, n: 2 * x + n, NUMBERS),
    ("returns the remainder of x divided by {n}", lambda x, n: x % n, NUMBERS),
    ("returns True if x is divisible by {n}, else False", lambda x, n: x % n == 0, NUMBERS),
    ("returns True if x is greater than {n}, else False", lambda x, n: x > n, NUMBERS),
    ("returns the larger of x and {n}", lambda x, n: max(x, n), NUMBERS),
    ("returns the smaller of x and {n}", lambda x, n: min(x, n), NUMBERS),
    ("returns the absolute difference of x and {n}", lambda x, n: abs(x - n), NUMBERS),
    ("returns the sum of the list x plus {n}", lambda x, n: sum(x) + n, LISTS),
    ("returns how many numbers in the list x are greater than {n}", lambda x, n: sum(v > n for v in x), LISTS),
    ("returns the numbers in the list x that are greater than {n}", lambda x, n: [v for v in x if v > n], LISTS),
    ("returns the list x with every number multiplied by {n}", lambda x, n: [v * n for v in x], LISTS),
    ("returns the list x with {n} added to every number", lambda x, n: [v + n for v in x], LISTS),
    ("returns the list x with {n} appended to it", lambda x, n: [*x, n], LISTS),
    ("returns True if {n} is in the list x, else False", lambda x, n: n in x, LISTS),
    ("returns the string x repeated {n} times", lambda x, n: x * n, WORDS),
    ("returns the first {n} characters of the string x", lambda x, n: x[:n], WORDS),
    ("returns the last {n} characters of the string x", lambda x, n: x[-n:], WORDS),
    ("returns True if the string x has more than {n} characters, else False", lambda x, n: len(x) > n, WORDS),
]


def functions(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a task for every kind and every constant up to MAX_CONSTANT. Raise TasksNotFoundError."""
    if options:
        raise TasksNotFoundError(f"generator functions has no option {next(iter(options))}")
    return [row for kind in KINDS for n in range(1, MAX_CONSTANT + 1) if (row := _row(*kind, n))]


def _row(text: str, function: Callable[[Any, int], Any], arguments: list[Any], n: int) -> dict[str, str] | None:
    """Return the task; None if all outputs are equal, because a constant function would pass."""
    cases = [{"args": [argument], "output": function(argument, n)} for argument in arguments]
    if all(case["output"] == cases[0]["output"] for case in cases):
        return None
    return {
        "question": f"Write a Python function f(x) that {text.format(n=n)}.",
        "tests": json.dumps({"kind": "functional", "entry": "f", "cases": cases}),
        "reward": "code",
    }
