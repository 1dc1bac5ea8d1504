"""The rows of a rollout file as plain arrays, one `Column` per field, and the schemas of submitted and accepted files.

A child process decodes Parquet and returns columns as raw little-endian numbers with their lengths. So the parent decodes
no Parquet, no Arrow data and no pickle.
Invariant: `unpack` returns columns of exactly the schema's types and within the given limits, or raises.
Called by `decode` (in the child), `quarantine` (in the parent) and `rollouts` (digest and rows).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from shoal.errors import ShoalError

PROOF_BYTES = 258
PROOF_CHUNK_TOKENS = 32  # completion tokens per proof
MAX_LIST_VALUES = 50_000_000  # in one column of one file, for example all its tokens
MAX_TASK_BYTES = 8_192  # limit for the mean length of the task names in one file
LENGTH = np.dtype("<i4")


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types.items()])


def _list_of(type_: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", type_, nullable=False))


SUBMISSION = _schema(
    group=pa.int32(),
    target_length=pa.int32(),
    seed=pa.int64(),
    tokens=_list_of(pa.int32()),
    logprobs=_list_of(pa.float32()),
    proofs=_list_of(pa.binary(PROOF_BYTES)),
    turns=_list_of(pa.int32()),
)
ACCEPTED = _schema(
    group=pa.int32(),
    task=pa.string(),
    prompt=_list_of(pa.int32()),
    tokens=_list_of(pa.int32()),
    logprobs=_list_of(pa.float32()),
    reward=pa.float32(),
    turns=_list_of(pa.int32()),
)


class RolloutFileError(ShoalError):
    """The rollout file is refused; the message says why."""


class BadSignatureError(RolloutFileError):
    """The file is readable, but has no valid signature by the key that it names."""


@dataclass(frozen=True)
class FileLimits:
    """The largest file that a reader accepts."""

    max_rows: int
    max_tokens: int  # in one list of tokens, logprobs, turns or prompt tokens

    def values(self, name: str) -> int:
        """Return how many values a whole column may hold at most."""
        per_row = {
            "tokens": self.max_tokens,
            "logprobs": self.max_tokens,
            "turns": self.max_tokens,
            "prompt": self.max_tokens,
            "proofs": -(-self.max_tokens // PROOF_CHUNK_TOKENS),
        }.get(name, 1)
        return min(self.max_rows * per_row, MAX_LIST_VALUES)

    def size_bytes(self, schema: pa.Schema) -> int:
        """Return how many bytes `pack` returns at most for a file of this schema, which has no text."""
        return sum(self.values(field.name) * width(field.type) + self.max_rows * LENGTH.itemsize for field in schema)


@dataclass(frozen=True)
class Column:
    """The values of n rows. Lists are concatenated; text and proofs are bytes (uint8)."""

    # Shape: (n,) for numbers, (sum of lengths,) for lists and text, (sum of lengths, PROOF_BYTES) for proofs.
    values: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any] | None = None  # int32, shape (n,): elements per list, or bytes per text

    def __len__(self) -> int:
        return len(self.values if self.lengths is None else self.lengths)


Columns = dict[str, Column]


def from_table(table: pa.Table) -> Columns:
    """Convert an Arrow table. Raise RolloutFileError if a value is null."""
    if any(column.null_count for column in table.columns):
        raise RolloutFileError("null values")
    return {name: _column(table[name].combine_chunks()) for name in table.column_names}


def _column(array: pa.Array) -> Column:
    if pa.types.is_list(array.type):
        lengths = np.asarray(array.value_lengths(), dtype=LENGTH)
        elements = array.flatten()
        if elements.null_count:
            raise RolloutFileError("null values")
        return Column(_column(elements).values, lengths)
    if pa.types.is_string(array.type):
        texts = [text.encode() for text in array.to_pylist()]
        lengths = np.array([len(text) for text in texts], dtype=LENGTH)
        return Column(np.frombuffer(b"".join(texts), dtype=np.uint8), lengths)
    if pa.types.is_fixed_size_binary(array.type):
        size = array.type.byte_width
        data = b"".join(array.to_pylist())
        return Column(np.frombuffer(data, dtype=np.uint8).reshape(len(array), size))
    return Column(array.to_numpy(zero_copy_only=False))


def content_digest(columns: Columns) -> str:
    """Return the BLAKE3 digest of the rows' values, column by column, so that the Parquet layout does not matter."""
    digest = blake3()
    for name, column in columns.items():
        digest.update(f"{name}\n{len(column)}\n".encode())
        values, lengths = column.values, column.lengths
        if values.ndim == 2:  # proofs, each prefixed with its size
            assert lengths is not None
            size = np.full((len(values), 1), values.shape[1], dtype=LENGTH).view(np.uint8)
            digest.update(lengths.tobytes())
            digest.update(np.hstack([size, values]).tobytes())
        elif values.dtype == np.uint8 and lengths is not None:  # text, each prefixed with its size
            for text in _slices(values.tobytes(), lengths):
                digest.update(len(text).to_bytes(4, "little") + text)
        else:
            digest.update(b"" if lengths is None else lengths.tobytes())
            digest.update(values.tobytes())
    return digest.hexdigest()


def entries(column: Column) -> list[Any]:
    """Return one entry per row: a number, a text, or a view of a list. Raise RolloutFileError if text is not UTF-8."""
    values, lengths = column.values, column.lengths
    if lengths is None:
        return list(values.tolist())
    if values.ndim == 1 and values.dtype == np.uint8:
        try:
            return [text.decode() for text in _slices(values.tobytes(), lengths)]
        except UnicodeDecodeError as error:
            raise RolloutFileError("text that is not UTF-8") from error
    return _slices(values, lengths)


def plain(entry: Any) -> Any:
    """Return an entry as Python objects: a list of numbers for a view, and a list of bytes for a view of proofs."""
    if not isinstance(entry, np.ndarray):
        return entry
    return entry.tolist() if entry.ndim == 1 else [proof.tobytes() for proof in entry]


def _slices(values: Any, lengths: np.ndarray[Any, Any]) -> list[Any]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


# --- between two processes -------------------------------------------------------------------------------------------


def pack(columns: Columns) -> bytes:
    """Concatenate the columns' bytes, lengths before values."""
    parts = [(column.lengths, column.values) for column in columns.values()]
    return b"".join(array.tobytes() for pair in parts for array in pair if array is not None)


def packed_bytes(columns: Columns) -> int:
    """Return the size of what `pack` returns."""
    parts = [(column.lengths, column.values) for column in columns.values()]
    return sum(array.nbytes for pair in parts for array in pair if array is not None)


def unpack(data: bytes, rows: int, schema: pa.Schema, limits: FileLimits) -> Columns:
    """Return the columns (no text) that untrusted bytes hold. Raise RolloutFileError if `pack` cannot have made them."""
    if not 0 < rows <= limits.max_rows:
        raise RolloutFileError(f"{rows} rows; between 1 and {limits.max_rows} are allowed")
    columns: Columns = {}
    rest = memoryview(data)
    for field in schema:
        lengths, count = None, rows
        if pa.types.is_list(field.type):
            lengths, rest = _take(rest, rows, LENGTH)
            count = int(lengths.sum(dtype=np.int64))
            if int(lengths.min()) < 0 or count > (max_count := limits.values(field.name)):
                raise RolloutFileError(f"column {field.name} has more than {max_count} values")
        values, rest = _take(rest, count, _dtype(field.type))
        columns[field.name] = Column(values, lengths)
    if rest.nbytes:
        raise RolloutFileError(f"{rest.nbytes} bytes after the last column")
    return columns


def _take(data: memoryview, count: int, dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], memoryview]:
    size = count * dtype.itemsize
    if size > data.nbytes:
        raise RolloutFileError(f"{data.nbytes} bytes instead of {size}")
    return np.frombuffer(data[:size], dtype=dtype), data[size:]


def element_type(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_list(type_) else type_


def width(type_: pa.DataType) -> int:
    """Return the bytes per value, or per element of a list; 1 for text."""
    element = element_type(type_)
    return 1 if pa.types.is_string(element) else element.bit_width // 8


def _dtype(type_: pa.DataType) -> np.dtype[Any]:
    element = element_type(type_)
    if pa.types.is_fixed_size_binary(element):
        return np.dtype((np.uint8, (element.byte_width,)))
    dtype: np.dtype[Any] = np.dtype(element.to_pandas_dtype())
    return dtype.newbyteorder("<")
