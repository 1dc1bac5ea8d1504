"""Reads a source of the config into tasks: rows of a file, a hub data set or a generator, their columns mapped to fields.

Invariant: a row becomes a task or an error that names the row; nothing is skipped. Called by `taskset`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from shoal.config.recipe import SourceSection
from shoal.tasks.arithmetic import arithmetic
from shoal.tasks.task import Task, TasksNotFoundError

GENERATORS = {"arithmetic": arithmetic}


def read_source(source: SourceSection, split: str) -> list[Task]:
    """Every task of a source. Raises TasksNotFoundError."""
    if source.generator:
        if source.generator not in GENERATORS:
            raise TasksNotFoundError(f"no generator {source.generator!r}; there are {', '.join(GENERATORS)}")
        rows: list[dict[str, Any]] = list(GENERATORS[source.generator](source.options))
    else:
        rows = _read_lines(Path(source.path).expanduser())
    return [_task(source, row, number) for number, row in enumerate(rows, start=1)]


def _task(source: SourceSection, row: dict[str, Any], number: int) -> Task:
    columns = {"question": "question", "answer": "answer"} | source.fields
    try:
        fields = {field: str(row[column]) for field, column in columns.items()}
    except KeyError as error:
        raise TasksNotFoundError(f"source {source.label}, row {number} has no column {error}") from error
    name = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return Task(id=f"{source.label}/{name[:16]}", source=source.label, **fields)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TasksNotFoundError(f"{path} is not readable as JSON lines ({error})") from error
