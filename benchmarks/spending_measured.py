"""What honest work uses of the tolerance: the data of `spending.py`, and whether the tests over many submissions bear it.

    python benchmarks/spending_measured.py tiny configs/tiny.toml 20        name, config, submissions of each dtype

Workers and validators in fp32 and bf16, every pair. Writes benchmarks/results/spending-measured.json, and prints the highest
evidence that each pair reached over its submissions; ln(1 / alpha) would dismiss an honest worker.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from shoal import config
from shoal.coordinator.spending import bets
from shoal.evidence.process import Process
from shoal.launch.calibrate import Checking, Generation, _judge, _producer
from shoal.model.dtype import DtypeName
from shoal.model.sources import resolve
from shoal.protocol.identity import Identity
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.checks import EXPENSIVE, run
from shoal.validator.spending import spent

DTYPES: list[DtypeName] = ["float32", "bfloat16"]
RESULTS = Path(__file__).parent / "results" / "spending-measured.json"


def main(name: str, path: Path, submissions: int) -> None:
    settings, folder, identity = config.load(path), resolve(config.load(path).model.name), Identity.generate()
    judges = {dtype: _judge(settings, Checking(dtype, settings.validator.row_tokens, 1)) for dtype in DTYPES}
    found: dict[str, Any] = {"rollouts": 0, "total_exposure": 0.0, "beyond": {}, "exposure": []}
    for judge in judges.values():
        judge.load(folder)
    for made in DTYPES:
        producer = _producer(settings, Generation(made, settings.workers.groups_per_submission, 1), identity, folder)
        processes, highest = dict.fromkeys(DTYPES, Process()), dict.fromkeys(DTYPES, 0.0)
        for number in range(submissions):
            asked = offline_assignment(settings, identity.public, number)
            data = producer.submission(asked)
            for dtype, judge in judges.items():
                opened = judge.open(asked, identity.public, data)
                assert isinstance(opened, Case) and judge.rules is not None
                [case] = judge.prefill([judge.grade(opened)])
                outcome = run(EXPENSIVE, judge.rules, case)
                assert outcome.finding is None, outcome.finding
                used = spent(case, settings, dict(outcome.evidence))
                processes[dtype] = processes[dtype].after(bets(used, settings))
                highest[dtype] = max(highest[dtype], processes[dtype].evidence)
                before = found["beyond"].setdefault(f"{made}|{dtype}", [0, 0, 0, 0])
                found["beyond"][f"{made}|{dtype}"] = [a + b for a, b in zip(before, used.beyond, strict=True)]
                if made == dtype == "float32":
                    exposure_N = 1 - case.computed().logprobs_N.exp()
                    per_rollout = [
                        round(float(one.sum()), 3) for one in torch.split(exposure_N, case.computed().lengths)
                    ]
                    found["exposure"] += per_rollout
                    found["rollouts"] += len(per_rollout)
                    found["total_exposure"] += used.exposure
        sys.stdout.write(f"{made}: highest evidence {highest} nats over {submissions} submissions\n")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(results | {name: found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
