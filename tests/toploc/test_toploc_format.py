"""The bytes, against what the public package wrote."""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.toploc import BFLOAT16, ChunkResult, build, build_many, to_base64, verify
from shoal.toploc.chunk import peaks
from shoal.toploc.field import PRIME, evaluate, interpolate
from shoal.toploc.proof import injective_modulus, parse, serialise

EXACT = ChunkResult(0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "prefill_at", "decode_at", "digest"),
    [
        (576, (), (5, 6), "d97772e1047edfb60777e7a18a1f7b3cb748efa73b60e946c7929507618102d6"),
        (  # indices that collide under the prime, in prefill and decode: both moduli are 65495
            4096,
            (9, 9 + PRIME, 9 + PRIME - 1, 131071),
            (9, 9 + PRIME, 9 + PRIME - 1, 131071),
            "39a26a23a38add3496f5791df439b594f4cec7c3c5da9bb93f6315320bcedefe",
        ),
    ],
)
def test_equals_what_the_public_package_wrote(
    tie_free: Callable[..., Tensor],
    width: int,
    prefill_at: tuple[int, ...],
    decode_at: tuple[int, ...],
    digest: str,
    dtype: torch.dtype,
) -> None:
    """build_proofs_bytes([prefill of 40 tokens, 37 single tokens], 32, 128) of toploc 0.1.6, the proofs joined.

    The bytes know nothing of the dtype: bfloat16 and float16 of the same bits have one digest.
    """
    prefill, whole, rest = (
        tie_free(40, width, prefill_at),
        tie_free(32, width, decode_at),
        tie_free(5, width, (1, 2, 3)),
    )
    hidden_TH = torch.cat([prefill, whole, rest]).view(torch.int16).view(dtype)
    proofs = [*build(hidden_TH[:40], chunk_tokens=40), *build(hidden_TH[40:])]
    assert hashlib.sha256(b"".join(proofs)).hexdigest() == digest
    assert verify(hidden_TH[40:], proofs[1:]) == [EXACT] * 2


def test_equals_the_public_packages_base64() -> None:
    """build_proofs_base64([two tokens, one token], 32, 4) of toploc 0.1.6 on these values."""
    rows = [
        [0.5, -3, 1.25, 0, 9, 0.125, -2, 0.75],
        [7, 1, -0.25, 4.5, 0, -6, 2.5, 0.625],
        [0.875, -5, 3.5, 0.375, 8, -10, 0.0625, 12],
    ]
    proofs = build(torch.tensor(rows), top_k=4, chunk_tokens=2)
    assert [to_base64(proof) for proof in proofs] == ["/9nI5pdSYE1URg==", "/9mke/vcMeruEQ=="]


def test_sizes_at_the_default_top_k(tie_free: Callable[..., Tensor]) -> None:
    (proof,) = build(tie_free(32, 576))
    assert (len(proof), len(to_base64(proof))) == (258, 344)


def test_chunks_and_sequences_do_not_influence_each_other(heavy_tailed: Callable[..., Tensor]) -> None:
    hiddens = [heavy_tailed(tokens, 192, seed=tokens) for tokens in (1, 32, 33, 70)]
    together = build_many(hiddens)
    assert [len(proofs) for proofs in together] == [1, 1, 2, 3]
    assert together == [build(hidden_TH) for hidden_TH in hiddens]
    assert together[3][1:2] == build(hiddens[3][32:64])


def test_float32_is_proven_as_its_bfloat16_rounding(heavy_tailed: Callable[..., Tensor]) -> None:
    hidden_TH = heavy_tailed(40, 192)
    assert build(hidden_TH) == build(hidden_TH.bfloat16())


def test_modulus_is_the_largest_without_collisions() -> None:
    index_BK = torch.tensor(
        [[0, 1, 2], [0, PRIME, 7], [1, PRIME, 7], [5, 5 + PRIME, 4 + PRIME], [0, 2 * PRIME, 2 * PRIME - 2]]
    )
    expected = [
        next(m for m in range(PRIME, 0, -1) if len({i % m for i in row}) == len(row)) for row in index_BK.tolist()
    ]
    assert injective_modulus(index_BK).tolist() == expected == [PRIME, PRIME - 1, PRIME, PRIME - 2, PRIME - 2]


def test_no_modulus_is_an_error_not_a_null_proof() -> None:
    with pytest.raises(ValueError, match="smaller top_k"):
        injective_modulus(torch.tensor([[PRIME, PRIME]]))


def test_either_choice_among_ties_verifies_under_the_other() -> None:
    """Of 24 equal magnitudes at the 128th place 8 are taken; two machines may take disjoint eights."""
    bits_X = torch.full((32 * 64,), 0x3C00, dtype=torch.int16)
    bits_X[:120] = 16000 + torch.arange(120, dtype=torch.int16)
    tied = list(range(1000, 1024))
    bits_X[tied] = 15900
    hidden_TH = bits_X.view(torch.bfloat16).reshape(32, 64)

    ours = set(peaks([hidden_TH], chunk_tokens=32, top_k=128).index_BK.flatten().tolist())
    other = [*range(120), *[i for i in tied if i not in ours][:8]]
    other_bits = bits_X[other].tolist()
    assert len(ours & set(other)) == 120

    index_1K, bits_1K = torch.tensor([other]), torch.tensor([other_bits])
    modulus_1 = injective_modulus(index_1K)
    others = serialise(modulus_1, interpolate(index_1K % modulus_1[:, None], bits_1K))
    (result,) = verify(hidden_TH, others)
    assert BFLOAT16.passes(result)
    assert result.exponent_mismatches <= 8 and result.mantissa_error_median == 0
    modulus_1, coefficients_1K = parse(build(hidden_TH), top_k=128)
    proven_1K = evaluate(coefficients_1K, index_1K % modulus_1[:, None])
    assert int((proven_1K & 0x7F80 != bits_1K & 0x7F80).sum()) <= 8
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT]
