"""The rows of one file, and the values of their columns as text.

Files are JSON lines, plain or gzipped, or Parquet.
Invariants: one row at a time is held, rows and files have bounded sizes, and every error names file, row and next step.
A value becomes the same text whether the row came from JSON lines or from Parquet.
"""

import codecs
import contextlib
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
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

Numbered = tuple[int, dict[str, Any]]  # rows are counted from 1, in JSON lines by lines
Row = Mapping[str, Any]


class Rows:
    """The rows of a file. `columns` are those of its first row; `first` is that row, None in an empty file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first: dict[str, Any] | None = next((row for _, row in self.read(None, batch_rows=1)), None)
        self.columns = list(self.first or {})

    def read(self, columns: Sequence[str] | None, *, batch_rows: int = BATCH_ROWS) -> Iterator[Numbered]:
        """Return every row with its number. Of Parquet only `columns` are read. Raises TasksNotFoundError."""
        if self.path.name.endswith(PARQUET):
            return _parquet_rows(self.path, columns, batch_rows)
        return _json_rows(self.path)


def _json_rows(path: Path) -> Iterator[Numbered]:
    try:
        with _open(path) as lines:
            for number in range(1, 1 << 62):
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
        raise TasksNotFoundError(f"{path} is not a whole gzip file ({error}); copy or download it again") from error
    except OSError as error:
        raise TasksNotFoundError(f"{path} is not readable ({error.strerror}); correct the source's path") from error


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise TasksNotFoundError(
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); convert the file: "
            f"iconv -f {encoding} -t UTF-8 FILE > NEW"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TasksNotFoundError(
            f"{where} is not readable as JSON ({error}); a row is one object on one line: correct or remove it"
        ) from error
    if not isinstance(row, dict):
        raise TasksNotFoundError(f"{where} is not an object with columns: write {{...}}, one per line")
    return row


def _parquet_rows(path: Path, columns: Sequence[str] | None, batch_rows: int) -> Iterator[Numbered]:
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=batch_rows, columns=None if columns is None else list(columns)):
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
    """Return a column's value as text; numbers lose a fraction of zero. Raises RowError."""
    return as_text(value(row, column), column)


def value(row: Row, path: str) -> Any:
    """Return a column's value; dots lead into nested columns, and into columns that hold JSON. Raises RowError."""
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
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return str(cell)
    if isinstance(cell, int):
        return str(cell)
    if isinstance(cell, float) and math.isfinite(cell):
        return str(int(cell)) if cell.is_integer() else repr(cell)
    raise RowError(f"column {column} holds {_kind(cell)}, not text; name a column with text in `fields`")


def as_json(cell: Any) -> str:
    """Return JSON of a value in one form: text that is JSON already is read and written again. Raises RowError."""
    try:
        if isinstance(cell, str):
            with contextlib.suppress(ValueError):  # plain text becomes a JSON string
                cell = json.loads(cell)
        return json.dumps(cell, sort_keys=True, ensure_ascii=False, default=str)
    except RecursionError as error:
        raise RowError("a column holds JSON that is nested too deep; flatten it, or leave the column out") from error


def parsed(cell: Any, column: str) -> Any:
    """Return a value that may be stored as JSON in a string. Raises RowError."""
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
        raise RowError(f"column {path} leads into {_kind(cell)}, which has no column {part}")
    if part not in cell:
        raise RowError(
            f"no column {path}: there are {', '.join(map(str, cell)) or 'none'}; correct the row or `fields`"
        )
    return cell[part]


def _kind(cell: Any) -> str:
    names = {list: "a list", dict: "an object", float: "a number that is not finite", bytes: "bytes"}
    return names.get(type(cell), type(cell).__name__)
