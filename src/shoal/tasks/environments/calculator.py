"""The calculator: the model writes `calc(12*7)`, ends its turn, and is answered `84`.

Of several calls in a turn the last one counts. A turn without a complete call ends the conversation. Expressions have
numbers, + - * / and parentheses. Results are exact: an integer, a decimal where that is exact, otherwise a fraction. What
cannot be computed is answered with `error: ` and why, so that the model can try again.
Invariant: parsed here, never evaluated as code; lengths, depth and digits are bounded, so that no input takes long.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from shoal.tasks.task import Environment, Task

CALL = "calc("
PARENTHESIS = re.compile(r"calc\(|[()]")
MAX_CHARACTERS = 200  # of an expression
MAX_DEPTH = 20  # of parentheses and signs
MAX_DIGITS = 30  # of a result's numerator or denominator
MAX_DECIMALS = 12
TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|(\S))", flags=re.ASCII)


class CalculationError(Exception):
    """An expression without a value; the message is shown to the model."""


class Calculator(Environment):
    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        expression = last_call(turns[-1])
        if expression is None:
            return None
        try:
            return written(value(expression))
        except CalculationError as error:
            return f"error: {error}"


def last_call(text: str) -> str | None:
    """Return what stands between the parentheses of the last complete call.

    >>> last_call("calc(1+1), then calc(2*(3+4)) and calc(5"), last_call("calculate")
    ('2*(3+4)', None)
    """
    open_at: list[int] = []  # for each open parenthesis, where its inside begins; -1 unless it is a call's
    last = (-1, -1)
    for match in PARENTHESIS.finditer(text):
        if match[0] != ")":
            open_at.append(match.end() if match[0] == CALL else -1)
        elif open_at:
            last = max(last, (open_at.pop(), match.start()))
    start, end = last
    return text[start:end] if start >= 0 else None


def value(expression: str) -> Fraction:
    """Return the exact value of an expression. Raises CalculationError.

    >>> value("2 * (3 + 4) / -7")
    Fraction(-2, 1)
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError("too long")
    tokens = [number or sign for number, sign in TOKEN.findall(expression)]
    result, rest = _sum(tokens, 0)
    if rest:
        raise CalculationError(f"unexpected {rest[0]}")
    return result


def written(number: Fraction) -> str:
    """Return a number as text. Raises CalculationError if it is too long.

    >>> [written(Fraction(*pair)) for pair in ((84, 1), (-5, 2), (1, 3))]
    ['84', '-2.5', '1/3']
    """
    if max(abs(number.numerator), number.denominator) >= 10**MAX_DIGITS:
        raise CalculationError("the result is too long")
    scaled = number * 10**MAX_DECIMALS
    if number.denominator == 1 or scaled.denominator != 1:
        return str(number)
    sign = "-" if number < 0 else ""
    whole, part = divmod(abs(scaled.numerator), 10**MAX_DECIMALS)
    return f"{sign}{whole}.{part:0{MAX_DECIMALS}}".rstrip("0")


def _sum(tokens: list[str], depth: int) -> tuple[Fraction, list[str]]:
    """Return the value of the longest sum that the tokens begin with, and the tokens after it."""
    result, tokens = _product(tokens, depth)
    while tokens and tokens[0] in "+-":
        term, rest = _product(tokens[1:], depth)
        result = result + term if tokens[0] == "+" else result - term
        tokens = rest
    return result, tokens


def _product(tokens: list[str], depth: int) -> tuple[Fraction, list[str]]:
    result, tokens = _factor(tokens, depth)
    while tokens and tokens[0] in "*/":
        factor, rest = _factor(tokens[1:], depth)
        if tokens[0] == "/" and factor == 0:
            raise CalculationError("division by zero")
        result = result * factor if tokens[0] == "*" else result / factor
        tokens = rest
    return result, tokens


def _factor(tokens: list[str], depth: int) -> tuple[Fraction, list[str]]:
    """Return a number, a sum in parentheses, or a factor behind a sign."""
    if depth > MAX_DEPTH:
        raise CalculationError("too many parentheses")
    if not tokens:
        raise CalculationError("a number is missing")
    first, rest = tokens[0], tokens[1:]
    if first in ("+", "-"):
        number, rest = _factor(rest, depth + 1)
        return (-number if first == "-" else number), rest
    if first == "(":
        number, rest = _sum(rest, depth + 1)
        if rest[:1] != [")"]:
            raise CalculationError("a closing parenthesis is missing")
        return number, rest[1:]
    if first == "." or first[0] not in ".0123456789":
        raise CalculationError(f"unexpected {first}")
    return Fraction(first), rest
