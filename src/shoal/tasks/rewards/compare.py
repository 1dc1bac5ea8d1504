"""Compare a program's output with the output that its tests expect, outside the sandbox.

Invariant: only builtins are compared, with their own operators, in time linear in the size of the smaller value. A
program's objects never get here.

stdout  is compared line by line and word by word, without blank lines. Words are equal as text or as numbers. A word is a
        number as programs print it: without leading zeros, which belong to codes such as 0101, and an exponent has a sign
        or a fraction before it. If the expected number is whole, the printed number must equal it. If it has a fraction
        or an exponent, the two may differ by the tolerances FLOAT_RELATIVE and FLOAT_ABSOLUTE, as in APPS's harness
        (numpy.allclose). LiveCodeBench's harness would compare fractions exactly.
values  are compared as with Python's ==, except that a tuple may equal a list (JSON has no tuples), a number as a
        dict's key equals its text (JSON has only text keys), and floats have the same tolerances. A set never equals a
        list.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

FLOAT_RELATIVE, FLOAT_ABSOLUTE = 1e-5, 1e-8
MAX_NUMBER = 4_000  # characters; longer words are compared as text
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
NUMBER = re.compile(
    r"[+-]?(?:(?:0|[1-9]\d*)(?:[eE][+-]\d{1,5})?|(?:(?:0|[1-9]\d*)\.\d*|\.\d+)(?:[eE][+-]?\d{1,5})?)", re.ASCII
)


@dataclass(frozen=True)
class Pairs:
    """A dict from the sandbox, as pairs, because building a real dict from hostile keys could take quadratic time."""

    items: Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class SetItems:
    items: Sequence[Any]


def same_output(actual: str, expected: str) -> bool:
    lines = _lines(actual), _lines(expected)
    return len(lines[0]) == len(lines[1]) and all(
        len(words) == len(others) and all(map(_same_word, words, others)) for words, others in zip(*lines, strict=True)
    )


def same_value(actual: Any, expected: Any) -> bool:
    """Return whether the values are equal. `actual` holds builtins, Pairs and SetItems; `expected` is parsed JSON."""
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        return _close(actual, expected)
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(actual, (list, tuple))
            and len(actual) == len(expected)
            and all(map(same_value, actual, expected))
        )
    if isinstance(expected, dict):
        return isinstance(actual, Pairs) and _same_items(actual.items, expected)
    if isinstance(actual, (list, tuple, Pairs, SetItems)):
        return False
    return bool(actual == expected)


def shown(value: Any, limit: int = 80) -> str:
    """Format a value for messages, in bounded time. The digits of a long int would take quadratic time."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        text = repr(value[:limit])
    elif isinstance(value, (list, tuple)):
        inner = ", ".join(shown(item, limit // 2) for item in value[:8]) + (", ..." if len(value) > 8 else "")
        text = f"[{inner}]" if isinstance(value, list) else f"({inner})"
    elif isinstance(value, (SetItems, Pairs, dict)):
        what = "set" if isinstance(value, SetItems) else "dict"
        text = f"a {what} of {len(value if isinstance(value, dict) else value.items)}"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _lines(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if max(len(actual), len(expected)) > MAX_NUMBER or not (NUMBER.fullmatch(actual) and NUMBER.fullmatch(expected)):
        return False
    if WHOLE.fullmatch(expected):
        return Decimal(actual) == Decimal(expected)
    return _close(float(actual), float(expected))


def _same_items(actual: Sequence[tuple[Any, Any]], expected: dict[str, Any]) -> bool:
    if len(actual) != len(expected):
        return False
    by_key = {key if isinstance(key, str) else repr(key): value for key, value in actual if _is_key(key)}
    return by_key.keys() == expected.keys() and all(same_value(by_key[key], expected[key]) for key in expected)


def _is_key(key: Any) -> bool:
    return isinstance(key, (str, float, bool)) or (isinstance(key, int) and key.bit_length() <= 200)


def _close(actual: float, expected: float) -> bool:
    if actual == expected:
        return True
    try:
        return abs(actual - expected) <= FLOAT_ABSOLUTE + FLOAT_RELATIVE * abs(expected) < float("inf")
    except OverflowError:  # an int beyond the range of floats
        return False
