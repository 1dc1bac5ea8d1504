import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.model.logprobs import token_logprobs
from shoal.model.sampling import SHOAL, _fmix32_, choose, entropy, position_keys, replay_margins, rollout_seed

NAMED: dict[str, Any] = {"run": "run", "step": 1, "worker": "worker", "submission": 2, "rollout": 3}
LOGITS_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5])
CHI2_7_LIMIT = 29.9  # exceeded by chance once in 10,000; the seeds here are fixed, so never by luck of the day


def dense_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Tensor:
    return SHOAL.gumbel(position_keys(seeds, positions)[:, None], np.arange(vocab_size))


@pytest.fixture(scope="module")
def noise_NV() -> Tensor:
    return dense_noise([11] * 1000, range(1000), 4096)


def chi2(counts_V: Tensor, logits_V: Tensor) -> float:
    expected_V = torch.softmax(logits_V.double(), -1) * counts_V.sum()
    return float(((counts_V - expected_V) ** 2 / expected_V).sum())


def sampled_counts(temperature: float, *, vary: str) -> Tensor:
    n = 20_000
    seeds, positions = ([7] * n, range(n)) if vary == "position" else (range(n), [7] * n)
    tokens_N, _ = choose(LOGITS_V.expand(n, -1), seeds, positions, temperature)
    return torch.bincount(tokens_N, minlength=len(LOGITS_V)).double()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


# ---- seeds


def test_the_seed_of_a_named_rollout_is_a_known_number() -> None:
    assert rollout_seed(**NAMED) == 6573906608246835865


@pytest.mark.parametrize(
    "changed",
    [{"run": "other"}, {"step": 2}, {"worker": "other"}, {"submission": 3}, {"rollout": 4}],
    ids=str,
)
def test_the_seed_changes_with_each_of_its_names(changed: dict[str, Any]) -> None:
    assert rollout_seed(**NAMED) != rollout_seed(**(NAMED | changed))


def test_the_seed_separates_neighbouring_fields() -> None:
    assert rollout_seed("run", 1, "w", 12, 3) != rollout_seed("run", 1, "w", 1, 23)


def test_the_seed_fits_a_signed_64_bit_integer() -> None:
    assert all(0 <= rollout_seed("run", 0, "w", 0, i) < 2**63 for i in range(100))


# ---- the hash


def test_position_keys_are_the_published_splitmix64_sequence() -> None:
    keys = position_keys([0, 0, 0], [0, 1, 2])
    assert keys.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_finaliser_is_murmur3s() -> None:
    mixed = _fmix32_(np.array([0, 1, 2**32 - 1], np.uint32))
    assert mixed.tolist() == [0, 0x514E28B7, 0x81F16F39]


def noise_in_plain_python(seed: int, position: int, token: int) -> float:
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31

    def fmix32(h: int) -> int:
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    bits = fmix32(fmix32((token * 0x9E3779B1 + x) % 2**32) ^ (x >> 32))
    return -math.log(-math.log(((bits >> 9) + 0.5) / 2**23))


@pytest.mark.parametrize(
    ("seed", "position", "token", "noise"),
    [
        (0, 0, 0, -0.0453709),
        (1, 2, 3, 4.7205272),
        (12345, 7, 31999, 0.5123168),
        (2**63 - 1, 10**6, 49151, 0.6447365),
    ],
)
def test_noise_is_a_known_number(seed: int, position: int, token: int, noise: float) -> None:
    assert float(dense_noise([seed], [position], token + 1)[0, token]) == pytest.approx(noise, abs=1e-6)


def test_noise_equals_a_plain_python_implementation() -> None:
    seeds, positions = [3, 2**63 - 1, 17], [0, 5, 32767]
    expected = [[noise_in_plain_python(s, p, v) for v in range(200)] for s, p in zip(seeds, positions, strict=True)]
    torch.testing.assert_close(dense_noise(seeds, positions, 200), torch.tensor(expected), atol=1e-5, rtol=1e-6)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size() -> None:
    assert torch.equal(dense_noise([5], [6], 1000)[:, :64], dense_noise([5], [6], 64))


def test_noise_of_a_row_alone_is_bitwise_that_in_a_batch() -> None:
    batch_NV = dense_noise(range(9), range(9), 777)
    assert all(torch.equal(dense_noise([i], [i], 777)[0], batch_NV[i]) for i in range(9))


# ---- the distribution of noise


def test_noise_has_the_mean_of_a_gumbel(noise_NV: Tensor) -> None:
    assert float(noise_NV.double().mean()) == pytest.approx(0.5772156649, abs=0.003)


def test_noise_has_the_variance_of_a_gumbel(noise_NV: Tensor) -> None:
    assert float(noise_NV.double().var()) == pytest.approx(math.pi**2 / 6, rel=0.005)


def test_noise_passes_a_kolmogorov_smirnov_test(noise_NV: Tensor) -> None:
    x = noise_NV.flatten().double().sort().values
    cdf = torch.exp(-torch.exp(-x))
    distance = float((cdf - torch.arange(1, len(x) + 1) / len(x)).abs().max())
    assert distance < 1.95 / math.sqrt(len(x))  # p = 0.001


def test_a_million_noises_are_finite_and_within_the_documented_bounds(noise_NV: Tensor) -> None:
    assert noise_NV.numel() > 1_000_000
    assert bool(((noise_NV > -2.9) & (noise_NV < 16.7)).all())


@pytest.mark.parametrize(("position", "token", "noise"), [(5, 633193, -2.8115408), (2, 150487, 16.6355324)])
def test_the_extreme_hashes_give_finite_noise(position: int, token: int, noise: float) -> None:
    """Found by search: seed 1 hashes to all zeros, and to all ones, at these two places."""
    assert float(dense_noise([1], [position], token + 1)[0, token]) == pytest.approx(noise, abs=1e-5)


def test_noise_is_uncorrelated_between_neighbouring_positions(noise_NV: Tensor) -> None:
    assert abs(correlation(noise_NV[:-1], noise_NV[1:])) < 5 / math.sqrt(noise_NV.numel())


def test_noise_is_uncorrelated_between_neighbouring_token_ids(noise_NV: Tensor) -> None:
    assert abs(correlation(noise_NV[:, :-1], noise_NV[:, 1:])) < 5 / math.sqrt(noise_NV.numel())


@pytest.mark.parametrize("other_seed", [12, 11 + 2**32, 11 ^ 2**62])
def test_noise_is_uncorrelated_between_seeds(noise_NV: Tensor, other_seed: int) -> None:
    other_NV = dense_noise([other_seed] * 200, range(200), 4096)
    assert abs(correlation(noise_NV[:200], other_NV)) < 5 / math.sqrt(other_NV.numel())


def test_noise_of_different_positions_is_never_the_same_values_in_another_order() -> None:
    rows = dense_noise([11] * 50, range(50), 4096).sort(-1).values
    assert len({tuple(row) for row in rows[:, :20].tolist()}) == 50


# ---- sampling


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_tokens_follow_the_softmax_at_the_temperature(temperature: float, vary: str) -> None:
    assert chi2(sampled_counts(temperature, vary=vary), LOGITS_V / temperature) < CHI2_7_LIMIT


def test_the_chi2_test_above_would_notice_a_slightly_wrong_temperature() -> None:
    assert chi2(sampled_counts(1.0, vary="position"), LOGITS_V / 1.1) > 2 * CHI2_7_LIMIT


def test_a_million_vocabulary_draw_is_not_biased_to_low_ids() -> None:
    tokens_N, _ = choose(torch.zeros(400, 50_000), [3] * 400, range(400), 1.0)
    assert float(tokens_N.double().mean()) == pytest.approx(25_000, abs=5 * 50_000 / math.sqrt(12 * 400))


def test_temperature_zero_is_the_argmax_whatever_the_seed() -> None:
    logits_NV = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose(logits_NV, range(50), range(50), 0.0)[0], logits_NV.argmax(-1))


def test_greedy_logprobs_are_at_temperature_one() -> None:
    logits_NV = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    _, logprobs_N = choose(logits_NV, [0] * 50, [0] * 50, 0.0)
    torch.testing.assert_close(logprobs_N, torch.log_softmax(logits_NV, -1).amax(-1))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_at_the_sampling_temperature(temperature: float) -> None:
    logits_NV = 3 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    tokens_N, logprobs_N = choose(logits_NV, range(50), range(50), temperature)
    expected_NV = torch.log_softmax(logits_NV / temperature, -1)
    torch.testing.assert_close(logprobs_N, expected_NV[torch.arange(50), tokens_N])


@pytest.mark.parametrize("vocab_size", [61, 49152])
def test_a_row_alone_is_bitwise_the_same_row_in_a_batch(vocab_size: int) -> None:
    logits_NV = 3 * torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(0))
    tokens_N, logprobs_N = choose(logits_NV, range(7), range(7), 0.7)
    alone = [choose(logits_NV[i : i + 1], [i], [i], 0.7) for i in range(7)]
    assert torch.equal(tokens_N, torch.cat([tokens for tokens, _ in alone]))
    assert torch.equal(logprobs_N, torch.cat([logprobs for _, logprobs in alone]))


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits_NV = (3 * torch.randn(40, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    expected = choose(logits_NV.float(), range(40), range(40), 0.9)
    got = choose(logits_NV, range(40), range(40), 0.9)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_choosing_leaves_the_logits_as_they_were() -> None:
    logits_NV = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    before_NV = logits_NV.clone()
    choose(logits_NV, range(5), range(5), 1.0)
    assert torch.equal(logits_NV, before_NV)


# ---- replay


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_margins_of_chosen_tokens_are_exactly_zero(temperature: float) -> None:
    logits_NV = 3 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    tokens_N, _ = choose(logits_NV, range(200), range(200), temperature)
    assert torch.equal(replay_margins(logits_NV / temperature, tokens_N, range(200), range(200)), torch.zeros(200))


def test_margins_of_any_other_token_are_positive() -> None:
    logits_NV = 3 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    tokens_N, _ = choose(logits_NV, range(200), range(200), 1.0)
    for shift in (1, 20, 63):
        assert bool((replay_margins(logits_NV, (tokens_N + shift) % 64, range(200), range(200)) > 0).all())


def test_margins_under_another_seed_are_mostly_positive() -> None:
    logits_NV = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    tokens_N, _ = choose(logits_NV, range(200), range(200), 1.0)
    assert float((replay_margins(logits_NV, tokens_N, range(1, 201), range(200)) > 0).float().mean()) > 0.8


def test_a_margin_is_the_nats_by_which_the_logits_would_have_to_move() -> None:
    logits_NV = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    scores_V = logits_NV[0] / 0.5 + dense_noise([9], [4], 64)[0]
    best, second = scores_V.topk(2).indices.tolist()
    (margin,) = replay_margins(logits_NV / 0.5, torch.tensor([second]), [9], [4]).tolist()
    assert margin == pytest.approx(float(scores_V[best] - scores_V[second]), abs=1e-6)
    logits_NV[0, second] += 0.5 * (margin + 1e-3)
    assert choose(logits_NV, [9], [4], 0.5)[0].tolist() == [second]


# ---- logprobs and entropy of logits


def test_token_logprobs_equal_a_gather_of_the_log_softmax() -> None:
    logits_NV = 5 * torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    tokens_N = torch.arange(30)
    expected_N = torch.log_softmax(logits_NV, -1)[torch.arange(30), tokens_N]
    torch.testing.assert_close(token_logprobs(logits_NV, tokens_N), expected_N)


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    assert float(entropy(torch.zeros(1, 64))) == pytest.approx(math.log(64))


def test_entropy_equals_its_definition() -> None:
    logits_NV = 3 * torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    p_NV = torch.softmax(logits_NV.double(), -1)
    torch.testing.assert_close(entropy(logits_NV), -(p_NV * p_NV.log()).sum(-1).float())


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0], ids=lambda spread: f"spread {spread}")
def test_noise_is_spared_only_for_tokens_that_cannot_win(spread: float) -> None:
    logits_NV = torch.randn(300, 500, generator=torch.Generator().manual_seed(1)) * spread
    scores_NV = logits_NV + dense_noise(range(300), range(300), 500)
    tokens_N, _ = choose(logits_NV, range(300), range(300), 1.0)
    assert torch.equal(tokens_N, scores_NV.argmax(-1))
    claimed_N = torch.randint(500, (300,), generator=torch.Generator().manual_seed(2))
    expected_N = scores_NV.amax(-1) - scores_NV.gather(-1, claimed_N[:, None])[:, 0]
    torch.testing.assert_close(
        replay_margins(logits_NV, claimed_N, range(300), range(300)), expected_N, atol=1e-5, rtol=1e-6
    )
