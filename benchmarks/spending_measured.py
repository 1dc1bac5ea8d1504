"""What honest work uses of the tolerance: the data of `spending.py`, and whether the tests over many submissions bear it.

    python benchmarks/spending_measured.py tiny-40 configs/tiny.toml 40      name, config, submissions of each dtype

A worker in fp32 and one in bf16, each with its own key and so its own tasks and seeds; a validator in each dtype judges all
they make. Writes benchmarks/results/spending-measured.json after each submission, and prints the highest evidence that each
pair reached; ln(1 / alpha) would dismiss an honest worker. `spending.py` reads the names `tiny` and `SmolLM2`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from attacks import identity

from shoal import config
from shoal.coordinator.spending import bets
from shoal.evidence.process import Process
from shoal.launch.calibrate import Checking, Generation, _judge, _producer
from shoal.model.dtype import DtypeName
from shoal.model.sources import resolve
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.checks import EXPENSIVE, GRADED, run
from shoal.validator.spending import spent

DTYPES: list[DtypeName] = ["float32", "bfloat16"]
WORKER = 100  # the first worker's key, behind those of the attack matrix
RESULTS = Path(__file__).parent / "results" / "spending-measured.json"


def main(name: str, path: Path, submissions: int) -> None:
    torch.set_num_threads(1)
    settings, folder = config.load(path), resolve(config.load(path).model.name)
    judges = {dtype: _judge(settings, Checking(dtype, settings.validator.row_tokens, 1)) for dtype in DTYPES}
    pairs = [f"{made}|{judged}" for made in DTYPES for judged in DTYPES]
    found: dict[str, Any] = {
        "submissions": dict.fromkeys(DTYPES, 0),
        "rollouts": 0,  # by fp32 workers, which the exposures are of
        "distinct": 0,  # of both kinds of workers: no two have the same seed
        "judgements": 0,  # of single rollouts
        "rejected": 0,
        "highest_nats": dict.fromkeys(pairs, 0.0),
        "total_exposure": 0.0,
        "exposures": dict.fromkeys(pairs, 0.0),
        "beyond": {pair: [0, 0, 0, 0] for pair in pairs},
        "exposure": [],
    }
    seeds: set[int] = set()
    for judge in judges.values():
        judge.load(folder)
    makers = {dtype: identity(WORKER + number) for number, dtype in enumerate(DTYPES)}
    shape = settings.workers.groups_per_submission, 1
    producers = {made: _producer(settings, Generation(made, *shape), makers[made], folder) for made in DTYPES}
    processes = dict.fromkeys(pairs, Process())
    for number in range(submissions):
        for made, producer in producers.items():
            asked = offline_assignment(settings, makers[made].public, number)
            data = producer.submission(asked)
            for dtype, judge in judges.items():
                pair = f"{made}|{dtype}"
                opened = judge.open(asked, makers[made].public, data)
                assert isinstance(opened, Case) and judge.rules is not None
                [case] = judge.prefill([judge.grade(opened)])
                outcome = run([*EXPENSIVE, *GRADED], judge.rules, case)
                found["judgements"] += len(case.rows)
                found["rejected"] += outcome.finding is not None
                used = spent(case, settings, dict(outcome.evidence))
                processes[pair] = processes[pair].after(bets(used, settings))
                found["highest_nats"][pair] = max(found["highest_nats"][pair], processes[pair].evidence)
                found["beyond"][pair] = [a + b for a, b in zip(found["beyond"][pair], used.beyond, strict=True)]
                found["exposures"][pair] += used.exposure
                seeds.update(row.seed for row in case.rows)
                if made == dtype == "float32":
                    exposure_N = 1 - case.computed().logprobs_N.exp()
                    per_rollout = torch.split(exposure_N, case.computed().lengths)
                    found["exposure"] += [round(float(one.sum()), 3) for one in per_rollout]
                    found["rollouts"] += len(per_rollout)
                    found["total_exposure"] += used.exposure
            found["submissions"][made] += 1
        found["distinct"] = len(seeds)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(results | {name: found}))
    sys.stdout.write(
        f"{found['distinct']} distinct honest rollouts, {found['judgements']} judgements, {found['rejected']} submissions "
        f"rejected; highest evidence {found['highest_nats']} nats over {submissions} submissions\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
