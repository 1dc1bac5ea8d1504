r"""Decide whether two mathematical answers are equal. Runs in child processes of the reward `math`.

Invariants: the gold answer (the task's) and the model's answer are parsed in the same way. A list of guesses does not
equal one of its members. Text never runs as Python. The library turns digits into numbers with sympy's `eval`, but an
audit hook allows only numbers and symbols there. The hook also refuses to write files, start processes or open sockets.

1. `normal` rewrites a text as plain LaTeX. Words that are mathematics become symbols ("3 million" is 3*10^6); all other
   words stand in \text{}.
2. `structure` splits lists, sets, tuples and ratios. A list keeps repeated numbers, a set does not.
3. `split_unit` takes the words at the end. They do not count if only one answer has them and they name a unit or what was
   counted. All other words must be the same in both answers.
4. `read` parses the rest, and `equal` compares it. Rational numbers must be exactly equal. A decimal must agree to six
   decimals and four significant digits. Expressions are equal if they simplify to the same; `x = 5` equals 5; 50 % equals
   50 and 0.5. Case is ignored. A number of more than `MAX_DIGITS` digits is not computed, and equals only the same text.
"""

import logging
import math
import re
import sys
from collections.abc import Callable
from functools import cache
from itertools import accumulate, product
from typing import Any
from unicodedata import normalize

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, _Latex2Sympy, normalize_latex
from math_verify import verify
from math_verify.grader import get_pct_val
from math_verify.parser import get_last_eq
from sympy import Basic, Expr, Float, I, MatrixBase, Mul, Number, Pow, Rational, factorial, nan, oo, zoo
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

MAX_LENGTH = 1_000  # characters of an answer
MAX_DEPTH = 30  # nested brackets
MAX_DIGITS = 20_000.0
DECIMALS, SIGNIFICANT, ROUNDING = Float("5e-7"), Float("1e-4"), Float("1e-12")
EXACT = Float("1e-100")  # an exact difference below this, relative to the numbers, is 0

SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u03c0": r"\pi ",
    "\u221e": r"\infty ", "\u2264": r"\le ", "\u2a7d": r"\le ", "\u2265": r"\ge ", "\u2a7e": r"\ge ", "\u2260": r"\ne ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u00b0": r"^{\circ}",
    "\u00b1": r"\pm ", ">=": r"\ge ", "<=": r"\le ", "**": "^", "\u221a": r"\sqrt ", "\x00": " ", "~": " ", "\u200b": "",
}  # fmt: skip
GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*+\})*+\})*+\}"
# What LaTeX takes as an argument without braces: a command with its own arguments, or a character.
BARE = rf"(?!\s*\{{)\s*(\\[A-Za-z]+(?:\s*\[[^\[\]]*\])?(?:{GROUP})*|[^\s\\{{}}&])"
WORDS = r"(?:multiplied|divided) by|below zero|[A-Za-z]+"
ENDS = r"(?![A-Za-z])"
Rewrites = list[tuple[str, str | Callable[[re.Match[str]], str]]]
UNICODE: Rewrites = [
    ("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+", r"^{\g<0>}"),
    ("[\u2080-\u208e]+", r"_{\g<0>}"),
    ("[\u00bc-\u00be\u2150-\u215e]", lambda match: r"\frac" + re.sub("(\\d+)\u2044?", r"{\1}", normalize("NFKC", match[0]))),
    ("\u221a\\s*(\\d+)", r"\\sqrt{\1}"),
]  # fmt: skip
LAYOUT: Rewrites = [
    (r"(?<!\\)\\\\(?=[A-Za-z])(?![^&]*\\(?:begin|end))", r"\\"),
    (rf"\\(?:left|right|[bB]igg?[lrm]?){ENDS}\s*\.?|\\!\s*|\\[hv]?phantom\s*\{{[^{{}}]*\}}", ""),
    (r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\[ ,;:>]|\\(?:hspace|color|textcolor)\s*\{[^{}]*\}|\\?[$€£¥₹]|\\text\s*\{\s*Rs\.?\s*\}|\bRs\b\.?", " "),
    (r"\\(?:mathbf|bm|boldsymbol|hat|vec)\s*\{\s*\\?([ijk])(?:math)?\s*\}", r"\\vec{\1}"),
    (r"\\(?:underline|boldsymbol|bm|mathbf|mathit|mathsf|emph)(?=\s*\{)", ""),
    (rf"(?:\^\s*(?:\{{\s*\\circ\s*\}}|\\circ{ENDS})|\\degree{ENDS})(\s*[CF]{ENDS})?", r"\\degree "),
    (r"\\text\s*\{\s*,?\s*for (?:all|any|every|each)\b.*", ""),
    (r"%\s*(?:\\text\{\s*of\s*\}|of\b)", r"%\\cdot "),
    (r"\\(min|max|gcd)\s*\\\{([^{}]*)\\\}", r"\\\1(\2)"),
    (r"(?<=[\d)])or(?=[A-Za-z]+(?:\([a-z]\))?\s*=|\()", ","),
]  # fmt: skip
NUMBERS: Rewrites = [
    (r"(?<=sqrt)(\s*\[[^\[\]]*\])?\s*\(([^()]*)\)", r"\1{\2}"),
    (rf"(?<=\\sqrt)(\s*\[[^\[\]]*\])?+{BARE}", r"\1{\2}"),
    (rf"(?<=\\frac|binom|\\pmod){BARE}", r"{\1}"),
    (rf"(?<=\\frac|binom)(\s*{GROUP}){BARE}", r"\1{\2}"),
    (r"(?<=\\log_)(\d)", r"{\1}"),
    (r"([\^_])\s*(?:([-+]?\d+(?:\.\d+)?)|\(([^()]*)\))", r"\1{\2\3}"),
    (rf"([\^_])\s*(-?){BARE}", r"\1{\2\3}"),
    # 1,000 is one number, but in brackets it is two, unless the text has other commas, with spaces.
    (r"(?:[(\[]|\\\{)[^()\[\]]*(?:[)\]]|\\\})", lambda match: match[0].replace(",", "," if ", " in match.string else ", ")),
    (r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)", lambda match: match[0].replace(",", "")),
    (r"(?<![\w.,^_])(?<![\d.,] )\d{1,3}(?: \d{3})+(?! ?\d)", lambda match: match[0].replace(" ", "")),
    (r"(?<![\w.\\}])\(?(\d[\dA-F]*)\)?_\{(\d|1[0-6])\}", lambda match: in_base(match[1], int(match[2])) or match[0]),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}", lambda match: repeating(*match.groups())),
    (r"(\d*)\.(\d{0,9}?)(\d{1,9}?)\3{2,}\s*(?:\\[lc]?dots|\.\.\.)", lambda match: repeating(*match.groups())),
    (r"(?<![A-Za-z\d.])([\d.]*\d)[eE]([-+]?\d{1,9})(?![\w.])", r"\1\\times 10^{\2}"),
    (r"(?<![\w.^_/] )(?<![\w.^_/])(\d+) +(\d+) */ *(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # 2 1/2
    (r"(?<![\w.^_/])(?<!\d )(\d+) *(\\frac\{(\d+)\}\{(\d+)\})",
     lambda match: f"({match[1]}+{match[2]})" if int(match[3]) < int(match[4]) else match[0]),
    (r"\\sqrt *\[ *(\d*[13579]) *\] *\{ *-([\d.]+) *\}", r"(-\\sqrt[\1]{\2})"),  # the real root
    (r"\\overline\s*\{([-+\d. ]*)i\}", r"(\1(-i))"),
]  # fmt: skip
DEGREES = re.compile(r"(\d+(?:\.\d+)?|\([^()]*\)|(?<![A-Za-z\\])[A-Za-z]|\\[a-z]+) *\\degree")
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
PRIME = re.compile(r"[A-Za-z)\]}]\s*(?:'|\u2032|\^\s*\{?\s*\\prime)")
DECIMAL_COMMA = re.compile(r"([-+]?(?:0|\d+(?!,\d{3}$))),(\d+)")
DECIMAL_POINT = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d*)\.\d+")
SIDE_BY_SIDE = re.compile(r"\d\s+[\d.]|\d\s*_")
COUNTS = re.compile(r"(?<![A-Za-z\\])i\s*(?:=|\\in\b|[<>]|\\[lg]e\b)|\\vec\{i\}")  # i is an index or a vector
RELATION = re.compile(r"[=<>(\[{]|\\(?:in|[lg]e|ne|cup|cap|mathbb|emptyset)(?![A-Za-z])")
LITERAL = re.compile(r"(?:\d+\+)?(\d+)/(\d+)|(?:\d+\.?\d*|\.\d+)(?:\\(?:times|cdot)10(?:\^[-+]?\d+)?)?(?:\\?%)?")

GLOSSARY = r"""and=, |or=, |percent=\% |pct=\% |percentage=\% |plus=+|minus=-|negative=-|times=\cdot |
multiplied by=\cdot |over=/|divided by=/|squared=^{2}|cubed=^{3}|factorial=!|below zero=\cdot(-1)|inf=\infty |
infinity=\infty |\lg=\log_{10} |\dfrac=\frac|\tfrac=\frac|\cfrac=\frac|\dbinom=\binom|\tbinom=\binom|\bmod=\mod |\gt=>|
\geq=\ge |\geqslant=\ge |\lt=<|\leq=\le |\leqslant=\le |\langle=(|\rangle=)|\varnothing=\emptyset |\quad= |\qquad= |
\displaystyle= |\textstyle= |\bf= |\rm= |\it= |\pounds= |\euro= """
FUNCTIONS = """sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp max min gcd lcm det sqrt pi alpha
beta gamma delta epsilon theta lambda mu rho sigma phi omega"""
MEANING = dict(entry.split("=") for entry in GLOSSARY.replace("\n", "").split("|"))
MEANING |= {name: rf"\{name} " for name in FUNCTIONS.split()}
NUMERALS = r"""gros=\cdot144 dozen=\cdot12 hundred=\cdot10^{2} thousand=\cdot10^{3} million=\cdot10^{6}
billion=\cdot10^{9} trillion=\cdot10^{12} half=/2 halve=/2 third=/3 quarter=/4 fourth=/4 fifth=/5 sixth=/6 eighth=/8
tenth=/10 hundredth=/100"""
AFTER_VALUE = dict(entry.split("=") for entry in NUMERALS.split())
UNITS = """mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|
ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|ton tonne|lb pound|oz ounce|ml milliliter millilitre|cl|dl|
l liter litre|gal gallon|ms|s sec second|min minute|h hr hour|day|week|month|yr year|dollar usd buck|cent ct|euro eur|gbp|
yuan|yen|rupee|deg degree|hz hertz|rad radian|n newton|kn|j joule|kj|w watt|kw|v volt|kv|a ampere|k kelvin|c celsius|
f fahrenheit|pa|mph|kph kmph|unit|men man|people person|2 square sq|3 cubic cu|women woman|children child|per|each|am|pm|
way|time|point|digit|old"""
SPELLED = {name: group.split()[0] for group in UNITS.replace("\n", "").split("|") for name in group.split()}
LETTER_UNITS = "msghLlNJWVKCFA"
# With one of these words, a plural at the end does not just name what was counted.
DECISIVE = """a not no nor less more fewer than at most least below above over under between is are was were if when
wrong right left base choose mod even odd unless"""
WORD = re.compile(
    rf"\\(?:text[a-z]*|mathrm|mbox|operatorname)\*?\s*\{{([^{{}}]*)\}}|\\(?:begin|end)\s*\{{[^{{}}]*\}}|"
    rf"\\[A-Za-z]+|\\.|{WORDS}"
)
LEADING = re.compile(
    r"(?:[\s/{]|\\(?:frac|cdot)|(?<![A-Za-z\\])[a-z]{2,}|\\text\s*\{[^{}]*\}\}*)+$"
)  # stands between a value and its unit
UNIT = re.compile(
    r"\s*(?:/|\\cdot(?![A-Za-z]))?\s*(?:\\frac\s*\{\s*)?\\text\{[^{}]*\}"
    r"(?:[\s/{}.]|\\cdot|\^\s*\{-?\d\}|\\text\{[^{}]*\})*$"
)
# The library's own removal of units would remove the t of "3t".
LIBRARY = NormalizationConfig(basic_latex=True, units=False, malformed_operators=False, nits=True, boxed="all")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timer is off


def judge(pair: list[str]) -> tuple[bool, str]:
    """Return whether gold and answer are equal, and why. Raise ValueError if the gold answer is too large.

    `pair`: gold and answer, and the word "literal" if a number must be written as a number.
    """
    sys.addaudithook(refuse)
    return compare(*pair)


def compare(gold: str, answer: str, literal: str = "") -> tuple[bool, str]:
    gold, answer = (re.sub(r"(?:(?<!\\)\\(?: |$)|\s)+", " ", text) for text in (gold, answer))
    gold, answer = decimal_point(gold, answer), decimal_point(answer, gold)
    if gold == answer:
        return True, "same text"
    too_large = [len(text) > MAX_LENGTH or max(depths(text)) > MAX_DEPTH for text in (gold, answer)]
    if too_large[0]:
        raise ValueError(f"the gold answer has more than {MAX_LENGTH} characters or {MAX_DEPTH} nested brackets")
    if too_large[1]:
        return False, f"the answer has more than {MAX_LENGTH} characters or {MAX_DEPTH} nested brackets"
    gold, answer = normal(gold), normal(answer)
    if len(PRIME.findall(gold.rpartition("=")[2])) != len(PRIME.findall(answer.rpartition("=")[2])):
        return False, "a different derivative: the library ignores primes"
    return same_text(gold, answer) or same(gold, answer, bool(literal)), ""


def decimal_point(text: str, other: str) -> str:
    """Replace a decimal comma in `text` by a point, if `other` is a decimal number. Otherwise "1,5" is a list."""
    comma = DECIMAL_COMMA.fullmatch(text.strip(" $"))
    return f"{comma[1]}.{comma[2]}" if comma and "." in other and DECIMAL_POINT.fullmatch(other.strip(" $")) else text


def depths(text: str) -> list[int]:
    """Return how many brackets are open before each character and at the end. Any two match, because of [0,1)."""
    return list(accumulate(((letter in "([{") - (letter in ")]}") for letter in text), initial=0))


# --- 1: plain LaTeX ---------------------------------------------------------------------------------------------------


def normal(text: str) -> str:
    text = normalize("NFKC", rewritten(text, UNICODE))
    for symbol, latex in SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = re.sub(r"\s+", " ", WORD.sub(meaning, rewritten(text, LAYOUT)).strip())
    text = rewritten(text, NUMBERS)
    if TRIGONOMETRY.search(text):
        text = DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    if text.startswith("[[") and text.endswith("]]"):
        rows = re.sub(r"\]\s*,\s*\[", r"\\\\", text[2:-2]).replace(",", "&")
        text = rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"
    return text.replace(r"\degree", "").strip().rstrip(".")


def rewritten(text: str, rewrites: Rewrites) -> str:
    for pattern, by in rewrites:
        text = re.sub(pattern, by, text)
    return text


def meaning(match: re.Match[str]) -> str:
    r"""Return words as mathematics, if they are that, or else in \text{}. Leave commands and products such as "xy"."""
    words, before = match[1], LEADING.sub("", match.string[: match.start()])
    after_value = before[-1:].isdigit() or before.endswith((")", "}", "%", r"\degree"))
    if words is None:
        words, word = match[0], match[0].lower()
        unit = (
            word in SPELLED
            or word.removesuffix("s") in AFTER_VALUE
            or len(word) == 3
            and match.string[match.start() - 1] == " "
        )
        is_word = (
            word in MEANING
            or len(word) > 3
            and words[1:].islower()
            or after_value
            and unit
            and word not in ("am", "pm")
        )
        if words[0] == "\\" or len(word) == 1 or not is_word:
            return MEANING.get(words, words)
    elif re.search(r"\d", words):
        return WORD.sub(meaning, words)
    elif len(letter := words.strip(" ()")) == 1:
        return rf"\text{{{letter}}}" if after_value and letter in LETTER_UNITS else f" {letter} "
    latex = ""
    for word in re.findall(rf"{WORDS}|[^A-Za-z\s.'\"!?]+", words):
        name = word.lower()
        known = MEANING.get(name) or after_value and AFTER_VALUE.get(name.removesuffix("s"))
        if after_value and name in SPELLED or name == "times" and not match.string[match.end() :].strip():
            known = None
        latex += known or (rf"\text{{{word}}}" if word[0].isalpha() else word)
    return latex


def in_base(digits: str, base: int) -> str:
    return str(int(digits, base)) if base > 1 and all(int(digit, 16) < base for digit in digits) else ""


def repeating(whole: str, start: str, period: str) -> str:
    nines = (10 ** len(period) - 1) * 10 ** len(start)
    return rf"\frac{{{int(whole + start + period) - int(whole + start or '0')}}}{{{nines}}}"


def same_text(gold: str, answer: str) -> bool:
    texts = [re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).casefold() for text in (gold, answer)]
    ours, theirs = (re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", re.sub(r"(\\[a-z]+)", r"\1 ", text)) for text in texts)
    return ours == theirs


# --- 2, 3: lists and units --------------------------------------------------------------------------------------------


def same(gold: str, answer: str, literal: bool) -> bool:
    (kind, golds), (other, answers) = structure(gold), structure(answer)
    if kind == other == "value":
        return same_value(golds[0], answers[0], literal)
    if "value" in (kind, other):
        if "{}" in (kind, other) and len(golds) == len(answers) == 1:
            return same(golds[0], answers[0], literal)
        return bool(RELATION.search(gold if kind == "value" else answer)) and equal(read(gold), read(answer))
    brackets = {kind, other} - {"", "{}"}
    if brackets:
        alike = kind == other or brackets == {"()"} or len(golds) > 2 and brackets <= {"()", "[]"}
        return alike and len(golds) == len(answers) and all(map(same, golds, answers, [literal] * len(golds)))
    is_set = "{}" in (kind, other) or all(structure(part)[0] != "value" for part in golds + answers)
    if not is_set and len(golds) != len(answers):
        return False
    equals = {pair for pair in dict.fromkeys(product(golds, answers)) if same(*pair, literal)}
    if is_set:
        return {pair[0] for pair in equals} == set(golds) and {pair[1] for pair in equals} == set(answers)
    for ours in golds:
        partner = next((theirs for theirs in answers if (ours, theirs) in equals), None)
        if partner is None:
            return False
        answers.remove(partner)
    return True


def structure(text: str) -> tuple[str, list[str]]:
    """Return the kind of a text and its members.

    The kind is the brackets of a set or tuple, "" for a list, ":" for a ratio, "value" for anything else.
    """
    text = text.strip()
    match = re.fullmatch(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", text)
    if match and 0 not in depths(text)[len(match[1]) : -len(match[3])]:
        kind, parts = match[1][-1] + match[3][-1], members(match[2], ",")
        if kind == "{}":
            return kind, [value for part in parts for value in signs(part)]
        if len(parts) > 1:
            return (kind, parts) if len(signs(text)) == 1 else ("", signs(text))
        if kind == "()":
            return structure(match[2])
    parts = [value for part in members(text, ",") for value in signs(part)]
    ratio = members(text.rpartition("=")[2], ":")
    if len(parts) == 1 and len(ratio) > 2:
        return ":", [f"({part})/({ratio[0]})" for part in ratio[1:]]
    return "" if len(parts) > 1 else "value", parts or [text]


def members(text: str, separator: str) -> list[str]:
    separator = ";" if separator == "," and ";" in text else separator
    cuts = [at for at, depth in enumerate(depths(text)[:-1]) if depth == 0 and text[at] == separator]
    parts = [text[start + 1 : end].strip() for start, end in zip([-1, *cuts], [*cuts, len(text)], strict=True)]
    return [part for part in parts if part]


def signs(text: str) -> list[str]:
    r"""Return the values of a text with \pm."""
    found = re.findall(r"\\(pm|mp)(?![A-Za-z])", text)
    choices = list(product("+-", repeat=len(found))) if len(found) < 4 else [("+",) * len(found)]
    if "mp" in found:
        choices = [tuple("+-"[name != sign] for name in found) for sign in ("pm", "mp")]
    around = re.split(r"\\(?:pm|mp)(?![A-Za-z])", text)
    return ["".join(map(str.__add__, around, (*choice, ""))) for choice in choices]


def split_unit(text: str) -> tuple[str, list[str]]:
    """Return a text without the words at its end, and these words in one spelling and order."""
    match = UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return text, []
    words = re.findall(r"[a-z]+|\d", re.sub(r"\\(?:text|frac|cdot)", " ", match[0]).lower())
    names = [SPELLED.get(word, SPELLED.get(word.removesuffix("s"), word)) for word in words]
    return text[: match.start()], sorted(name for name in names if name != "per")


def same_value(gold: str, answer: str, literal: bool) -> bool:
    (gold, unit), (answer, other) = split_unit(gold), split_unit(answer)
    names = unit or other
    counted = all(name in SPELLED for name in names) or any(re.fullmatch(r"[a-z]{3,}s", name) for name in names)
    if unit != other and (unit and other or not counted or set(names) & set(DECISIVE.split())):
        return False
    words = [re.findall(r"\\text\{([^{}]*)\}", text.lower()) for text in (gold, answer)]
    if words[0] != words[1] or same_text(gold, answer):
        return words[0] == words[1]
    return not (literal and is_literal(gold) and not is_literal(answer)) and equal(
        read(forward(gold)), read(forward(answer))
    )


def is_literal(text: str) -> bool:
    """Return whether a text is a number, or x = a number. A fraction must be reduced."""
    number = re.sub(r"\\frac\{-?(\d+)\}\{-?(\d+)\}", r"\1/\2", text.rpartition("=")[2]).translate(
        dict.fromkeys(map(ord, "(){} "))
    )
    match = LITERAL.fullmatch(number.lstrip("+-"))
    return match is not None and (match[1] is None or match[2] != "1" and math.gcd(int(match[1]), int(match[2])) == 1)


def forward(text: str) -> str:
    """Turn a > b > c around."""
    parts = re.split(r"\s*(<|>|\\[lg]e(?![A-Za-z]))\s*", text)
    flipped = {">": "<", r"\ge": r"\le "}
    is_chain = len(parts) > 4 and set(parts[1::2]) <= set(flipped)
    return "".join(flipped.get(part, part) for part in reversed(parts)) if is_chain else text


# --- 4: values --------------------------------------------------------------------------------------------------------


class Parser(_Latex2Sympy):  # type: ignore[misc]
    """The library's parser, but numbers side by side are multiplied, and i is the imaginary unit unless it counts."""

    def __init__(self, imaginary: bool) -> None:
        super().__init__(is_real=True)
        self.imaginary = imaginary

    def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
        first = self.convert_postfix(arr[i])
        if not isinstance(first, Expr | MatrixBase | list) or i + 1 == len(arr):
            return first
        rest = self.convert_postfix_list(arr, i + 1)
        if isinstance(first, list):
            return sympy.Derivative(rest, first[0])
        is_matrix = getattr(first, "is_Matrix", False) or getattr(rest, "is_Matrix", False)
        return self.mat_mul_flat(first, rest) if is_matrix else self.mul_flat(first, rest)

    def convert_atom_expr(self, atom_expr: Any) -> Any:
        known = {sympy.Symbol("i", real=True): I} if self.imaginary else {}
        return super().convert_atom_expr(atom_expr).xreplace(known)


@cache
def read(text: str) -> Basic | MatrixBase | None:
    """Parse a text; None if it is not mathematics."""
    latex = normalize_latex(text, LIBRARY)
    for part in dict.fromkeys((latex, get_last_eq(latex))):  # the whole text, or else the last part of a = b = c
        try:
            value = None if SIDE_BY_SIDE.search(part) else Parser(COUNTS.search(part) is None).parse(part)
        except ForbiddenError:
            raise
        except Exception:  # noqa: BLE001  the library's parser raises any kind of Exception
            continue
        return value if isinstance(value, Basic | MatrixBase) else None
    return None


def equal(gold: Basic | MatrixBase | None, answer: Basic | MatrixBase | None) -> bool:
    if gold is None or answer is None or max(digits(gold), digits(answer)) > MAX_DIGITS:
        return False
    gold, answer = (value.doit() if getattr(value, "is_Matrix", False) else value for value in (gold, answer))
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return gold.shape == answer.shape and all(map(equal, gold.flat(), answer.flat()))
    if getattr(gold, "is_number", False) and getattr(answer, "is_number", False):
        pairs = product((gold, get_pct_val(gold, gold)), (answer, get_pct_val(answer, answer)))  # 50 % is 50 or 0.5
        found = [same_number(ours.doit(), theirs.doit()) for ours, theirs in pairs]
        if None not in found:
            return True in found
    gold, answer = region(gold), renamed(gold, region(answer))
    return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))


def region(value: Any) -> Any:
    """Return the set that a list of inequalities describes: all of them hold, or one of them if all cannot."""
    if not (isinstance(value, sympy.FiniteSet) and value and all(isinstance(part, Relational) for part in value)):
        return value
    sets = [part.as_set() for part in value]
    return sympy.Union(*sets) if sympy.Intersection(*sets).is_empty else sympy.Intersection(*sets)


def same_number(gold: Any, answer: Any) -> bool | None:
    """Return whether two numbers are equal; None if their difference cannot be computed."""
    if gold.has(nan, zoo) or answer.has(nan, zoo):
        return False
    if isinstance(gold, Rational) and isinstance(answer, Rational) or oo in (abs(gold), abs(answer)):
        return bool(gold == answer)
    difference = gold - answer
    if difference.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit):
        return None
    distance, *sizes = (abs(number.evalf(15, maxn=400)).evalf() for number in (difference, gold, answer))
    if not all(isinstance(number, Number) for number in (distance, *sizes)):
        return None
    size = max(sizes)
    limit = max(ROUNDING * size, min(DECIMALS, SIGNIFICANT * size)) if difference.has(Float) else EXACT * size
    return bool(distance <= limit)


def renamed(gold: Any, answer: Any) -> Any:
    """Return the answer with the gold answer's variable if both define one function: f(t) = t^2 becomes f(x) = x^2."""
    ours, theirs = (getattr(value, "lhs", None) for value in (gold, answer))
    if not (isinstance(ours, AppliedUndef) and isinstance(theirs, AppliedUndef) and ours.func == theirs.func):
        return answer
    return answer if ours.free_symbols & answer.free_symbols else answer.subs(theirs.args[0], ours.args[0])


def digits(value: Any) -> float:
    """Return a bound on the digits of all numbers in the computation of `value`; infinite for towers of powers."""
    if isinstance(value, Number):
        return 1.0 + (math.log10(abs(value.p)) + math.log10(value.q) if isinstance(value, Rational) and value else 0)
    parts = [digits(part) for part in (value.flat() if isinstance(value, MatrixBase) else getattr(value, "args", ()))]
    if isinstance(value, Pow | factorial) and value.args[-1].is_number and value.args[0] not in (0, 1, -1):
        if parts[-1] > 8:
            return math.inf
        size = abs(value.args[-1].evalf(3)).evalf(3)
        size = float(size) if isinstance(size, Number) else math.inf
        return max(1.0, size) * (parts[0] if isinstance(value, Pow) else math.log10(size + 10))
    return sum(parts) if isinstance(value, Mul | sympy.Add) else max(parts, default=1.0)


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


WARM_UP = r"""\frac{1}{3} \sqrt{2}+1;[1,2) (1,2];\{1,2\} 1,2;x^2+1 (x+1)^2;x=5 5;50\% 0.5;3t 3h;10^{10} 1000
2\frac12 2.5;\text{abc} xyz;1<x<2 x>3;3+4i 5!;\sin(x)+\pi \log_2{8}e^{3};x\in\mathbb{R} \emptyset
(-\infty,2]\cup[3,4) [1,2];\int_0^1{x^2}dx 2
\begin{pmatrix}1&2\\3&4\end{pmatrix} \begin{pmatrix}1&2\\3&5\end{pmatrix};\sum_{n=1}^{3}n^2 2
\lim_{x\to{}0}\frac{\sin(x)}{x} 2"""


def prepare() -> None:
    """Fill the library's caches and run its late imports before the first fork."""
    for pair in re.split(r"[;\n]", WARM_UP):
        compare(*pair.split())
