"""Adapter for reasoning-gym: lists the entries of a data set, and scores answers with its `score_answer`.

Invariant: neither a completion nor an option runs as code. Options contain nothing that could be a call. Nine data sets
evaluate an answer as Python; they get only answers with the syntax of a literal or formula. Scoring generates an entry
again from its index.
"""

import json
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
# An answer for eval() has no parenthesis, dot, brace or colon, so no call, attribute or lambda. It has no lower-case name.
LITERAL = re.compile(r"[\dA-Z_\s\[\],'\"-]*", re.ASCII)
# An answer for sympy.parse_expr has no quotes. Its names are single letters or functions. Its dots occur only in numbers.
WORD = r"\b(?:[A-Za-z]|pi|a?(?:sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|Abs)\b"
FORMULA = re.compile(rf"(?:[\d\s+\-*/^%(),]|(?<=\d)\.|\.(?=\d)|{WORD})*+", re.ASCII)
EVALUATED = dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), LITERAL)
EVALUATED |= dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), FORMULA)
EVALUATED |= dict.fromkeys(("intermediate_integration", "simple_integration"), FORMULA)

# Their scorers give 1 to the same wrong answer on every entry: a prefix, nan, 24 from any numbers, any text.
REFUSED = {"coin_flip", "complex_arithmetic", "puzzle24", "game_of_life_halting"}

ROUNDING = 1e-9  # a score above 1 by less than this is 1: spell_backward adds fractions, and their sum can exceed 1

dataset: Any = None  # the source's data set; `prepare` sets it


def rows(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries as rows, each question once."""
    setting = {"size": 1000, "seed": 42} | options
    entries = open_dataset(setting)
    listed: dict[str, dict[str, Any]] = {}
    for index in range(setting["size"]):
        entry = generate(entries, index)
        metadata = {"generator": "reasoning_gym", "version": VERSION, "setting": setting, "index": index}
        answer = "" if entry["answer"] is None else str(entry["answer"])
        row = {"question": entry["question"], "answer": answer, "metadata": json.dumps(metadata)}
        listed.setdefault(entry["question"], row)
    return list(listed.values())


def generate(entries: Any, index: int) -> dict[str, Any]:
    random.seed(index)  # codeio runs programs that use unseeded random numbers
    numpy.random.seed(index)
    return dict(entries[index])


def prepare(setting: str) -> None:
    global dataset
    dataset = open_dataset(json.loads(setting))


def score(value: dict[str, Any]) -> dict[str, Any]:
    """Return the library's score for a completion, as the fields of a grade."""
    if value["version"] != VERSION:
        raise ValueError(
            f"the task needs reasoning-gym {value['version']}, but this machine has {VERSION}: install the same version"
        )
    tagged = extract_answer(value["completion"])
    answer = (value["completion"] if tagged is None else str(tagged)).strip()
    if not answer:
        return {"score": 0.0, "outcome": "wrong_format", "detail": "the completion has no answer"}
    entry = generate(dataset, value["index"])
    if entry["question"] != value["question"]:
        raise ValueError("the data set generates another question here than in the process that listed it")
    detail = f"answer {answer[:200]!r}"
    allowed = EVALUATED.get(entry["metadata"].get("source_dataset", value["setting"]["dataset"]))
    if allowed and answer != entry["answer"] and not allowed.fullmatch(answer):
        answer, detail = "", f"{detail} is not a plain literal or formula, so it counts as an empty answer"
    try:
        score = float(dataset.score_answer(answer, entry))
        return {"score": 1.0 if 1 < score < 1 + ROUNDING else score, "detail": detail}
    except Exception as error:  # noqa: BLE001  the answer or the entry is at fault
        dataset.score_answer(entry["answer"], entry)  # this raises, too, if the entry is at fault
        text = f"{detail} is not readable: {type(error).__name__}: {error}"
        return {"score": 0.0, "outcome": "wrong_format", "detail": text[:500]}


def open_dataset(setting: dict[str, Any]) -> Any:
    options = dict(setting)
    name = options.pop("dataset", None)
    if name not in DATASETS:
        raise ValueError(f"options.dataset is {name!r}; reasoning-gym {VERSION} has {', '.join(sorted(DATASETS))}")
    parts = options.get("datasets", []) if name == "composite" else []
    names = {name, *(str(part.get("name")) for part in parts if isinstance(part, dict))}
    if refused := sorted(REFUSED & names):
        raise ValueError(
            f"data set {refused[0]} is refused, because its scorer gives 1 to a constant wrong answer; choose another"
        )
    if not plain(options):
        raise ValueError(
            "options may hold only numbers, words and operators, because data sets may evaluate them or open them as files"
        )
    try:
        if name == "composite":
            options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}} | part) for part in options["datasets"]]
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"data set {name} refuses the options: {error}") from error


def plain(value: Any) -> bool:
    """Return whether an option is harmless: evaluating it has no effect, and it is not a path."""
    if isinstance(value, dict | list):
        return all(map(plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or re.fullmatch(r"[\w.+*%^&|<>=~-]*|/|//", str(value)) is not None
