"""A valid submission with its signer, and ways to make invalid ones."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.protocol.identity import Identity
from shoal.store.columns import PROOF_BYTES, SUBMISSION, RolloutFileError, content_digest, from_table
from shoal.store.rollouts import SCHEMA_VERSION, AcceptedRollout, Header, Rollout, read_submission, write_submission

ME, OTHER = Identity.generate(), Identity.generate()
PLAIN = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "store_schema": False}
HEADER = Header(
    schema_version=SCHEMA_VERSION,
    run="sums-0",
    step=4,
    policy_version=3,
    policy_digest="ab" * 32,
    worker=ME.public,
    submission=7,
    nonce="0" * 32,
    signer=ME.public,
)
ROWS = [
    Rollout(
        group=i // 2,
        target_length=100 * i,
        seed=2**62 + i,
        tokens=list(range(i, i + 3 + i)),
        logprobs=[-0.5 * i] * (3 + i),
        proofs=[bytes([i]) * PROOF_BYTES] * (1 + i % 2),
        turns=[1, i] * (i // 2),  # an environment answered in the last two rows only
    )
    for i in range(4)
]
ACCEPTED_ROWS = [
    AcceptedRollout(r.group, f"{i}+1", [5, 6, 7], r.tokens, r.logprobs, float(i % 2), r.turns)
    for i, r in enumerate(ROWS)
]
DATA = write_submission(HEADER, ROWS, ME)


def read(data: bytes, max_rows: int = 8, max_tokens: int = 16) -> list[Rollout]:
    return list(read_submission(data, max_rows=max_rows, max_tokens=max_tokens).rows)


def digest(table: pa.Table) -> str:
    return content_digest(from_table(table))


def opened(data: bytes) -> tuple[pa.Table, dict[str, str]]:
    """Return the rows and the metadata of a file."""
    file = pq.ParquetFile(io.BytesIO(data))
    return file.read(), {key.decode(): value.decode() for key, value in file.metadata.metadata.items()}


def forged(table: pa.Table, metadata: dict[str, Any], **options: Any) -> bytes:
    """Return a file with this metadata."""
    buffer = io.BytesIO()
    row_group_size = options.pop("row_group_size", None)
    with pq.ParquetWriter(buffer, table.schema, **PLAIN | options) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata(metadata)
    return buffer.getvalue()


def signed(table: pa.Table, *, domain: str = "submission", **options: Any) -> bytes:
    """Return a validly signed file of any table."""
    header = HEADER.model_copy(update={"content": digest_or_zeros(table)}).model_dump_json().encode()
    return with_header(table, header, domain=domain, **options)


def with_header(table: pa.Table, header: bytes, *, domain: str = "submission", **options: Any) -> bytes:
    """Return a file of any table and header, with a valid signature of the header."""
    return forged(table, {"shoal.header": header, "shoal.signature": ME.sign(header, domain=domain)}, **options)


def digest_or_zeros(table: pa.Table) -> str:
    try:
        with np.errstate(invalid="ignore"):  # nulls have no length
            return digest(table)
    except (AttributeError, KeyError, TypeError, ValueError, pa.ArrowException, RolloutFileError):
        return "0" * 64  # the table has no digest


def with_column(name: str, values: Any, type_: pa.DataType | None = None, nullable: bool = False) -> pa.Table:
    table, _ = opened(DATA)
    at = table.schema.get_field_index(name)
    field = pa.field(name, type_ or table.schema.field(name).type, nullable=nullable)
    array = values if isinstance(values, pa.Array) else pa.array(values, field.type)
    return table.set_column(at, field, array)


def zigzag(number: int) -> bytes:
    """Encode a number for Thrift's compact protocol."""
    number, out = number << 1 if number >= 0 else -2 * number - 1, b""
    while True:
        number, low = number >> 7, number & 0x7F
        out += bytes([low | 0x80 if number else low])
        if not number:
            return out


def long_submission(tokens: int) -> bytes:
    field = SUBMISSION.field("tokens")
    column = pa.ListArray.from_arrays(pa.array([0, tokens], pa.int32()), pa.array(np.full(tokens, 50_000, "<i4")))
    at = SUBMISSION.get_field_index("tokens")
    table = opened(DATA)[0].slice(0, 1).set_column(at, field, column.cast(field.type))
    return signed(table, data_page_size=1 << 30)


def never(*_: object, **__: object) -> None:
    raise AssertionError("decompressed")
