"""What it costs that idle threads of the arithmetic sleep at once, or look a number of times first whether they are needed.

    python benchmarks/idle_threads.py [--threads 2] [--rounds 3]

SmolLM2-135M in bf16. Each process generates 64 completions of 16 tokens (8 prompts of 46) and makes the gradients and the
update of as many, once to warm up and then twice. The settings take turns, alone and beside a second such process:

    sleep   OMP_WAIT_POLICY=PASSIVE alone
    brief   what `shoal run` gives its processes: PASSIVE with GOMP_SPINCOUNT=1000
    longer  PASSIVE with GOMP_SPINCOUNT=3000

Writes benchmarks/results/idle_threads.json: seconds by the clock and CPU seconds of every measurement.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "results" / "idle_threads.json"
SETTINGS = {
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "brief": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"},
    "longer": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"},
}
PROMPTS, PROMPT, GROUP, TOKENS = 8, 46, 8, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        sys.stdout.write(json.dumps(measure(arguments.threads)) + "\n")
        return
    from machine import describe

    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": describe(), "measured": []}
    for number in range(arguments.rounds):
        for name, setting in SETTINGS.items():
            for together in (1, 2):
                found = [one for of in started(setting, arguments.threads, together) for one in of]
                result["measured"].append({"round": number, "threads": name, "processes": together, "times": found})
    result["median"] = medians(result["measured"])
    PATH.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["median"]:
        sys.stdout.write(json.dumps(row) + "\n")


def started(setting: dict[str, str], threads: int, together: int) -> list[list[dict[str, float]]]:
    """The times of so many processes that run at once."""
    argv = [sys.executable, __file__, "--one", "--threads", str(threads)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = clean | setting | {"OMP_NUM_THREADS": str(threads)}
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) for _ in range(together)]
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a measured process failed")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def measure(threads: int) -> list[dict[str, float]]:
    """Seconds by the clock and of the CPU of two generations and two updates."""
    import torch

    from shoal.config import load
    from shoal.engine.protocol import Sampling
    from shoal.engine.torch_engine import TorchEngine
    from shoal.learner.batch import micro_batches
    from shoal.learner.groups import Group
    from shoal.learner.policy import Policy
    from shoal.model import numerics
    from shoal.model.sources import SMOLLM2, resolve

    torch.set_num_threads(threads)
    folder, picked = resolve(SMOLLM2), numerics.pick("auto", "bfloat16", "cpu")
    settings = ["learner.row_tokens=1024", "learner.activation_checkpointing=false"]
    config = load(Path(__file__).parents[1] / "configs" / "quickstart.toml", settings)
    policy = Policy(folder, config.learner, "bfloat16", "cpu", 1.0, numerics=picked)
    engine = TorchEngine("bfloat16", "cpu", picked)
    engine.load(folder)
    draw, sampling = random.Random(0), Sampling(1.0, TOKENS, ())
    prompts = [[draw.randrange(100, 4000) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    times = []
    for turn in range(3):
        began = time.time(), time.process_time()
        seeds = [[1000 * turn + GROUP * i + g for g in range(GROUP)] for i in range(PROMPTS)]
        answers = engine.generate(prompts, seeds, sampling)
        generated = time.time(), time.process_time()
        groups = [
            Group(
                submission="",
                policy_version=0,
                prompt=prompt,
                completions=[one.tokens for one in own],
                behaviour=[one.logprobs for one in own],
                rewards=[float(g % 2) for g in range(GROUP)],
            )
            for prompt, own in zip(prompts, answers, strict=True)
        ]
        rows = micro_batches(groups, row_tokens=1024, normalize_std=True)
        policy.update(rows, float(sum(group.n_tokens for group in groups)))
        trained = time.time(), time.process_time()
        times.append(
            {
                "generate_s": generated[0] - began[0],
                "generate_cpu_s": generated[1] - began[1],
                "update_s": trained[0] - generated[0],
                "update_cpu_s": trained[1] - generated[1],
            }
        )
    return times[1:]


def medians(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every setting and number of processes."""
    rows = []
    for together in (1, 2):
        for name in SETTINGS:
            times = [
                time_
                for one in measured
                if (one["threads"], one["processes"]) == (name, together)
                for time_ in one["times"]
            ]
            middle = {field: round(statistics.median(time_[field] for time_ in times), 2) for field in times[0]}
            rows.append({"threads": name, "processes": together} | middle)
    return rows


if __name__ == "__main__":
    main()
