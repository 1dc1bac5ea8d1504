"""`shoal grade CONFIG COMPLETIONS.jsonl`: scores completions outside of a run, exactly as a run would.

Invariant: the same task set, rewards and sandbox as worker and validator use; one line out for each line in, in order.
For people who ask why a reward is 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, UsageError, add_command, read_config, say, takes_config

if TYPE_CHECKING:
    from shoal.tasks import Task, TaskSet

AT_ONCE = 64  # completions graded before their lines are printed


@dataclass(frozen=True)
class Line:
    where: str  # for messages
    key: str  # "task" or "question"
    value: str
    completion: str


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    grade_ = add_command(
        commands, "grade", "score completions outside of a run, exactly as a run would", "quickstart completions.jsonl"
    )
    takes_config(grade_)
    grade_.add_argument(
        "completions",
        metavar="COMPLETIONS.jsonl",
        help='a line each: {"task": id or "question": text, "completion": text}; - reads stdin',
    )


def grade(arguments: argparse.Namespace) -> None:
    settings = read_config(arguments)
    lines = list(read_lines(arguments.completions))
    from shoal import tasks

    task_set = tasks.load(settings.tasks)
    found = find_tasks(task_set, lines)
    outcomes: Counter[str] = Counter()
    with tasks.Graders(settings.tasks, files=task_set.files) as graders:
        for start in range(0, len(lines), AT_ONCE):
            chunk = lines[start : start + AT_ONCE]
            asked = [found[line.key, line.value] for line in chunk]
            grades = graders.grade(asked, [line.completion for line in chunk])
            for task, one in zip(asked, grades, strict=True):
                outcomes[one.outcome] += 1
                row = {
                    "task": task.id,
                    "question": task.question,
                    "answer": task.answer,
                    "score": one.score,
                    "outcome": one.outcome,
                    "tier": one.tier,
                    "detail": one.detail,
                }
                parts = {"parts": dict(one.parts)} if one.parts else {}
                say(json.dumps(row | parts))
    say(", ".join(f"{count} {name}" for name, count in outcomes.items()), sys.stderr)


def read_lines(name: str) -> Iterator[Line]:
    """Every completion. Raises UsageError, which names the line."""
    if name == "-":
        yield from parse_lines("stdin", sys.stdin)
        return
    try:
        with Path(name).open(encoding="utf-8") as file:
            yield from parse_lines(name, file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} cannot be read ({error})") from error


def parse_lines(name: str, lines: Iterable[str]) -> Iterator[Line]:
    for number, text in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON ({error})") from error
        if not isinstance(row, dict):
            row = {}
        key = "task" if "task" in row else "question"
        value, completion = row.get(key), row.get("completion")
        if not isinstance(value, str) or not isinstance(completion, str):
            raise UsageError(f'{where} must be {{"task": id or "question": text, "completion": text}}, each as text')
        yield Line(where, key, value, completion)


def find_tasks(task_set: TaskSet, lines: list[Line]) -> dict[tuple[str, str], Task]:
    """The tasks that the lines name, by key and value. Raises UsageError, which names the first that is not there."""
    ids = sorted({line.value for line in lines if line.key == "task"})
    questions = {line.value for line in lines if line.key == "question"}
    found: dict[tuple[str, str], Task] = {}
    for view in (task_set.train, task_set.heldout):
        found |= {("task", task.id): task for task in view.having(ids)}
        if questions:
            found |= {("question", task.question): task for task in view if task.question in questions}
    for line in lines:
        if (line.key, line.value) not in found:
            example = task_set.train[0]
            raise UsageError(
                f"{line.where}: no {line.key} {line.value!r} in this config's sources; there is, for example, task "
                f"{example.id} with the question {example.question[:80]!r}"
            )
    return found
