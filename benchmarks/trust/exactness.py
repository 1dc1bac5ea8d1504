"""Count the tokens for which the engine and the validator's prefill differ in any bit, on honest rollouts.

    python -m benchmarks.trust.exactness configs/tiny.toml --rollouts 100000
    python -m benchmarks.trust.exactness configs/quickstart.toml --rollouts 2000
    python -m benchmarks.trust.exactness configs/tiny.toml --rollouts 2000 --dtype bfloat16 --threads 2

Batch shapes change with every submission: the number of groups decoded together, the length of completions, the packing of
the prefill's rows, the number of submissions in a prefill, and each side's number of threads. A token is mismatched if it is
not the argmax with a margin of exactly 0, or if its logprob differs. A proof is mismatched if any byte differs.

Writes benchmarks/results/exactness.json, one entry per model and dtype. The exit status is 1 if anything differed.
"""

import argparse
import hashlib
import itertools
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.common.machine import RESULTS, about, save
from shoal import config, toploc
from shoal.cli.calibrate import RUN
from shoal.engine.torch_engine import TorchEngine
from shoal.model.dtype import pick
from shoal.model.sources import resolve
from shoal.protocol.identity import Identity
from shoal.store.columns import PROOF_CHUNK_TOKENS
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Judge
from shoal.worker.produce import Producer

PATH = RESULTS / "exactness.json"
GROUPS, SHARING, ROW_TOKENS = (1, 2, 3, 5, 8), (1, 2, 3), (256, 1000, 4096, 10_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--weights", type=Path, help="folder of a policy version (default: the config's model)")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: the faster one here)")
    parser.add_argument("--threads", type=int, default=1, help="maximum threads of each side")
    arguments = parser.parse_args()
    settings = config.load(arguments.config)
    folder = arguments.weights or resolve(settings.model.name)
    dtype, _ = pick(arguments.dtype or settings.model.dtype, settings.model.device)
    random_ = random.Random(0)
    identity = Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"shoal/exactness").digest()))
    counts = {"rollouts": 0, "tokens": 0, "mismatched_tokens": 0, "mismatched_logprobs": 0, "mismatched_proofs": 0}
    shapes: set[tuple[int, ...]] = set()
    started_s, number, printed_s = time.perf_counter(), itertools.count(), 0.0
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"numerics": "exact"})})
    with Judge(settings, RUN, dtype) as judge:
        judge.load(folder)
        producer = Producer(settings, RUN, identity, TorchEngine(dtype, settings.model.device, "exact"))
        producer.load(folder, 0)
        longest = producer.sampling.max_tokens
        while counts["rollouts"] < arguments.rollouts:
            groups, row_tokens = random_.choice(GROUPS), random_.choice(ROW_TOKENS)
            most = random_.choice([longest, longest, max(1, longest // 3), 1])
            threads = [random_.randint(1, arguments.threads) for _ in range(2)]
            judge.row_tokens = row_tokens
            producer.sampling = replace(producer.sampling, max_tokens=most)
            torch.set_num_threads(threads[0])
            cases: list[Case] = []
            for _ in range(random_.choice(SHARING)):
                assignment = offline_assignment(settings, identity.public, next(number))
                assignment = assignment.model_copy(update={"groups": groups})
                case = judge.open(assignment, identity.public, producer.submission(assignment))
                assert isinstance(case, Case), case
                cases.append(case)
            torch.set_num_threads(threads[1])
            for case in judge.prefill(cases):
                add(counts, case)
            shapes.add((groups, len(cases), row_tokens, most, *threads))
            if time.perf_counter() - printed_s > 20:
                printed_s = time.perf_counter()
                sys.stdout.write(f"{counts}\n")
                sys.stdout.flush()
    result: dict[str, Any] = {
        "model": settings.model.name,
        "dtype": dtype,
        **counts,
        "batch_shapes": len(shapes),
        "wall_s": round(time.perf_counter() - started_s),
        **about(),
    }
    kept = json.loads(PATH.read_text()) if PATH.exists() else {}
    save(PATH, kept | {f"{settings.model.name} {dtype}": result})
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return int(any(count for name, count in counts.items() if name.startswith("mismatched")))


def add(counts: dict[str, int], case: Case) -> None:
    prefill = case.computed()
    claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs], dtype=torch.float32)
    hiddens = list(torch.split(prefill.hidden_NH, prefill.lengths))
    proofs = toploc.build_many(hiddens, chunk_tokens=PROOF_CHUNK_TOKENS)
    counts["rollouts"] += len(case.rows)
    counts["tokens"] += len(claimed_N)
    counts["mismatched_tokens"] += int((prefill.margins_N != 0).sum())
    counts["mismatched_logprobs"] += int((claimed_N != prefill.logprobs_N).sum())
    counts["mismatched_proofs"] += sum(
        claimed != own
        for row, made in zip(case.rows, proofs, strict=True)
        for claimed, own in zip(row.proofs, made, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
