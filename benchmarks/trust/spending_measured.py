"""Measure how much tolerance honest work uses, and whether it passes the tests over many submissions.

    python -m benchmarks.trust.spending_measured tiny-40 configs/tiny.toml 10 4

Workers run in fp32 and bf16, each with its own key and therefore its own tasks and seeds. A validator in each dtype judges
all their work. Writes benchmarks/results/spending-measured.json after each worker, and prints the highest evidence that any
worker reached for each pair of dtypes. Evidence of ln(1 / alpha) would dismiss an honest worker. `spending.py` reads the
rows `tiny` and `SmolLM2`.
"""

import argparse
import json
import multiprocessing
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import RESULTS, commit, save
from benchmarks.trust.attacks import identity
from shoal import config
from shoal.cli.calibrate import Checking, Generating, _judge, _producer
from shoal.config.sections import ROW_TOKENS
from shoal.coordinator.trust import bets
from shoal.evidence import Process
from shoal.model.dtype import DtypeName
from shoal.model.sources import resolve
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.checks import ANSWERS, EXPENSIVE, run
from shoal.validator.spending import spent

DTYPES: list[DtypeName] = ["float32", "bfloat16"]
PAIRS = [f"{made}|{judged}" for made in DTYPES for judged in DTYPES]
WORKER = 100  # number of the first worker's key, after those of the attack matrix
PATH = RESULTS / "spending-measured.json"
SIMULATED = ("tiny", "SmolLM2")  # rows for which `spending.py` reads the exposure of every rollout


def empty() -> dict[str, Any]:
    return {
        "workers": 0,  # workers of each dtype
        "rollouts": 0,  # rollouts of fp32 workers, whose exposures are recorded
        "distinct": 0,  # rollouts of all workers; no two have the same seed
        "judgements": 0,  # judgements of single rollouts
        "rejected": 0,  # rejected submissions
        "highest_nats": dict.fromkeys(PAIRS, 0.0),
        "total_exposure": 0.0,
        "exposures": dict.fromkeys(PAIRS, 0.0),
        "beyond": {pair: [0, 0, 0, 0] for pair in PAIRS},
        "exposure": [],
    }


def measured(path: Path, submissions: int, worker: int) -> dict[str, Any]:
    """Measure one worker of each dtype with a validator of each dtype."""
    torch.set_num_threads(1)
    settings = config.load(path)
    folder = resolve(settings.model.name)
    judges = {dtype: _judge(settings, Checking(dtype, ROW_TOKENS, 1)) for dtype in DTYPES}
    for judge in judges.values():
        judge.load(folder)
    result, seeds, processes = empty() | {"workers": 1}, set[int](), dict.fromkeys(PAIRS, Process())
    for number, made in enumerate(DTYPES):
        key = identity(WORKER + worker * len(DTYPES) + number)
        producer = _producer(settings, Generating(made, settings.workers.groups_per_submission, 1), key, folder)
        for assignment in (offline_assignment(settings, key.public, number) for number in range(submissions)):
            data = producer.submission(assignment)
            for dtype, judge in judges.items():
                pair = f"{made}|{dtype}"
                opened = judge.open(assignment, key.public, data)
                assert isinstance(opened, Case) and judge.rules is not None
                [case] = judge.prefill([judge.grade(opened)])
                outcome = run([*EXPENSIVE, *ANSWERS], judge.rules, case)
                seeds.update(row.seed for row in case.rows)
                result["judgements"] += len(case.rows)
                result["rejected"] += outcome.finding is not None
                used = spent(case, settings, dict(outcome.evidence))
                processes[pair] = processes[pair].after(bets(used, settings))
                result["highest_nats"][pair] = max(result["highest_nats"][pair], processes[pair].evidence)
                result["beyond"][pair] = [a + b for a, b in zip(result["beyond"][pair], used.beyond, strict=True)]
                result["exposures"][pair] += used.exposure
                if made == dtype == "float32":
                    exposure_N = 1 - case.computed().logprobs_N.exp()
                    per_rollout = torch.split(exposure_N, case.computed().lengths)
                    result["exposure"] += [round(float(one.sum()), 3) for one in per_rollout]
                    result["rollouts"] += len(per_rollout)
                    result["total_exposure"] += used.exposure
    return result | {"distinct": len(seeds)}


def added(one: Any, other: Any) -> Any:
    """Return the sum of two results. Add numbers and lists of numbers; concatenate exposures."""
    if isinstance(one, dict):
        return {
            name: {pair: max(one[name][pair], other[name][pair]) for pair in PAIRS}
            if name == "highest_nats"
            else one[name] + other[name]
            if name == "exposure"
            else added(one[name], other[name])
            for name in one
        }
    return [added(*pair) for pair in zip(one, other, strict=True)] if isinstance(one, list) else one + other


def main(name: str, path: Path, submissions: int, workers: int) -> None:
    result = empty()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for of_worker in pool.imap_unordered(partial(measured, path, submissions), range(workers)):
            result = added(result, of_worker) | {"submissions": submissions, "commit": commit()}
            results = json.loads(PATH.read_text()) if PATH.exists() else {}
            kept = result if name in SIMULATED else {key: value for key, value in result.items() if key != "exposure"}
            save(PATH, results | {name: kept})
            result = {key: value for key, value in result.items() if key not in ("submissions", "commit")}
            sys.stdout.write(
                f"{result['workers']} workers of each dtype: {result['distinct']} distinct honest rollouts, "
                f"{result['judgements']} judgements, {result['rejected']} submissions rejected; highest evidence "
                f"{result['highest_nats']} nats\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the row in the results file")
    parser.add_argument("config", type=Path)
    parser.add_argument("submissions", type=int, help="submissions of each worker")
    parser.add_argument("workers", type=int, help="workers of each dtype")
    arguments = parser.parse_args()
    main(arguments.name, arguments.config, arguments.submissions, arguments.workers)
