"""Page headers are checked before anything is decompressed."""

import io
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest
import zstandard

from shoal.store import decode
from shoal.store.columns import PROOF_BYTES, RolloutFileError
from shoal.store.decode import MAX_PAGES, ColumnChunk, check_pages
from shoal.store.rollouts import Rollout, read_submission, write_submission

from .support import HEADER, ME, PLAIN, never, opened, read, signed, with_column, zigzag

BOMB_BYTES = 64 << 20
PLAIN_PAGE = "uncompressed page of 3 bytes whose header says 12"


def struct(**fields: int | bool | bytes) -> bytes:
    """Return a Thrift struct: `f1=5` sets field 1 to 5; bytes are a nested struct."""
    out, last = b"", 0
    for name, value in fields.items():
        number = int(name[1:])
        kind = 12 if isinstance(value, bytes) else (1 if value else 2) if isinstance(value, bool) else 5
        out += bytes([(number - last) << 4 | kind])
        out += value if isinstance(value, bytes) else b"" if isinstance(value, bool) else zigzag(value)
        last = number
    return out + b"\x00"


def page(
    values: int, inflated: int, body: bytes, *, type: int = 0, encoding: int = 0, size: int | None = None
) -> bytes:
    about = struct(f1=values, f2=encoding, f3=3, f4=3)
    return struct(f1=type, f2=inflated, f3=len(body) if size is None else size, f5=about) + body


def page_v2(values: int, inflated: int, body: bytes, *, compressed: bool = True) -> bytes:
    about = struct(f1=values, f2=0, f3=values, f4=0, f5=0, f6=0, f7=compressed)
    return struct(f1=3, f2=inflated, f3=len(body), f8=about) + body


def check(data: bytes, values: int, *, compressed: bool = True, pages_left: int = 9, **changed: Any) -> int:
    described = {"column": "tokens", "start": 0, "size_bytes": len(data), "values": values, "value_bytes": 4}
    return check_pages(data, ColumnChunk(**described | {"compressed": compressed} | changed), pages_left)


def test_pages_that_fill_their_chunk_are_accepted_and_counted() -> None:
    assert check(page(3, 12, b"abc") + page(2, 8, b"x") + page_v2(1, 4, b""), 6) == 6
    assert (
        check(b"....".join([b"", page(3, 12, b"abc") + b"...."]), 3, start=4, size_bytes=len(page(3, 12, b"abc"))) == 8
    )
    assert check(page(3, 12, bytes(12)) + page_v2(1, 4, bytes(4), compressed=False), 4, compressed=False) == 7


@pytest.mark.parametrize(
    ("data", "values", "message"),
    [
        (page(3, 1 << 30, b"abc"), 3, "page of 3 values that decompresses to 1073741824 bytes"),
        (page_v2(3, 1 << 30, b"abc"), 3, "decompresses to"),
        (page(3, 2**31 - 1, b"abc"), 3, "decompresses to"),
        (page(3, -1, b"abc"), 3, "does not fit"),
        (page(3, 12, b"abc", size=4), 3, "does not fit"),
        (page(3, 12, b"abc", size=-1), 3, "does not fit"),
        (page(3, 12, b"abc", size=2**31 - 1), 3, "does not fit"),
        (page(3, 12, b"abc"), 4, "pages of 3 values where the footer says 4"),
        (page(3, 12, b"abc") * 2, 3, "pages of 6 values where the footer says 3"),
        (page(0, 12, b"abc"), 0, "page without values"),
        (page(-3, 12, b"abc"), -3, "page without values"),
        (page(3, 12, b"abc", encoding=8), 3, "an encoding that is not allowed"),
        (page(3, 12, b"abc", type=2), 3, "page of type 2"),
        (page(3, 12, b"abc", type=3), 3, "page of type 3"),
        (page(3, 12, b"abc")[:-4], 3, "malformed or too long|does not fit"),
        (page_v2(3, 12, b"abc", compressed=False), 3, PLAIN_PAGE),
        (page(3, 12, b"abc"), 3, PLAIN_PAGE),
        (b"", 3, "lies outside of the file"),
        (b"\x15\x00", 3, "malformed"),  # cut off
        (b"\x05\x02\x00\x00", 3, "malformed"),  # an absolute field number, not a difference
        (b"\x18\x04abcd\x00", 3, "malformed"),  # a field of text
        (b"\x15" + b"\xff" * 5 + b"\x01\x00", 3, "malformed"),  # more than 32 bits
        (b"\x1c" * 2_000, 3, "malformed"),  # structs in structs
        (b"\x11" * 2_000, 3, "malformed or too long"),
    ],
)
def test_pages_that_our_writer_would_not_write_are_refused(data: bytes, values: int, message: str) -> None:
    with pytest.raises(RolloutFileError, match=f"column tokens has a?.*({message})|column tokens ({message})"):
        check(data, values, compressed=message != PLAIN_PAGE)


def test_a_chunk_outside_of_the_file_is_refused() -> None:
    for start, size_bytes in [(-1, 5), (0, 0), (0, -5), (0, 10_000), (10_000, 5), (2**62, 2**62)]:
        with pytest.raises(RolloutFileError, match="outside of the file"):
            check(page(3, 12, b"abc"), 3, start=start, size_bytes=size_bytes)


def test_pages_are_counted_over_the_whole_file() -> None:
    with pytest.raises(RolloutFileError, match=f"more than {MAX_PAGES} pages"):
        check(page(1, 4, b"") * 3, 3, pages_left=2)


# --- whole files -----------------------------------------------------------------------------------------------------


def with_chunk(pages: bytes) -> bytes:
    """Return a file with `pages` after all other columns. Its footer says that they are the column `proofs`."""
    rows = [Rollout(0, 0, 7, [1] * 40, [-0.5] * 40, [bytes(range(256)) + b"xy"] * 2)]
    table, _ = opened(write_submission(HEADER, rows, ME))
    data = signed(table, compression="zstd", compression_level=1)
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    chunk = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(5)
    for true, claimed in ((chunk.data_page_offset, len(body)), (chunk.total_compressed_size, len(pages))):
        assert footer.count(zigzag(true)) == 1 or true == chunk.data_page_offset
        footer = footer.replace(zigzag(true), zigzag(claimed))
    return body + pages + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def zeros(size: int) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(bytes(size))


def many_proofs() -> bytes:
    """Return a file of less than 20 kB, made by an ordinary writer, that holds 4 MB of equal proofs."""
    return signed(with_column("proofs", [[bytes(PROOF_BYTES)] * 4_096] * 4))


BOMBS: dict[str, Callable[[], bytes]] = {
    "a page that decompresses to more bytes than its values need": lambda: with_chunk(
        page(2, BOMB_BYTES, zeros(BOMB_BYTES))
    ),
    "a second, unneeded page": lambda: with_chunk(page(2, 530, zeros(530)) + page(1, BOMB_BYTES, zeros(BOMB_BYTES))),
    "a page of version 2": lambda: with_chunk(page_v2(2, BOMB_BYTES, zeros(BOMB_BYTES))),
    "a page that claims fewer values than the footer": lambda: with_chunk(page(1, 530, zeros(530))),
    "a page that claims more values than the footer": lambda: with_chunk(page(2**20, BOMB_BYTES, zeros(BOMB_BYTES))),
    "a dictionary page that the footer hides": lambda: with_chunk(
        struct(f1=2, f2=BOMB_BYTES, f3=len(zeros(BOMB_BYTES)), f7=struct(f1=2, f2=0))
        + zeros(BOMB_BYTES)
        + page(2, 530, zeros(530))
    ),
    "more proofs than any rollout has": many_proofs,
}


@pytest.mark.parametrize("fault", BOMBS)
def test_a_decompression_bomb_is_refused_before_it_is_decompressed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = BOMBS[fault]()
    assert len(data) < 20_000
    monkeypatch.setattr(pq.ParquetFile, "read", never)
    with pytest.raises(RolloutFileError, match="column proofs"):
        read(data, max_tokens=64)


def test_a_page_within_its_bounds_is_read_from_where_the_footer_says() -> None:
    """Unlike the bombs above, this page is decompressed. The file is then refused because its content is not signed."""
    levels = b"\x04\x00\x00\x00\x02\x00\x02\x01" + b"\x02\x00\x00\x00\x04\x01"
    body = levels + bytes(2 * PROOF_BYTES)
    with pytest.raises(RolloutFileError, match="not the signed rows"):
        read(with_chunk(page(2, len(body), zstandard.ZstdCompressor().compress(body))), max_tokens=64)


@pytest.mark.parametrize(
    "options", [{"data_page_size": 64}, {"data_page_version": "2.0"}, {"compression": "none"}], ids=str
)
def test_every_page_of_an_honest_file_is_within_bounds(options: dict[str, Any]) -> None:
    """The file has short and long lists, and many pages."""
    rows = [
        Rollout(i // 4, i, i, list(range(n)), [-i / 9] * n, [bytes([i]) * PROOF_BYTES] * -(-n // 32))
        for i, n in enumerate([1, 2, 3, 31, 32, 33, 64, 500] * 4)
    ]
    data = write_submission(HEADER, rows, ME)
    table = pq.ParquetFile(io.BytesIO(data)).read()
    data = signed(table, **PLAIN | options)
    decoded = read_submission(data, max_rows=32, max_tokens=500).rows
    assert [(row.tokens, row.proofs) for row in decoded] == [(r.tokens, r.proofs) for r in rows]


@pytest.mark.parametrize(
    ("encoded", "number"),
    [(b"\xff\xff\xff\xff\x0f", -(1 << 31)), (b"\xfe\xff\xff\xff\x0f", (1 << 31) - 1), (b"\x00", 0)],
)
def test_integers_of_32_bits_are_read(encoded: bytes, number: int) -> None:
    assert decode._int32(memoryview(encoded), 0) == (number, len(encoded))


@pytest.mark.parametrize("encoded", [b"\x80\x80\x80\x80\x10", b"\x80\x80\x80\x80\x80\x01"])
def test_longer_integers_are_refused_because_readers_truncate_them(encoded: bytes) -> None:
    with pytest.raises(ValueError, match="more than 32 bits"):
        decode._int32(memoryview(encoded), 0)
