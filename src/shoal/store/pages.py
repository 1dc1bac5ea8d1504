"""The pages of a Parquet file, found and bounded before anything is decompressed.

A column chunk is a run of pages: a small Thrift header that names two sizes, a count of values and encodings, and then
the compressed bytes. Footer and headers may contradict each other, and a reader trusts the headers: a page of 100
compressed bytes may ask for gigabytes. So every header is read here first.
Invariant: `check_pages` returns only if the pages fill the chunk exactly, hold as many values as the footer says, use the
allowed encodings, and decompress to no more than these values take.
Called by `decode`. Only what our writer produces is allowed: data pages, no dictionaries, no statistics in page headers.
Format: https://github.com/apache/parquet-format (parquet.thrift), Thrift compact protocol.
"""

from dataclasses import dataclass
from typing import Any

from shoal.store.columns import RolloutFileError

DATA_PAGE, DATA_PAGE_V2 = 0, 3  # PageType
PLAIN, RLE = 0, 3  # Encoding
MAX_PAGES = 10_000  # in one file: an honest one has a page per MiB
MAX_HEADER_BYTES = 1_024
LEVEL_BYTES = 4  # of one value's repetition and definition levels, at most: two runs of two bytes
PAGE_OVERHEAD_BYTES = 64  # the levels' own sizes, and text of one value more than the average

TRUE, FALSE, I32, STRUCT = 1, 2, 5, 12  # Thrift's compact types; no others occur in the headers of our writer
Fields = dict[int, Any]


@dataclass(frozen=True)
class Chunk:
    """What the footer says of a column chunk."""

    column: str
    start: int  # offset of its first page in the file
    size_bytes: int
    values: int
    value_bytes: int  # one value takes at most this many bytes when decompressed
    compressed: bool


def check_pages(data: bytes, chunk: Chunk, pages_left: int) -> int:
    """Returns how many pages are left for other chunks. Raises RolloutFileError."""
    end = chunk.start + chunk.size_bytes
    if not 0 <= chunk.start < end <= len(data):
        raise _refused(chunk, "lies outside of the file")
    at, values = chunk.start, 0
    while at < end:
        pages_left -= 1
        if pages_left < 0:
            raise RolloutFileError(f"more than {MAX_PAGES} pages")
        header, at = _header(data, at, min(end, at + MAX_HEADER_BYTES), chunk)
        inflated_bytes, size_bytes = header.get(2, -1), header.get(3, -1)
        count = _values(header, chunk)
        if not 0 <= size_bytes <= end - at or inflated_bytes < 0:
            raise _refused(chunk, f"has a page of {size_bytes} bytes that does not fit")
        if inflated_bytes > count * (chunk.value_bytes + LEVEL_BYTES) + PAGE_OVERHEAD_BYTES:
            raise _refused(chunk, f"has a page of {count} values that inflates to {inflated_bytes} bytes")
        plain = not chunk.compressed or (header[1] == DATA_PAGE_V2 and header[8].get(7) is False)
        if plain and inflated_bytes != size_bytes:
            raise _refused(chunk, f"has a plain page of {size_bytes} bytes that claims {inflated_bytes}")
        at, values = at + size_bytes, values + count
    if values != chunk.values:
        raise _refused(chunk, f"has pages of {values} values where the footer says {chunk.values}")
    return pages_left


def _values(header: Fields, chunk: Chunk) -> int:
    """The number of values in a data page in plain encoding."""
    kind = header.get(1)
    if kind == DATA_PAGE and isinstance(page := header.get(5), dict):
        count, encodings = page.get(1), (page.get(2), page.get(3), page.get(4))
        allowed = encodings == (PLAIN, RLE, RLE)
    elif kind == DATA_PAGE_V2 and isinstance(page := header.get(8), dict):
        count, allowed = page.get(1), page.get(4) == PLAIN
    else:
        raise _refused(chunk, f"has a page of type {kind}")
    if not allowed:
        raise _refused(chunk, "has a page in another encoding than the footer says")
    if not isinstance(count, int) or count < 1:
        raise _refused(chunk, "has a page without values")
    return count


def _refused(chunk: Chunk, fault: str) -> RolloutFileError:
    return RolloutFileError(f"column {chunk.column} {fault}")


# --- Thrift ----------------------------------------------------------------------------------------------------------


def _header(data: bytes, at: int, end: int, chunk: Chunk) -> tuple[Fields, int]:
    try:
        return _struct(memoryview(data)[:end], at, depth=2)
    except (IndexError, ValueError) as error:
        raise _refused(chunk, "has a page header that is malformed or too long") from error


def _struct(data: memoryview, at: int, depth: int) -> tuple[Fields, int]:
    """A struct of integers, booleans and structs by field number. Raises ValueError, or IndexError at the end."""
    fields: Fields = {}
    number = 0
    while head := data[at]:
        step, kind = head >> 4, head & 0x0F
        if step == 0 or depth == 0:
            raise ValueError("fields out of order, or structs too deep")
        number, at = number + step, at + 1  # numbers grow, so no field can occur twice
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
