"""The calculator: the model writes `calc(12*7)`, ends its turn, and gets the answer `84`.

The last complete call of a turn counts. A turn without a complete call ends the conversation. Expressions consist of
numbers, parentheses and + - * /. Results are exact: an integer, a decimal where that is exact, otherwise a fraction. If
an expression has no value, the answer is `error: ` and the reason, so that the model can try again.
Invariant: an expression is parsed with Python's parser but never executed, and its characters cannot form names.
Length, depth and digits are bounded, so no input takes long.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from shoal.tasks.task import Environment, Task

CALL = "calc("
PARENTHESIS = re.compile(r"calc\(|[()]")
MAX_CHARACTERS = 200  # in an expression
MAX_DEPTH = 20  # of nested parentheses
MAX_DIGITS = 30  # in a result's numerator or denominator
MAX_DECIMALS = 12
UNEXPECTED = re.compile(r"[^0-9.+\-*/()\s]|\*\*|//")
LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")
NOT_AN_EXPRESSION = "not numbers with + - * / and parentheses"
SIGNS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculationError(Exception):
    """An expression without a value; the message is shown to the model."""


class Calculator(Environment):
    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        expression = last_call(turns[-1])
        if expression is None:
            return None
        try:
            return to_text(value(expression))
        except CalculationError as error:
            return f"error: {error}"


def last_call(text: str) -> str | None:
    """Return the text between the parentheses of the last complete call.

    >>> last_call("calc(1+1), then calc(2*(3+4)) and calc(5"), last_call("calculate")
    ('2*(3+4)', None)
    """
    open_at: list[int] = []  # per open parenthesis: the start of its call's content; -1 if it does not begin a call
    last = (-1, -1)
    for match in PARENTHESIS.finditer(text):
        if match[0] != ")":
            open_at.append(match.end() if match[0] == CALL else -1)
        elif open_at:
            last = max(last, (open_at.pop(), match.start()))
    start, end = last
    return text[start:end] if start >= 0 else None


def value(expression: str) -> Fraction:
    """Return the exact value of an expression. Raise CalculationError.

    >>> value("2 * (3 + 4) / -7")
    Fraction(-2, 1)
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError("too long")
    if unexpected := UNEXPECTED.search(expression):
        raise CalculationError(f"unexpected {unexpected[0]}")
    depth = deepest = 0
    for character in expression:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise CalculationError("too many parentheses")
    plain = LEADING_ZEROS.sub("", " ".join(expression.split()))  # Python refuses 007
    try:
        return _value(ast.parse(plain, mode="eval").body, plain)
    except SyntaxError as error:
        raise CalculationError(NOT_AN_EXPRESSION) from error


def to_text(number: Fraction) -> str:
    """Return a number as text. Raise CalculationError if it is too long.

    >>> [to_text(Fraction(*pair)) for pair in ((84, 1), (-5, 2), (1, 3))]
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


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(int() | float()):  # this excludes the constant `...`
            return Fraction(ast.get_source_segment(text, node) or "")  # the digits as written, because a float rounds
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
            number = _value(operand, text)
            return -number if isinstance(sign, ast.USub) else number
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            first, second = _value(left, text), _value(right, text)
            if isinstance(sign, ast.Div) and second == 0:
                raise CalculationError("division by zero")
            return SIGNS[type(sign)](first, second)
    raise CalculationError(NOT_AN_EXPRESSION)
