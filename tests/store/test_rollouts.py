"""Reading a rollout file returns what was written; a file that was tampered with is refused with the right error."""

import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.config import parse
from shoal.store.columns import PROOF_BYTES, SUBMISSION, BadSignatureError, RolloutFileError
from shoal.store.decode import OVERHEAD_BYTES
from shoal.store.rollouts import (
    SCHEMA_VERSION,
    Rollout,
    accepted_columns,
    read_accepted,
    read_submission,
    write_accepted,
    write_submission,
)

from .support import (
    ACCEPTED_ROWS,
    DATA,
    HEADER,
    ME,
    OTHER,
    ROWS,
    digest,
    forged,
    long_submission,
    never,
    opened,
    read,
    signed,
    with_column,
    with_header,
    zigzag,
)

# --- round trip -----------------------------------------------------------------------------------------


def test_reading_a_submission_returns_what_was_written() -> None:
    assert write_submission(HEADER, ROWS, ME) == DATA, "the same rows must make the same file"
    file = read_submission(DATA, max_rows=8, max_tokens=16)
    assert list(file.rows) == ROWS
    assert file.header == HEADER.model_copy(update={"content": digest(opened(DATA)[0])})


def test_reading_an_accepted_file_returns_what_was_written() -> None:
    file = read_accepted(write_accepted(HEADER, ACCEPTED_ROWS, OTHER), max_rows=8, max_tokens=16)
    assert list(file.rows) == ACCEPTED_ROWS
    assert file.header.signer == OTHER.public and file.header.worker == ME.public


def test_the_rows_of_a_file_take_the_memory_of_its_numbers() -> None:
    """A file of a few kilobytes may hold millions of tokens."""
    data = long_submission(1_000_000)
    assert len(data) < 10_000
    tracemalloc.start()
    try:
        file = read_submission(data, max_rows=1, max_tokens=1_000_000)
        assert tracemalloc.get_traced_memory()[0] < 5_000_000, "a token must take no more than its four bytes"
        assert file.rows[0].tokens == [50_000] * 1_000_000
    finally:
        tracemalloc.stop()


def test_limits_are_inclusive() -> None:
    rows = [replace(row, proofs=row.proofs[:1]) for row in ROWS]
    assert read(write_submission(HEADER, rows, ME), max_rows=4, max_tokens=6) == rows


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none"},
        {"compression": "gzip"},
        {"row_group_size": 1},
        {"row_group_size": 3},
        {"data_page_size": 8},
        {"data_page_version": "2.0"},
    ],
    ids=str,
)
def test_the_digest_depends_on_the_values_and_not_on_their_layout(options: dict[str, Any]) -> None:
    table, metadata = opened(DATA)
    other = forged(table, metadata, **options)
    assert other != DATA
    assert digest(opened(other)[0]) == digest(table)
    assert read(other) == ROWS


def test_the_digest_depends_on_which_row_a_value_is_in() -> None:
    moved = [[*ROWS[0].tokens, ROWS[1].tokens[0]], ROWS[1].tokens[1:], *(row.tokens for row in ROWS[2:])]
    assert sum(moved, []) == [token for row in ROWS for token in row.tokens]
    assert digest(with_column("tokens", moved)) != digest(opened(DATA)[0])


# --- unsigned changes ------------------------------------------------------------------------------------

CHANGED: dict[str, Any] = {
    "group": 5,
    "target_length": 1,
    "seed": 1,
    "tokens": [9, 9, 9],
    "logprobs": [0.0, 0.0, -1e-7],
    "proofs": [bytes(PROOF_BYTES - 1) + b"x"],
    "turns": [1, 1],
}


@pytest.mark.parametrize("name", SUBMISSION.names)
def test_a_changed_value_is_refused(name: str) -> None:
    _, metadata = opened(DATA)
    values = [getattr(row, name) for row in ROWS]
    with pytest.raises(BadSignatureError, match="not the signed rows"):
        read(forged(with_column(name, [CHANGED[name], *values[1:]]), metadata))


def test_a_changed_value_with_a_matching_digest_is_refused() -> None:
    _, metadata = opened(DATA)
    table = with_column("target_length", [1, 1, 1, 1])
    header = json.loads(metadata["shoal.header"]) | {"content": digest(table)}
    with pytest.raises(BadSignatureError, match="not signed by"):
        read(forged(table, metadata | {"shoal.header": json.dumps(header)}))


@pytest.mark.parametrize("take", [slice(0, 3), slice(1, 4), slice(None, None, -1)], ids=["fewer", "later", "reversed"])
def test_missing_or_reordered_rows_are_refused(take: slice) -> None:
    table, metadata = opened(DATA)
    with pytest.raises(BadSignatureError):
        read(forged(table.take(list(range(4))[take]), metadata))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", "other"),
        ("step", 5),
        ("policy_version", 2),
        ("policy_digest", "ac" * 32),
        ("worker", OTHER.public),
        ("submission", 8),
        ("signer", OTHER.public),
    ],
    # Fixed ids, because some values are random keys.
    ids=["run", "step", "version", "digest", "worker", "submission", "signer"],
)
def test_a_changed_header_is_refused(name: str, value: Any) -> None:
    table, metadata = opened(DATA)
    header = json.loads(metadata["shoal.header"]) | {name: value}
    with pytest.raises(BadSignatureError):
        read(forged(table, metadata | {"shoal.header": json.dumps(header)}))


@pytest.mark.parametrize(
    "signature",
    [
        "0" * 128,
        "",
        "no hex",
        OTHER.sign(opened(DATA)[1]["shoal.header"].encode(), domain="submission"),
        ME.sign(opened(DATA)[1]["shoal.header"].encode(), domain="accepted"),
        opened(DATA)[1]["shoal.signature"].upper(),
    ],
    ids=["zeros", "empty", "text", "another's", "another domain", "uppercase"],
)
def test_an_invalid_signature_is_refused(signature: str) -> None:
    table, metadata = opened(DATA)
    with pytest.raises(BadSignatureError):
        read(forged(table, metadata | {"shoal.signature": signature}))


# --- unknown formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": "x"}, "metadata must hold a header and a signature"),
        ({"shoal.signature": None}, "metadata must hold a header and a signature"),
        ({"shoal.header": "{}"}, "header: "),
        ({"shoal.header": "[" * 4000}, "header: "),
        ({"shoal.header": " " * 5000}, "a header of more than 4096 bytes"),
    ],
    ids=["extra", "unsigned", "empty", "nested", "long"],
)
def test_unknown_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    table, metadata = opened(DATA)
    changed = {key: value for key, value in (metadata | change).items() if value is not None}
    with pytest.raises(RolloutFileError, match=message):
        read(forged(table, changed))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema_version", SCHEMA_VERSION + 1),
        ("step", -1),
        ("step", "4"),
        ("worker", "x"),
        ("more", 1),
        ("run", "r" * 121),
    ],
)
def test_an_invalid_header_field_is_refused(name: str, value: Any) -> None:
    table, metadata = opened(DATA)
    header = json.dumps(json.loads(metadata["shoal.header"]) | {name: value})
    with pytest.raises(RolloutFileError) as refusal:
        read(with_header(table, header.encode()))
    assert not isinstance(refusal.value, BadSignatureError)


def test_a_signed_header_with_a_repeated_key_is_refused() -> None:
    table, metadata = opened(DATA)
    header = metadata["shoal.header"].replace('"step":', '"step":9,"step":')
    with pytest.raises(RolloutFileError, match="header: a key is repeated"):
        read(with_header(table, header.encode()))


BAD_TABLES: dict[str, Callable[[], pa.Table]] = {
    "extra column": lambda: opened(DATA)[0].append_column("more", pa.array([1, 2, 3, 4])),
    "missing column": lambda: opened(DATA)[0].drop_columns(["seed"]),
    "reordered columns": lambda: opened(DATA)[0].select(SUBMISSION.names[::-1]),
    "column twice": lambda: opened(DATA)[0].append_column("group", pa.array([1, 2, 3, 4], pa.int32())),
    "wider integer": lambda: with_column("group", [0, 0, 1, 1], pa.int64()),
    "claimed rewards, of an older version": lambda: opened(DATA)[0].append_column("reward", pa.array([1.0] * 4)),
    "wider floats": lambda: with_column("logprobs", [[0.0]] * 4, pa.list_(pa.float64())),
    "shorter proofs": lambda: with_column(
        "proofs", [[b"x"]] * 4, pa.list_(pa.field("element", pa.binary(1), nullable=False))
    ),
    "lists of lists": lambda: with_column("tokens", [[[1]]] * 4, pa.list_(pa.list_(pa.int32()))),
    "nullable column": lambda: with_column("seed", [1, 2, 3, 4], nullable=True),
    "nulls": lambda: with_column("seed", [1, None, 3, 4], nullable=True),
    "null element": lambda: with_column("tokens", [[1, None]] * 4, pa.list_(pa.int32())),
    "no columns": lambda: opened(DATA)[0].select([]),
    "accepted": lambda: opened(write_accepted(HEADER, ACCEPTED_ROWS, ME))[0],
}


@pytest.mark.parametrize("fault", BAD_TABLES)
def test_a_wrong_schema_is_refused_even_if_signed(fault: str) -> None:
    with pytest.raises(RolloutFileError) as refusal:
        read(signed(BAD_TABLES[fault]()))
    assert not isinstance(refusal.value, BadSignatureError)


@pytest.mark.parametrize(
    ("options", "encoding"),
    [
        ({"use_dictionary": True}, "is encoded as .*DICTIONARY"),
        ({"column_encoding": {"seed": "DELTA_BINARY_PACKED"}}, "column seed is encoded as DELTA_BINARY_PACKED"),
    ],
)
def test_unknown_encodings_are_refused(options: dict[str, Any], encoding: str) -> None:
    with pytest.raises(RolloutFileError, match=encoding):
        read(signed(opened(DATA)[0], **options))


def test_text_that_is_not_utf8_is_refused() -> None:
    bad = pa.array([b"\xff\xfe"] * 4, pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, bad.buffers())
    table, _ = opened(write_accepted(HEADER, ACCEPTED_ROWS, ME))
    table = table.set_column(table.schema.get_field_index("task"), table.schema.field("task"), text)
    with pytest.raises(RolloutFileError, match="UTF8"):
        read_accepted(signed(table, domain="accepted"), max_rows=8, max_tokens=16)


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "allowed"), [(4, 3), (0, 8)])
def test_too_many_or_no_rows_are_refused(rows: int, allowed: int) -> None:
    with pytest.raises(RolloutFileError, match=f"{rows} rows; between 1 and {allowed}"):
        read(signed(opened(DATA)[0].slice(0, rows)), max_rows=allowed)


@pytest.mark.parametrize("name", ["tokens", "logprobs", "turns"])
def test_a_list_that_is_too_long_is_refused(name: str) -> None:
    values = [[1] * 17, [1], [1], [1]]
    with pytest.raises(RolloutFileError, match=f"a rollout with more than 16 {name}"):
        read(signed(with_column(name, values)))


@pytest.mark.parametrize("options", [{}, {"row_group_size": 1}], ids=["one group", "groups that would pass alone"])
@pytest.mark.parametrize(("name", "limit"), [("tokens", 128), ("turns", 128), ("proofs", 8)])
def test_a_column_of_too_many_values_is_refused_before_it_is_read(
    name: str, limit: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = 1 if name != "proofs" else bytes(PROOF_BYTES)
    data = signed(with_column(name, [[value] * 40] * 4), **options)
    monkeypatch.setattr(pq.ParquetFile, "read", never)
    with pytest.raises(RolloutFileError, match=f"column {name} has more than {limit} values"):
        read(data)


def claiming(data: bytes, true: int, claimed: int) -> bytes:
    """Replace a number in the file's footer with another."""
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    assert zigzag(true) in footer
    footer = footer.replace(zigzag(true), zigzag(claimed))
    return body + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("claimed", [2**31, 2**40, 2**62])
def test_huge_claims_are_refused_before_anything_is_decompressed(claimed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = claiming(long_submission(10_007), 10_007, claimed)
    monkeypatch.setattr(pq.ParquetFile, "read", never)
    with pytest.raises(RolloutFileError):
        read(data, max_tokens=20_000)


def test_a_footer_longer_than_the_file_or_a_megabyte_is_refused() -> None:
    with pytest.raises(RolloutFileError):
        read(DATA[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(RolloutFileError, match="a footer of more than 1048576 bytes"):
        read(bytes(1 << 21) + (1 << 21).to_bytes(4, "little") + b"PAR1")


def test_a_file_much_larger_than_its_rows_is_refused() -> None:
    """Its content would be valid, and the pool would keep its other bytes for ever."""
    footer_at = len(DATA) - 8 - int.from_bytes(DATA[-8:-4], "little")
    with pytest.raises(RolloutFileError, match="bytes for rows of"):
        read(DATA[:footer_at] + bytes(2 * OVERHEAD_BYTES) + DATA[footer_at:])


@pytest.mark.parametrize(("groups", "max_tokens"), [(1, 2), (1, 64), (16, 64), (1, 2_048)])
def test_an_honest_file_fits_into_its_tasks_limit(groups: int, max_tokens: int) -> None:
    """Even one whose rows are as long as possible and cannot be compressed."""
    config = parse({"sampling": {"max_tokens": max_tokens}, "tasks": {"length_targets": []}})
    draw = random.Random(0)
    rows = [
        Rollout(
            group=i // config.sampling.group_size,
            target_length=draw.getrandbits(31),
            seed=draw.getrandbits(63),
            tokens=[draw.getrandbits(31) for _ in range(max_tokens)],
            logprobs=[-draw.random() for _ in range(max_tokens)],
            proofs=[draw.randbytes(PROOF_BYTES) for _ in range(-(-max_tokens // 32))],
            turns=[1, 1] * min(draw.randrange(8), (max_tokens - 1) // 2),
        )
        for i in range(groups * config.sampling.group_size)
    ]
    data = write_submission(HEADER.model_copy(update={"engine": "e" * 20 + "/" + "d" * 19}), rows, ME)
    assert len(data) <= config.submission_bytes(groups)
    assert [row.tokens for row in read(data, len(rows), max_tokens)] == [row.tokens for row in rows]


# --- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + bytes(8) + b"PAR1", b"\x80\x04." * 9, b"{}" * 99]
)
def test_bytes_that_are_not_parquet_are_refused(data: bytes) -> None:
    with pytest.raises(RolloutFileError, match="not a readable rollout file"):
        read(data)


def test_a_file_truncated_anywhere_is_refused() -> None:
    for size in range(0, len(DATA), 37):
        with pytest.raises(RolloutFileError):
            read(DATA[:size])


@pytest.mark.parametrize("turns", [[3], [0, 1], [-1, 2], [1, 6], [2**26, 1], [2**31 - 1, 2**31 - 1], [1] * 12])
def test_files_with_turns_that_do_not_fit_are_refused(turns: list[int]) -> None:
    with pytest.raises(RolloutFileError, match="do not fit 6 tokens"):
        read(write_submission(HEADER, [*ROWS[:3], replace(ROWS[3], turns=turns)], ME))
    data = write_accepted(HEADER, [*ACCEPTED_ROWS[:3], replace(ACCEPTED_ROWS[3], turns=turns)], ME)
    for reader in (read_accepted, accepted_columns):
        with pytest.raises(RolloutFileError, match="do not fit 6 tokens"):
            reader(data, max_rows=8, max_tokens=16)
