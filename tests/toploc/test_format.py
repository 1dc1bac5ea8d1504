"""Field arithmetic is compared with Python's integers, peaks with a full sort, and proofs with the public package."""

import hashlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.toploc import BFLOAT16, build, build_many, to_base64, verify
from shoal.toploc.chunk import largest, peaks
from shoal.toploc.field import PRIME, evaluate, interpolate, inverse
from shoal.toploc.proof import injective_modulus, parse, serialise

from .support import EXACT, heavy_tailed, tie_free

# --- GF(65497) -------------------------------------------------------------------------------------------------------


def test_every_inverse_is_pythons_modular_inverse() -> None:
    assert inverse(torch.arange(1, PRIME)).tolist() == [pow(a, -1, PRIME) for a in range(1, PRIME)]
    with pytest.raises(ZeroDivisionError):
        inverse(torch.tensor([3, 0]))


def test_evaluate_gives_the_values_that_pythons_integers_give() -> None:
    draw = random.Random(1)
    coefficients = [[draw.randrange(PRIME) for _ in range(40)] for _ in range(3)]
    coefficients[2] = [PRIME - 1] * 40  # gives the largest possible products
    x = [[draw.randrange(PRIME) for _ in range(7)] + [0, PRIME - 1] for _ in range(3)]
    expected = [
        [sum(c * point**power for power, c in enumerate(row)) % PRIME for point in points]
        for row, points in zip(coefficients, x, strict=True)
    ]
    assert evaluate(torch.tensor(coefficients), torch.tensor(x)).tolist() == expected


@pytest.mark.parametrize("points", [1, 2, 3, 128])
def test_an_interpolant_passes_through_its_points(points: int) -> None:
    draw = random.Random(points)
    x_BK = torch.tensor([draw.sample(range(PRIME), points) for _ in range(5)])
    y_BK = torch.tensor([[draw.randrange(PRIME) for _ in range(points)] for _ in range(5)])
    assert torch.equal(evaluate(interpolate(x_BK, y_BK), x_BK), y_BK)


def test_interpolation_does_not_change_its_arguments() -> None:
    # Transposing a tensor of shape (B, 1) copies nothing, so a change in place would change the argument.
    x_BK, y_BK = torch.tensor([[4], [5]]), torch.tensor([[6], [7]])
    interpolate(x_BK, y_BK)
    assert (x_BK.tolist(), y_BK.tolist()) == ([[4], [5]], [[6], [7]])


def test_repeated_points_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        interpolate(torch.tensor([[1, 2, 1]]), torch.tensor([[1, 2, 3]]))


# --- peaks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 700), st.integers(1, 40), st.sampled_from([1, 3, 40, 20000]), st.integers(0, 2**31))
def test_the_selected_magnitudes_are_those_of_a_full_sort(values: int, top_k: int, distinct: int, seed: int) -> None:
    top_k = min(top_k, values)
    generator = torch.Generator().manual_seed(seed)
    magnitude_BX = torch.randint(0, distinct, (3, values), generator=generator, dtype=torch.int16)
    negative_BX = torch.randint(0, 2, (3, values), generator=generator, dtype=torch.int16) << 15
    index_BK = largest(magnitude_BX | negative_BX, top_k)
    assert all(len(set(row)) == top_k for row in index_BK.tolist())
    expected = magnitude_BX.sort(dim=1, descending=True).values[:, :top_k]
    assert torch.equal(magnitude_BX.gather(1, index_BK).sort(dim=1, descending=True).values, expected)


@pytest.mark.parametrize("values", [1000, 18432, 131072, 131075])
def test_rows_do_not_influence_each_other(values: int) -> None:
    """Five rows of 131072 values are more than one slab, the number of chunks searched together."""
    bits_BX = torch.randint(0, 300, (5, values), generator=torch.Generator().manual_seed(values), dtype=torch.int16)
    alone = torch.cat([largest(bits_BX[row : row + 1], 128) for row in range(5)])
    assert torch.equal(largest(bits_BX, 128).sort().values, alone.sort().values)


def test_among_equal_magnitudes_the_first_are_selected() -> None:
    """This rule makes the bytes equal on every device."""
    assert sorted(largest(torch.tensor([[7, 1, -32761, 7, 9, 7]], dtype=torch.int16), 3)[0].tolist()) == [0, 2, 4]


def test_the_peaks_of_a_long_prompt_are_those_of_a_full_sort() -> None:
    hidden_TH = torch.randn(3000, 512, generator=torch.Generator().manual_seed(0)).half()
    index_K = peaks([hidden_TH], chunk_tokens=3000, top_k=128).index_BK[0]
    expected = hidden_TH.abs().flatten().topk(128).values
    assert torch.equal(hidden_TH.flatten()[index_K].abs().sort(descending=True).values, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_computes_the_same_bytes_and_figures(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(150, 4096, generator=generator).to(dtype)  # magnitudes tie for the last place
    other_TH = (hidden_TH.float() * (1 + torch.randn(150, 4096, generator=generator) / 256)).to(dtype)
    proofs = build(hidden_TH)
    assert build(hidden_TH.cuda()) == proofs
    assert peaks([hidden_TH.cuda()], chunk_tokens=32, top_k=128).bits_BK.is_cuda
    assert verify(other_TH.cuda(), proofs) == verify(other_TH, proofs)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "prefill_at", "decode_at", "digest"),
    [
        (576, (), (5, 6), "d97772e1047edfb60777e7a18a1f7b3cb748efa73b60e946c7929507618102d6"),
        (  # some indices are equal modulo the prime, in prefill and in decoding, so both moduli are 65495
            4096,
            (9, 9 + PRIME, 9 + PRIME - 1, 131071),
            (9, 9 + PRIME, 9 + PRIME - 1, 131071),
            "39a26a23a38add3496f5791df439b594f4cec7c3c5da9bb93f6315320bcedefe",
        ),
    ],
)
def test_proofs_equal_those_of_the_public_package(
    width: int, prefill_at: tuple[int, ...], decode_at: tuple[int, ...], digest: str, dtype: torch.dtype
) -> None:
    """The digest is that of the joined proofs from toploc 0.1.6: build_proofs_bytes([40 prompt tokens, 37 single], 32,
    128).

    The bytes do not contain the dtype, so bfloat16 and float16 values with the same bits have the same digest.
    """
    parts = tie_free(40, width, prefill_at), tie_free(32, width, decode_at), tie_free(5, width, (1, 2, 3))
    hidden_TH = torch.cat(parts).view(torch.int16).view(dtype)
    proofs = [*build(hidden_TH[:40], chunk_tokens=40), *build(hidden_TH[40:])]
    assert hashlib.sha256(b"".join(proofs)).hexdigest() == digest
    assert verify(hidden_TH[40:], proofs[1:]) == [EXACT] * 2


def test_the_text_form_of_proofs_equals_that_of_the_public_package() -> None:
    """The text is what build_proofs_base64([two tokens, one token], 32, 4) of toploc 0.1.6 returns for these values."""
    rows = [
        [0.5, -3, 1.25, 0, 9, 0.125, -2, 0.75],
        [7, 1, -0.25, 4.5, 0, -6, 2.5, 0.625],
        [0.875, -5, 3.5, 0.375, 8, -10, 0.0625, 12],
    ]
    proofs = build(torch.tensor(rows), top_k=4, chunk_tokens=2)
    assert [to_base64(proof) for proof in proofs] == ["/9nI5pdSYE1URg==", "/9mke/vcMeruEQ=="]


def test_a_proof_has_258_bytes_and_its_text_344_characters() -> None:
    (proof,) = build(tie_free(32, 576))
    assert (len(proof), len(to_base64(proof))) == (258, 344)


def test_chunks_and_sequences_do_not_influence_each_other() -> None:
    hiddens = [heavy_tailed(tokens, 192, seed=tokens) for tokens in (1, 32, 33, 70)]
    together = build_many(hiddens)
    assert [len(proofs) for proofs in together] == [1, 1, 2, 3]
    assert together == [build(hidden_TH) for hidden_TH in hiddens]
    assert together[3][1:2] == build(hiddens[3][32:64])


def test_float32_is_rounded_to_bfloat16() -> None:
    assert build(heavy_tailed(40, 192)) == build(heavy_tailed(40, 192).bfloat16())


def test_the_memory_layout_does_not_matter() -> None:
    hidden_TH = torch.randn(192, 64, generator=torch.Generator().manual_seed(0)).bfloat16().T
    assert build(hidden_TH) == build(hidden_TH.contiguous())


def test_the_modulus_is_the_largest_that_keeps_all_indices_distinct() -> None:
    index_BK = torch.tensor(
        [[0, 1, 2], [0, PRIME, 7], [1, PRIME, 7], [5, 5 + PRIME, 4 + PRIME], [0, 2 * PRIME, 2 * PRIME - 2]]
    )
    expected = [
        next(m for m in range(PRIME, 0, -1) if len({i % m for i in row}) == len(row)) for row in index_BK.tolist()
    ]
    assert injective_modulus(index_BK).tolist() == expected == [PRIME, PRIME - 1, PRIME, PRIME - 2, PRIME - 2]
    with pytest.raises(ValueError, match="smaller top_k"):
        injective_modulus(torch.tensor([[PRIME, PRIME]]))


def test_proofs_from_two_selections_among_equal_magnitudes_verify_each_other() -> None:
    """24 equal magnitudes tie for the last 8 of the 128 places, so two machines may select disjoint sets of 8."""
    bits_X = torch.full((32 * 64,), 0x3C00, dtype=torch.int16)
    bits_X[:120] = 16000 + torch.arange(120, dtype=torch.int16)
    tied = list(range(1000, 1024))
    bits_X[tied] = 15900
    hidden_TH = bits_X.view(torch.bfloat16).reshape(32, 64)

    ours = set(peaks([hidden_TH], chunk_tokens=32, top_k=128).index_BK.flatten().tolist())
    other = [*range(120), *[i for i in tied if i not in ours][:8]]
    assert len(ours & set(other)) == 120

    index_1K, bits_1K = torch.tensor([other]), torch.tensor([bits_X[other].tolist()])
    modulus_1 = injective_modulus(index_1K)
    (result,) = verify(hidden_TH, serialise(modulus_1, interpolate(index_1K % modulus_1[:, None], bits_1K)))
    assert BFLOAT16.passes(result)
    assert result.exponent_mismatches <= 8 and result.mantissa_error_median == 0
    modulus_1, coefficients_1K = parse(build(hidden_TH), top_k=128)
    proven_1K = evaluate(coefficients_1K, index_1K % modulus_1[:, None])
    assert int((proven_1K & 0x7F80 != bits_1K & 0x7F80).sum()) <= 8
    assert verify(hidden_TH, build(hidden_TH)) == [EXACT]
