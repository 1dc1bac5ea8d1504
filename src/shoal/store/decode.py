"""Parquet into columns, after every size that the file announces has been bounded. No signature is checked here.

Invariant: nothing is decompressed before footer and page headers were checked, and what is decompressed is bounded by
the limits, whatever the file says.
A damaged file may still abort the process inside pyarrow: files of strangers are decoded by `reader`, in a child process.
"""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.errors import first_line
from shoal.store.columns import MAX_TASK_BYTES, Columns, Limits, RolloutFileError, from_table, width
from shoal.store.pages import MAX_PAGES, Chunk, check_pages

MAX_HEADER_BYTES = 4_096
MAX_FOOTER_BYTES = 1 << 20
ENCODINGS = {"PLAIN", "RLE"}  # no dictionaries: a few bytes of one can stand for billions of values
HEADER, SIGNATURE = b"shoal.header", b"shoal.signature"


@dataclass(frozen=True)
class Decoded:
    """A file's content, bounded but not verified."""

    header: str  # JSON
    signature: str
    columns: Columns

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))


def decode(data: bytes, schema: pa.Schema, limits: Limits) -> Decoded:
    """Raises RolloutFileError for whatever pyarrow or this module refuses."""
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
        table.validate(full=True)  # also finds text that is not UTF-8
        return Decoded(metadata[HEADER].decode(), metadata[SIGNATURE].decode(), from_table(table))
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        raise RolloutFileError(f"not a readable rollout file: {first_line(error)[:200]}") from error


def _check_rows(file: pq.ParquetFile, schema: pa.Schema, limits: Limits) -> None:
    metadata = file.metadata
    if not file.schema_arrow.remove_metadata().equals(schema):
        raise RolloutFileError("columns or types are not the schema's")
    if not 0 < metadata.num_rows <= limits.max_rows:
        raise RolloutFileError(f"{metadata.num_rows} rows; between 1 and {limits.max_rows} are allowed")
    if metadata.num_row_groups > metadata.num_rows:
        raise RolloutFileError(f"{metadata.num_row_groups} row groups for {metadata.num_rows} rows")
    if sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)) != metadata.num_rows:
        raise RolloutFileError("the row groups do not add up to the file's rows")


def _check_columns(data: bytes, file: pq.ParquetFile, schema: pa.Schema, limits: Limits) -> None:
    """Bound the values of each column, then each page."""
    row_groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    pages_left = MAX_PAGES
    for number, field in enumerate(schema):
        chunks = [group.column(number) for group in row_groups]
        limit = limits.values(field.name)
        if sum(chunk.num_values for chunk in chunks) > limit:
            raise RolloutFileError(f"column {field.name} holds more than {limit} values")
        encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
        if not encodings <= ENCODINGS or any(chunk.has_dictionary_page for chunk in chunks):
            raise RolloutFileError(f"column {field.name} is encoded as {', '.join(sorted(encodings))}")
        value_bytes = MAX_TASK_BYTES + 4 if pa.types.is_string(field.type) else width(field.type)
        for chunk in chunks:
            described = Chunk(
                column=field.name,
                start=chunk.data_page_offset,
                size_bytes=chunk.total_compressed_size,
                values=chunk.num_values,
                value_bytes=value_bytes,
                compressed=chunk.compression != "UNCOMPRESSED",
            )
            pages_left = check_pages(data, described, pages_left)
