"""A worker that spends the tolerance passes every check and gains, until the sum of its submissions dismisses it.

Real generations, prefills, verdicts and a real coordinator, on a tiny random model whose completions end early. Rewards are
length penalties. Both sides compute in fp32, where honest work has hardly a mismatch on any machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from benchmarks.adversary.attacks import ATTACKS, Attack, Lab
from benchmarks.adversary.nearly import NearTemperature
from benchmarks.adversary.tolerance import FAR, PLANS, SPENT, Plan, SpendsTolerance, Swap, Tried

from shoal.engine.protocol import Completion
from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.messages import ToleranceSpent
from shoal.store.rollouts import read_submission
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Judge
from shoal.validator.spending import changed, spent

from ..coordinator.support import ALICE as KEY
from ..coordinator.support import Harness, open_pool
from ..validator.support import judged as validators_word
from ..validator.support import make_validator
from ..workers import ALICE, BOB, RUN, config

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = config(
    tasks={"length_targets": [4, 12]},
    sampling={"max_tokens": 24, "group_size": 8},
    workers={"groups_per_submission": 4},
    evidence={"rates": (0.03, 0.005, 1e-3, 1e-3)},  # as in configs/tiny.toml
)
MOST = 12  # submissions


@pytest.fixture(scope="module")
def judge(one_thread: None, talkative_folder: Path) -> Iterator[Judge]:
    with Judge(SETTINGS, RUN, "float32") as judge:
        judge.load(talkative_folder)
        yield judge


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine("float32")


def attacker(kind: type[Attack], folder: Path, engine: TorchEngine) -> Attack:
    made = kind(SETTINGS, RUN, ALICE, engine, Lab([folder], BOB))
    made.load(folder, 0)
    return made


def judged(judge: Judge, made: Attack, number: int) -> tuple[ToleranceSpent, float]:
    """What an accepted submission used, and its mean reward."""
    asked = offline_assignment(SETTINGS, ALICE.public, number)
    case = judge.open(asked, ALICE.public, made.submission(asked))
    assert isinstance(case, Case), case
    [one] = judge.examine([case])
    assert one.finding is None, f"it stays within every limit: {one.finding}"
    return spent(one.case, SETTINGS, one.evidence), fmean(one.case.graded())


def pool() -> Harness:
    harness = open_pool()
    harness.pool.judgement.trust.config = SETTINGS
    harness.join(KEY)
    harness.publish(0)
    return harness


def uploaded(harness: Harness, used: ToleranceSpent) -> str:
    """The state of one more submission that used this much."""
    task = harness.upload(KEY)
    assert harness.claim() is not None
    harness.judge(task.id, None, (False, False), spent=used)
    return harness.state(task.id)


@pytest.mark.parametrize(("name", "sign"), [("spends_tolerance", 1), ("spends_tolerance_down", -1)])
def test_the_adaptive_attacker_is_dismissed_for_real(
    judge: Judge, engine: TorchEngine, talkative_folder: Path, name: str, sign: int
) -> None:
    harness, liar = pool(), attacker(ATTACKS[name], talkative_folder, engine)
    honest = attacker(Attack, talkative_folder, engine)
    states, gains = ["accepted"], list[float]()
    while states[-1] == "accepted" and len(gains) < MOST:
        used, reward = judged(judge, liar, len(gains))
        gains.append(reward - judged(judge, honest, len(gains))[1])
        states.append(uploaded(harness, used))
    assert sign * fmean(gains) > 0, "it gets what it wants meanwhile"
    assert states[-1] == "rejected", f"not found within {MOST} submissions"
    assert harness.kinds().count("dismissed") == 1 and "slashed" not in harness.kinds()


def test_an_honest_worker_is_not(judge: Judge, engine: TorchEngine, talkative_folder: Path) -> None:
    harness, honest = pool(), attacker(Attack, talkative_folder, engine)
    assert {uploaded(harness, judged(judge, honest, number)[0]) for number in range(MOST)} == {"accepted"}
    assert harness.pool.judgement.trust.evidence.of(KEY).evidence < 1


@pytest.mark.parametrize("name", ["spends_tolerance", "spends_tolerance_down"])
def test_each_completion_it_changed_shows_when_its_seed_is_asked_again(
    judge: Judge, engine: TorchEngine, talkative_folder: Path, name: str
) -> None:
    asked = offline_assignment(SETTINGS, ALICE.public, 0)
    cases: dict[type[Attack], Case] = {}
    for kind in (Attack, ATTACKS[name]):
        case = judge.open(asked, ALICE.public, attacker(kind, talkative_folder, engine).submission(asked))
        assert isinstance(case, Case)
        [one] = judge.examine([case])
        cases[kind] = one.case
    lied, honest = cases[ATTACKS[name]], cases[Attack]
    moved = sum(row.tokens != own.tokens for row, own in zip(lied.rows, honest.rows, strict=True))
    assert moved > 4
    improved, spoiled = changed(judge, lied, 32)
    if name.endswith("down"):
        improved, spoiled = spoiled, improved
    assert improved >= moved - 1 and spoiled <= 1, "but for a near tie that falls otherwise on this machine"
    assert 0 < sum(changed(judge, lied, 3)) <= 3, "no more than are asked for"
    assert sum(changed(judge, honest, 32)) <= 1
    near = replace(lied, grades=[replace(grade, repeatable=False) for grade in lied.grades])
    assert changed(judge, near, 32) == (0, 0), "a busy machine may have changed these rewards, whatever the tokens are"


@pytest.mark.parametrize("most", [0, 4])
def test_the_verdict_tells_of_it_if_the_run_asks(engine: TorchEngine, talkative_folder: Path, most: int) -> None:
    evidence = SETTINGS.evidence.model_copy(update={"regenerated": most})
    asked = offline_assignment(SETTINGS, ALICE.public, 0)
    data = attacker(ATTACKS["spends_tolerance"], talkative_folder, engine).submission(asked)
    asking = SETTINGS.model_copy(update={"evidence": evidence})
    validator = make_validator(talkative_folder, asking, version=asked.policy_version)
    with validator.judge:
        verdict = validators_word(validator, asked, data)
    assert verdict.spent is not None, verdict.detail
    assert (verdict.spent.improved > 0) == (most > 0)
    assert verdict.spent.improved + verdict.spent.spoiled <= most


def test_a_lean_of_nothing_is_honest_and_more_is_not(engine: TorchEngine, talkative_folder: Path) -> None:
    asked = offline_assignment(SETTINGS, ALICE.public, 0)

    def tokens(kind: type[Attack], strength: float) -> list[list[int]]:
        made = attacker(kind, talkative_folder, engine)
        if isinstance(made, NearTemperature):
            made.lean(1.0, strength)
        rows = read_submission(made.submission(asked), max_rows=32, max_tokens=24).rows
        return [row.tokens for row in rows]

    honest = tokens(Attack, 0.0)
    assert tokens(NearTemperature, 0.0) == honest
    assert tokens(NearTemperature, 0.5) != honest


# --- how much a plan spends -------------------------------------------------------------------------------------------


def tried(margins: list[float], gain: float = 1.0) -> list[Tried]:
    """Swaps of these margins, in completions of their own, whose reward was 0."""
    empty = Completion.__new__(Completion)
    return [Tried(Swap(0, n, 0, 0, margin), empty, 0.0, gain) for n, margin in enumerate(margins)]


def margins(plan: Plan, found: list[Tried], direction: float = 1.0) -> list[float]:
    """The margins of what is chosen among 1,000 tokens."""
    one = SpendsTolerance.__new__(SpendsTolerance)
    one.config, one.spending, one.direction = SETTINGS, plan, direction
    return [taken.swap.margin for taken in one.chosen(found, 1_000, 400.0)]


LIMIT = SETTINGS.validator.sampling_margin
NATS = SPENT * SETTINGS.validator.sampling_margin_mean * 1_000


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_exceeds_a_limit(name: str) -> None:
    found = tried([LIMIT * FAR * n / 2_000 for n in range(1, 2_000)])
    chosen = margins(PLANS[name], found)
    assert chosen and sum(nats for nats in chosen if nats <= LIMIT) <= NATS
    assert max(chosen) <= FAR * LIMIT
    assert sum(nats > LIMIT for nats in chosen) <= SETTINGS.validator.sampling_mismatches


def test_a_plan_takes_the_nearest_that_help_and_pays_for_decoys() -> None:
    assert margins(Plan(reach=0.5), tried([0.1, 0.2, 0.5 * LIMIT + 0.01])) == [0.1, 0.2]
    assert margins(Plan(), tried([0.1], gain=-1.0)) == [] and margins(Plan(), tried([0.1], gain=-1.0), -1.0) == [0.1]
    assert margins(Plan(reach=0.0, far=2), tried([0.1, LIMIT + 0.1, 2.0, 2.5])) == [LIMIT + 0.1, 2.0]
    bound = int(0.25 * SETTINGS.evidence.rates[0] * 400)
    assert len(margins(Plan(rate=0.25), tried([0.01] * 50))) == bound
    useless = [Tried(one.swap, one.completion, 0.0, 0.0) for one in tried([0.01] * 60)[50:]]
    assert len(margins(Plan(rate=0.25, decoys=1.0), tried([0.01] * 50) + useless)) == 2 * (bound // 2)
