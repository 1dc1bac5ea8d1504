"""Decode Parquet to columns after checking every size in the file. This module also runs as a child process.

A column chunk is a sequence of pages. Each page is a small Thrift header and then the compressed bytes. The header
states two sizes, a count of values, and encodings. The footer and the headers may contradict each other, and Parquet
readers trust the headers. A page of 100 compressed bytes may claim gigabytes, so every header is checked here first.

Invariant: nothing is decompressed before the footer and all page headers have been checked. The pages of a chunk fill
it exactly, hold as many values as the footer says, use the allowed encodings, and decompress to no more bytes than
these values need. A file has at most twice as many bytes as its rows, plus OVERHEAD_BYTES, so it carries little else: a
file is kept for ever, and its worker is paid for its rows only. Signatures are not checked here.

A damaged file may still crash or stall pyarrow or exhaust memory, so `quarantine` runs this module as a child process. The
child writes one line of JSON when it is ready. Then it reads files from stdin. Before each file come its size and the
number of rows that it may have, in 8 bytes each. For each file the child writes a line of JSON, {"error": ...} or
{"header", "signature", "rows", "size_bytes"}, and then `size_bytes` bytes of columns (`columns.pack`). The parent does not
trust these answers.

A file may use only the features that our writer uses: data pages, no dictionaries, no statistics in page headers.
Format: https://github.com/apache/parquet-format (parquet.thrift), Thrift compact protocol.
"""

import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.errors import first_line
from shoal.store.columns import (
    MAX_TASK_BYTES,
    SUBMISSION,
    Columns,
    FileLimits,
    RolloutFileError,
    from_table,
    pack,
    packed_bytes,
    width,
)

MAX_HEADER_BYTES = 4_096
MAX_FOOTER_BYTES = 1 << 20
OVERHEAD_BYTES = 64 << 10  # allowed for header and footer, which take about 2 KiB
ENCODINGS = {"PLAIN", "RLE"}  # dictionaries are not allowed: in them, a few bytes can stand for billions of values
HEADER, SIGNATURE = b"shoal.header", b"shoal.signature"
DATA_PAGE, DATA_PAGE_V2 = 0, 3  # of parquet.thrift's enum PageType
PLAIN, RLE = 0, 3  # of parquet.thrift's enum Encoding
MAX_PAGES = 10_000  # in one file; an honest file has about one per MiB
MAX_PAGE_HEADER_BYTES = 1_024
LEVEL_BYTES = 4  # a value's repetition and definition levels take at most two runs of two bytes
PAGE_OVERHEAD_BYTES = 64  # margin for the lengths of a page's levels, and for texts longer than the mean

TRUE, FALSE, I32, STRUCT = 1, 2, 5, 12  # Thrift's compact types; our writer's headers contain no others
Fields = dict[int, Any]
OUT_OF_MEMORY = 3  # exit status of the child


@dataclass(frozen=True)
class Decoded:
    """A file's content. Its sizes have been checked. Its signature has not been verified."""

    header: str  # JSON
    signature: str
    columns: Columns

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))


def decode(data: bytes, schema: pa.Schema, limits: FileLimits) -> Decoded:
    """Decode a file. Raise RolloutFileError if pyarrow or this module refuses it."""
    if MAX_FOOTER_BYTES < int.from_bytes(data[-8:-4], "little") <= len(data):
        raise RolloutFileError(f"a footer of more than {MAX_FOOTER_BYTES} bytes")
    try:
        file = pq.ParquetFile(
            pa.BufferReader(data), thrift_string_size_limit=1 << 20, thrift_container_size_limit=1 << 16
        )
        metadata = file.metadata.metadata or {}
        if set(metadata) != {HEADER, SIGNATURE}:
            raise RolloutFileError("metadata must hold a header and a signature, nothing else")
        if len(metadata[HEADER]) > MAX_HEADER_BYTES:
            raise RolloutFileError(f"a header of more than {MAX_HEADER_BYTES} bytes")
        _check_rows(file, schema, limits)
        _check_columns(data, file, schema, limits)
        table = file.read(use_threads=False)
        table.validate(full=True)  # also checks that text is UTF-8
        columns = from_table(table)
        if len(data) > 2 * (rows_bytes := packed_bytes(columns)) + OVERHEAD_BYTES:
            raise RolloutFileError(f"a file of {len(data)} bytes for rows of {rows_bytes} bytes")
        return Decoded(metadata[HEADER].decode(), metadata[SIGNATURE].decode(), columns)
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        raise RolloutFileError(f"not a readable rollout file: {first_line(error)[:200]}") from error


def _check_rows(file: pq.ParquetFile, schema: pa.Schema, limits: FileLimits) -> None:
    metadata = file.metadata
    if not file.schema_arrow.remove_metadata().equals(schema):
        raise RolloutFileError("columns or types are not the schema's: another version of Shoal may have written it")
    if not 0 < metadata.num_rows <= limits.max_rows:
        raise RolloutFileError(f"{metadata.num_rows} rows; between 1 and {limits.max_rows} are allowed")
    if metadata.num_row_groups > metadata.num_rows:
        raise RolloutFileError(f"{metadata.num_row_groups} row groups for {metadata.num_rows} rows")
    if sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)) != metadata.num_rows:
        raise RolloutFileError("the row groups do not add up to the file's rows")


def _check_columns(data: bytes, file: pq.ParquetFile, schema: pa.Schema, limits: FileLimits) -> None:
    """Check the number of values and the encodings of each column, then each page."""
    row_groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    pages_left = MAX_PAGES
    for number, field in enumerate(schema):
        chunks = [group.column(number) for group in row_groups]
        limit = limits.values(field.name)
        if sum(chunk.num_values for chunk in chunks) > limit:
            raise RolloutFileError(f"column {field.name} has more than {limit} values")
        encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
        if not encodings <= ENCODINGS or any(chunk.has_dictionary_page for chunk in chunks):
            raise RolloutFileError(f"column {field.name} is encoded as {', '.join(sorted(encodings))}")
        value_bytes = MAX_TASK_BYTES + 4 if pa.types.is_string(field.type) else width(field.type)
        for chunk in chunks:
            described = ColumnChunk(
                column=field.name,
                start=chunk.data_page_offset,
                size_bytes=chunk.total_compressed_size,
                values=chunk.num_values,
                value_bytes=value_bytes,
                compressed=chunk.compression != "UNCOMPRESSED",
            )
            pages_left = check_pages(data, described, pages_left)


# --- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnChunk:
    """A column chunk as the footer describes it."""

    column: str
    start: int  # offset of its first page in the file
    size_bytes: int
    values: int
    value_bytes: int  # maximum per value when decompressed
    compressed: bool


def check_pages(data: bytes, chunk: ColumnChunk, pages_left: int) -> int:
    """Check the pages of a chunk. Return how many pages the chunks after it may have. Raise RolloutFileError."""
    end = chunk.start + chunk.size_bytes
    if not 0 <= chunk.start < end <= len(data):
        raise _refused(chunk, "lies outside of the file")
    at, values = chunk.start, 0
    while at < end:
        pages_left -= 1
        if pages_left < 0:
            raise RolloutFileError(f"more than {MAX_PAGES} pages")
        header, at = _header(data, at, min(end, at + MAX_PAGE_HEADER_BYTES), chunk)
        inflated_bytes, size_bytes = header.get(2, -1), header.get(3, -1)
        count = _values(header, chunk)
        if not 0 <= size_bytes <= end - at or inflated_bytes < 0:
            raise _refused(chunk, f"has a page of {size_bytes} bytes that does not fit into it")
        if inflated_bytes > count * (chunk.value_bytes + LEVEL_BYTES) + PAGE_OVERHEAD_BYTES:
            raise _refused(chunk, f"has a page of {count} values that decompresses to {inflated_bytes} bytes")
        plain = not chunk.compressed or (header[1] == DATA_PAGE_V2 and header[8].get(7) is False)
        if plain and inflated_bytes != size_bytes:
            raise _refused(chunk, f"has an uncompressed page of {size_bytes} bytes whose header says {inflated_bytes}")
        at, values = at + size_bytes, values + count
    if values != chunk.values:
        raise _refused(chunk, f"has pages of {values} values where the footer says {chunk.values}")
    return pages_left


def _values(header: Fields, chunk: ColumnChunk) -> int:
    """Return the number of values in a plainly encoded data page. Raise RolloutFileError for any other page."""
    kind = header.get(1)
    if kind == DATA_PAGE and isinstance(page := header.get(5), dict):
        count, encodings = page.get(1), (page.get(2), page.get(3), page.get(4))
        allowed = encodings == (PLAIN, RLE, RLE)
    elif kind == DATA_PAGE_V2 and isinstance(page := header.get(8), dict):
        count, allowed = page.get(1), page.get(4) == PLAIN
    else:
        raise _refused(chunk, f"has a page of type {kind}")
    if not allowed:
        raise _refused(chunk, "has a page in an encoding that is not allowed")
    if not isinstance(count, int) or count < 1:
        raise _refused(chunk, "has a page without values")
    return count


def _refused(chunk: ColumnChunk, fault: str) -> RolloutFileError:
    return RolloutFileError(f"column {chunk.column} {fault}")


# --- Thrift ----------------------------------------------------------------------------------------------------------


def _header(data: bytes, at: int, end: int, chunk: ColumnChunk) -> tuple[Fields, int]:
    try:
        return _struct(memoryview(data)[:end], at, depth=2)
    except (IndexError, ValueError) as error:
        raise _refused(chunk, "has a page header that is malformed or too long") from error


def _struct(data: memoryview, at: int, depth: int) -> tuple[Fields, int]:
    """Parse a struct: integers, booleans and structs by field number. Raise ValueError, or IndexError if it is cut off."""
    fields: Fields = {}
    number = 0
    while head := data[at]:
        step, kind = head >> 4, head & 0x0F
        if step == 0 or depth == 0:
            raise ValueError("fields out of order, or structs too deep")
        number, at = number + step, at + 1  # field numbers increase, so none can occur twice
        if kind == I32:
            fields[number], at = _int32(data, at)
        elif kind == STRUCT:
            fields[number], at = _struct(data, at, depth - 1)
        elif kind in (TRUE, FALSE):
            fields[number] = kind == TRUE
        else:
            raise ValueError(f"a field of type {kind}")
    return fields, at + 1


def _int32(data: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 35, 7):
        number |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            if number >= 1 << 32:
                break
            return number >> 1 ^ -(number & 1), at
    raise ValueError("an integer of more than 32 bits")


# --- the child process -----------------------------------------------------------------------------------------------


def main(max_tokens: int, memory_bytes: int, cpu_s: float, alarm_s: float) -> None:
    """Decode files from stdin until it is closed.

    memory_bytes: memory for one file, beyond what the imports use. The process ends if one file takes cpu_s of CPU time,
    or alarm_s.
    """
    import pyarrow.compute  # noqa: F401  pyarrow imports it at first use, which would count against a file's memory

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])  # in use after the imports
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _answer({"error": None})
    while True:
        prefix = sys.stdin.buffer.read(16)
        if len(prefix) < 16:
            return
        size_bytes, max_rows = int.from_bytes(prefix[:8], "big"), int.from_bytes(prefix[8:], "big")
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        signal.setitimer(signal.ITIMER_REAL, alarm_s)  # SIGALRM ends it, too
        _read(size_bytes, FileLimits(max_rows, max_tokens))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read(size_bytes: int, limits: FileLimits) -> None:
    try:
        decoded = decode(sys.stdin.buffer.read(size_bytes), SUBMISSION, limits)
        columns = pack(decoded.columns)
        about = {"header": decoded.header, "signature": decoded.signature, "rows": decoded.rows}
    except RolloutFileError as error:
        if isinstance(error.__cause__, MemoryError):
            os._exit(OUT_OF_MEMORY)
        _answer({"error": str(error)})
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # too little memory may be left for the next file
    else:
        _answer(about | {"size_bytes": len(columns)}, columns)


def _answer(about: dict[str, object], columns: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(about).encode() + b"\n" + columns)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
