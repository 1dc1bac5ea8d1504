"""How fast the torch engine decodes, against another commit, in turns; and whether its memory stays flat.

    git worktree add ../before COMMIT
    python benchmarks/engine_speed.py --before ../before [--threads 1] [--rounds 3] [--cases 1 16 64 mixed]
    python benchmarks/engine_speed.py --memory 1000

SmolLM2-135M, seeded sampling at temperature 1, hidden states kept and TOPLOC proofs built, as a worker does.

    1, 16, 64  as many completions of 200 tokens, prompts of 40 tokens in groups of up to 8
    mixed      128 completions that end on their own after 1 to 200 tokens

Each tree has one process, which waits while the other one computes, and warms up with 8 tokens. `--memory` generates
submissions of many sizes with the tiny model, one after the other, then from two threads, and keeps the resident memory.

Writes benchmarks/results/engine_speed.json, or engine_memory.json.
"""

import argparse
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from machine import commit, describe

from shoal import toploc
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model.sources import SMOLLM2, TINY, resolve

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CASES = ("1", "16", "64", "mixed")
GROUP, PROMPT, TOKENS, MIXED = 8, 40, 200, 128
CHUNK_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--numerics", default="exact")
    parser.add_argument("--memory", type=int, metavar="SUBMISSIONS")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        child(arguments.dtype, arguments.numerics)
    elif arguments.memory:
        memory(arguments.memory)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    trees = {"after": HERE.parent} | ({"before": arguments.before.resolve()} if arguments.before else {})
    children = {name: start(tree, arguments) for name, tree in trees.items()}
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe() | {"load": os.getloadavg()},
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "threads": arguments.threads,
        "cases": {},
    }
    path = RESULTS / "engine_speed.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for case in arguments.cases:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for number in range(arguments.rounds):
            for name in sorted(trees, reverse=bool(number % 2)):
                rounds[name].append(ask(children[name], case))
        result["cases"][case] = rounds
        for unit in ("wall_s", "cpu_s"):
            rates = {n: statistics.median(one["tokens"] / one[unit] for one in found) for n, found in rounds.items()}
            said = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
            sys.stdout.write(f"{case}, tokens by {unit}: {said}\n")
        sys.stdout.flush()
        path.write_text(json.dumps(known | {f"{arguments.threads} threads": result}, indent=1) + "\n")
    for process in children.values():
        process.communicate("")


def start(tree: Path, arguments: argparse.Namespace) -> "subprocess.Popen[str]":
    argv = [sys.executable, __file__, "--child", "--threads", str(arguments.threads)]
    argv += ["--dtype", arguments.dtype, "--numerics", arguments.numerics]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    return subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: "subprocess.Popen[str]", case: str) -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(case + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended in case {case}; its error is above")
    found: dict[str, float] = json.loads(line)
    return found


def child(dtype: Any, numerics: Any) -> None:
    engine = TorchEngine(dtype, "cpu", numerics)
    engine.load(resolve(SMOLLM2))
    warm: set[str] = set()
    for line in sys.stdin:
        if line not in warm:
            warm.add(line)
            measured(engine, line.strip(), 8)
        sys.stdout.write(json.dumps(measured(engine, line.strip())) + "\n")
        sys.stdout.flush()


def measured(engine: TorchEngine, case: str, tokens: int = TOKENS) -> dict[str, float]:
    """One case: tokens, seconds, CPU seconds, and the process's largest resident size so far in MiB."""
    draw = random.Random(0)
    vocabulary = engine.model.config.vocab_size
    count = MIXED if case == "mixed" else int(case)
    ends = tuple(draw.sample(range(vocabulary), vocabulary // 60)) if case == "mixed" else ()
    prompts = [[draw.randrange(5, vocabulary) for _ in range(PROMPT)] for _ in range(-(-count // GROUP))]
    seeds = [list(range(start, min(start + GROUP, count))) for start in range(0, count, GROUP)]
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    groups = engine.generate(prompts, seeds, Sampling(1.0, tokens, ends))
    generated_s = time.perf_counter() - started_s
    flat = [one for group in groups for one in group]
    toploc.build_many([one.hidden_TH for one in flat], chunk_tokens=CHUNK_TOKENS)
    return {
        "tokens": sum(len(one.tokens) for one in flat),
        "wall_s": time.perf_counter() - started_s,
        "generated_s": generated_s,
        "cpu_s": time.process_time() - cpu_started_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def memory(submissions: int) -> None:
    """Resident memory over submissions of 1 to 32 completions, from one thread and from two."""
    engine = TorchEngine("float32", "cpu", "exact")
    engine.load(resolve(TINY))
    vocabulary = engine.model.config.vocab_size
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": describe(), "resident_mib": {}}

    def submit(seed: int, count: int) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            groups = draw.randint(1, 4)
            prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 60))] for _ in range(groups)]
            seeds = [[draw.randrange(1 << 40) for _ in range(draw.randint(1, 8))] for _ in range(groups)]
            engine.generate(prompts, seeds, Sampling(1.0, draw.randint(4, 48), (1,)))

    for threads in (1, 2):
        sizes: list[float] = []
        for part in range(20):
            each = submissions // (20 * threads)
            several = [threading.Thread(target=submit, args=(2 * part + n, each)) for n in range(threads)]
            for thread in several:
                thread.start()
            for thread in several:
                thread.join()
            gc.collect()
            sizes.append(resident_mib())
        result["resident_mib"][f"{threads} at a time"] = sizes
        sys.stdout.write(f"{threads} at a time: {[round(size) for size in sizes]} MiB\n")
    (RESULTS / "engine_memory.json").write_text(json.dumps(result, indent=1) + "\n")


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


if __name__ == "__main__":
    main()
