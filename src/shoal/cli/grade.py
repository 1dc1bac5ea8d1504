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

from shoal.cli.arguments import Commands, UsageError, read_config, takes_config

if TYPE_CHECKING:
    from shoal.tasks import Task, TaskSet

AT_ONCE = 64  # completions graded before their lines are printed


@dataclass(frozen=True)
class Line:
    where: str  # for messages
    task: str
    completion: str


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    grade_ = commands.add_parser("grade", help="score completions outside of a run, exactly as a run would")
    takes_config(grade_)
    grade_.add_argument(
        "completions", metavar="COMPLETIONS.jsonl", help='{"task": id, "completion": text} a line; - reads stdin'
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
            grades = graders.grade([found[line.task] for line in chunk], [line.completion for line in chunk])
            for line, one in zip(chunk, grades, strict=True):
                outcomes[one.outcome] += 1
                row = {
                    "task": line.task,
                    "score": one.score,
                    "outcome": one.outcome,
                    "tier": one.tier,
                    "detail": one.detail,
                }
                parts = {"parts": dict(one.parts)} if one.parts else {}
                sys.stdout.write(json.dumps(row | parts, ensure_ascii=False) + "\n")
            sys.stdout.flush()
    sys.stderr.write(", ".join(f"{count} {name}" for name, count in outcomes.items()) + "\n")


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
        task, completion = (row.get("task"), row.get("completion")) if isinstance(row, dict) else (None, None)
        if not isinstance(task, str) or not isinstance(completion, str):
            raise UsageError(f'{where} must be {{"task": id, "completion": text}}, both as text')
        yield Line(where, task, completion)


def find_tasks(task_set: TaskSet, lines: list[Line]) -> dict[str, Task]:
    """The tasks that the lines name. Raises UsageError, which names the first line whose task is not there."""
    wanted = sorted({line.task for line in lines})
    found = {task.id: task for view in (task_set.train, task_set.heldout) for task in view.having(wanted)}
    for line in lines:
        if line.task not in found:
            raise UsageError(
                f"{line.where}: no task {line.task!r} in this config's sources; ids look like {task_set.train[0].id}"
            )
    return found
