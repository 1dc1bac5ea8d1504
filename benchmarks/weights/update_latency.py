"""Measure the time from an optimizer step until the new weights are in a worker's engine.

    python -m benchmarks.weights.update_latency --versions DIR [--count 20] [--threads 1]

DIR holds the versions v000000, v000001, ... of a real run (`learner/versions` of `shoal run CONFIG --set
learner.keep_versions=100`). `shoal origin`, `shoal relay` and `shoal fetch --follow` run as processes on loopback. The
versions are moved into the origin's folder one after the other. For each version, these times are measured:

    write_s    until the learner has written the version (save_model, from the weights in memory)
    reach_s    from its move into the folder until the client has verified it (encode, relay, fetch, apply, verify)
    load_s     until its weights are copied into the engine's model

The result also says whether the version was sent as a delta. Writes every timing to benchmarks/results/update_latency.json.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import RESULTS, about, save
from benchmarks.common.process import SHOAL, next_json, running
from shoal.model.dtype import pick
from shoal.model.load import load_model, load_tokenizer, load_weights_, save_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="versions after the first")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folders = sorted(arguments.versions.glob("v*"))[: arguments.count + 1]
    dtype, _ = pick("auto")
    trained, engine = load_model(folders[0], "float32", "cpu"), load_model(folders[0], dtype, "cpu")
    tokenizer = load_tokenizer(folders[0])
    result: dict[str, Any] = {
        **about(),
        "dtype": dtype,
        "versions": [],
    }
    with tempfile.TemporaryDirectory() as name, servers(Path(name)) as (watched, relay, key, start):
        arrived = start("fetch", relay, "--key", key, "--out", Path(name) / "out", "--follow").stdout
        for folder in folders:
            load_weights_(trained, folder)
            made, final = Path(name) / "made", watched / folder.name
            write_s = seconds(lambda made=made: save_model(trained, tokenizer, made))  # type: ignore[misc]
            started_s = time.perf_counter()
            made.rename(final)
            here = Path(arrived.readline().strip())
            reach_s = time.perf_counter() - started_s
            load_s = seconds(lambda here=here: load_weights_(engine, here))  # type: ignore[misc]
            kinds = sorted(path.name for path in (Path(name) / "relay" / folder.name).iterdir() if path.is_dir())
            row = {"version": folder.name, "kinds": kinds, "write_s": write_s, "reach_s": reach_s, "load_s": load_s}
            result["versions"].append(row)
            shutil.rmtree(final)
    later = result["versions"][1:]
    for part in ("write_s", "reach_s", "load_s"):
        result[part] = statistics.median(row[part] for row in later)
    result["total_s"] = statistics.median(row["write_s"] + row["reach_s"] + row["load_s"] for row in later)
    save(RESULTS / "update_latency.json", result)
    sys.stdout.write(
        ", ".join(f"{part} {result[part]:.2f}" for part in ("write_s", "reach_s", "load_s", "total_s")) + "\n"
    )


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Path, str, str, Callable[..., subprocess.Popen[str]]]]:
    """Start an origin and a relay. Yield the origin's folder, the relay's URL, the key, and a function that starts another
    process."""
    watched = folder / "watched"
    watched.mkdir()
    with ExitStack() as stack:

        def start(*arguments: object) -> subprocess.Popen[str]:
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            return stack.enter_context(running([*SHOAL, *arguments], **output))

        origin = start("origin", watched, "--store", folder / "origin", "--key-file", folder / "key.pem")
        facts = next_json(origin)
        relay = start("relay", "--upstream", facts["url"], "--key", facts["key"], "--store", folder / "relay")
        yield watched, next_json(relay)["url"], facts["key"], start


def seconds(work: Any) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
