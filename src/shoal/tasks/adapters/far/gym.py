"""reasoning-gym's side of the adapter: lists the entries of a data set and scores answers with its `score_answer`.

Invariants: an entry survives the way through JSON with its tuples and integer keys, because some data sets score by them.
Nine data sets evaluate an answer as Python. Such an answer is scored only if it is a plain literal or formula, otherwise as
an empty one, so a completion never runs as code. Nor does an entry, which the run's author wrote: some data sets evaluate
parts of it too, so while one scores, an audit hook lets only literals and formulas be compiled. Runs in a process of its
own, without Shoal: see `listing.py` and `trunk.py`.
"""

import ast
import dataclasses
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

VERSION = version("reasoning_gym")
SIZE, SEED = 1000, 42
TUPLE, PAIRS = "(tuple)", "(pairs)"  # names of what JSON does not have

# Data sets that call eval() on the answer, and those that call sympy.parse_expr, which does.
LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
FORMULAS = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Load, ast.Constant, ast.UnaryOp, ast.USub)
FORMULA = (
    *(ast.Expression, ast.Load, ast.Constant, ast.Name, ast.Call, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod),
)
# What is compiled while a data set scores: formulas with bits, lists and symbols too, and what sympy writes by itself.
COMPILED = (*(*FORMULA, *LITERAL, ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert),)
CONSTRUCTORS = {"Integer", "Float", "Rational", "Symbol"}
MONOMIALS = re.compile(r"[\s()+\-*,=<>:0-9]|\b(?:def|return|if|else|monomial_[a-z]+|None|[abABkr]\d*|min|max)\b")
FUNCTIONS = {
    *(
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
    ),
    *("exp", "log", "ln", "sqrt", "Abs"),
}

dataset: Any = None  # of the source, set by `prepare`
scoring = False  # what the audit hook looks at
hooked = False


class Refused(BaseException):  # noqa: N818 - no Exception, so that no data set swallows it
    """An entry would run as code."""


class RefusedError(Exception):
    """For the person who wrote the config; the message is shown as it is."""


def rows(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    setting = {"size": SIZE, "seed": SEED} | options
    found = open_dataset(setting)
    for index in range(setting["size"]):
        random.seed(index)  # codeio runs programs that draw without a seed
        numpy.random.seed(index)
        entry = found[index]
        try:
            kept = encode({name: value for name, value in entry.items() if name != "question"})
        except TypeError as error:
            raise RefusedError(
                f"data set {setting['dataset']}: entry {index} cannot be kept as JSON ({error})"
            ) from error
        metadata = {
            "generator": "reasoning_gym",
            "version": VERSION,
            "setting": setting,
            "entry": kept,
        }
        yield {
            "question": entry["question"],
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "metadata": json.dumps(metadata),
        }


def prepare(setting: str) -> None:
    global dataset, hooked
    dataset = open_dataset(json.loads(setting))
    if not hooked:
        sys.addaudithook(refuse)
        hooked = True


def score(value: dict[str, Any]) -> dict[str, Any]:
    """What the library gives for a completion, as the fields of a grade."""
    if value["version"] != VERSION:
        raise ValueError(
            f"the task is of reasoning-gym {value['version']}, this machine has {VERSION}: install the same"
        )
    entry = decode(value["entry"]) | {"question": value["question"]}
    answer = find_answer(value["completion"])
    if not answer:
        return {"score": 0.0, "outcome": "wrong_format", "detail": "the completion has no answer"}
    detail = f"answer {answer[:200]!r}"
    name = entry["metadata"].get("source_dataset", value["setting"]["dataset"])
    if not may_score(name, answer, entry):
        answer, detail = (
            "",
            f"{detail} is not a plain literal or formula: it is not evaluated and counts as an empty answer",
        )
    try:
        points = points_of(answer, entry)
    except Exception as error:  # noqa: BLE001  whose fault it is follows from the gold answer
        if not isinstance(entry["answer"], str):
            raise
        points_of(entry["answer"], entry)  # raises too if the entry is at fault
        text = f"{detail} is not readable: {type(error).__name__}: {error}"
        return {"score": 0.0, "outcome": "wrong_format", "detail": text[:500]}
    if not (math.isfinite(points) and 0 <= points <= 1):
        raise ValueError(f"reasoning-gym gives {points}, which is not within [0, 1]")
    return {"score": points, "outcome": "graded", "detail": detail}


def points_of(answer: str, entry: dict[str, Any]) -> float:
    global scoring
    scoring = True
    try:
        return float(dataset.score_answer(answer, entry))
    finally:
        scoring = False


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook (PEP 578). Text that is only parsed has the name "<unknown>", modules have that of their file."""
    if (
        scoring
        and event == "compile"
        and isinstance(args[1], str)
        and args[1].startswith("<")
        and args[1] != "<unknown>"
    ):
        source = args[0].decode() if isinstance(args[0], bytes) else args[0]
        if source is None or not harmless(source):
            raise Refused(f"the data set would run {source!r:.100}, which is neither a literal nor a formula")


def harmless(source: str) -> bool:
    if source in ("", "from sympy import *") or not MONOMIALS.sub("", source):
        return True
    return parses(source, COMPILED, otherwise=not_python(source))


def find_answer(completion: str) -> str:
    """What the last <answer> tag holds; without one, all that follows the last </think>."""
    tagged = extract_answer(completion)
    return (completion.rpartition("</think>")[2] if tagged is None else str(tagged)).strip()


def may_score(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Whether the library evaluates nothing of this answer but a literal or a formula."""
    if name in LITERALS:
        return answer == entry["answer"] or parses(answer, LITERAL, otherwise=not_python(answer))
    return name not in FORMULAS or (answer.isascii() and parses(answer, FORMULA, otherwise=False))


def parses(text: str, allowed: tuple[type[ast.AST], ...], *, otherwise: bool) -> bool:
    """Whether all nodes of a Python expression are allowed; `otherwise` if it is none.

    eval() runs nothing of a text that is not an expression. sympy rewrites a text before it does, so there it must be one.
    """
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return otherwise
    return all(isinstance(node, allowed) and is_plain(node, allowed) for node in ast.walk(tree))


def not_python(text: str) -> bool:
    """Whether no part of it can run, because it does not compile."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return True
    except (MemoryError, RecursionError):
        return False
    return False


def is_plain(node: ast.AST, allowed: tuple[type[ast.AST], ...]) -> bool:
    match node:
        case ast.Constant(value):
            return type(value) in ((int, float) if allowed is FORMULA else (int, float, str))
        case ast.Name(name):
            return re.fullmatch("[A-Za-z][A-Za-z0-9]*", name) is not None
        case ast.Call(function, _, keywords):
            names = FUNCTIONS | CONSTRUCTORS if allowed is COMPILED else FUNCTIONS
            return isinstance(function, ast.Name) and function.id in names and not keywords
    return True


def open_dataset(setting: dict[str, Any]) -> Any:
    options = dict(setting)
    name = options.pop("dataset", None)
    if name not in DATASETS:
        raise RefusedError(f"options.dataset is {name!r}; reasoning-gym {VERSION} has {', '.join(sorted(DATASETS))}")
    size, seed = options["size"], options["seed"]
    if not (type(size) is int and size > 0 and type(seed) is int):
        raise RefusedError("options.size must be a positive integer and options.seed an integer")
    fields = {field.name for field in dataclasses.fields(DATASETS[name][1])}
    if unknown := set(options) - fields:
        raise RefusedError(f"data set {name} has no option {min(unknown)}; it has {', '.join(sorted(fields))}")
    if not re.fullmatch(r"[\w.-]*", str(options.get("data_file", ""))):
        raise RefusedError("options.data_file names a file of the library, without a path")
    try:
        if name == "composite":
            options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}} | part) for part in options["datasets"]]
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise RefusedError(f"data set {name} refuses its options: {error}") from error


def encode(value: Any) -> Any:
    """JSON that `decode` turns into the same value. Raises TypeError for what neither JSON nor a tuple holds."""
    if hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item()  # a number of numpy
    if isinstance(value, tuple):
        return {TUPLE: [encode(part) for part in value]}
    if isinstance(value, list):
        return [encode(part) for part in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in (TUPLE, PAIRS) for key in value):
            return {str(key): encode(part) for key, part in value.items()}
        return {PAIRS: [[encode(key), encode(part)] for key, part in value.items()]}
    if isinstance(value, str):
        return str(value)
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise TypeError(f"{value!r:.80} of type {type(value).__name__}")


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(part) for part in value]
    if isinstance(value, dict):
        if set(value) == {TUPLE}:
            return tuple(decode(part) for part in value[TUPLE])
        if set(value) == {PAIRS}:
            return {decode(key): decode(part) for key, part in value[PAIRS]}
        return {key: decode(part) for key, part in value.items()}
    return value
