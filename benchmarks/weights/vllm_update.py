"""Measure how soon vLLM generates with a version that arrives as a delta, from an origin and a relay on loopback.

    SHOAL_VLLM_PYTHON=... python -m benchmarks.weights.vllm_update --versions DIR [--threads 1] [--dtype bfloat16]

DIR holds the versions v000000, v000001, ... of a real run with SmolLM2 (`learner/versions` of `shoal run CONFIG --set
learner.keep_versions=100`). They are copied into the origin's folder one at a time, with a pause before each, so that the
servers can finish removing older versions. Time counts from the moment at which the relay first shows a version's manifest
to this process:

    fetch_s    fetch the version's delta, apply and verify it, which gives a folder of the whole version
    load_s     vLLM replaces its weights in place with those of the folder
    first_s    vLLM generates one token
    total_s    all three

The result has the token's logprob, and for comparison the logprobs of plain torch with the new version and with the
previous one. In bf16 the engines may draw different tokens, whose logprobs are far apart, so these figures do not prove
that vLLM has the new weights. The tests in tests/engine/vllm and the validators' checks of proofs show that it has. Writes
every figure to benchmarks/results/vllm_update.json. Its `load` shows how busy the machine was.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import RESULTS, about, save
from benchmarks.common.process import wait_until
from benchmarks.weights.update_latency import servers
from shoal.engine.protocol import Engine, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import VllmEngine
from shoal.shardcast import Access, Client, FetchError

PATH = RESULTS / "vllm_update.json"
PROMPT = list(range(200, 240))
PAUSE_S = 2.0
PARTS = ("fetch_s", "load_s", "first_s", "total_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plain = TorchEngine(arguments.dtype)
    result: dict[str, Any] = {
        **about(),
        "load": [os.getloadavg()],
        "versions": [],
    }
    with (
        tempfile.TemporaryDirectory() as name,
        servers(Path(name)) as (watched, relay, key, _),
        closing(VllmEngine(arguments.dtype, arguments.threads)) as vllm,
    ):
        client = Client([relay], Access(key), Path(name) / "cache")
        before = 0.0
        for number, folder in enumerate(sorted(arguments.versions.glob("v*"))):
            time.sleep(PAUSE_S)
            made = Path(name) / "made"
            shutil.copytree(folder, made)
            made.rename(watched / folder.name)
            row = arrives(client, vllm, number)
            plain.load(folder)
            expected = first_logprob(plain)
            row |= {"torch": expected, "torch_before": before}
            before = expected
            result["versions"].append(row)
            sys.stdout.write(json.dumps(row) + "\n")
    deltas = [row for row in result["versions"] if row["delta"]]
    result |= {part: {"median": statistics.median(of), "max": max(of)} for part, of in columns(deltas).items()}
    result["load"].append(os.getloadavg())
    save(PATH, result)
    for part in PARTS:
        sys.stdout.write(f"{part}: median {result[part]['median']:.2f}, maximum {result[part]['max']:.2f}\n")


def arrives(client: Client, engine: Engine, version: int) -> dict[str, Any]:
    """Wait until the relay shows the version's manifest. Then fetch the version, load it, and generate one token."""
    wait_until(lambda: shown(client, version), f"version {version}", within_s=120.0)
    times_s = [time.perf_counter()]
    folder, manifest = client.fetch(version)
    times_s.append(time.perf_counter())
    engine.load(folder)
    times_s.append(time.perf_counter())
    logprob = first_logprob(engine)
    times_s.append(time.perf_counter())
    report = client.progress
    assert manifest.version == version
    spans = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    return dict(zip(PARTS, [*spans, times_s[-1] - times_s[0]], strict=True)) | {
        "version": version,
        "delta": report.parent is not None,
        "transferred_bytes": report.transferred_bytes,
        "logprob": logprob,
    }


def shown(client: Client, version: int) -> bool:
    try:
        latest = client.latest()
    except FetchError:  # the relay has nothing yet
        return False
    return latest is not None and latest.version == version


def first_logprob(engine: Engine) -> float:
    [[one]] = engine.generate([PROMPT], [[0]], Sampling(1.0, 1, ()))
    return one.logprobs[0]


def columns(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {part: [row[part] for row in rows] for part in PARTS}


if __name__ == "__main__":
    main()
