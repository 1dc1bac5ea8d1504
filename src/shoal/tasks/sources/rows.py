"""Reads the rows of one file: JSON lines, plain or gzipped, or Parquet.

Invariant: one row at a time is held, rows and files have bounded sizes, and every error names file, row and next step.
Called by `sources`.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
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


class Rows:
    """The rows of a file. `columns` are those of its first row; `first` is that row, None in an empty file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first: dict[str, Any] | None = next((row for _, row in self.read(None, batch_rows=1)), None)
        self.columns = list(self.first or {})

    def read(self, columns: Sequence[str] | None, *, batch_rows: int = BATCH_ROWS) -> Iterator[Numbered]:
        """Every row with its number. Of Parquet only `columns` are read. Raises TasksNotFoundError."""
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
