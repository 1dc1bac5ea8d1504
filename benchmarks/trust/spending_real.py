"""Run a real worker that knows every limit and makes the best use of it. Measure its gain, and when it is detected.

    python -m benchmarks.trust.spending_real configs/tiny.toml --better DIR/v000024 --most 30

`spending.py` simulates this worker over many submissions. Here a model generates, the attacks of `adversary/` make their
changes, the validator's code prefills and judges, and the coordinator's bets and capital may detect the worker. Worker
and validator compute in fp32, where an honest worker has no mismatch, so every mismatch is the attacker's. --better is a
later version of the same run, for the attacker that moves its weights towards that version (or away from it).

For each budget the attacker first searches for the largest strength that stays below 90 % of every limit in two trial
submissions. The gain is the mean reward of its submissions minus that of honest work for the same assignments.
With exact replay the same attacker, at the same strength, claims the validator's fingerprint. Its first submission that
differs from honest work is rejected as `inexact`, so it gains nothing.

Writes benchmarks/results/spending-real.json after each row, and keeps the rows of other strategies (--only).
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.machine import RESULTS, command_line, describe, save
from benchmarks.trust.adversary.lab import Attack, Lab
from benchmarks.trust.adversary.nearly import NearLogprobs, NearTemperature, NearWeights
from benchmarks.trust.adversary.tolerance import PLANS, SPENT, SpendsTolerance
from benchmarks.trust.attacks import LIMITS, identity
from shoal import config
from shoal.cli.calibrate import RUN
from shoal.config import Config
from shoal.coordinator.trust import bets
from shoal.engine.torch_engine import TorchEngine
from shoal.evidence import ALPHA, Process
from shoal.model.sources import resolve
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case, Finding
from shoal.validator.checks import ANSWERS, EXPENSIVE
from shoal.validator.checks import run as run_checks
from shoal.validator.judge import Judge
from shoal.validator.spending import spent

PATH = RESULTS / "spending-real.json"
WORKER, TRIALS = 200, 1_000_000  # number of the worker's key; first number of its trial submissions
STRENGTHS = {
    "weights": 0.3,
    "temperature": 0.3,
    "logprobs": 0.05,
}  # the first strength tried; each further one is 0.8 times the one before
DIRECTIONS = {"raise": 1.0, "lower": -1.0}
ROWS = ["honest|", *(f"{strategy}|{direction}" for strategy in [*PLANS, *STRENGTHS] for direction in DIRECTIONS)]


class Bench:
    """A worker's engine and a validator's judge, in fp32, with the same numerics."""

    def __init__(self, settings: Config, folder: Path, better: Path, exact: bool) -> None:
        model = settings.model.model_copy(update={"numerics": "exact" if exact else "fast"})
        self.settings = settings.model_copy(update={"model": model})
        self.folder, self.better, self.exact = folder, better, exact
        self.engine = TorchEngine("float32", "cpu", model.numerics)
        self.judge = Judge(self.settings, RUN, "float32")
        self.judge.load(folder)
        self.key = identity(WORKER)
        own = TorchEngine("float32", "cpu", model.numerics)  # the attackers' engine may hold other weights
        self.honest = Attack(self.settings, RUN, self.key, own, Lab([folder]))
        self.honest.load(folder, 0)
        self.rewards: dict[int, float] = {}  # rewards of honest work, by submission number

    def attacker(self, strategy: str, direction: float) -> Any:
        kind = {"weights": NearWeights, "temperature": NearTemperature, "logprobs": NearLogprobs}.get(
            strategy, SpendsTolerance
        )
        made: Any = kind(self.settings, RUN, self.key, self.engine, Lab([self.folder]))
        made.load(self.folder, 0)
        if strategy in PLANS:
            made.direction, made.spending = direction, PLANS[strategy]
        made.better = self.better
        return made

    def judged(self, maker: Attack, number: int) -> tuple[Case, Finding | None, dict[str, float]]:
        """Return a submission as the validator sees it: the graded case, the finding, and the figures."""
        assignment = offline_assignment(self.settings, self.key.public, number)
        opened = self.judge.open(assignment, self.key.public, maker.submission(assignment))
        assert isinstance(opened, Case), opened
        [case] = self.judge.prefill([self.judge.grade(opened)])
        assert self.judge.rules is not None
        outcome = run_checks([*EXPENSIVE, *ANSWERS], self.judge.rules, case)
        return case, outcome.finding, dict(outcome.evidence)

    def honest_reward(self, number: int) -> float:
        if number not in self.rewards:
            self.rewards[number] = statistics.fmean(self.judged(self.honest, number)[0].rewards)
        return self.rewards[number]

    def strongest(self, attacker: Any, strategy: str, direction: float) -> float:
        """Return the largest tried strength that stays below 90 % of every limit."""
        strength = STRENGTHS[strategy]
        while strength > 1e-4:
            attacker.lean(direction, strength)
            if all(self.passes(attacker, TRIALS + trial) for trial in range(2)):
                return strength
            strength *= 0.8
        raise SystemExit(f"{strategy}: no strength passes the trial submissions")

    def passes(self, attacker: Attack, number: int) -> bool:
        _, finding, figures = self.judged(attacker, number)
        limits = self.settings.validator
        return finding is None and all(
            figures[name] <= SPENT * getattr(limits, limit) for name, limit in LIMITS.items()
        )

    def lasts(self, attacker: Attack, most: int) -> dict[str, Any]:
        """Return the number of submissions until the worker is detected, the check that detects it, and its gain."""
        process, gains, highest = Process(), [], dict.fromkeys(LIMITS, 0.0)
        for number in range(most):
            case, finding, figures = self.judged(attacker, number)
            if finding is not None:
                return {
                    "found": number + 1,
                    "by": f"a limit: {finding.reason.value}",
                    "gains": gains,
                    "highest": highest,
                }
            gains.append(statistics.fmean(case.rewards) - self.honest_reward(number))
            for name, limit in LIMITS.items():  # the share of each limit that any submission used
                highest[name] = max(highest[name], figures[name] / getattr(self.settings.validator, limit))
            process = process.after(bets(spent(case, self.settings, figures), self.settings))
            if process.evidence >= -np.log(ALPHA):
                record = {"found": number + 1, "by": ", ".join(process.strongest(2))}
                return record | {"gains": gains, "highest": highest, "nats": process.evidence}
        return {"found": None, "by": "", "gains": gains, "highest": highest, "nats": process.evidence}

    def first_inexact(self, attacker: Attack, most: int) -> dict[str, Any]:
        """Return the first submission that exact replay rejects, and the check that rejects it."""
        for number in range(most):
            assignment = offline_assignment(self.settings, self.key.public, number)
            opened = self.judge.open(assignment, self.key.public, attacker.submission(assignment))
            assert isinstance(opened, Case), opened
            [one] = self.judge.examine([replace(opened, exact=True)])
            if one.finding is not None:
                return {"found": number + 1, "by": one.finding.reason.value}
        return {"found": None, "by": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--better", type=Path, required=True, help="a later version of the same run")
    parser.add_argument("--most", type=int, default=30, help="submissions of each attacker")
    parser.add_argument("--only", nargs="+", choices=["honest", *PLANS, *STRENGTHS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-exact", action="store_true", help="do not measure exact replay")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = config.load(arguments.config)
    folder = resolve(settings.model.name)
    fast = Bench(settings, folder, arguments.better, exact=False)
    exact = None if arguments.no_exact else Bench(settings, folder, arguments.better, exact=True)
    about = {
        "config": arguments.config.name,
        "machine": describe(),
        "alpha": ALPHA,
        "rollouts_per_submission": settings.workers.groups_per_submission * settings.sampling.group_size,
    }
    for strategy in arguments.only or ["honest", *PLANS, *STRENGTHS]:
        for name, direction in DIRECTIONS.items() if strategy != "honest" else [("", 0.0)]:
            write(about, f"{strategy}|{name}", row(fast, exact, strategy, direction, arguments.most))


def row(fast: Bench, exact: Bench | None, strategy: str, direction: float, most: int) -> dict[str, Any]:
    attacker = fast.attacker(strategy, direction)
    if strategy == "honest":
        attacker.spending = replace(PLANS["up to half of the margin"], reach=0.0, mean=0.0)
    strength = fast.strongest(attacker, strategy, direction) if strategy in STRENGTHS else None
    record = fast.lasts(attacker, most)
    gain = statistics.fmean(record["gains"]) if record["gains"] else 0.0
    made = {"command": command_line(), "strength": strength, "gain": gain, "most": most} | record
    if exact is not None:
        same = exact.attacker(strategy, direction)
        same.spending = getattr(attacker, "spending", None)
        if strength is not None:
            same.lean(direction, strength)
        made["exact"] = exact.first_inexact(same, 3)
    return made


def write(about: dict[str, Any], name: str, record: dict[str, Any]) -> None:
    """Add a row to the results. Other processes may add rows at the same time."""
    result = json.loads(PATH.read_text()) if PATH.exists() else {}
    rows = result.get("rows", {}) | {name: record}
    rows = {known: rows[known] for known in ROWS if known in rows}
    save(PATH, about | {"rows": rows})
    sys.stdout.write(line(name, record))
    sys.stdout.flush()


def line(name: str, record: dict[str, Any]) -> str:
    strategy, _, direction = name.partition("|")
    until = str(record["found"]) if record["found"] else f"not within {record['most']}"
    exact = record.get("exact", {})
    replayed = (
        f"{exact['by']}, submission {exact['found']}" if exact.get("found") else "nothing to detect" if exact else ""
    )
    return f"| {strategy} | {direction} | {record['gain']:+.3f} | {until} | {record['by']} | {replayed} |\n"


if __name__ == "__main__":
    main()
