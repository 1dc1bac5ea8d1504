"""Compare the torch engine with vLLM, with seeded sampling and hidden states. Time vLLM's weight updates.

    SHOAL_VLLM_PYTHON=... python -m benchmarks.speed.vllm_speed [--rounds 3] [--threads 1] [--tokens 200] [--dtype bfloat16]

Both engines take turns to generate 1, 16 and 64 completions of SmolLM2, up to 8 for each prompt of 40 tokens, on equally
many threads. No token ends a completion early. CPU seconds are also recorded, because other processes disturb them less
than wall-clock seconds. The first round is a warm-up. In every other round vLLM goes first. Then vLLM alternates between
two versions that differ in 1 % of their weights. An update is timed from `load` until vLLM can generate.

Writes every timing to benchmarks/results/vllm_speed.json. Its `load` shows how busy the machine was.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.machine import RESULTS, about, save
from shoal.engine.protocol import Engine, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import VllmEngine
from shoal.model.load import WEIGHTS
from shoal.model.sources import SMOLLM2, resolve

PATH = RESULTS / "vllm_speed.json"
SIZES = (1, 16, 64)
GROUP, PROMPT_TOKENS = 8, 40
UPDATES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = resolve(SMOLLM2)
    ours = TorchEngine(arguments.dtype)
    ours.load(folder)
    result: dict[str, Any] = {
        **about(),
        "load": [os.getloadavg()],
    }
    with closing(VllmEngine(arguments.dtype, arguments.threads)) as theirs, tempfile.TemporaryDirectory() as changed:
        theirs.load(folder)
        result["versions"] = theirs.versions
        engines: dict[str, Engine] = {"torch": ours, "vllm": theirs}
        result["speed"] = [
            one | {"round": number}
            for number in range(arguments.rounds + 1)
            for one in in_turns(engines, arguments.tokens if number else 8, vllm_first=number % 2 == 1)
        ]
        result["update_s"] = updates(theirs, [change(folder, Path(changed)), folder])
    result["load"].append(os.getloadavg())
    save(PATH, result)
    report(result)


def in_turns(engines: dict[str, Engine], tokens: int, *, vllm_first: bool) -> list[dict[str, Any]]:
    """Measure each size once with each engine."""
    figures = []
    for size in SIZES:
        for name in sorted(engines, reverse=vllm_first):
            groups = -(-size // GROUP)
            prompts = [[100 + 7 * group + at for at in range(PROMPT_TOKENS)] for group in range(groups)]
            seeds = [list(range(GROUP * group, min(GROUP * group + GROUP, size))) for group in range(groups)]
            began_s, before_s = time.perf_counter(), cpu_s(engines[name])
            made = engines[name].generate(prompts, seeds, Sampling(1.0, tokens, ()))
            wall_s, used_s = time.perf_counter() - began_s, cpu_s(engines[name]) - before_s
            total = sum(len(one.tokens) for group in made for one in group)
            assert total == size * tokens
            figures.append({"engine": name, "size": size, "tokens": total, "wall_s": wall_s, "cpu_s": used_s})
    return figures


def cpu_s(engine: Engine) -> float:
    """Return the CPU seconds so far of this process, plus those of vLLM's process if `engine` is vLLM."""
    own = time.process_time()
    if isinstance(engine, VllmEngine):
        ticks = Path(f"/proc/{engine.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        own += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return own


def change(folder: Path, to: Path) -> Path:
    """Write a version in which 1 % of the weights differ from `folder`."""
    for path in folder.iterdir():
        if path.name != WEIGHTS and path.is_file():
            (to / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / WEIGHTS)
    for weight in weights.values():
        weight.mul_(1 + 0.05 * (torch.rand_like(weight) < 0.01))
    save_file(weights, to / WEIGHTS, {"format": "pt"})
    return to


def updates(engine: VllmEngine, folders: list[Path]) -> list[float]:
    """Return the seconds of each `load`. Check that the output changes."""
    sampling = Sampling(0.0, 32, ())
    prompt, figures, before = list(range(200, 240)), [], None
    for number in range(UPDATES):
        began_s = time.perf_counter()
        engine.load(folders[number % 2])
        figures.append(time.perf_counter() - began_s)
        [[one]] = engine.generate([prompt], [[0]], sampling)
        assert before != one.logprobs, "the new weights did not take effect"
        before = one.logprobs
    return figures


def report(result: dict[str, Any]) -> None:
    for size in SIZES:
        for unit in ("wall_s", "cpu_s"):
            speeds = {
                name: statistics.median(
                    one["tokens"] / one[unit]
                    for one in result["speed"]
                    if one["engine"] == name and one["size"] == size and one["round"]
                )
                for name in ("torch", "vllm")
            }
            ratio = speeds["torch"] / speeds["vllm"]
            sys.stdout.write(
                f"{size:3}, tokens by {unit}: torch {speeds['torch']:.0f}, vllm {speeds['vllm']:.0f}; {ratio:.0%}\n"
            )
    sys.stdout.write(f"weight update: median {statistics.median(result['update_s']):.2f} s\n")


if __name__ == "__main__":
    main()
