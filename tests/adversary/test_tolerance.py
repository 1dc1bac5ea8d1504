"""A worker that exploits the tolerance passes every check, until the test over all its submissions dismisses it.

Generation, prefills, verdicts and the coordinator are real; the model is tiny and random, and its completions end early.
Rewards are length penalties. Both sides compute in fp32, where honest work has hardly any mismatches.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from benchmarks.trust.adversary.attacks import ATTACKS, Attack, Lab
from benchmarks.trust.adversary.tolerance import FAR, PLANS, SPENT, Plan, SpendsTolerance, Swap, Tried

from shoal.coordinator.trust import shared_evidence
from shoal.engine.protocol import Completion
from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.messages import ToleranceSpent
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Examined, Judge
from shoal.validator.spending import regenerate, spent

from ..coordinator.support import ALICE as KEY
from ..coordinator.support import OTHER_VALIDATOR, VALIDATOR, Harness, open_pool
from ..validator.support import judged as verdict_of
from ..validator.support import make_validator
from ..workers import ALICE, BOB, RUN, config

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = config(
    tasks={"length_targets": [4, 12]},
    sampling={"max_tokens": 24, "group_size": 8},
    workers={"groups_per_submission": 4},
    evidence={"rates": (0.03, 0.005, 1e-3, 1e-3)},  # as in configs/tiny.toml
)
MAX_SUBMISSIONS = 12


@pytest.fixture(scope="module")
def judge(one_thread: None, talkative_folder: Path) -> Iterator[Judge]:
    with Judge(SETTINGS, RUN, "float32") as judge:
        judge.load(talkative_folder)
        yield judge


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine("float32")


def attacker(kind: type[Attack], folder: Path, engine: TorchEngine) -> Attack:
    attacker = kind(SETTINGS, RUN, ALICE, engine, Lab([folder], BOB))
    attacker.load(folder, 0)
    return attacker


def examined(judge: Judge, attacker: Attack, number: int) -> Examined:
    assignment = offline_assignment(SETTINGS, ALICE.public, number)
    case = judge.open(assignment, ALICE.public, attacker.submission(assignment))
    assert isinstance(case, Case), case
    [examined] = judge.examine([case])
    return examined


def judged(judge: Judge, attacker: Attack, number: int) -> tuple[ToleranceSpent, float]:
    """Return the tolerance that an accepted submission spent, and its mean reward."""
    result = examined(judge, attacker, number)
    assert result.finding is None, f"the attack exceeds a limit: {result.finding}"
    return spent(result.case, SETTINGS, result.evidence), fmean(result.case.rewards)


def pool() -> Harness:
    harness = open_pool()
    harness.pool.judgement.trust.config = SETTINGS
    harness.join(KEY)
    harness.publish(0)
    return harness


def uploaded(harness: Harness, used: ToleranceSpent) -> str:
    """Upload a submission that spent this much for each of two validators, and return the state of the last one."""
    for validator in (VALIDATOR, OTHER_VALIDATOR):
        task = harness.upload(KEY)
        assert harness.claim(validator) is not None
        harness.judge(task.id, None, (False, False), validator, spent=used)
        if (state := harness.state(task.id)) == "rejected":
            break
    return state


@pytest.mark.parametrize(("name", "sign"), [("spends_tolerance", 1), ("spends_tolerance_down", -1)])
def test_the_adaptive_attacker_is_dismissed(
    judge: Judge, engine: TorchEngine, talkative_folder: Path, name: str, sign: int
) -> None:
    harness, liar = pool(), attacker(ATTACKS[name], talkative_folder, engine)
    honest = attacker(Attack, talkative_folder, engine)
    states, gains = ["accepted"], list[float]()
    while states[-1] == "accepted" and len(gains) < MAX_SUBMISSIONS:
        used, reward = judged(judge, liar, len(gains))
        gains.append(reward - judged(judge, honest, len(gains))[1])
        states.append(uploaded(harness, used))
    assert sign * fmean(gains) > 0, "until then the attacker must move the reward in the intended direction"
    assert states[-1] == "rejected", f"not dismissed within {MAX_SUBMISSIONS} submissions"
    assert harness.kinds().count("dismissed") == 1 and "slashed" not in harness.kinds()


def test_an_honest_worker_is_not_dismissed(judge: Judge, engine: TorchEngine, talkative_folder: Path) -> None:
    harness, honest = pool(), attacker(Attack, talkative_folder, engine)
    assert {uploaded(harness, judged(judge, honest, number)[0]) for number in range(MAX_SUBMISSIONS)} == {"accepted"}
    assert shared_evidence(harness.pool.judgement.trust.evidence.of(KEY)) < 1


@pytest.mark.parametrize("name", ["spends_tolerance", "spends_tolerance_down"])
def test_regeneration_detects_each_changed_completion(
    judge: Judge, engine: TorchEngine, talkative_folder: Path, name: str
) -> None:
    kinds = ATTACKS[name], Attack
    lied, honest = (examined(judge, attacker(kind, talkative_folder, engine), 0).case for kind in kinds)
    moved = sum(row.tokens != own.tokens for row, own in zip(lied.rows, honest.rows, strict=True))
    assert moved > 4
    improved, spoiled = regenerate(judge, lied, 32)
    if name.endswith("down"):
        improved, spoiled = spoiled, improved
    assert improved >= moved - 1 and spoiled <= 1, "at most one near tie may break differently on this machine"
    assert 0 < sum(regenerate(judge, lied, 3)) <= 3, "of 3 regenerated rollouts, 1 to 3 must have a different reward"
    assert sum(regenerate(judge, honest, 32)) <= 1
    near = replace(lied, grades=[replace(grade, repeatable=False) for grade in lied.grades])
    assert regenerate(judge, near, 32) == (0, 0), "rewards whose grading came near its time limit must not be compared"


@pytest.mark.parametrize("regenerated", [0, 4])
def test_a_verdict_counts_the_regenerated_rollouts_whose_reward_changed(
    engine: TorchEngine, talkative_folder: Path, regenerated: int
) -> None:
    evidence = SETTINGS.evidence.model_copy(update={"regenerated": regenerated})
    assignment = offline_assignment(SETTINGS, ALICE.public, 0)
    data = attacker(ATTACKS["spends_tolerance"], talkative_folder, engine).submission(assignment)
    settings = SETTINGS.model_copy(update={"evidence": evidence})
    validator = make_validator(talkative_folder, settings, version=assignment.policy_version)
    with validator.judge:
        verdict = verdict_of(validator, assignment, data)
    used = verdict.opinion.spent
    assert used is not None, verdict.detail
    assert (used.improved > 0) == (regenerated > 0)
    assert used.improved + used.spoiled <= regenerated


# --- plans -------------------------------------------------------------------------------------------


def tried(margins: list[float], gain: float = 1.0) -> list[Tried]:
    """Return swaps with these margins, each in a different completion whose reward was 0."""
    empty = Completion.__new__(Completion)
    return [Tried(Swap(0, n, 0, 0, margin), empty, 0.0, gain) for n, margin in enumerate(margins)]


def margins(plan: Plan, swaps: list[Tried], direction: float = 1.0) -> list[float]:
    """Return the margins of the swaps that a plan chooses in a submission of 1,000 tokens."""
    worker = SpendsTolerance.__new__(SpendsTolerance)
    worker.config, worker.spending, worker.direction = SETTINGS, plan, direction
    return [chosen.swap.margin for chosen in worker.chosen(swaps, 1_000, 400.0)]


LIMIT = SETTINGS.validator.sampling_margin
NATS = SPENT * SETTINGS.validator.sampling_margin_mean * 1_000


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_exceeds_a_limit(name: str) -> None:
    chosen = margins(PLANS[name], tried([LIMIT * FAR * n / 2_000 for n in range(1, 2_000)]))
    assert chosen and sum(nats for nats in chosen if nats <= LIMIT) <= NATS
    assert max(chosen) <= FAR * LIMIT
    assert sum(nats > LIMIT for nats in chosen) <= SETTINGS.validator.sampling_mismatches
