"""GSM8K: grade-school word problems, from local files or the Hugging Face hub.

    tasks.path = a folder   gsm8k_train.jsonl in it is for training, gsm8k_test.jsonl is held out
    tasks.path = a file     JSON lines; `tasks.heldout` of them, chosen by a hash of the text, are held out
    tasks.path = ""         openai/gsm8k on the hub

A line is {"question": ..., "answer": ...}; the answer's number follows `####`.
Invariant: a task's name is a hash of its text, and `digest` is a hash of all tasks in order, so two machines with the same
digest have the same tasks. `tasks.sha256`, if set, must equal it. No question is in both lists.
Called through `tasks.load` by worker, validator and evaluator. Left out: the worked solutions, which nothing reads.
Paper: Training Verifiers to Solve Math Word Problems (arXiv 2110.14168).
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.config.recipe import TaskSection
from shoal.errors import ShoalError
from shoal.tasks.arithmetic import MIN_TRAIN, Task

HUB = "openai/gsm8k"
HUB_FILES = ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")
LOCAL_FILES = ("gsm8k_train.jsonl", "gsm8k_test.jsonl")

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*+)\}")
# A minus sign counts unless an operand precedes it: "5-3" has no -3. A comma counts between groups of three digits.
NUMBER = re.compile(
    r"((?<![\w)])[-\u2212])?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)", flags=re.ASCII
)


class TasksNotFoundError(ShoalError, ValueError):
    """Tasks cannot be read, or differ from those of the config; the message names the next step."""


class Gsm8k:
    def __init__(self, config: TaskSection) -> None:
        path = Path(config.path).expanduser()
        if not config.path:
            train, heldout = (_read_parquet(_from_hub(name)) for name in HUB_FILES)
        elif path.is_dir():
            train, heldout = (_read_lines(path / name) for name in LOCAL_FILES)
        else:
            train, heldout = _split(_read_lines(path), config.heldout)
        apart = {task.question for task in heldout}
        self.train = [task for task in train if task.question not in apart]
        self.heldout = heldout
        self.digest = _digest(self.train, self.heldout)
        if config.sha256 and config.sha256 != self.digest:
            raise TasksNotFoundError(
                f"tasks.sha256 is {config.sha256}, but {config.path or HUB} gives {self.digest}: use the same files on "
                "every machine, or correct the config"
            )
        if len(self.heldout) < config.heldout or len(self.train) < MIN_TRAIN:
            raise TasksNotFoundError(
                f"{config.path or HUB} has {len(self.train)} tasks to train on and {len(self.heldout)} held out; "
                f"{MIN_TRAIN} and tasks.heldout = {config.heldout} are needed"
            )

    def grade(self, task: Task, answer: str) -> float:
        return float(last_number(answer) == task.answer)


def last_number(text: str) -> str | None:
    r"""The last number in the last \boxed{}, or else in the text, in a canonical form.

    >>> last_number("She pays $1,250.50."), last_number(r"\\boxed{018} of 20"), last_number("none")
    ('1250.5', '18', None)
    """
    boxes = [number for box in BOXED.findall(text)[-1:] for number in NUMBER.findall(box.replace("{,}", ","))]
    found = boxes or NUMBER.findall(text)
    if not found:
        return None
    sign, digits = found[-1]
    whole, _, part = digits.replace(",", "").partition(".")  # as text: int() refuses and float() rounds long numbers
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return f"-{value}" if sign and value != "0" else value


def _split(tasks: list[Task], heldout: int) -> tuple[list[Task], list[Task]]:
    ordered = sorted(tasks, key=lambda task: task.id)
    return ordered[heldout:], ordered[:heldout]


def _digest(train: list[Task], heldout: list[Task]) -> str:
    listed = [[[task.question, task.answer] for task in tasks] for tasks in (train, heldout)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _task(row: Any, where: str) -> Task:
    try:
        question, (_, marker, answer) = str(row["question"]), str(row["answer"]).rpartition("####")
    except (KeyError, TypeError) as error:
        raise TasksNotFoundError(f"{where} is not a task: a question and an answer are expected") from error
    number = last_number(answer)
    if not marker or number is None:
        raise TasksNotFoundError(f"{where} has no number after ####")
    name = hashlib.sha256(json.dumps([question, number]).encode()).hexdigest()
    return Task(id=f"gsm8k/{name[:16]}", question=question, answer=number)


def _tasks(rows: Iterable[Any], path: Path) -> list[Task]:
    return [_task(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]


def _read_lines(path: Path) -> list[Task]:
    try:
        return _tasks([json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()], path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TasksNotFoundError(
            f"{path} is not readable as JSON lines ({error}); set tasks.path to a file, to a folder with "
            f"{' and '.join(LOCAL_FILES)}, or to nothing for {HUB} on the hub"
        ) from error


def _read_parquet(path: Path) -> list[Task]:
    from pyarrow import ArrowException, parquet

    try:
        return _tasks(parquet.read_table(path).to_pylist(), path)
    except (OSError, ArrowException) as error:
        raise TasksNotFoundError(f"{path} is not readable as Parquet ({error}); delete it and try again") from error


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(HUB, name, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise TasksNotFoundError(
            f"{HUB} could not be fetched from the Hugging Face hub ({first_line}); set tasks.path to a folder with "
            f"{' and '.join(LOCAL_FILES)}"
        ) from error
