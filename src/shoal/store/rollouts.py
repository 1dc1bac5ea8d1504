"""The two rollout files, as Parquet with a strict schema: a worker's submission and a validator's accepted file.

    submission  signed by the worker: what it claims to have generated
    accepted    signed by a validator: what it recomputed, and all the learner ever reads

A file is one row per rollout, groups in order. Its metadata holds a JSON header and an ed25519 signature of it; the
header holds a digest of the rows, so the signature covers everything. Invariant: `read_*` returns whole, bounded,
non-null columns under a valid signature, or raises; nothing is unpickled.
Called by worker (writes), validator (reads, writes) and learner (reads).
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ShoalError
from shoal.protocol.identity import Identity, verify

SCHEMA_VERSION = 2
PROOF_BYTES = 258
PROOF_CHUNK_TOKENS = 32  # of a completion, for which one proof stands
MAX_HEADER_BYTES = 4_096
MAX_LIST_VALUES = 50_000_000  # tokens, logprobs or proofs of one file: what a reader may be made to hold
ENCODINGS = {"PLAIN", "RLE"}  # no dictionaries: a few bytes of one can stand for billions of values

SUBMISSION = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("target_length", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False)), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("proofs", pa.list_(pa.field("element", pa.binary(PROOF_BYTES), nullable=False)), nullable=False),
    ]
)
ACCEPTED = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("prompt", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False)), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
    ]
)


class RolloutFileError(ShoalError):
    """A file that is not what it should be; the message says in what."""


class BadSignatureError(RolloutFileError):
    """Readable, but not signed by whom it names."""


class Header(BaseModel):
    """What a rollout file is of. `signer` is the worker of a submission, the validator of an accepted file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_version: int
    run: str = Field(max_length=100)
    step: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    policy_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    worker: str = Field(pattern=r"^[0-9a-f]{64}$")
    submission: int = Field(ge=0)
    signer: str = Field(pattern=r"^[0-9a-f]{64}$")
    prompts: str = Field(default="0" * 64, pattern=r"^[0-9a-f]{64}$")  # of a submission: digest of its prompts
    content: str = Field(default="0" * 64, pattern=r"^[0-9a-f]{64}$")  # digest of the rows, proofs among them


@dataclass(frozen=True)
class Rollout:
    """One row of a submission."""

    group: int
    task: str
    target_length: int
    seed: int
    tokens: list[int]
    logprobs: list[float]
    reward: float
    proofs: list[bytes]


@dataclass(frozen=True)
class AcceptedRollout:
    """One row of an accepted file."""

    group: int
    task: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


Row = TypeVar("Row", Rollout, AcceptedRollout)


@dataclass(frozen=True)
class RolloutFile(Generic[Row]):
    header: Header
    rows: list[Row]


def write_submission(header: Header, rows: list[Rollout], identity: Identity) -> bytes:
    return _write(header, rows, SUBMISSION, identity, domain="submission")


def read_submission(data: bytes, *, max_rows: int, max_tokens: int) -> RolloutFile[Rollout]:
    """Rows of a submission under the signature of the worker it names. Raises RolloutFileError.

    max_rows and max_tokens (of one completion) bound what is decoded.
    """
    return RolloutFile(*_read(data, SUBMISSION, Rollout, max_rows, max_tokens, domain="submission"))


def write_accepted(header: Header, rows: list[AcceptedRollout], identity: Identity) -> bytes:
    return _write(header, rows, ACCEPTED, identity, domain="accepted")


def read_accepted(data: bytes, *, max_rows: int, max_tokens: int) -> RolloutFile[AcceptedRollout]:
    """Rows of an accepted file under the signature of the validator it names. Raises RolloutFileError."""
    return RolloutFile(*_read(data, ACCEPTED, AcceptedRollout, max_rows, max_tokens, domain="accepted"))


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """BLAKE3 of the groups' prompts as token ids, one after the other with their lengths."""
    digest = blake3()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(4, "little") + np.asarray(prompt, dtype="<i4").tobytes())
    return digest.hexdigest()


def content_digest(table: pa.Table) -> str:
    """BLAKE3 of the rows' values, column by column: independent of Parquet's encoding of them."""
    digest = blake3()
    for name in table.column_names:
        array = table[name].combine_chunks()
        digest.update(f"{name}\n{len(array)}\n".encode())
        if pa.types.is_list(array.type):
            digest.update(np.asarray(array.value_lengths(), dtype="<i4").tobytes())
            array = array.flatten()
        if pa.types.is_string(array.type) or pa.types.is_fixed_size_binary(array.type):
            for value in array.to_pylist():
                encoded = value.encode() if isinstance(value, str) else value
                digest.update(len(encoded).to_bytes(4, "little") + encoded)
        else:
            digest.update(array.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def _write(header: Header, rows: list[Any], schema: pa.Schema, identity: Identity, *, domain: str) -> bytes:
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=schema)
    signed = header.model_copy(update={"content": content_digest(table), "signer": identity.public}).model_dump_json()
    metadata = {"shoal.header": signed, "shoal.signature": identity.sign(signed.encode(), domain=domain)}
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer, schema, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return buffer.getvalue()


def _read(
    data: bytes, schema: pa.Schema, row_type: type[Row], max_rows: int, max_tokens: int, *, domain: str
) -> tuple[Header, list[Row]]:
    try:
        raw, signature, table = _decode(data, schema, max_rows, max_rows * max_tokens)
        header = Header.model_validate_json(raw)
    except ValidationError as error:
        raise RolloutFileError(f"header: {error.errors()[0]['loc']} {error.errors()[0]['msg']}") from error
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        raise RolloutFileError(f"not a readable rollout file: {_first_line(error)}") from error
    if any(column.null_count for column in table.columns):
        raise RolloutFileError("null values")
    for name in ("tokens", "logprobs"):
        if table.num_rows and max(table[name].combine_chunks().value_lengths().to_pylist()) > max_tokens:
            raise RolloutFileError(f"a rollout with more than {max_tokens} {name}")
    if header.schema_version != SCHEMA_VERSION:
        raise RolloutFileError(f"schema version {header.schema_version}, not {SCHEMA_VERSION}")
    if content_digest(table) != header.content:
        raise BadSignatureError("the rows are not those that were signed")
    if not verify(header.signer, raw, signature, domain=domain):
        raise BadSignatureError(f"not signed by {header.signer[:16]}")
    return header, [row_type(**row) for row in table.to_pylist()]


def _decode(data: bytes, schema: pa.Schema, max_rows: int, max_values: int) -> tuple[bytes, str, pa.Table]:
    """The raw header, its signature and the rows, of which nothing but layout and size is checked yet."""
    file = pq.ParquetFile(io.BytesIO(data), thrift_string_size_limit=1 << 20, thrift_container_size_limit=1 << 16)
    metadata = file.metadata.metadata or {}
    if set(metadata) != {b"shoal.header", b"shoal.signature"}:
        raise RolloutFileError("metadata must hold a header and a signature, nothing else")
    if len(metadata[b"shoal.header"]) > MAX_HEADER_BYTES:
        raise RolloutFileError(f"a header of more than {MAX_HEADER_BYTES} bytes")
    _check_layout(file, schema, max_rows, max_values)
    table = file.read(use_threads=False)
    table.validate(full=True)  # text that is no UTF-8 would fail later, as another error
    return metadata[b"shoal.header"], metadata[b"shoal.signature"].decode(), table


def _check_layout(file: pq.ParquetFile, schema: pa.Schema, max_rows: int, max_values: int) -> None:
    metadata = file.metadata
    if not file.schema_arrow.remove_metadata().equals(schema):
        raise RolloutFileError("columns or types are not the schema's")
    if not 0 < metadata.num_rows <= max_rows:
        raise RolloutFileError(f"{metadata.num_rows} rows; between 1 and {max_rows} are allowed")
    if metadata.num_row_groups > metadata.num_rows:
        raise RolloutFileError(f"{metadata.num_row_groups} row groups for {metadata.num_rows} rows")
    row_groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    if sum(group.num_rows for group in row_groups) != metadata.num_rows:
        raise RolloutFileError("the row groups do not add up to the file's rows")
    limit = min(max_values, MAX_LIST_VALUES)
    for column in range(metadata.num_columns):
        chunks = [group.column(column) for group in row_groups]
        name = file.schema.column(column).path
        size_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
        if sum(chunk.num_values for chunk in chunks) > limit or size_bytes > PROOF_BYTES * limit + (1 << 16):
            raise RolloutFileError(f"column {name} holds more than {limit} values")
        encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
        if not encodings <= ENCODINGS:
            raise RolloutFileError(f"column {name} is encoded as {', '.join(sorted(encodings))}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
