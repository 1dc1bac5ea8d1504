"""What a step of 33 million tokens costs before it is computed: from accepted files to packed rows, in CPU seconds.

    python benchmarks/learner_deal.py [--tokens 33000000] [--ranks 64]

A synthetic step of 256 groups of 16 completions (8,056 tokens each behind a prompt of 256), random tokens and logprobs, in
signed Parquet files. It goes through the learner's own code, in one process:

    read      files decoded, digests and signatures checked: rank 0, while the step before trains (`Prefetch`)
    outlines  groups to outlines to bytes and back: rank 0, then every rank
    plan      rows of all updates planned and dealt by cost: every rank
    encode    the contents of all ranks' rows as messages: rank 0
    pack      messages to packed rows: every rank its own; all rows here, divided by the number of ranks below

To these the table adds the computed time to send the other ranks' bytes over LINK_BPS. Next to it is a measured time: one
other rank receives all of them over gloo on loopback. The sum for rank 0, without `read`, delays a step. It is compared with
the time to train the step at 40 % MFU, by the arithmetic of `learner/report`, which counts no recomputation:

    training  3 forwards x FLOPs / (devices x 989e12 x 0.40)

The limit is 5 %. Writes benchmarks/results/learner_deal.json and prints the tables.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from learner_memory import MODELS
from machine import describe

from shoal.cli.preflight.estimate import sizes_of
from shoal.config import parse
from shoal.learner.batch import Row
from shoal.learner.batch import plan as rows_of
from shoal.learner.groups import Gathering, Group, Outline, decode, encode
from shoal.learner.ranks import Ranks
from shoal.learner.report import Shape, forward_flops
from shoal.learner.updates import cost, dealing_order
from shoal.learner.updates import decode as decode_contents
from shoal.learner.updates import encode as encode_contents
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Batch, BatchGroup
from shoal.store.columns import ACCEPTED, content_digest, from_table
from shoal.store.rollouts import SCHEMA_VERSION, Header

PATH = Path(__file__).parent / "results" / "learner_deal.json"
G, PROMPT, UPDATES, ROW_TOKENS, VOCAB = 16, 256, 8, 40_960, 152_064
GROUPS_PER_FILE = 4
H100_FLOPS, MFU, LIMIT = 989e12, 0.40, 0.05
LINK_BPS = 3e9  # bytes a second of rank 0's network, an assumption: 25 Gb/s
CASES = (("7B", 8), ("7B", 64), ("32B", 8), ("32B", 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=33_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--out", type=Path, default=PATH)
    arguments = parser.parse_args()
    length = arguments.tokens // (256 * G)
    validator = Identity.generate()
    stages = Stages()
    groups = stages.of("read", lambda: read(files(256, length, validator), validator))
    measured = deal(groups, arguments.ranks, stages)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe(),
        "tokens": sum(group.n_tokens for group in groups),
        "ranks": arguments.ranks,
        "stages": stages.found,
        **measured,
        "loopback": loopback(measured["bytes_to_others"]),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cases": [case(name, ranks, groups, stages.found, measured) for name, ranks in CASES],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table(result) + "\n")


class Stages:
    """CPU and wall seconds of each stage, in this process."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    def of(self, name: str, do: Callable[[], Any]) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        found = do()
        own = self.found.setdefault(name, {"cpu_s": 0.0, "wall_s": 0.0})
        own["cpu_s"] += time.process_time() - cpu_s - MADE.pop("cpu_s", 0.0)
        own["wall_s"] += time.perf_counter() - wall_s - MADE.pop("wall_s", 0.0)
        return found


MADE: dict[str, float] = {}  # seconds in which files were made, which are no part of a stage


def files(groups: int, length: int, validator: Identity) -> Iterator[bytes]:
    """Accepted files of random rollouts, made one at a time."""
    draw = np.random.default_rng(0)
    for _ in range(groups // GROUPS_PER_FILE):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        data = accepted(draw, length, validator)
        MADE["wall_s"] = MADE.get("wall_s", 0.0) + time.perf_counter() - wall_s
        MADE["cpu_s"] = MADE.get("cpu_s", 0.0) + time.process_time() - cpu_s
        yield data


def accepted(draw: np.random.Generator, length: int, validator: Identity) -> bytes:
    """What `store.write_accepted` writes, from arrays."""
    n = GROUPS_PER_FILE * G
    prompts = draw.integers(0, VOCAB, (GROUPS_PER_FILE, PROMPT), np.int32).repeat(G, axis=0)
    columns = {
        "group": pa.array(np.arange(n, dtype=np.int32) // G),
        "task": pa.array(["a task"] * n),
        "prompt": lists(prompts.ravel(), [PROMPT] * n, pa.int32()),
        "tokens": lists(draw.integers(0, VOCAB, n * length, np.int32), [length] * n, pa.int32()),
        "logprobs": lists(
            -draw.exponential(1.0, n * length).clip(0, 40).astype(np.float32), [length] * n, pa.float32()
        ),
        "reward": pa.array(draw.integers(0, 2, n).astype(np.float32)),
        "turns": lists(np.empty(0, np.int32), [0] * n, pa.int32()),
    }
    table = pa.Table.from_arrays([columns[field.name].cast(field.type) for field in ACCEPTED], schema=ACCEPTED)
    header = Header(
        schema_version=SCHEMA_VERSION,
        run="run",
        step=0,
        policy_version=0,
        policy_digest="0" * 64,
        worker="1" * 64,
        submission=0,
        nonce="0" * 32,
        signer=validator.public,
        content=content_digest(from_table(table)),
    ).model_dump_json()
    buffer = pa.BufferOutputStream()
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "store_schema": False}
    with pq.ParquetWriter(buffer, ACCEPTED, **options) as writer:
        writer.write_table(table)
        signature = validator.sign(header.encode(), domain="accepted")
        writer.add_key_value_metadata({"shoal.header": header, "shoal.signature": signature})
    return buffer.getvalue().to_pybytes()


def lists(values: Any, lengths: list[int], kind: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


def read(made: Iterator[bytes], validator: Identity) -> list[Group]:
    """By the learner's own code, which downloads a file when it is first named."""
    config = parse(
        {
            "sampling": {"group_size": G, "max_tokens": 32768},
            "workers": {"groups_per_submission": GROUPS_PER_FILE},
        }
    )
    gathering = Gathering(lambda _: next(made), run="run", config=config, quarantine=Path("/nonexistent"))
    members = [
        BatchGroup(submission=f"{'a' * 16}-{file:06d}", group=number)
        for file in range(256 // GROUPS_PER_FILE)
        for number in range(GROUPS_PER_FILE)
    ]
    batch = Batch(step=0, ready=True, have=256, need=256, groups=members)
    found = gathering.gather(batch, {validator.public})
    assert len(found.groups) == 256, found.left_out
    return found.groups


def deal(groups: list[Group], ranks: int, stages: Stages) -> dict[str, Any]:
    """All stages after reading, for all ranks, in this process."""
    shape = shape_of("32B")
    message = stages.of("outlines", lambda: encode(groups))
    outlines = stages.of("outlines", lambda: decode(message))
    assert outlines == [group.outline for group in groups]
    sent = rows = 0
    for update in range(UPDATES):
        planned, dealt = stages.of("plan", lambda u=update: plan(groups[u::UPDATES], ranks, shape))
        theirs, _ = plan(outlines[update::UPDATES], ranks, shape)  # as another rank plans them
        rows += len(planned)
        for rank in range(ranks):
            own = dealt[rank::ranks]
            data = stages.of("encode", lambda o=own, p=planned: encode_contents([p[n].contents() for n in o]))
            sent += len(data) if rank else 0
            stages.of("pack", lambda o=own, t=theirs, d=data: pack([t[n] for n in o], d))
    return {"outline_bytes": len(message), "bytes_to_others": sent, "rows": rows}


def plan(groups: list[Group] | list[Outline], ranks: int, shape: Shape) -> tuple[list[Row], list[int]]:
    planned = rows_of(groups, row_tokens=ROW_TOKENS)
    return planned, dealing_order([cost(row, shape) for row in planned], ranks)


def pack(rows: list[Row], data: bytes) -> None:
    for row, contents in zip(rows, decode_contents(data, rows), strict=True):
        row.packed(contents, normalize_std=False)


def shape_of(name: str) -> Shape:
    sizes = sizes_of(MODELS[name])
    return Shape(body=sizes.body, head=sizes.head, layers=sizes.layers, width=sizes.width)


def loopback(size_bytes: int) -> dict[str, float]:
    """Seconds in which one other rank gets so many bytes by `Ranks.deal`, both on this machine."""
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    other = context.Process(target=exchange, args=(1, size_bytes, found))
    other.start()
    exchange(0, size_bytes, found)
    other.join()
    return {"bytes": size_bytes, "wall_s": found.get()}


def exchange(rank: int, size_bytes: int, found: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 29611, 2, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = Ranks(rank, 2)
    messages = None if rank else [b"", bytes(size_bytes)]
    ranks.deal(None if rank else [b"", b"x"], 0 if rank == 0 else 1)  # connects
    started_s = time.perf_counter()
    ranks.deal(messages, 0 if rank == 0 else size_bytes)
    if rank:
        found.put(time.perf_counter() - started_s)
    dist.destroy_process_group()


def case(
    name: str, ranks: int, groups: list[Group], stages: dict[str, dict[str, float]], measured: dict[str, Any]
) -> dict[str, Any]:
    """The delay of a step of this model on so many H100, against the time to train it."""
    shape = shape_of(name)
    flops = 3 * sum(forward_flops(shape, PROMPT, group.outline.lengths) for group in groups)
    training_s = flops / (ranks * H100_FLOPS * MFU)
    cpu = {stage: found["cpu_s"] for stage, found in stages.items()}
    send_s = measured["bytes_to_others"] / LINK_BPS
    delay_s = cpu["outlines"] + cpu["plan"] + cpu["encode"] + send_s + cpu["pack"] / ranks
    return {
        "model": name,
        "ranks": ranks,
        "flops": flops,
        "training_s": training_s,
        "delay_s": delay_s,
        "share": delay_s / training_s,
        "share_with_read": (delay_s + cpu["read"]) / training_s,
        "within_limit": delay_s <= LIMIT * training_s,
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| stage | CPU s | wall s |", "| --- | --- | --- |"]
    lines += [f"| {name} | {of['cpu_s']:.2f} | {of['wall_s']:.2f} |" for name, of in result["stages"].items()]
    lines += ["", "| model | H100 | training, s | delay, s | share | share with read |", "| --- |" + " --- |" * 5]
    for of in result["cases"]:
        shares = f"{of['share']:.2%} | {of['share_with_read']:.2%}"
        lines.append(f"| {of['model']} | {of['ranks']} | {of['training_s']:.0f} | {of['delay_s']:.2f} | {shares} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
