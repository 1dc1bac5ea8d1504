"""What verification accepts, what it fails, and the figures it reports."""

import math
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.toploc import BFLOAT16, ChunkResult, Thresholds, build, build_many, verify, verify_many
from shoal.toploc.field import PRIME
from shoal.toploc.prove import compare

AcceptedConstants = Callable[[Tensor, Thresholds], dict[int, int]]

EXACT = ChunkResult(0, 0.0, 0.0)


def constant_proof(bits: int, top_k: int = 128) -> bytes:
    return struct.pack(f">{1 + top_k}H", PRIME, bits, *[0] * (top_k - 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64])
def test_own_proofs_verify_without_error(heavy_tailed: Callable[..., Tensor], tokens: int, dtype: torch.dtype) -> None:
    hidden_TH = heavy_tailed(tokens, 192).to(dtype)
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT] * math.ceil(tokens / 32)


def test_own_proofs_verify_where_indices_collide_under_the_prime(tie_free: Callable[..., Tensor]) -> None:
    hidden_TH = tie_free(32, 4096, at=(9, 9 + PRIME, 9 + PRIME - 1, 131071))
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT]


def test_float16_is_measured_in_its_own_mantissa() -> None:
    """All values in [1, 2): 200 units of 10 bits apart, which 7 bits would call other exponents."""
    bits_TH = (0x3C00 + torch.arange(192 * 4) * 501 % 797).to(torch.int16).reshape(4, 192)
    proven, own = bits_TH.view(torch.float16), (bits_TH + 200).view(torch.float16)
    assert verify(own, build(proven)) == [ChunkResult(0, 200.0, 200.0)]


@pytest.mark.parametrize("seed", range(5))
def test_numeric_noise_passes(heavy_tailed: Callable[..., Tensor], seed: int) -> None:
    hidden_TH = heavy_tailed(64, 576, seed)
    noise_TH = torch.randn(64, 576, generator=torch.Generator().manual_seed(seed))
    elsewhere_TH = hidden_TH * (1 + noise_TH / 256)  # about one bfloat16 rounding more
    results = verify(elsewhere_TH, build(hidden_TH.bfloat16()))
    assert all(BFLOAT16.passes(result) for result in results)
    assert EXACT not in results


def test_other_tokens_of_the_same_model_fail(heavy_tailed: Callable[..., Tensor]) -> None:
    """The same loud channels, other tokens."""
    hidden_TH = heavy_tailed(64, 576)
    assert not BFLOAT16.passes(verify(hidden_TH[32:], build(hidden_TH[:32]))[0])


def test_one_changed_chunk_fails_alone(heavy_tailed: Callable[..., Tensor]) -> None:
    hiddens = [heavy_tailed(70, 192, seed) for seed in range(3)]
    proofs = build_many(hiddens)
    proofs[1][2] = proofs[0][2]
    results = verify_many(hiddens, proofs)
    verdicts = [[BFLOAT16.passes(result) for result in row] for row in results]
    assert verdicts == [[True] * 3, [True, True, False], [True] * 3]


def test_constants_that_the_thresholds_would_accept_fail_by_their_degree(accepted_constants: AcceptedConstants) -> None:
    """Gaussian peaks in the upper half of one binade: too alike for the thresholds to refuse a constant."""
    gaussian_TH = torch.randn(32, 4096, generator=torch.Generator().manual_seed(0))
    hidden_TH = next(h for h in (gaussian_TH * 2 ** (n / 32) for n in range(32)) if accepted_constants(h, BFLOAT16))
    proof = constant_proof(min(accepted_constants(hidden_TH, BFLOAT16)))
    assert verify(hidden_TH, [proof]) == [ChunkResult(128, math.inf, math.inf)]


def test_hidden_states_that_really_are_constant_verify() -> None:
    hidden_TH = torch.ones(32, 192)
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT]


def test_proofs_of_low_degree_agree_nowhere(heavy_tailed: Callable[..., Tensor]) -> None:
    proofs = [constant_proof(0), constant_proof(0x3F80), struct.pack(">129H", PRIME, *[5] * 120, *[0] * 8)]
    for proof in proofs:
        assert verify(heavy_tailed(32, 576), [proof]) == [ChunkResult(128, math.inf, math.inf)]


def test_figures_are_those_of_the_definition() -> None:
    """Exponents agree in three of five; mantissas differ there by 1, 2 and 6, sign ignored."""
    own = [0x3F80, 0x3F81, 0x3F90, 0x4000, 0x4080]
    proven = [0x3F81, 0xBF83, 0x3F8A, 0x4080, 0x4000]
    rows = (
        torch.tensor([own, own, own[:2] * 2 + own[:1]]),
        torch.tensor([proven, own[::-1], proven[:2] * 2 + [0]]),
    )
    results = compare(*rows, torch.zeros(3, dtype=torch.bool), mantissa_bits=7)
    assert results[0] == ChunkResult(2, 3.0, 2.0)
    assert results[1] == ChunkResult(4, 0.0, 0.0)
    assert results[2] == ChunkResult(1, 1.5, 1.5)  # an even number: the mean of the middle two


def test_float16_figures_use_five_exponent_and_ten_mantissa_bits() -> None:
    own, proven = torch.tensor([[0x3C00, 0x4001]]), torch.tensor([[0x3FFF, 0x3C01]])
    (result,) = compare(own, proven, torch.zeros(1, dtype=torch.bool), mantissa_bits=10)
    assert result == ChunkResult(1, 1023.0, 1023.0)


def test_no_agreeing_exponent_is_infinitely_wrong() -> None:
    own, proven = torch.tensor([[0x3F80, 0x3F80]]), torch.tensor([[0x4000, 0x4000]])
    (result,) = compare(own, proven, torch.zeros(1, dtype=torch.bool), mantissa_bits=7)
    assert result == ChunkResult(2, math.inf, math.inf)


def test_thresholds_are_inclusive_and_each_counts() -> None:
    assert BFLOAT16.passes(ChunkResult(38, 10.0, 8.0))
    for beyond in (ChunkResult(39, 0, 0), ChunkResult(0, 10.1, 0), ChunkResult(0, 0, 8.5)):
        assert not BFLOAT16.passes(beyond)
    assert not BFLOAT16.passes(ChunkResult(0, math.nan, 0))
