"""Verification accepts proofs from honest arithmetic, rejects all others, and reports the paper's figures."""

import math
import struct

import pytest
import torch

from shoal.toploc import BFLOAT16, ChunkResult, Thresholds, build, build_many, verify, verify_many
from shoal.toploc.field import PRIME
from shoal.toploc.prove import compare

from .support import EXACT, accepted_constants, constant_proof, heavy_tailed, real_states, tie_free


def verdicts(worker: str, validator: str) -> list[bool]:
    """Return whether each chunk of a worker's proofs passes at a validator. Both are names in `real_states`."""
    results = verify(real_states()[validator].bfloat16(), build(real_states()[worker].bfloat16()))
    return [BFLOAT16.passes(result) for result in results]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64])
def test_own_proofs_verify_without_error(tokens: int, dtype: torch.dtype) -> None:
    hidden_TH = heavy_tailed(tokens, 192).to(dtype)
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT] * math.ceil(tokens / 32)


def test_own_proofs_verify_if_indices_are_equal_modulo_the_prime() -> None:
    hidden_TH = tie_free(32, 4096, at=(9, 9 + PRIME, 9 + PRIME - 1, 131071))
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT]


def test_own_proofs_of_constant_hidden_states_verify() -> None:
    hidden_TH = torch.ones(32, 192)
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT]


@pytest.mark.parametrize("seed", range(5))
def test_hidden_states_with_numeric_noise_pass(seed: int) -> None:
    hidden_TH = heavy_tailed(64, 576, seed)
    noise_TH = torch.randn(64, 576, generator=torch.Generator().manual_seed(seed))
    other_TH = hidden_TH * (1 + noise_TH / 256)  # the noise is about as large as one more rounding to bfloat16
    results = verify(other_TH, build(hidden_TH.bfloat16()))
    assert all(BFLOAT16.passes(result) for result in results)
    assert EXACT not in results


@pytest.mark.parametrize("validator", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("worker", ["float32", "bfloat16", "bfloat16_decoded", "float16", "float16_decoded"])
def test_a_real_models_honest_arithmetic_passes(worker: str, validator: str) -> None:
    assert all(verdicts(worker, validator))


@pytest.mark.parametrize("validator", ["float32", "bfloat16", "float16"])
def test_weights_rounded_to_4_bits_fail_in_every_chunk(validator: str) -> None:
    assert not any(verdicts("4_bit", validator))


def test_a_repeated_proof_passes_only_in_its_own_chunk() -> None:
    hidden_TH = real_states()["bfloat16"].bfloat16()
    proofs = build(hidden_TH)
    for repeated in (0, 7, 15):
        results = verify(hidden_TH, [proofs[repeated]] * 16)
        assert [BFLOAT16.passes(result) for result in results] == [chunk == repeated for chunk in range(16)]


def test_proofs_of_other_tokens_of_the_same_model_fail() -> None:
    """In each channel, the other tokens have the same scale as the proven ones."""
    hidden_TH = heavy_tailed(64, 576)
    assert not BFLOAT16.passes(verify(hidden_TH[32:], build(hidden_TH[:32]))[0])


def test_only_the_changed_chunk_fails() -> None:
    hiddens = [heavy_tailed(70, 192, seed) for seed in range(3)]
    proofs = build_many(hiddens)
    proofs[1][2] = proofs[0][2]
    passed = [[BFLOAT16.passes(result) for result in row] for row in verify_many(hiddens, proofs)]
    assert passed == [[True] * 3, [True, True, False], [True] * 3]


# --- constants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validator", ["float32", "bfloat16", "float16"])
def test_the_thresholds_alone_accept_no_constant_on_a_real_model(validator: str) -> None:
    assert accepted_constants(real_states()[validator].bfloat16(), BFLOAT16) == {}


def test_a_constant_that_60_40_40_would_accept_fails_by_its_degree() -> None:
    hidden_TH, loose = real_states()["bfloat16"].bfloat16(), Thresholds(60, 40, 40)
    accepted = accepted_constants(hidden_TH, loose)
    constant = max(accepted, key=lambda bits: accepted[bits])
    assert accepted[constant] >= 15, "the thresholds alone must accept the constant in nearly all of the 16 chunks"
    assert not any(loose.passes(result) for result in verify(hidden_TH, [constant_proof(constant)] * 16))


def test_a_constant_that_the_thresholds_would_accept_fails_by_its_degree() -> None:
    """If the largest Gaussian values lie in the upper half of one binade, the thresholds accept some constant."""
    gaussian_TH = torch.randn(32, 4096, generator=torch.Generator().manual_seed(0))
    hidden_TH = next(h for h in (gaussian_TH * 2 ** (n / 32) for n in range(32)) if accepted_constants(h, BFLOAT16))
    proof = constant_proof(min(accepted_constants(hidden_TH, BFLOAT16)))
    assert verify(hidden_TH, [proof]) == [ChunkResult(128, math.inf, math.inf)]


def test_every_entry_of_a_polynomial_of_low_degree_is_a_mismatch() -> None:
    for proof in [constant_proof(0), constant_proof(0x3F80), struct.pack(">129H", PRIME, *[5] * 120, *[0] * 8)]:
        assert verify(heavy_tailed(32, 576), [proof]) == [ChunkResult(128, math.inf, math.inf)]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_compare_computes_the_figures_that_chunk_result_defines() -> None:
    """In the first row, three of five entries have equal exponents; their mantissas differ by 1, 2 and 6."""
    own = [0x3F80, 0x3F81, 0x3F90, 0x4000, 0x4080]
    proven = [0x3F81, 0xBF83, 0x3F8A, 0x4080, 0x4000]
    rows = (
        torch.tensor([own, own, own[:2] * 2 + own[:1], [0x3F80] * 5]),
        torch.tensor([proven, own[::-1], proven[:2] * 2 + [0], [0x4000] * 5]),
    )
    assert compare(*rows, torch.zeros(4, dtype=torch.bool), mantissa_bits=7) == [
        ChunkResult(2, 3.0, 2.0),
        ChunkResult(4, 0.0, 0.0),
        ChunkResult(1, 1.5, 1.5),  # four entries have equal exponents, so the median is the mean of the middle two
        ChunkResult(5, math.inf, math.inf),  # no exponent agrees
    ]


def test_float16_figures_use_five_exponent_and_ten_mantissa_bits() -> None:
    own, proven = torch.tensor([[0x3C00, 0x4001]]), torch.tensor([[0x3FFF, 0x3C01]])
    (result,) = compare(own, proven, torch.zeros(1, dtype=torch.bool), mantissa_bits=10)
    assert result == ChunkResult(1, 1023.0, 1023.0)
    # All values are in [1, 2), and own and proven values are 200 units in the last of 10 mantissa bits apart. If only 7
    # mantissa bits were assumed, exponents would differ.
    bits_TH = (0x3C00 + torch.arange(192 * 4) * 501 % 797).to(torch.int16).reshape(4, 192)
    own, proven = (bits_TH + 200).view(torch.float16), bits_TH.view(torch.float16)
    assert verify(own, build(proven)) == [ChunkResult(0, 200.0, 200.0)]


def test_an_error_equal_to_its_threshold_passes_and_each_threshold_can_reject() -> None:
    assert BFLOAT16.passes(ChunkResult(38, 10.0, 8.0))
    for beyond in (ChunkResult(39, 0, 0), ChunkResult(0, 10.1, 0), ChunkResult(0, 0, 8.5), ChunkResult(0, math.nan, 0)):
        assert not BFLOAT16.passes(beyond)
