"""A worker that exploits tolerances over many submissions is dismissed, not slashed. Honest workers remain members."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.coordinator.database import PoolError
from shoal.coordinator.trust import bets, shared_evidence
from shoal.evidence import Process
from shoal.protocol.messages import Reason, Replay, ToleranceSpent

from .support import ALICE, BOB, OTHER_VALIDATOR, VALIDATOR, Clock, Harness, config, open_pool, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database_slow")

USELESS = (False, False)  # fills no batch, so that any number can be uploaded


def spent(**figures: Any) -> ToleranceSpent:
    """Return the figures of a submission of 1,000 tokens, by default at the honest rates and half the limits."""
    honest: dict[str, Any] = {
        "exposure": 400.0,
        "beyond": (30, 8, 0, 0),
        "better": 0.0,
        "worse": 0.0,
        "easier": 0.0,
        "harder": 0.0,
        "proof_exponent_mean": 5.0,
        "proof_mantissa_mean": 1.2,
        "logprob_error_mean": 0.05,
        "distribution": -20.0,
    }
    return ToleranceSpent(**(honest | figures))


@pytest.fixture
def harness() -> Harness:
    return staffed_pool(validators=())


def submitted(
    harness: Harness, used: ToleranceSpent | None, key: str = ALICE, validator: str = "", **given: Any
) -> str:
    """Submit work that passes all checks. Return the submission's state after the verdict.

    By default the validators take turns.
    """
    task = harness.upload(key)
    validator = validator or (VALIDATOR, OTHER_VALIDATOR)[task.number % 2]
    claim = harness.claim(validator)
    assert claim is not None and claim.assignment.id == task.id
    harness.judge(task.id, None, given.pop("useful", USELESS), validator, spent=used, **given)
    return harness.state(task.id)


SPENDING = {  # each exploits one tolerance, without exceeding any limit on a single submission
    "more tokens": {"beyond": (90, 8, 0, 0)},
    "larger margins": {"beyond": (40, 40, 8, 0)},
    "two far tokens": {"beyond": (30, 10, 3, 3)},
    "for reward": {"better": 2.0},
    "against reward": {"worse": 2.0},
    "on easy tasks": {"easier": 2.0},
    "on hard tasks": {"harder": 2.0},
    "slightly other weights": {"proof_exponent_mean": 9.9, "proof_mantissa_mean": 2.3},
    "logprobs": {"logprob_error_mean": 0.099},
    "slightly other sampling": {"distribution": 2.0},
}


@pytest.mark.parametrize("what", SPENDING)
def test_a_worker_that_exploits_a_tolerance_is_dismissed_and_not_slashed(harness: Harness, what: str) -> None:
    states = [submitted(harness, spent(**SPENDING[what]))]
    while states[-1] == "accepted" and len(states) < 250:
        states.append(submitted(harness, spent(**SPENDING[what])))
    assert states[-1] == "rejected", f"{what}: not detected within 250 submissions"
    assert harness.status().reject_reasons == {"spending": 1}
    assert harness.kinds().count("dismissed") == 1 and "slashed" not in harness.kinds()
    answer = harness.beat()
    assert answer.state == "running" and answer.assignment is None and "dismissed" in answer.waiting_for
    assert harness.beat(BOB).assignment is not None, "another worker must still get tasks"
    entry = json.loads(next(iter(harness.pool.db.ledger.entries(kind="dismissed"))).body)
    assert entry["worker"] == ALICE and entry["submissions"] == len(states) and entry["evidence"] > 13.8


def test_an_honest_worker_is_never_dismissed(harness: Harness) -> None:
    """Its numbers of mismatches have Poisson distributions at the honest rates."""
    rng = np.random.default_rng(0)
    rates = harness.pool.config.evidence.rates
    process = Process()
    for _ in range(3_000):
        parts = rng.poisson(400 * np.diff([0.0, *reversed(rates)]))
        beyond = tuple(int(count) for count in np.cumsum(parts)[::-1])
        used = spent(
            beyond=beyond, proof_exponent_mean=rng.uniform(3.4, 10), logprob_error_mean=rng.uniform(0.034, 0.1)
        )
        process = process.after(bets(used, harness.pool.config))
        assert process.evidence < 13.8


def test_an_honest_worker_with_an_engine_with_wider_limits_is_never_dismissed() -> None:
    """Its figures are at two thirds of its own limits, and beyond the limits of the other engines."""
    own = {"proof_exponent_mean": 16.0, "proof_mantissa_mean": 3.8, "logprob_error_mean": 0.16}
    settings = config()
    settings = settings.model_copy(
        update={"validator": settings.validator.model_copy(update={"limits": {"vllm/cpu": own}})}
    )
    used = spent(proof_exponent_mean=10.6, proof_mantissa_mean=2.53, logprob_error_mean=0.106)
    process = Process()
    for _ in range(3_000):
        process = process.after(bets(used, settings))
        assert process.evidence < 13.8


def submissions_until_detected(draw: Any, regenerated: int = 4) -> int | None:
    """Return how many submissions detection takes; None if more than 400.

    `draw` returns the numbers of improved and spoiled rollouts in one submission.
    """
    section = config().evidence.model_copy(update={"regenerated": regenerated})
    settings, process = config().model_copy(update={"evidence": section}), Process()
    for number in range(1, 401):
        improved, spoiled = draw()
        process = process.after(bets(spent(improved=improved, spoiled=spoiled), settings))
        if process.evidence >= 13.8:
            return number
    return None


def test_a_worker_that_spoils_rare_right_answers_is_detected_by_regenerated_rollouts() -> None:
    """Each submission has two right answers, as with SmolLM2 at first, and the worker spoils both. Its eight other
    rollouts with mismatches are wrong anyway, so those mismatches do not change the reward."""
    rng = np.random.default_rng(0)

    def spoils() -> tuple[int, int]:
        return 0, int(rng.hypergeometric(2, 8, 4))

    number = submissions_until_detected(spoils)
    assert number is not None and number < 120
    assert submissions_until_detected(lambda: (2, 0)) == submissions_until_detected(lambda: (0, 2)) < 40  # type: ignore[operator]
    assert submissions_until_detected(lambda: (0, 2), regenerated=0) is None, "it must stay undetected without them"


def test_numerics_that_change_rewards_both_ways_are_no_evidence() -> None:
    """REWARD_TILT allows honest numerics to help twice as often as they hurt."""
    rng = np.random.default_rng(0)
    for chance in (0.5, 2 / 3):
        for _ in range(20):
            assert submissions_until_detected(lambda: (k := int(rng.binomial(3, chance)), 3 - k)) is None  # noqa: B023


def test_evidence_survives_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    harness = open_pool(tmp_path / "pool.db", clock)
    harness.join(ALICE)
    harness.publish(0)
    submitted(harness, spent(better=3.0))
    submitted(harness, spent(better=3.0))
    before = harness.pool.judgement.trust.evidence.of(ALICE)
    assert {process.observations for process in before.values()} == {1} and shared_evidence(before) > 0
    harness.pool.db.connection.close()
    again = open_pool(tmp_path / "pool.db", clock)
    assert again.pool.judgement.trust.evidence.of(ALICE) == before
    node = next(node for node in again.status().nodes if node.name == "worker-a")
    assert node.evidence == pytest.approx(shared_evidence(before))


def test_exact_work_and_unchecked_work_are_no_evidence(harness: Harness) -> None:
    submitted(harness, None)
    submitted(harness, spent(better=3.0), replay=Replay(tokens=10, mismatched=0))
    assert harness.pool.judgement.trust.evidence.of(ALICE) == {}


def test_a_dismissed_workers_unbatched_groups_are_dropped(harness: Harness) -> None:
    late = harness.upload()
    harness.claimed()
    harness.judge(late.id, None, (True, False), spent=spent(better=1.0))
    assert harness.pool.db.groups.count_waiting(max_unchecked=0) == 1
    while submitted(harness, spent(better=6.0)) == "accepted":
        pass
    assert harness.pool.db.groups.count_waiting(max_unchecked=4) == 0


@pytest.mark.parametrize("figures", [{"better": 1e6}, {"beyond": (2**53 - 1,) * 4}, {"distribution": 1e6}])
def test_one_validators_figures_dismiss_nobody(harness: Harness, figures: dict[str, Any]) -> None:
    """Not even beside any number of honest opinions of another validator."""
    for _ in range(8):
        assert submitted(harness, spent(**figures), validator=VALIDATOR) == "accepted"
        assert submitted(harness, spent(), validator=OTHER_VALIDATOR) == "accepted"
    with pytest.raises(PoolError, match="only the coordinator finds spending"):
        harness.rejected(Reason.SPENDING)
    assert "dismissed" not in harness.kinds() and harness.task()


def test_a_verdict_with_impossible_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond"):
        spent(beyond=(1, 2, 0, 0))
    with pytest.raises(ValueError, match="better"):
        spent(better=float("nan"))
    with pytest.raises(ValueError, match="no evidence about where"):
        spent(beyond=(0, 0, 0, 0), worse=1.0)


def test_missed_tasks_dismiss_nobody_because_a_cut_connection_can_cause_them(harness: Harness) -> None:
    harness.task()
    harness.clock.now_s += 601.0
    harness.beat()
    assert harness.pool.db.submissions.count_missed() == {ALICE: 1}
    assert harness.pool.judgement.trust.evidence.of(ALICE) == {}
    assert not {"dismissed", "slashed"} & set(harness.kinds())


def test_bets_use_the_runs_own_bounds() -> None:
    settings = config()
    tighter = settings.model_copy(
        update={"evidence": settings.evidence.model_copy(update={"rates": (0.01, 0.003, 2e-4, 1e-4)})}
    )
    used = spent()
    assert bets(used, tighter)["beyond 0 theta 1.5"] > bets(used, settings)["beyond 0 theta 1.5"] + 10
