"""What do second opinions cost honest nodes? Simulate pools whose validators are slow, late or flaky, or die and return.

    python -m benchmarks.trust.honest_cost --pools 100 --out benchmarks/results/honest_cost.json

Each pool is a real `Pool` in virtual time (tests/coordinator/simulation.py) with two or three validators and three to
eight workers, all honest. Workers crash and lose uploads. One validator of each pool is flaky: it falsely rejects 2, 5 or
20 % of all work for a hard reason. One holds a claim beyond its lease now and then, and one dies with its claims and
returns within a minute; these may be the same. Two flaky validators could slash together, so no pool has two.

Second opinions are drawn at the real rate. Each pool runs again with the same seed and without second opinions, so that
the first verdict counts; and both once more without any fault of a validator. The command fails if an honest worker is
slashed, dismissed or suspended, or if work is rejected although a second validator was live. A rejection by the only live
validator costs its submission; these are counted.
"""

import argparse
import logging
import random
import statistics
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.coordinator.simulation import STEPS, Member, Simulation, workers
from tests.coordinator.support import OTHER_VALIDATOR, THIRD_VALIDATOR, VALIDATOR

from benchmarks.common.machine import about, save
from shoal.coordinator.database import PoolError
from shoal.coordinator.nodes import TIMEOUT_S
from shoal.protocol.messages import LEASE_S, Claim, Reason

POLL_S, BEAT_S = 0.5, 10.0
KEYS = (VALIDATOR, OTHER_VALIDATOR, THIRD_VALIDATOR)


@dataclass
class Validator:
    key: str
    takes_s: float  # per submission
    flaky: float = 0.0  # probability of a false rejection
    late: float = 0.0  # probability that it holds a claim beyond its lease
    dies: float = 0.0  # probability that it dies with its claims
    away_s: float = 0.0  # until it returns
    alive: bool = True
    life: int = 0


@dataclass
class Outcome:
    """What came of one pool."""

    seconds: float
    steps: int
    punished: int  # honest workers that were slashed, dismissed or suspended
    judged: int  # submissions
    opinions: int
    false_rejections: int  # opinions of the flaky validator
    unpaid: int  # submissions rejected although a second validator was live
    unpaid_alone: int  # submissions rejected by the only live validator


class CheckedSimulation(Simulation):
    """A pool with several validators, each with its own speed and faults."""

    def __init__(self, members: list[Member], validators: list[Validator], seed: int, *, opinions: bool) -> None:
        super().__init__(members, seed)
        self.seed, self.false, self.given = seed, 0, 0
        self.told: list[str] = []  # to the operator
        checkers = self.harness.pool.checkers
        checkers.random, checkers.notify = random.Random(seed).random, self.told.append
        if not opinions:
            checkers.needs_another = lambda worker, judged: False  # type: ignore[method-assign]
        self.harness.pool.db.nodes.timeout_s = TIMEOUT_S
        for validator in validators[1:]:
            self.harness.join(validator.key, "validator")
        for validator in validators:
            self.beat_validator(validator)
            self.after(POLL_S, lambda validator=validator: self.check(validator))  # type: ignore[misc]
        for member in members:
            self.after(BEAT_S, lambda member=member: self.beat_worker(member))  # type: ignore[misc]

    def judge(self) -> None:
        """Publish what full batches allow, instead of judging: `check` judges."""

    def beat_worker(self, member: Member) -> None:
        ids = [task.id for task in member.working_on]
        self.harness.beat(member.key, member.version, wants=False, working_on=ids)
        self.after(BEAT_S, lambda: self.beat_worker(member))

    def beat_validator(self, validator: Validator) -> None:
        if validator.alive:
            self.harness.beat(validator.key, self.published, wants=False)
        self.after(BEAT_S, lambda: self.beat_validator(validator))

    def luck(self, validator: Validator, claim: Claim) -> random.Random:
        """Return the luck of this validator with this submission, the same in each run of this pool."""
        return random.Random(f"{self.seed} {validator.key} {claim.assignment.id}")

    def check(self, validator: Validator) -> None:
        """Claim work, and judge one submission after the other."""
        wait_s, life = 0.0, validator.life
        for claim in self.harness.claims(validator.key, 4):
            luck = self.luck(validator, claim)
            wait_s += validator.takes_s * luck.uniform(0.8, 1.25)
            if luck.random() < validator.late:
                wait_s += LEASE_S + 10
            if luck.random() < validator.dies:
                self.after(wait_s, lambda: self.die_and_return(validator, life))
                return
            wrong = luck.random() < validator.flaky
            self.after(wait_s, lambda claim=claim, wrong=wrong: self.give(validator, claim, life, wrong))  # type: ignore[misc]
        self.after(max(wait_s, POLL_S), lambda: self.check(validator) if validator.life == life else None)

    def die_and_return(self, validator: Validator, life: int) -> None:
        if validator.life == life:
            validator.alive, validator.life = False, life + 1
            self.after(validator.away_s, lambda: self.come_back(validator))

    def come_back(self, validator: Validator) -> None:
        validator.alive = True
        self.harness.beat(validator.key, self.published, wants=False)
        self.check(validator)

    def give(self, validator: Validator, claim: Claim, life: int, wrong: bool) -> None:
        if validator.life != life:
            return
        id, before = claim.assignment.id, self.open_step()
        useful = (True,) * claim.assignment.groups
        try:
            self.harness.judge(id, Reason.PROOF if wrong else None, useful, validator.key, confirmed=False)
        except PoolError as refusal:
            assert refusal.status == 409, refusal  # its lease ended, and another validator has the submission
            return
        self.given += 1
        self.false += wrong
        for step in range(before, self.open_step()):
            self.after(1.0, lambda step=step: self.publish(step + 1))  # type: ignore[misc]

    def outcome(self, seconds: float) -> Outcome:
        db = self.harness.pool.db
        states = [state for (state,) in db.connection.rows("SELECT state FROM submissions WHERE judged_s IS NOT NULL")]
        alone = sum("no second validator confirmed" in line for line in self.told)
        return Outcome(
            seconds=seconds,
            steps=self.open_step(),
            punished=sum(node.state in ("banned", "dismissed") or node.suspensions > 0 for node in db.nodes.all()),
            judged=len(states),
            opinions=self.given,
            false_rejections=self.false,
            unpaid=states.count("rejected") - alone,
            unpaid_alone=alone,
        )


def pool(seed: int, *, opinions: bool = True, faults: bool = True) -> Outcome:
    """Simulate one pool. Equal seeds give equal machines, and equal luck with the same work."""
    draw = random.Random(seed)
    members = workers(draw.randint(3, 8))
    for member in members:
        member.takes_s = draw.choice([0.5, 1.0, 2.0, 4.0])
        member.crashes, member.loses = draw.choice([0.0, 0.03]), draw.choice([0.0, 0.05])
    validators = [Validator(key, draw.choice([0.05, 0.1, 0.2, 0.5])) for key in KEYS[: 2 + seed % 2]]
    kinds = [{"flaky": draw.choice([0.02, 0.05, 0.2])}, {"late": 0.005}, {"dies": 0.02, "away_s": draw.uniform(1, 60)}]
    for fault in kinds:
        vars(draw.choice(validators)).update(fault if faults else {})
    simulation = CheckedSimulation(members, validators, seed, opinions=opinions)
    return simulation.outcome(simulation.run())


def throughput(pools: list[Outcome]) -> float:
    """Return steps per second."""
    return sum(each.steps for each in pools) / sum(each.seconds for each in pools)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    result: dict[str, Any] = {**about(), "pools": arguments.pools, "steps": STEPS}
    failures: list[str] = []
    for faults, name in ((True, "faulty"), (False, "healthy")):
        pairs = [[pool(seed, opinions=o, faults=faults) for o in (True, False)] for seed in range(arguments.pools)]
        judged_twice, judged_once = ([pair[number] for pair in pairs] for number in (0, 1))
        figures = [field.name for field in fields(Outcome) if field.name not in ("seconds", "steps")]
        ratios = [once.seconds / twice.seconds for twice, once in pairs]
        result[name] = {
            **{figure: sum(getattr(each, figure) for each in judged_twice) for figure in figures},
            "unpaid_without": sum(each.unpaid + each.unpaid_alone for each in judged_once),
            "punished_without": sum(each.punished for each in judged_once),
            "step_s": 1 / throughput(judged_twice),
            "step_s_without": 1 / throughput(judged_once),
            "ratio": throughput(judged_twice) / throughput(judged_once),
            "ratio_median": statistics.median(ratios),
            "seconds": [[each.seconds for each in pair] for pair in pairs],
        }
        failures += [f"{name}: {figure}" for figure in ("punished", "unpaid") if result[name][figure]]
        shown = {key: value for key, value in result[name].items() if key != "seconds"}
        sys.stdout.write(f"{name}: {shown}\n")
    save(arguments.out, result)
    sys.stdout.write("\n".join(failures) + "\n" if failures else "nobody honest was harmed\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
