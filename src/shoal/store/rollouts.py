"""The two kinds of rollout file, as Parquet with a strict schema: a worker's submission and a validator's accepted file.

    submission  signed by the worker: what the worker claims to have generated
    accepted    signed by a validator: what the validator recomputed, and everything that the learner reads

A file has one row per rollout, sorted by group. `turns` tells which tokens an environment wrote (see `model/turns`).
Logprobs and proofs cover the other tokens. The metadata holds a JSON header and its ed25519 signature. The header holds
a digest of the rows, so the signature covers everything.
Invariant: `read_*` and `verified_submission` return complete, bounded, non-null rows with a valid signature and with turns
that fit the tokens, or raise. Nothing is unpickled.
Called by worker (writes), validator (reads through `quarantine`, writes) and learner (reads).
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3
from pydantic import Field, ValidationError

from shoal.errors import first_problem
from shoal.files import unique_json
from shoal.model.turns import fit
from shoal.protocol.identity import Identity, verify
from shoal.protocol.messages import Count, Hex64, Message, RunId
from shoal.store.columns import (
    ACCEPTED,
    SUBMISSION,
    BadSignatureError,
    Columns,
    FileLimits,
    RolloutFileError,
    content_digest,
    entries,
    from_table,
    plain,
)
from shoal.store.decode import Decoded, decode

SCHEMA_VERSION = 10


class Header(Message):
    """The work that a rollout file holds. `signer` is a submission's worker, or an accepted file's validator."""

    schema_version: Count
    run: str = RunId
    step: Count
    policy_version: Count
    policy_digest: str = Hex64
    worker: str = Hex64
    submission: Count
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")  # the assignment's nonce
    groups: Count = 0  # number of groups in the assignment
    signer: str = Hex64
    # `prompts` and `engine` are for submissions only, the two after them for accepted files only. `engine` is
    # ENGINE/DEVICE and selects the limits that apply; if it is empty, the run's limits apply.
    prompts: Annotated[str, Hex64] = "0" * 64  # digest of the prompts
    engine: str = Field(default="", max_length=40, pattern=r"^([a-z0-9]+/[a-z0-9]+)?$")
    graded_with: str = Field(default="", max_length=1000)  # versions of the validator's graders
    prefilled: bool = True  # if false, most logprobs are the worker's and unchecked
    content: Annotated[str, Hex64] = "0" * 64  # digest of the rows, proofs included


@dataclass(frozen=True)
class Rollout:
    """One row of a submission."""

    group: int
    target_length: int
    seed: int
    tokens: list[int]
    logprobs: list[float]
    proofs: list[bytes]
    turns: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class AcceptedRollout:
    """One row of an accepted file."""

    group: int
    task: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float
    turns: list[int] = field(default_factory=list)


Row = TypeVar("Row", Rollout, AcceptedRollout)


class Rows(Sequence[Row]):
    """The rows of a file, each made when it is read. Until then its lists stay arrays, in a sixth of the memory.

    So a file of a few kilobytes with millions of equal tokens is cheap to refuse.
    """

    def __init__(self, columns: Columns, row_type: type[Row]) -> None:
        self.row_type: Callable[..., Row] = row_type
        self.entries = {name: entries(column) for name, column in columns.items()}

    def __len__(self) -> int:
        return len(self.entries["group"])

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        return self.row_type(**{name: plain(column[at]) for name, column in self.entries.items()})


@dataclass(frozen=True)
class RolloutFile(Generic[Row]):
    header: Header
    rows: Sequence[Row]


def write_submission(header: Header, rows: list[Rollout], identity: Identity) -> bytes:
    return _write(header, rows, SUBMISSION, identity, domain="submission")


def read_submission(data: bytes, *, max_rows: int, max_tokens: int) -> RolloutFile[Rollout]:
    """Return a submission that is signed by the worker it names. Raise RolloutFileError.

    max_rows and max_tokens (per completion) limit what is decoded. The file is decoded in this process, so use `quarantine`
    for files from other machines.
    """
    limits = FileLimits(max_rows, max_tokens)
    return verified_submission(decode(data, SUBMISSION, limits), limits)


def verified_submission(decoded: Decoded, limits: FileLimits) -> RolloutFile[Rollout]:
    """Check the lengths and the signature of a decoded submission. Raise RolloutFileError."""
    return RolloutFile(*_verified(decoded, Rollout, limits, domain="submission"))


def write_accepted(header: Header, rows: list[AcceptedRollout], identity: Identity) -> bytes:
    return _write(header, rows, ACCEPTED, identity, domain="accepted")


def read_accepted(data: bytes, *, max_rows: int, max_tokens: int) -> RolloutFile[AcceptedRollout]:
    """Return an accepted file that is signed by the validator it names. Raise RolloutFileError."""
    limits = FileLimits(max_rows, max_tokens)
    return RolloutFile(*_verified(decode(data, ACCEPTED, limits), AcceptedRollout, limits, domain="accepted"))


def accepted_columns(data: bytes, *, max_rows: int, max_tokens: int) -> tuple[Header, Columns]:
    """Read an accepted file as `read_accepted` does, into arrays. Raise RolloutFileError."""
    limits = FileLimits(max_rows, max_tokens)
    decoded = decode(data, ACCEPTED, limits)
    return _checked_header(decoded, limits, domain="accepted"), decoded.columns


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """Return the BLAKE3 digest of the groups' prompts as token ids, each prefixed with its length."""
    digest = blake3()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(4, "little") + np.asarray(prompt, dtype="<i4").tobytes())
    return digest.hexdigest()


def _write(header: Header, rows: list[Any], schema: pa.Schema, identity: Identity, *, domain: str) -> bytes:
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=schema)
    content = content_digest(from_table(table))
    signed = header.model_copy(update={"content": content, "signer": identity.public}).model_dump_json()
    metadata = {"shoal.header": signed, "shoal.signature": identity.sign(signed.encode(), domain=domain)}
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer, schema, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return buffer.getvalue()


def _verified(decoded: Decoded, row_type: type[Row], limits: FileLimits, *, domain: str) -> tuple[Header, Rows[Row]]:
    header = _checked_header(decoded, limits, domain=domain)
    return header, Rows(decoded.columns, row_type)


def _checked_header(decoded: Decoded, limits: FileLimits, *, domain: str) -> Header:
    """Return the header of a file whose lengths, digest, signature and turns are valid. Raise RolloutFileError."""
    try:
        unique_json(decoded.header)
        header = Header.model_validate_json(decoded.header)
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise RolloutFileError(f"header: {why}") from error
    lengths: dict[str, Any] = {name: decoded.columns[name].lengths for name in ("tokens", "logprobs", "turns")}
    for name, lengths_N in lengths.items():
        if int(lengths_N.max()) > limits.max_tokens:
            raise RolloutFileError(f"a rollout with more than {limits.max_tokens} {name}")
    if header.schema_version != SCHEMA_VERSION:
        raise RolloutFileError(f"schema version {header.schema_version}, not {SCHEMA_VERSION}")
    if content_digest(decoded.columns) != header.content:
        raise BadSignatureError("the rows are not the signed rows")
    if not verify(header.signer, decoded.header.encode(), decoded.signature, domain=domain):
        raise BadSignatureError(f"not signed by {header.signer[:16]}")
    for view, n_tokens in zip(entries(decoded.columns["turns"]), lengths["tokens"].tolist(), strict=True):
        if not fit(turns := plain(view), n_tokens):  # otherwise a reader could allocate memory for billions of tokens
            raise RolloutFileError(f"turns of {turns[:8]} do not fit {n_tokens} tokens")
    return header
