"""Seeds, the bits and distribution of the noise, sampling, and replay."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.model.logprobs import token_logprobs
from shoal.model.sampling import (
    LARGEST_NOISE,
    _fmix32_,
    _gumbel_for_all,
    _outscore_by_all,
    _outscore_by_candidates,
    choose,
    gumbel,
    position_keys,
    replay_margins,
    rollout_seed,
)

NAMED: dict[str, Any] = {"run": "run", "step": 1, "worker": "worker", "submission": 2, "rollout": 3}
LOGITS_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5])
CHI2_7_LIMIT = 29.9  # with 7 degrees of freedom, chance exceeds this once in 10,000; the seeds here are fixed
SIZE = 4096


def dense(seeds: Sequence[int], positions: Sequence[int], size: int) -> Tensor:
    return gumbel(position_keys(seeds, positions)[:, None], np.arange(size)[None])


def random_logits(rows: int, size: int = 64) -> Tensor:
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


def chi2(counts_V: Tensor, logits_V: Tensor) -> float:
    expected_V = torch.softmax(logits_V.double(), -1) * counts_V.sum()
    return float(((counts_V - expected_V) ** 2 / expected_V).sum())


def sampled_counts(temperature: float, vary: str) -> Tensor:
    n = 20_000
    seeds, positions = ([7] * n, range(n)) if vary == "position" else (range(n), [7] * n)
    tokens_N, _ = choose(LOGITS_V.expand(n, -1), seeds, positions, temperature)
    return torch.bincount(tokens_N, minlength=len(LOGITS_V)).double()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


# ---- seeds


def test_a_seed_is_a_known_number_and_depends_on_each_part_of_the_rollouts_name() -> None:
    assert rollout_seed(**NAMED) == 6573906608246835865
    for changed in ({"run": "o"}, {"step": 2}, {"worker": "o"}, {"submission": 3}, {"rollout": 4}, {"nonce": "o"}):
        assert rollout_seed(**(NAMED | changed)) != rollout_seed(**NAMED), changed
    assert rollout_seed("run", 1, "w", 12, 3) != rollout_seed("run", 1, "w", 1, 23)
    assert all(0 <= rollout_seed("run", 0, "w", 0, i) < 2**63 for i in range(100))


# ---- the hashes


def test_splitmix64_and_murmurhash3s_finaliser_give_published_values() -> None:
    assert position_keys([0, 0, 0], [0, 1, 2]).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert _fmix32_(np.array([0, 1, 2**32 - 1], np.uint32)).tolist() == [0, 0x514E28B7, 0x81F16F39]


def fmix32(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def noise_in_plain_python(seed: int, position: int, token: int) -> float:
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    bits = fmix32(fmix32((token * 0x9E3779B1 + x) % 2**32) ^ (x >> 32))
    return -math.log(-math.log(((bits >> 9) + 0.5) / 2**23))


def test_noise_equals_a_plain_python_implementation() -> None:
    seeds, positions = [3, 2**63 - 1, 17], [0, 5, 32767]
    expected = [[noise_in_plain_python(s, p, v) for v in range(200)] for s, p in zip(seeds, positions, strict=True)]
    torch.testing.assert_close(dense(seeds, positions, 200), torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("seed", "position", "token", "value"),
    [
        (0, 0, 0, -0.0453709),
        (1, 2, 3, 4.7205272),
        (12345, 7, 31999, 0.5123168),
        (2**63 - 1, 10**6, 49151, 0.6447365),
        (1, 5, 633193, -2.8115408),  # the hash is all zeros
        (1, 2, 150487, 16.6355324),  # the hash is all ones
    ],
)
def test_noise_is_a_known_number(seed: int, position: int, token: int, value: float) -> None:
    assert float(dense([seed], [position], token + 1)[0, token]) == pytest.approx(value, abs=1e-5)


def test_a_gpus_way_of_sampling_gives_the_same_noise_tokens_and_margins() -> None:
    logits_NV, seeds, positions = random_logits(50, SIZE), range(2**63 - 50, 2**63), range(50)
    expected = _outscore_by_candidates(logits_NV, logits_NV.argmin(-1), seeds, positions)
    torch.testing.assert_close(_outscore_by_all(logits_NV, logits_NV.argmin(-1), seeds, positions), expected)
    noise_NV = _gumbel_for_all(position_keys(seeds, positions), logits_NV)
    torch.testing.assert_close(noise_NV, dense(seeds, positions, SIZE))


# ---- the distribution of noise


def test_noise_is_gumbel_distributed_and_depends_only_on_its_row_and_token() -> None:
    noise_NV = dense([11] * 500, range(500), SIZE)
    x = noise_NV.flatten().double().sort().values
    distance = float((torch.exp(-torch.exp(-x)) - torch.arange(1, len(x) + 1) / len(x)).abs().max())
    assert distance < 1.95 / math.sqrt(len(x))  # Kolmogorov-Smirnov test, p = 0.001
    assert float(x.mean()) == pytest.approx(0.5772156649, abs=0.005)
    assert float(x.var()) == pytest.approx(math.pi**2 / 6, rel=0.008)
    assert bool(((noise_NV > -2.9) & (noise_NV < LARGEST_NOISE)).all())
    limit = 5 / math.sqrt(noise_NV.numel())
    assert abs(correlation(noise_NV[:-1], noise_NV[1:])) < limit
    assert abs(correlation(noise_NV[:, :-1], noise_NV[:, 1:])) < limit
    for other in (12, 11 + 2**32, 11 ^ 2**62):
        assert abs(correlation(noise_NV, dense([other] * 500, range(500), SIZE))) < limit
    assert torch.equal(dense([11], [7], 64)[0], noise_NV[7, :64])
    rows = noise_NV[:50].sort(-1).values
    assert len({tuple(row) for row in rows[:, :20].tolist()}) == 50, "a row is a permutation of another"


# ---- sampling


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_tokens_follow_the_softmax_at_the_temperature(temperature: float, vary: str) -> None:
    assert chi2(sampled_counts(temperature, vary), LOGITS_V / temperature) < CHI2_7_LIMIT


def test_a_slightly_wrong_temperature_would_fail_the_chi2_test_above() -> None:
    assert chi2(sampled_counts(1.0, "position"), LOGITS_V / 1.1) > 2 * CHI2_7_LIMIT


def test_sampling_from_a_large_vocabulary_is_not_biased_to_low_ids() -> None:
    tokens_N, _ = choose(torch.zeros(400, 50_000), [3] * 400, range(400), 1.0)
    assert float(tokens_N.double().mean()) == pytest.approx(25_000, abs=5 * 50_000 / math.sqrt(12 * 400))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_logprobs_are_at_the_sampling_temperature_or_at_one_if_greedy(temperature: float) -> None:
    logits_NV = random_logits(50)
    tokens_N, logprobs_N = choose(logits_NV, range(50), range(50), temperature)
    assert temperature or torch.equal(tokens_N, logits_NV.argmax(-1)), "greedy must pick the argmax whatever the seed"
    expected_N = torch.log_softmax(logits_NV / (temperature or 1.0), -1)[torch.arange(50), tokens_N]
    torch.testing.assert_close(logprobs_N, expected_N)
    torch.testing.assert_close(token_logprobs(logits_NV / (temperature or 1.0), tokens_N), expected_N)


@pytest.mark.parametrize("vocab_size", [61, 49152])
def test_a_row_alone_has_the_same_bits_as_in_a_batch(vocab_size: int) -> None:
    logits_NV = random_logits(7, vocab_size)
    tokens_N, logprobs_N = choose(logits_NV, range(7), range(7), 0.7)
    alone = [choose(logits_NV[i : i + 1], [i], [i], 0.7) for i in range(7)]
    assert torch.equal(tokens_N, torch.cat([tokens for tokens, _ in alone]))
    assert torch.equal(logprobs_N, torch.cat([logprobs for _, logprobs in alone]))


def test_bfloat16_logits_are_scored_in_float32_and_left_as_they_were() -> None:
    logits_NV = random_logits(40).bfloat16()
    before_NV = logits_NV.clone()
    for got, expected in zip(
        choose(logits_NV, range(40), range(40), 0.9),
        choose(logits_NV.float(), range(40), range(40), 0.9),
        strict=True,
    ):
        assert torch.equal(got, expected)
    assert torch.equal(logits_NV, before_NV)


# ---- replay


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_margins_are_exactly_zero_for_chosen_tokens_and_positive_for_any_other(temperature: float) -> None:
    logits_NV, rows = random_logits(200), range(200)
    scaled_NV = logits_NV / temperature
    tokens_N, _ = choose(logits_NV, rows, rows, temperature)
    assert torch.equal(replay_margins(scaled_NV, tokens_N, rows, rows), torch.zeros(200))
    for shift in (1, 20, 63):
        assert bool((replay_margins(scaled_NV, (tokens_N + shift) % 64, rows, rows) > 0).all())
    flat_NV = logits_NV / 3
    tokens_N, _ = choose(flat_NV, rows, rows, 1.0)
    assert float((replay_margins(flat_NV, tokens_N, range(1, 201), rows) > 0).float().mean()) > 0.8


def test_a_margin_is_how_many_nats_a_tokens_logit_must_rise_for_it_to_be_chosen() -> None:
    logits_NV = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    scores_V = logits_NV[0] / 0.5 + dense([9], [4], 64)[0]
    best, second = scores_V.topk(2).indices.tolist()
    (margin,) = replay_margins(logits_NV / 0.5, torch.tensor([second]), [9], [4]).tolist()
    assert margin == pytest.approx(float(scores_V[best] - scores_V[second]), abs=1e-6)
    logits_NV[0, second] += 0.5 * (margin + 1e-3)
    assert choose(logits_NV, [9], [4], 0.5)[0].tolist() == [second]


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0], ids=lambda spread: f"spread {spread}")
def test_noise_is_skipped_only_for_tokens_that_cannot_win(spread: float) -> None:
    logits_NV = torch.randn(300, 500, generator=torch.Generator().manual_seed(1)) * spread
    scores_NV = logits_NV + dense(range(300), range(300), 500)
    tokens_N, _ = choose(logits_NV, range(300), range(300), 1.0)
    assert torch.equal(tokens_N, scores_NV.argmax(-1))
    claimed_N = torch.randint(500, (300,), generator=torch.Generator().manual_seed(2))
    expected_N = scores_NV.amax(-1) - scores_NV.gather(-1, claimed_N[:, None])[:, 0]
    margins_N = replay_margins(logits_NV, claimed_N, range(300), range(300))
    torch.testing.assert_close(margins_N, expected_N, atol=1e-5, rtol=1e-6)
