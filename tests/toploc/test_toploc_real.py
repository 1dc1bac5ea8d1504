"""The presets on a real model's hidden states: honest arithmetic passes, what needs no such states does not."""

import struct
from collections.abc import Callable

import pytest
from torch import Tensor

from shoal.toploc import BFLOAT16, Thresholds, build, verify

PRIME = 65497
AcceptedConstants = Callable[[Tensor, Thresholds], dict[int, int]]


def verdicts(validator_TH: Tensor, proofs: list[bytes], thresholds: Thresholds) -> list[bool]:
    return [thresholds.passes(result) for result in verify(validator_TH, proofs)]


@pytest.mark.parametrize("validator", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("worker", ["float32", "bfloat16", "bfloat16_decoded", "float16", "float16_decoded"])
def test_honest_arithmetic_passes(real: dict[str, Tensor], worker: str, validator: str) -> None:
    proofs = build(real[worker].bfloat16())
    assert all(verdicts(real[validator].bfloat16(), proofs, BFLOAT16))


@pytest.mark.parametrize("validator", ["float32", "bfloat16", "float16"])
def test_weights_rounded_to_4_bits_fail_in_every_chunk(real: dict[str, Tensor], validator: str) -> None:
    proofs = build(real["4_bit"].bfloat16())
    assert not any(verdicts(real[validator].bfloat16(), proofs, BFLOAT16))


def test_one_chunks_proof_repeated_passes_only_there(real: dict[str, Tensor]) -> None:
    hidden_TH = real["bfloat16"].bfloat16()
    proofs = build(hidden_TH)
    for repeated in (0, 7, 15):
        expected = [chunk == repeated for chunk in range(16)]
        assert verdicts(hidden_TH, [proofs[repeated]] * 16, BFLOAT16) == expected


def test_the_presets_alone_accept_no_constant(real: dict[str, Tensor], accepted_constants: AcceptedConstants) -> None:
    for validator in ("float32", "bfloat16", "float16"):
        assert accepted_constants(real[validator].bfloat16(), BFLOAT16) == {}


def test_proofs_of_constants_fail_even_under_60_40_40(
    real: dict[str, Tensor], accepted_constants: AcceptedConstants
) -> None:
    hidden_TH, loose = real["bfloat16"].bfloat16(), Thresholds(60, 40, 40)
    accepted = accepted_constants(hidden_TH, loose)
    constant = max(accepted, key=lambda bits: accepted[bits])
    assert accepted[constant] >= 15, "thresholds alone would accept it for nearly all of the 16 chunks"
    proofs = [struct.pack(">129H", PRIME, constant, *[0] * 127)] * 16
    assert not any(verdicts(hidden_TH, proofs, loose))
