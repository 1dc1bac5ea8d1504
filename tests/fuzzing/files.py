"""Damages rollout files: flips, cuts or splices their bytes, or inserts huge counts. Some files are signed again with
another header or other columns.

Each file is read in quarantine, as the validator reads it. Outcomes are described in `damage`. A damaged file that was
not signed again must never yield changed rows.
Left out: files of accepted work, because trusted validators sign them and the same code reads them.
"""

import io
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.store.columns import PROOF_BYTES, SUBMISSION, BadSignatureError, RolloutFileError
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import Rollout, read_submission, write_submission

from ..store.support import HEADER, ME, digest_or_zeros, with_header
from .damage import VALUES, Note, crash, damaged

MAX_ROWS, MAX_TOKENS = 8, 64


@dataclass(frozen=True)
class _File:
    data: bytes
    rows: list[Rollout]
    table: pa.Table
    header: dict[str, Any]
    footer: int  # offset of the footer


def fuzz_files(random: Random, cases: int, note: Note) -> None:
    """Damage submissions, read them in quarantine, and report the outcomes."""
    files = [_file(random, **options) for options in _LAYOUTS]
    every = [file.data for file in files]
    with Quarantine(MAX_ROWS, MAX_TOKENS, memory_bytes=256 << 20, cpu_s=10.0) as quarantine:
        for _ in range(cases):
            file = random.choice(files)
            match random.randrange(10):
                case 0:
                    note(_read(quarantine, _with_header(random, file), None))
                case 1:
                    note(_read(quarantine, _with_table(random, file), None))
                case 2 | 3 | 4:  # the footer is only a tenth of the bytes, but most of the code parses it
                    at = file.footer
                    data = file.data[:at] + damaged(random, file.data[at:-8], every)
                    data += struct.pack("<I", len(data) - at) + b"PAR1"
                    note(_read(quarantine, data, file.rows))
                case 5:
                    note(_read(quarantine, _with_number(random, file), file.rows))
                case _:
                    note(_read(quarantine, damaged(random, file.data, every), file.rows))


_LAYOUTS: list[dict[str, Any]] = [
    {"compression": "zstd"},
    {"compression": "none"},
    {"compression": "gzip", "row_group_size": 1},
    {"compression": "snappy", "data_page_size": 8},
    {"compression": "zstd", "data_page_version": "2.0", "row_group_size": 3},
]


def _file(random: Random, **layout: Any) -> _File:
    rows = [
        Rollout(
            group=i // 2,
            target_length=i,
            seed=random.getrandbits(62),
            tokens=[random.randrange(49_152) for _ in range(3 + i)],
            logprobs=[-0.5] * (3 + i - i % 2),
            proofs=[random.randbytes(PROOF_BYTES)],
            turns=[1, 1] * (i % 2),
        )
        for i in range(4)
    ]
    written = pq.ParquetFile(io.BytesIO(write_submission(HEADER, rows, ME)))
    table, header_json = written.read(), written.metadata.metadata[b"shoal.header"]
    data = with_header(table, header_json, **layout)
    rows = list(read_submission(data, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS).rows)  # now rounded to float32
    return _File(data, rows, table, json.loads(header_json), len(data) - 8 - int.from_bytes(data[-8:-4], "little"))


def _with_header(random: Random, file: _File) -> bytes:
    header = json.dumps(file.header | {random.choice([*file.header, "more"]): random.choice(VALUES)}).encode()
    if random.random() < 0.3:
        header = damaged(random, header)
    return with_header(file.table, header)


def _with_table(random: Random, file: _File) -> bytes:
    """Return a validly signed file with other types, lengths or encodings.

    If its rows have a digest, the header has it.
    """
    table, n = file.table, file.table.num_rows
    name = random.choice(SUBMISSION.names)
    at = table.schema.get_field_index(name)
    many = random.choice([0, 1, MAX_TOKENS, MAX_TOKENS + 1, 20_000, 400_000])
    columns: list[Callable[[], Any]] = [
        lambda: pa.array([None] * n, table.schema.field(name).type),
        lambda: pa.array([random.getrandbits(50)] * n, random.choice([pa.int64(), pa.uint64(), pa.float64()])),
        lambda: pa.array(["x" * random.choice([0, 1, 100_000])] * n),
        lambda: pa.array([random.randbytes(random.randrange(300))] * n, pa.binary()),
        lambda: pa.array([[0] * many] + [[0]] * (n - 1), pa.list_(pa.int32())),
        lambda: pa.array([[float("nan")] * many] + [[0.0]] * (n - 1), pa.list_(pa.float32())),
        lambda: pa.array([[b"x"]] * n, pa.list_(pa.binary(random.choice([1, -1])))),
        lambda: pa.array([[[1]]] * n, pa.list_(pa.list_(pa.int32()))),
        lambda: pa.array([{"a": 1}] * n),
    ]
    match random.randrange(6):
        case 0:
            table = table.drop_columns([name])
        case 1:
            table = table.append_column(random.choice(["more", name]), random.choice(columns)())
        case 2:
            table = pa.concat_tables([table] * random.choice([2, 3, 1_000]))
        case _:
            column = random.choice(columns)()
            kept = table.schema.field(name) if column.type == table.schema.field(name).type else None
            field = kept if kept is not None and not column.null_count else pa.field(name, column.type)
            element = (
                pa.field("element", column.type.value_type, nullable=False) if pa.types.is_list(column.type) else None
            )
            if element is not None and random.random() < 0.7:
                column = column.cast(pa.list_(element))
                field = pa.field(name, column.type, nullable=False)
            table = table.set_column(at, field, column)
    layout: dict[str, Any] = random.choice(
        [{}, {}, {"use_dictionary": True}, {"row_group_size": 1}, {"write_statistics": True}]
    )
    return with_header(table, json.dumps(file.header | {"content": digest_or_zeros(table)}).encode(), **layout)


def _with_number(random: Random, file: _File) -> bytes:
    """Replace a varint in the footer with another, often huge one."""
    footer = bytearray(file.data[file.footer : -8])
    at = random.randrange(len(footer))
    number = random.choice([0, 1, 2**16, 2**31, 2**32, 2**40, 2**62, 2**64 - 1, random.getrandbits(40)])
    varint = bytearray()
    while not varint or number:
        varint.append(number & 0x7F | (0x80 if number > 0x7F else 0))
        number >>= 7
    footer[at : at + random.randint(1, 3)] = varint
    return file.data[: file.footer] + bytes(footer) + struct.pack("<I", len(footer)) + b"PAR1"


def _read(quarantine: Quarantine, data: bytes, rows: list[Rollout] | None) -> str:
    """Read a file and return the outcome. The file may yield only `rows`.

    If `rows` is None, the file was signed again and may yield any rows.
    """
    try:
        result = list(quarantine.read(data).rows)
    except BadSignatureError:
        return "file of bad signature"
    except RolloutFileError as error:
        endings = ("ends its reader", "takes more than", "its reader was killed", "makes its reader")
        return f"file that {error}" if str(error).startswith(endings) else "file refused"
    except Exception as error:  # noqa: BLE001
        return crash("Quarantine.read", error, data)
    return "file passes" if rows is None or result == rows else crash("a changed file passes", result, data)
