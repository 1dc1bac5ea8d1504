"""What a row of a data set holds for a task, and the values in rows as text.

Invariant: a value becomes the same text whether the row came from JSON lines or from Parquet.
Called by `schemas`, `code_tests` and `sources`.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.tasks.task import TasksNotFoundError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Fields:
    """A task before it has a name."""

    question: str
    answer: str = ""
    tests: str = ""  # JSON, see `code_tests`
    metadata: str = ""  # JSON
    reward: str = ""  # the default of its schema


class RowError(TasksNotFoundError):
    """A row that is not as its schema or the field map says. The caller adds file and row number."""


class LeftOutError(Exception):
    """A row that its data set itself marks as unusable for training by rewards. It is counted by this reason."""


def text(row: Row, column: str) -> str:
    """A column's value as text; numbers lose a fraction of zero. Raises RowError."""
    return as_text(value(row, column), column)


def value(row: Row, path: str) -> Any:
    """A column's value; dots lead into nested columns, and into columns that hold JSON. Raises RowError."""
    if path in row:
        found = row[path]
    else:
        found = row
        for part in path.split("."):
            found = _step(found, part, path)
    if found is None:
        raise RowError(f"column {path} is empty")
    return found


def as_text(found: Any, column: str) -> str:
    if isinstance(found, str):
        return found
    if isinstance(found, bool):
        return str(found)
    if isinstance(found, int):
        return str(found)
    if isinstance(found, float) and math.isfinite(found):
        return str(int(found)) if found.is_integer() else repr(found)
    raise RowError(f"column {column} holds {_kind(found)}, not text; name a column with text in `fields`")


def as_json(found: Any) -> str:
    """JSON of a value in one form: text that is JSON already is read and written again. Raises RowError."""
    try:
        if isinstance(found, str):
            with contextlib.suppress(ValueError):  # plain text becomes a JSON string
                found = json.loads(found)
        return json.dumps(found, sort_keys=True, ensure_ascii=False, default=str)
    except RecursionError as error:
        raise RowError("a column holds JSON that is nested too deep; flatten it, or leave the column out") from error


def metadata(row: Row, *columns: str) -> str:
    """JSON of those of the columns that the row has; "" if it has none."""
    held = {column: row[column] for column in columns if row.get(column) is not None}
    return as_json(held) if held else ""


def parsed(found: Any, column: str) -> Any:
    """A value that may be stored as JSON in a string. Raises RowError."""
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        raise RowError(f"column {column} is not JSON ({error})") from error


def _step(found: Any, part: str, path: str) -> Any:
    if isinstance(found, str):
        found = parsed(found, path)
    if not isinstance(found, Mapping):
        raise RowError(f"column {path} leads into {_kind(found)}, which has no column {part}")
    if part not in found:
        raise RowError(
            f"no column {path}: there are {', '.join(map(str, found)) or 'none'}; correct the row or `fields`"
        )
    return found[part]


def _kind(found: Any) -> str:
    names = {list: "a list", dict: "an object", float: "a number that is not finite", bytes: "bytes"}
    return names.get(type(found), type(found).__name__)
