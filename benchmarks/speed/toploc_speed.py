"""Compare the speed of shoal.toploc with that of the public package toploc 0.1.6, in turns on the same hidden states.

    python -m benchmarks.speed.toploc_speed --public PATH

PATH is a folder with the public package, compiled against this torch (about 25 minutes on one core):

    pip download toploc==0.1.6 --no-binary :all: --no-deps
    pip wheel --no-build-isolation --no-deps toploc-0.1.6.tar.gz && python -m zipfile -e toploc-0.1.6-*.whl PATH

Writes benchmarks/results/toploc_speed.json: milliseconds of every round, medians, and the ratio of each round. Each number
of threads is measured in its own process. The process is confined to that many cores before it imports anything, because
the public package starts a thread per visible core. The public package is called in the way that is fastest for it: build
gets whole chunks, and verify gets one tensor. Its build is also measured with one token at a time, as in its documentation.
OpenMP's threads wait without spinning (OMP_WAIT_POLICY=passive), because torch's threads wait for each other at every
operation. If they spun, a busy neighbour would make two threads many times slower than one.

The hidden states come from SmolLM2-135M, after the final norm, for 1024 tokens of this repository's source. For width 576,
they are the outputs of the last four layers, which gives 4 x 1024 rows. For width 4096, a row joins the outputs of eight
neighbouring layers for one token, cut to 4096 numbers. Four such groups of layers give 4 x 1024 rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.machine import RESULTS, ROOT, about, save

ROUNDS = 21
CHUNK, TOP_K = 32, 128
WIDTHS = (4096, 576)


def main() -> None:
    parser = argparse.ArgumentParser(description="shoal.toploc against the public package")
    parser.add_argument("--public", type=Path, required=True, help="a folder with the public package, compiled")
    parser.add_argument(
        "--states", type=Path, help=argparse.SUPPRESS
    )  # --states and --threads start a measuring process
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.states:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
        json.dump(measure(arguments.public, arguments.states, arguments.threads), sys.stdout)
        return

    figures: dict[str, Any] = about()
    with tempfile.TemporaryDirectory() as folder:
        states = Path(folder) / "states.pt"
        make_states(states)
        for threads in (1, 2):
            own = [sys.executable, "-m", __spec__.name, "--public", str(arguments.public)]
            run = subprocess.run(
                [*own, "--states", str(states), "--threads", str(threads)],
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
                stdout=subprocess.PIPE,
                check=True,
            )
            figures[f"{threads} threads"] = rows = json.loads(run.stdout)
            for shape, row in rows.items():
                sys.stdout.write(f"{threads} threads, {shape}: {json.dumps({k: row[k] for k in row if k != 'ms'})}\n")
    path = RESULTS / "toploc_speed.json"
    save(path, figures)


def make_states(path: Path) -> None:
    """Write {width: (4096, width) bfloat16} to a file."""
    import torch

    from shoal.model.load import load_model, load_tokenizer
    from shoal.model.sources import SMOLLM2, resolve

    folder = resolve(SMOLLM2)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    tokens_BT = torch.tensor(load_tokenizer(folder).encode(text)[:1024]).view(2, 512)
    model = load_model(folder).base_model
    with torch.inference_mode():
        *raw, last = model(tokens_BT, output_hidden_states=True).hidden_states
        layers = [
            last,
            *(model.norm(hidden) for hidden in reversed(raw)),
        ]  # the last layer's output has passed the norm
    layers = [hidden.flatten(0, 1).bfloat16() for hidden in layers]
    wide = torch.cat([torch.cat(layers[group : group + 8], dim=1) for group in (0, 7, 14, 21)])
    torch.save({4096: wide[:, :4096].clone(), 576: torch.cat(layers[:4]).clone()}, path)


def measure(public_path: Path, states: Path, threads: int) -> dict[str, Any]:
    sys.path.insert(0, str(public_path))
    import torch

    import toploc as public  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    loaded = torch.load(states, weights_only=True)
    return {f"4096 x {width} bfloat16": compare(public, loaded[width]) for width in WIDTHS}


def compare(public: Any, hidden_TH: Any) -> dict[str, Any]:
    from shoal import toploc

    chunks, tokens = list(hidden_TH.split(CHUNK)), list(hidden_TH.split(1))
    theirs = public.build_proofs_bytes(chunks, 1, TOP_K, skip_prefill=True)
    ours = toploc.build(hidden_TH)
    contenders: dict[str, Callable[[], Any]] = {
        "build": lambda: toploc.build(hidden_TH),
        "public build": lambda: public.build_proofs_bytes(chunks, 1, TOP_K, skip_prefill=True),
        "public build, token by token": lambda: public.build_proofs_bytes(tokens, CHUNK, TOP_K, skip_prefill=True),
        "verify": lambda: toploc.verify(hidden_TH, ours),
        "public verify": lambda: public.verify_proofs_bytes(hidden_TH, theirs, CHUNK, TOP_K, skip_prefill=True),
    }
    ms: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            ms[name].append(round((time.perf_counter() - start) * 1e3, 3))

    ratios = {
        name: spread([a / b for a, b in zip(ms[f"public {name}"], ms[name], strict=True)])
        for name in ("build", "verify")
    }
    crossed = {
        "ours by public": public.verify_proofs_bytes(hidden_TH, ours, CHUNK, TOP_K, skip_prefill=True),
        "public by ours": toploc.verify(hidden_TH, theirs),
    }
    mismatches = {
        "ours by public": max(result.exp_mismatches for result in crossed["ours by public"]),
        "public by ours": max(result.exponent_mismatches for result in crossed["public by ours"]),
    }
    return {
        "median_ms": {name: spread(values) for name, values in ms.items()},
        "public_over_ours": ratios,
        "chunks": len(ours),
        "chunks_with_equal_bytes": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "most_exponent_mismatches": mismatches,
        "ms": ms,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


if __name__ == "__main__":
    main()
