"""Measure how a worker's speed depends on the number of submissions that it generates at once (`workers.in_flight`).

    python -m benchmarks.speed.in_flight [--in-flight 1 2 4] [--submissions 8] [--rounds 2] [--threads 2] [--engine vllm]

Runs the worker's own loop with SmolLM2-135M in bf16, on GSM8K: completions of up to 256 tokens, two groups of eight per
submission. A stand-in for the coordinator hands out one task after the other and takes the files. Time counts from the
first task to the last file, so it includes the end, when no task follows and fewer submissions are in flight. All settings
write the same completions, because with exact numerics no bit depends on the batch. The settings take turns, in reverse
order in every other round.

Writes every timing to benchmarks/results/in_flight.json (in_flight-vllm.json for vLLM).
"""

import argparse
import statistics
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.workers import FakeNode

from benchmarks.common.machine import RESULTS, ROOT, about, save
from shoal import config as config_module
from shoal.cli.roles import opened_engine
from shoal.model.sources import resolve
from shoal.protocol.identity import Identity
from shoal.protocol.messages import HeartbeatAnswer
from shoal.validator.by_hand import offline_assignment
from shoal.worker.loop import OneThread, Worker
from shoal.worker.produce import Producer

RUN = "in-flight"


class Pool(FakeNode):
    """A stand-in for the worker's connection to the coordinator: it hands out a number of tasks and takes files."""

    def __init__(self, config: config_module.Config, identity: Identity, submissions: int) -> None:
        super().__init__(identity)
        self.config, self.left = config, list(range(submissions))

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        state, assigned = "running", None
        if self.left:
            assigned = offline_assignment(self.config, self.identity.public, self.left.pop(0))
        elif not self.working_on:
            state = "finished"
        return HeartbeatAnswer.model_construct(state=state, newest_version=0, relays=[], assignment=assigned)

    def pause_s(self, least_s: float) -> float:
        return least_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--submissions", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of GSM8K")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = RESULTS / ("in_flight.json" if arguments.engine == "torch" else "in_flight-vllm.json")
    result: dict[str, Any] = about() | {"runs": []}
    settings = config_of(arguments, 1)
    compute = OneThread()
    with opened_engine(arguments.engine, settings, "bfloat16", arguments.threads, compute) as (engine, kind, _):
        for number in range(arguments.rounds):
            for most in arguments.in_flight[:: -1 if number % 2 else 1]:
                identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
                config = config_of(arguments, most)
                with closing(Producer(config, RUN, identity, engine, kind=kind, compute=compute)) as producer:
                    result["runs"].append(
                        measured(config, producer, arguments.submissions, compute) | {"round": number}
                    )
                sys.stdout.write(f"{result['runs'][-1]}\n")
                sys.stdout.flush()
                result["tokens_per_s"] = medians(result["runs"])
                save(path, result)


def config_of(arguments: argparse.Namespace, in_flight: int) -> config_module.Config:
    source = f"{{path = '{arguments.data.resolve()}/gsm8k_train.jsonl', reward = 'number'}}"
    return config_module.load(
        ROOT / "configs" / "gsm8k.toml",
        [
            f"tasks.sources=[{source}]",
            f"workers.in_flight={in_flight}",
            f"workers.groups_per_submission={arguments.groups}",
        ],
    )


def measured(config: config_module.Config, producer: Producer, submissions: int, compute: OneThread) -> dict[str, Any]:
    """Return the seconds and tokens of a worker's loop over `submissions` submissions."""
    folder = resolve(config.model.name)
    pool = Pool(config, producer.identity, submissions)
    worker: Any = Worker(pool, producer, compute=compute)  # type: ignore[arg-type]
    newest = (folder, SimpleNamespace(version=0, digest="0" * 64))
    worker.load_newer(newest)
    began_s, before_s = time.perf_counter(), time.process_time()
    worker.run(SimpleNamespace(newest=lambda: newest, last_error=""), threading.Event())
    seconds = time.perf_counter() - began_s
    assert len(pool.uploads) == submissions
    return {
        "in_flight": config.workers.in_flight,
        "seconds": seconds,
        "cpu_s": time.process_time() - before_s,  # of this process, so vLLM's process is not included
        "tokens": producer.tokens,
        "tokens_per_s": producer.tokens / seconds,
    }


def medians(runs: list[dict[str, Any]]) -> dict[int, float]:
    settings = sorted({run["in_flight"] for run in runs})
    return {
        most: statistics.median(run["tokens_per_s"] for run in runs if run["in_flight"] == most) for most in settings
    }


if __name__ == "__main__":
    main()
