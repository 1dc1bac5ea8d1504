"""The tolerance that a submission used is computed from given margins and rewards."""

import pytest
import torch

from shoal.config import parse
from shoal.protocol.messages import ToleranceSpent
from shoal.store.rollouts import Header
from shoal.tasks.derive import GroupPlan
from shoal.validator.case import Case, Prefill
from shoal.validator.spending import spent

EVIDENCE = {
    "proof_exponent_mean": 1.0,
    "proof_mantissa_mean": 0.5,
    "logprob_error_mean": 0.01,
    "distribution_evidence": -3.0,
}
CONFIG = parse({"validator": {"sampling_margin": 0.8}})


def case(margins: list[list[float]], rewards: list[float], group_size: int = 4) -> Case:
    """Return a case whose rollouts have three tokens, each of probability 1/2."""
    margins_N = torch.tensor([margin for row in margins for margin in row])
    prefill = Prefill(
        hidden_NH=torch.zeros(len(margins_N), 1),
        logprobs_N=torch.full((len(margins_N),), 0.5).log(),
        margins_N=margins_N,
        evidence_NA=torch.zeros(len(margins_N), 4),
        lengths=[len(row) for row in margins],
    )
    plan = GroupPlan.__new__(GroupPlan)
    object.__setattr__(plan, "seeds", tuple(range(group_size)))
    header = Header.model_construct(engine="torch/cpu")
    empty = Case.__new__(Case)
    for name, value in {"header": header, "plans": [plan], "rewards": rewards, "prefill": prefill}.items():
        object.__setattr__(empty, name, value)
    return empty


def used_by(margins: list[list[float]], rewards: list[float]) -> ToleranceSpent:
    return spent(case(margins, rewards), CONFIG, EVIDENCE)


QUIET = [0.0, 0.0, 0.0]


def test_tokens_beyond_each_limit_of_the_margin_are_counted() -> None:
    used = used_by([[0.01, 0.05, 0.0], [0.2, 0.5, 0.9], QUIET, QUIET], [0.0, 0.0, 1.0, 1.0])
    assert used.beyond == (5, 3, 2, 1), "the tokens with margins above 0, 0.1, 0.4 and 0.8 must be counted"
    assert used.exposure == pytest.approx(12 * 0.5)
    assert (used.proof_exponent_mean, used.distribution) == (1.0, -3.0)


def test_mismatches_in_better_completions_are_evidence() -> None:
    missed = [0.0, 0.02, 0.0]
    up = used_by([QUIET, QUIET, missed, missed], [0.0, 0.0, 1.0, 1.0])
    assert up.better > 0.2 and up.worse < -1, up
    down = used_by([missed, missed, QUIET, QUIET], [0.0, 0.0, 1.0, 1.0])
    assert down.worse == pytest.approx(up.better) and down.better == pytest.approx(up.worse)
    assert used_by([missed] * 4, [1.0] * 4).better == 0.0, "equal rewards must give no evidence"


def test_mismatches_in_groups_of_high_reward_are_evidence() -> None:
    missed = [0.0, 0.02, 0.02]
    used = used_by([missed] * 4 + [QUIET] * 4, [1.0] * 4 + [0.0] * 4)
    assert used.easier > 0.5 and used.harder < -1
    assert used.better == used.worse == 0.0


def test_honest_mismatches_are_no_evidence_on_average_even_if_they_correlate_with_the_reward() -> None:
    """Mismatches are twice as likely in right completions here. REWARD_TILT makes the bets allow that."""
    generator = torch.Generator().manual_seed(0)
    paid = []
    for _ in range(400):
        rewards = [0.0, 0.0, 1.0, 1.0]
        chances = torch.tensor([0.05, 0.05, 0.1, 0.1])[:, None].expand(4, 3)
        missed = torch.bernoulli(chances, generator=generator) * 0.02
        paid.append(used_by(missed.tolist(), rewards).better)
    mean = float(torch.tensor(paid).exp().mean())
    assert mean < 1.1
