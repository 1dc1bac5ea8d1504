"""Read the rows of one file (JSON lines, plain or gzipped, or Parquet), and the values of their columns as text.

Invariants: memory holds one JSON row or one batch of Parquet at a time. Rows have bounded sizes. Every error names the
file, the row and a remedy. A value becomes the same text from JSON lines and from Parquet.
"""

import contextlib
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from shoal.errors import first_line
from shoal.tasks.task import TasksNotFoundError

JSON_LINES, PARQUET = (".jsonl", ".jsonl.gz"), ".parquet"
SUFFIXES = (*JSON_LINES, PARQUET)
MAX_LINE_BYTES = 192 << 20
BATCH_ROWS = 256

Row = Mapping[str, Any]


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every row with its number, counted from 1. In JSON lines, empty lines count, too. Raise TasksNotFoundError.

    `columns`: the only columns to read from Parquet; JSON rows have all their columns.
    """
    return _parquet_rows(path, columns) if path.name.endswith(PARQUET) else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as lines:
            for number in itertools.count(1):
                line = lines.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise TasksNotFoundError(
                        f"{path}, row {number} is longer than {MAX_LINE_BYTES >> 20} MB; remove or split it"
                    )
                if line.strip():
                    yield number, _object(line, f"{path}, row {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TasksNotFoundError(f"{path} is not a complete gzip file ({error}); copy or download it again") from error
    except OSError as error:
        raise TasksNotFoundError(f"{path} is not readable ({error.strerror}); correct the source's path") from error


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # drops a byte order mark
    except UnicodeDecodeError as error:
        raise TasksNotFoundError(
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); convert the file with iconv"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TasksNotFoundError(
            f"{where} is not readable as JSON ({error}); a row is one object on one line: correct or remove it"
        ) from error
    if not isinstance(row, dict):
        raise TasksNotFoundError(f"{where} is not an object with columns: write {{...}}, one per line")
    return row


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=None if columns is None else list(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TasksNotFoundError(
            f"{path}, after row {number}, is not readable as Parquet ({first_line(error)}); copy or download it again"
        ) from error


# --- columns ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskFields:
    """A task before it has an id."""

    question: str
    answer: str = ""
    tests: str = ""  # JSON, see `code_tests`
    metadata: str = ""  # JSON
    reward: str = ""  # the reward of the row's schema


class RowError(TasksNotFoundError):
    """A row does not match its schema or the field map. The caller adds file and row number."""


class LeftOutError(Exception):
    """The data set marks the row as unusable, or the row has nothing to grade with. The message is the reason."""


def text(row: Row, column: str) -> str:
    """Return a column's value as text; 3.0 becomes "3". Raise RowError."""
    return as_text(value(row, column), column)


def value(row: Row, path: str) -> Any:
    """Return a column's value; dots select nested columns, also in columns that hold JSON. Raise RowError."""
    if path in row:
        cell = row[path]
    else:
        cell = row
        for part in path.split("."):
            cell = _step(cell, part, path)
    if cell is None:
        raise RowError(f"column {path} is empty")
    return cell


def as_text(cell: Any, column: str) -> str:
    if isinstance(cell, str | int):
        return str(cell)
    if isinstance(cell, float) and math.isfinite(cell):
        return str(int(cell)) if cell.is_integer() else repr(cell)
    raise RowError(f"column {column} holds a {type(cell).__name__}, not text; name a column with text in `fields`")


def as_json(cell: Any) -> str:
    """Return a value as normalized JSON; text that is JSON is parsed first. Raise RowError."""
    try:
        if isinstance(cell, str):
            with contextlib.suppress(ValueError):  # plain text becomes a JSON string
                cell = json.loads(cell)
        return json.dumps(cell, sort_keys=True, ensure_ascii=False, default=str)
    except RecursionError as error:
        raise RowError("a column holds JSON that is nested too deep; flatten it, or omit the column") from error


def parsed(cell: Any, column: str) -> Any:
    """Return a cell's value. If it is a string, parse it as JSON. Raise RowError."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise RowError(f"column {column} is not JSON ({error})") from error


def _step(cell: Any, part: str, path: str) -> Any:
    if isinstance(cell, str):
        cell = parsed(cell, path)
    if not isinstance(cell, Mapping):
        raise RowError(f"column {path} leads into a {type(cell).__name__}, which has no column {part}")
    if part not in cell:
        raise RowError(
            f"no column {path}: there are {', '.join(map(str, cell)) or 'none'}; correct the row or `fields`"
        )
    return cell[part]
