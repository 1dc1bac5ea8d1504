r"""Decide with math-verify whether two mathematical answers are equal. Runs in child processes of the reward `math`.

`judge` raises whatever the library raises.
Invariants: the gold answer (the task's) and the model's answer are parsed in the same way. A list of guesses does not
equal one of its members. Text never runs as Python. The library turns digits into numbers with sympy's `eval`, but an
audit hook allows only numbers and symbols there. The hook also refuses to write files, start processes or open sockets.

Whole numbers and fractions must be exactly equal. Other numbers must agree to six decimals and four significant digits.
These also count as equal: expressions that simplify to the same expression; sets in any order, but tuples only in the
same order; intervals with the same ends; `x = 5` and 5; 50 %, 50 and 0.5. Units, degrees and currency are dropped, so 5
cm equals 5 m. Case is ignored. A number of more than `MAX_DIGITS` digits is not computed. It equals only the same text.
"""

import itertools
import logging
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import get_pct_val, should_treat_as_complex
from math_verify.parser import get_last_eq
from sympy import (
    Add,
    Basic,
    Eq,
    FiniteSet,
    Float,
    MatrixBase,
    Mul,
    Number,
    Pow,
    Rational,
    Tuple,
    factorial,
    nan,
    oo,
    zoo,
)
from sympy.core.function import AppliedUndef

MAX_LENGTH = 1_000  # characters of an answer
MAX_DEPTH = 30  # nested brackets
MAX_DIGITS = 20_000.0
SMALL = 0.01
SIGNIFICANT = 1e-4
ROUNDING = 1e-12

SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u03c0": r"\pi ",
    "\u221e": r"\infty ", "\u221a": r"\sqrt", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u00b0": "", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}",
    "\u00be": r"\frac{3}{4}", "\u00b2": "^{2}", "\u00b3": "^{3}", "\u00a0": " ", "\u2205": r"\emptyset ",
    "\x00": " ", "~": " ",
}  # fmt: skip
# Two or three letters after a number may be a product, as in 3ab, so short units are listed. Longer words are units.
SHORT = r"(?:[kcmd]m|[mk]g|[mcd]l|m[si]|k[mp]h|mph|in|ft|yd|lbs?|oz|hrs?|min|sec|day|deg|rad|cts?|[kM]?Hz|[kM][JWNV])"
UNIT = rf"(?!\s*(?:percent|pct)\b)(?:\s*{SHORT}(?![A-Za-z])|\s+[A-Za-z]{{3,}}|[A-Za-z]{{4,}})"
REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\(?:left|right|big|Big|bigg|Bigg)(?![A-Za-z])\s*\.?", ""),
    (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", ""),
    (r"\\?[$€£]|\\(?:pounds|euro)(?![A-Za-z])|\b(?:USD|EUR|GBP)\b", " "),
    (r"^([-+]?\d{1,3}(?: \d{3})+)(?=\.\d|$)", lambda match: match[1].replace(" ", "")),  # 1 000
    (r"(?<=\d)(?:\{,\}|\\[,!;: ]|,\\!)(?=\d{3}(?!\d))", ""),  # 1{,}000 and 1\,000
    (r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?=\.\d|\s*(?:[A-Za-z%\\]|$))(?!\s*,)", lambda match: match[1].replace(",", "")),
    (r"\\(?:textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathit|mbox|operatorname)(?=\s*\{)", r"\\text"),
    (r"^\\text\s*\{([^{}]*\d[^{}]*)\}$", r"\1"),  # \text{18 dollars}
    (r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|(?<=[\d)])or(?=[A-Za-z]+(?:\([a-z]\))?\s*=)", ","),
    (r"(?<=[\d}%])\s*\\text\s*\{\s*percent\s*\}", r"\\%"),
    # Remove units at the end. They are words after a number, or \text{...} after anything.
    (r"(?<=[\w})\]%])(?:\s|\\[ ,;!])*\\text\s*\{[^{}\d,;]*\}(?:\s*\^\s*(?:\d|\{\d\}))?\s*$", ""),
    (rf"^([-+]?[\d.,/ ]*\d){UNIT}(?:[ ./][A-Za-z]+)*(?:\s*\^\s*\{{?\d\}}?)?$", r"\1"),
    (r"^([-+]?\d+)\s+(\d+)\s*/\s*(\d+)$", r"\1\\frac{\2}{\3}"),  # 2 1/2
    (r"(?<![A-Za-z\d.])([\d.]*\d)[eE]([-+]?\d{1,9})(?![\w.])", r"\1\\times 10^{\2}"),
    (r"\*\*", "^"),
    (r"\^\s*(-\s*\d+)", r"^{\1}"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
]  # fmt: skip
COMPILED = [(re.compile(pattern), by) for pattern, by in REWRITES]
PRIME = re.compile(r"[A-Za-z)\]}]\s*(?:'|\u2032|\^\s*\{?\s*\\prime)")
DECIMAL_COMMA = re.compile(r"([-+]?(?:0|\d+(?!,\d{3}$))),(\d+)")
DECIMAL_POINT = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d*)\.\d+")
# The library's own removal of units would remove the t of "3t".
LIBRARY = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timer is off


def judge(pair: list[str]) -> tuple[bool, str]:
    """Return whether gold and answer are equal, and why. Raise ValueError if the gold answer is too large."""
    sys.addaudithook(refuse)
    return compare(*pair)


def compare(gold: str, answer: str) -> tuple[bool, str]:
    gold, answer = decimal_point(gold, answer), decimal_point(answer, gold)
    if normal(gold) == normal(answer):
        return True, "same text"
    if (why := too_large(gold)) is not None:
        raise ValueError(f"the gold answer {why}")
    if (why := too_large(answer)) is not None:
        return False, f"the answer {why}"
    if len(PRIME.findall(gold.rpartition("=")[2])) != len(PRIME.findall(answer.rpartition("=")[2])):
        return False, "a different derivative: the library ignores primes"
    gold_value, answer_value = read(gold), read(answer)
    if gold_value is None:
        return False, "the gold answer is text, and the answer is not the same"
    if answer_value is None:
        return False, "the answer cannot be parsed as mathematics"
    return equal(gold_value, answer_value), ""


def decimal_point(text: str, other: str) -> str:
    """Replace a decimal comma in `text` by a point, if `other` is a decimal number. Otherwise "1,5" is a list."""
    comma = DECIMAL_COMMA.fullmatch(text.strip(" $"))
    return f"{comma[1]}.{comma[2]}" if comma and "." in other and DECIMAL_POINT.fullmatch(other.strip(" $")) else text


def normal(text: str) -> str:
    for symbol, latex in SYMBOLS.items():
        text = text.replace(symbol, latex)
    for pattern, by in COMPILED:
        text = pattern.sub(by, text.strip())
    return re.sub(r"\s+", " ", text).strip().rstrip(".")


def too_large(text: str) -> str | None:
    if len(text) > MAX_LENGTH:
        return f"has more than {MAX_LENGTH} characters"
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return f"nests brackets more than {MAX_DEPTH} deep" if deepest > MAX_DEPTH else None


def read(text: str) -> Basic | MatrixBase | None:
    """Parse a text; None if it is not mathematics."""
    latex = normalize_latex(normal(text), LIBRARY)
    for part in dict.fromkeys((latex, get_last_eq(latex))):  # the whole text, or else the last part of a = b = c
        try:
            value = latex2sympy(part, is_real=not should_treat_as_complex(part), normalization_config=None)
        except ForbiddenError:
            raise
        except Exception:  # noqa: BLE001  the library's parser raises any kind of Exception
            continue
        return value if isinstance(value, Basic | MatrixBase) else None
    return None


def equal(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    if max(digits(gold), digits(answer)) > MAX_DIGITS:
        return False
    for number in (gold, answer):
        if is_number(number) and number.doit().has(nan, zoo):
            return False
    exact = exactly(gold, answer)
    if exact is not None:
        return exact
    answer = renamed(gold, answer)
    if is_number(gold) and is_number(answer) and oo in (abs(gold.doit()), abs(answer.doit())):
        return bool(gold.doit() == answer.doit())
    if small_and_apart(gold, answer):
        return False
    if same_but_for_rounding(gold, answer):
        return True
    rounding = 6 + max(0, math.ceil(-2 - math.log10(smallest(gold))))
    return bool(
        verify(
            gold,
            answer,
            float_rounding=rounding,
            timeout_seconds=None,
            raise_on_error=True,
            allow_set_relation_comp=True,
        )
    )


def is_number(value: Any) -> bool:
    return isinstance(value, Basic) and bool(getattr(value, "is_number", False))


def readings(number: Basic) -> list[Basic]:
    """Return the values that a number may mean: 50 % is 50 or 0.5."""
    of_percent = get_pct_val(number)
    return [number] if of_percent is None else [number, of_percent]


def exactly(gold: Any, answer: Any) -> bool | None:
    """Return whether two rationals are equal; None if one is not rational. The library would compare only 15 digits."""
    pairs = []
    for number in (gold, answer):
        if not is_number(number) or number.has(Float):
            return None
        pairs.append([value.doit() for value in readings(number)])
    if not all(isinstance(value, Rational) for side in pairs for value in side):
        return None
    return any(value in pairs[0] for value in pairs[1])


def small_and_apart(gold: Any, answer: Any) -> bool:
    """Return whether both numbers are small and not nearly equal. The library would find 6.6e-34 equal to 9.1e-31."""
    if not (is_number(gold) and is_number(answer)):
        return False
    pairs = itertools.product(readings(gold), readings(answer))
    return all(apart(number.doit().evalf(30), other.doit().evalf(30)) for number, other in pairs)


def apart(number: Any, other: Any) -> bool:
    size, difference = max_size(number, other), abs(number - other).evalf()
    return isinstance(difference, Number) and size < SMALL and bool(difference > SIGNIFICANT * size)


def same_but_for_rounding(gold: Any, answer: Any) -> bool:
    """Return whether two numbers agree to 12 digits. The library compares 15, so it finds 7^{0.5} unequal to sqrt(7)."""
    if not (is_number(gold) and is_number(answer) and (gold.has(Float) or answer.has(Float))):
        return False
    difference = abs(gold.doit() - answer.doit()).evalf()
    return isinstance(difference, Number) and bool(difference <= ROUNDING * max_size(gold.doit(), answer.doit()))


def renamed(gold: Any, answer: Any) -> Any:
    """Return the answer with the gold answer's variable if both define one function: f(t) = t^2 becomes f(x) = x^2."""
    ours, theirs = defined_function(gold), defined_function(answer)
    if ours is None or theirs is None or ours.func != theirs.func or ours.args[0] in answer.free_symbols:
        return answer
    return answer.subs(theirs.args[0], ours.args[0])


def defined_function(value: Any) -> Any:
    """Return the f(x) of `f(x) = ...`, or of a set of such equations; None for anything else."""
    parts = list(value) if isinstance(value, FiniteSet) else [value]
    left = {part.lhs if isinstance(part, Eq) else None for part in parts}
    function = left.pop() if len(left) == 1 else None
    of_symbol = isinstance(function, AppliedUndef) and len(function.args) == 1 and function.args[0].is_Symbol
    return function if of_symbol else None


def max_size(*numbers: Any) -> float:
    sizes = [abs(number).evalf() for number in numbers]
    return max(map(float, sizes)) if all(isinstance(size, Number) for size in sizes) else math.inf


def smallest(gold: Any) -> float:
    """Return the smallest nonzero absolute value among the numbers in a set, tuple or matrix, but at most 1."""
    parts = list(gold) if isinstance(gold, FiniteSet | Tuple | MatrixBase) else [gold]
    sizes = [abs(float(part.evalf())) for part in parts if is_number(part) and part.is_real]
    return min([1.0, *(size for size in sizes if size > 1e-300)])


def digits(value: Any) -> float:
    """Return a bound on the digits of all numbers in the computation of `value`; infinite for towers of powers."""
    if isinstance(value, Number):
        return 1.0 + (
            abs(float(math.log10(abs(value.p)))) + math.log10(value.q) if isinstance(value, Rational) and value else 0
        )
    if isinstance(value, Pow):
        base, exponent = value.args
        if base in (0, 1, -1) or not exponent.is_number:
            return max(digits(base), digits(exponent))
        if digits(exponent) > 8:
            return math.inf
        return max(1.0, digits(base)) * max(1.0, magnitude(exponent))
    if isinstance(value, factorial):
        size = magnitude(value.args[0])
        return size * math.log10(size + 10)
    parts = [digits(part) for part in (value.flat() if isinstance(value, MatrixBase) else getattr(value, "args", ()))]
    return sum(parts) if isinstance(value, Mul | Add) else max(parts, default=1.0)


def magnitude(exponent: Any) -> float:
    """Return a bound on the absolute value of an expression."""
    if isinstance(exponent, Number):
        return abs(float(exponent)) if digits(exponent) < 300 else math.inf
    if isinstance(exponent, Add | Mul):
        sizes = [magnitude(part) for part in exponent.args]
        return sum(sizes) if isinstance(exponent, Add) else math.prod(sizes)
    if not exponent.is_number:
        return 1.0
    power = digits(exponent)
    return 10.0**power if power < 300 else math.inf


class ForbiddenError(BaseException):
    """The library tried something other than arithmetic. It is no Exception, so no `except Exception` catches it."""


NAMES = "from sympy import *"  # sympy runs this before it evaluates
# Code that sympy generates for polynomials. It computes with tuples of exponents, uses no attributes, and calls only
# min and max.
MONOMIALS = re.compile(r"[\s()+\-*,=<>:0-9]|\b(?:def|return|if|else|monomial_[a-z]+|None|[abABkr]\d*|min|max)\b")
NUMBERS_ONLY = re.compile(r"[\s()+\-*/,0-9.eE]|Integer|Float|Rational|Symbol|'[\w.+\-]*'")
FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "urllib.", "http.", "ftplib.", "smtplib.")


def harmless(source: str) -> bool:
    return source == NAMES or "" in (NUMBERS_ONLY.sub("", source), MONOMIALS.sub("", source))


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """Refuse dangerous audit events (PEP 578). Allow imports, because the library imports some modules late."""
    if event == "compile" and isinstance(args[1], str) and args[1].startswith("<"):
        source = args[0].decode() if isinstance(args[0], bytes) else args[0]
        if source is None or not harmless(source):
            raise ForbiddenError(f"the library would evaluate {source!r:.100}")
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise ForbiddenError(f"the library would write {args[0]!r:.100}")
    elif event.startswith(FORBIDDEN) and event not in ("os.listdir", "os.scandir"):
        raise ForbiddenError(f"the library would do {event}")


WARM_UP = [
    (r"\frac{1}{3}", r"\sqrt{2}+1"), ("[1,2)", "(1,2]"), (r"\{1,2\}", "1,2"), ("x^2+1", "(x+1)^2"), ("x=5", "5"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"), (r"50\%", "0.5"),
    (r"\text{abc}", "xyz"), (r"\sin(x)+\pi", r"\log_2 8 e^{3}"), ("1<x<2", "x>3"), (r"2\frac12", "2.5"),
    (r"(-\infty,2]\cup[3,4)", "[1,2]"), ("10^{10}", "1000"), (r"x\in\mathbb{R}", r"\emptyset"), ("3+4i", "5!"),
    (r"\int_0^1 x^2 dx", "2"), (r"\sum_{n=1}^{3} n^2", "2"), (r"\lim_{x\to 0}\frac{\sin x}{x}", "2"), ("3t", "3h"),
]  # fmt: skip


def prepare() -> None:
    """Fill the library's caches and run its late imports before the first fork."""
    for pair in WARM_UP:
        compare(*pair)
