"""reasoning-gym's side of the adapter: lists the entries of a data set and scores answers with its `score_answer`.

Invariants: an entry is known by its number, and drawn again where it is scored: of the run's author come only the data
set's options, which hold nothing that could be a call. Nine data sets evaluate an answer as Python. Such an answer is
scored only if it is a plain literal or formula, otherwise as an empty one. So neither a completion nor an option runs
as code.
"""

import ast
import dataclasses
import json
import math
import random
import re
from importlib.metadata import version
from typing import Any

import numpy
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

VERSION = version("reasoning_gym")
SIZE, SEED = 1000, 42

# Data sets that call eval() on the answer, and those that call sympy.parse_expr, which does.
LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
FORMULAS = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Load, ast.Constant, ast.UnaryOp, ast.USub)
FORMULA = (
    *(ast.Expression, ast.Load, ast.Constant, ast.Name, ast.Call, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod),
)
FUNCTIONS = set(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs".split()  # noqa: SIM905
)

dataset: Any = None  # of the source, set by `prepare`


class RefusedError(Exception):
    """For the person who wrote the config; the message is shown as it is."""


def rows(options: dict[str, Any]) -> list[dict[str, Any]]:
    setting = {"size": SIZE, "seed": SEED} | options
    entries = open_dataset(setting)
    return [row(drawn(entries, index), index, setting) for index in range(setting["size"])]


def row(entry: dict[str, Any], index: int, setting: dict[str, Any]) -> dict[str, Any]:
    metadata = {"generator": "reasoning_gym", "version": VERSION, "setting": setting, "index": index}
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return {"question": entry["question"], "answer": answer, "metadata": json.dumps(metadata)}


def drawn(entries: Any, index: int) -> dict[str, Any]:
    random.seed(index)  # codeio runs programs that draw without a seed
    numpy.random.seed(index)
    return dict(entries[index])


def prepare(setting: str) -> None:
    global dataset
    dataset = open_dataset(json.loads(setting))


def score(value: dict[str, Any]) -> dict[str, Any]:
    """Return what the library gives for a completion, as the fields of a grade."""
    if value["version"] != VERSION:
        raise ValueError(
            f"the task is of reasoning-gym {value['version']}, this machine has {VERSION}: install the same"
        )
    answer = find_answer(value["completion"])
    if not answer:
        return {"score": 0.0, "outcome": "wrong_format", "detail": "the completion has no answer"}
    entry = drawn(dataset, value["index"])
    if entry["question"] != value["question"]:
        raise ValueError("the data set draws another question here: its entries change from process to process")
    detail = f"answer {answer[:200]!r}"
    name = entry["metadata"].get("source_dataset", value["setting"]["dataset"])
    if not may_score(name, answer, entry):
        answer, detail = "", f"{detail} is not a plain literal or formula: not evaluated, it counts as an empty answer"
    try:
        points = float(dataset.score_answer(answer, entry))
    except Exception as error:  # noqa: BLE001  whose fault it is follows from the gold answer
        if not isinstance(entry["answer"], str):
            raise
        dataset.score_answer(entry["answer"], entry)  # raises too if the entry is at fault
        text = f"{detail} is not readable: {type(error).__name__}: {error}"
        return {"score": 0.0, "outcome": "wrong_format", "detail": text[:500]}
    if not (math.isfinite(points) and 0 <= points <= 1):
        raise ValueError(f"reasoning-gym gives {points}, which is not within [0, 1]")
    return {"score": points, "outcome": "graded", "detail": detail}


def find_answer(completion: str) -> str:
    """Return what the last <answer> tag holds; without one, all that follows the last </think>."""
    tagged = extract_answer(completion)
    return (completion.rpartition("</think>")[2] if tagged is None else str(tagged)).strip()


def may_score(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Return whether the library evaluates nothing of this answer but a literal or a formula."""
    if name in LITERALS:
        return answer == entry["answer"] or parses(answer, LITERAL, otherwise=not_python(answer))
    return name not in FORMULAS or (answer.isascii() and parses(answer, FORMULA, otherwise=False))


def parses(text: str, allowed: tuple[type[ast.AST], ...], *, otherwise: bool) -> bool:
    """Return whether all nodes of a Python expression are allowed; `otherwise` if it is none.

    eval() runs nothing of a text that is not an expression. sympy rewrites a text before it does, so there it must be one.
    """
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return otherwise
    return all(isinstance(node, allowed) and is_plain(node, allowed) for node in ast.walk(tree))


def not_python(text: str) -> bool:
    """Return whether no part of it can run, because it does not compile."""
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
            return isinstance(function, ast.Name) and function.id in FUNCTIONS and not keywords
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
    if not plain(options):
        raise RefusedError("options are numbers, words and signs, and lists of these: data sets evaluate or open them")
    try:
        if name == "composite":
            options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}} | part) for part in options["datasets"]]
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise RefusedError(f"data set {name} refuses its options: {error}") from error


def plain(value: Any) -> bool:
    """Return whether an option holds nothing that would do something if it were evaluated, and no path."""
    if isinstance(value, dict):
        return all(plain(part) for item in value.items() for part in item)
    if isinstance(value, list):
        return all(map(plain, value))
    return (
        value is None
        or isinstance(value, int | float)
        or re.fullmatch(r"[\w.+*%^&|<>=~-]*|/|//", str(value)) is not None
    )
