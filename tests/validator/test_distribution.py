"""The e-value (e to the evidence) has mean 1 for honest sampling, and grows for every other way of sampling."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from shoal.validator.checks import DISTRIBUTION_EVIDENCE
from shoal.validator.prefill import ALTERNATIVES, submission_evidence, token_evidence

LIMIT = DISTRIBUTION_EVIDENCE
VOCABULARY = 64


def logits(n: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return 3 * torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(seed))


def drawn(scaled_NV: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.multinomial(scaled_NV.softmax(-1), 1, generator=generator)[:, 0]


def evidence(scaled_NV: Tensor, tokens_N: Tensor) -> float:
    return submission_evidence(token_evidence(scaled_NV.clone(), tokens_N)[1])


@pytest.mark.parametrize("alternative", range(len(ALTERNATIVES)), ids=ALTERNATIVES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 12.0])
def test_every_alternative_is_a_distribution_so_honest_e_values_have_mean_1(alternative: int, spread: float) -> None:
    scaled_V = spread * torch.randn(11, generator=torch.Generator().manual_seed(3))
    logp_N, evidence_NA = token_evidence(scaled_V.repeat(11, 1), torch.arange(11))
    torch.testing.assert_close(logp_N, scaled_V.log_softmax(-1), atol=1e-5, rtol=1e-5)
    expected = (logp_N.double() + evidence_NA[:, alternative].double()).exp().sum()
    assert float(expected) == pytest.approx(1, abs=1e-4)


def test_a_submissions_e_value_has_mean_1() -> None:
    """The test computes the mean exactly, over every pair of tokens from a vocabulary of three."""
    scaled_NV = logits(2, vocabulary=3)
    mean = 0.0
    for pair in itertools.product(range(3), repeat=2):
        tokens_N = torch.tensor(pair)
        logp_N, evidence_NA = token_evidence(scaled_NV.clone(), tokens_N)
        mean += math.exp(float(logp_N.sum()) + submission_evidence(evidence_NA))
    assert mean == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_honest_sampling_stays_below_the_limit(seed: int) -> None:
    scaled_NV = logits(2_000, seed)
    for n in (1, 20, 200, 2_000):
        assert evidence(scaled_NV[:n], drawn(scaled_NV, seed)[:n]) < LIMIT


def test_at_most_a_share_of_e_to_the_minus_x_of_honest_submissions_exceeds_x() -> None:
    scaled = [logits(20, seed) for seed in range(400)]
    nats = torch.tensor([evidence(scaled_NV, drawn(scaled_NV, seed)) for seed, scaled_NV in enumerate(scaled)])
    for x in (1.0, 2.0, 3.0):
        assert float((nats > x).float().mean()) <= math.exp(-x)


def top_k(scaled_NV: Tensor, k: int) -> Tensor:
    least_N1 = scaled_NV.topk(k).values[:, -1:]
    return scaled_NV.masked_fill(scaled_NV < least_N1, -math.inf)


@pytest.mark.parametrize(
    ("way", "nearest"),
    [
        ("greedy", "sharper"),
        ("half temperature", "sharper"),
        ("double temperature", "flatter"),
        ("top 3", "truncated"),
        ("min p", "truncated"),
        ("uniform", "foreign"),
    ],
)
def test_other_sampling_exceeds_the_limit_after_a_few_hundred_tokens(way: str, nearest: str) -> None:
    scaled_NV = logits(400)
    likelihood_NV = (scaled_NV - scaled_NV.amax(-1, keepdim=True)).exp()
    tokens_N = {
        "greedy": scaled_NV.argmax(-1),
        "half temperature": drawn(2 * scaled_NV),
        "double temperature": drawn(scaled_NV / 2),
        "top 3": drawn(top_k(scaled_NV, 3)),
        "min p": drawn(scaled_NV.masked_fill(likelihood_NV < 0.05, -math.inf)),
        "uniform": drawn(torch.zeros_like(scaled_NV)),
    }[way]
    assert evidence(scaled_NV, tokens_N) > LIMIT
    _, evidence_NA = token_evidence(scaled_NV.clone(), tokens_N)
    assert submission_evidence(evidence_NA[:, [ALTERNATIVES.index(nearest)]]) > LIMIT, (
        "the evidence for the nearest alternative alone must exceed the limit"
    )


def test_a_very_unlikely_token_is_finite_evidence() -> None:
    scaled_NV = torch.zeros(1, VOCABULARY)
    scaled_NV[0, 0] = 200.0
    logp_N, evidence_NA = token_evidence(scaled_NV, torch.tensor([5]))
    assert float(logp_N[0]) == pytest.approx(-200) and not evidence_NA.isnan().any()
    assert submission_evidence(evidence_NA) > LIMIT
