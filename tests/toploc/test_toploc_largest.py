"""The tournament against a full sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.toploc import build, verify
from shoal.toploc.chunk import largest, peaks


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 700), st.integers(1, 40), st.sampled_from([1, 3, 40, 20000]), st.integers(0, 2**31))
def test_magnitudes_are_those_of_a_full_sort(values: int, top_k: int, distinct: int, seed: int) -> None:
    top_k = min(top_k, values)
    random = torch.Generator().manual_seed(seed)
    magnitude_BX = torch.randint(0, distinct, (3, values), generator=random, dtype=torch.int16)
    negative_BX = torch.randint(0, 2, (3, values), generator=random, dtype=torch.int16) << 15
    index_BK = largest(magnitude_BX | negative_BX, top_k)
    assert all(len(set(row)) == top_k for row in index_BK.tolist())
    expected = magnitude_BX.sort(dim=1, descending=True).values[:, :top_k]
    assert torch.equal(magnitude_BX.gather(1, index_BK).sort(dim=1, descending=True).values, expected)


@pytest.mark.parametrize("values", [1000, 18432, 131072, 131075])
def test_rows_do_not_influence_each_other(values: int) -> None:
    """5 · 131072 values are more than one slab."""
    bits_BX = torch.randint(0, 300, (5, values), generator=torch.Generator().manual_seed(values), dtype=torch.int16)
    alone = torch.cat([largest(bits_BX[row : row + 1], 128) for row in range(5)])
    assert torch.equal(largest(bits_BX, 128).sort().values, alone.sort().values)


def test_of_equal_magnitudes_the_first_are_taken() -> None:
    """Bit by bit the same on every device; here where all values compete at once."""
    assert sorted(largest(torch.tensor([[7, 1, -32761, 7, 9, 7]], dtype=torch.int16), 3)[0].tolist()) == [0, 2, 4]


def test_largest_prefill_of_a_long_prompt() -> None:
    hidden_TH = torch.randn(3000, 512, generator=torch.Generator().manual_seed(0)).half()
    found = peaks([hidden_TH], chunk_tokens=3000, top_k=128)
    expected = hidden_TH.abs().flatten().topk(128).values
    assert torch.equal(hidden_TH.flatten()[found.index_BK[0]].abs().sort(descending=True).values, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_finds_the_same_bytes_and_figures(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(150, 4096, generator=random).to(dtype)  # ties at the last place in every chunk
    other_TH = (hidden_TH.float() * (1 + torch.randn(150, 4096, generator=random) / 256)).to(dtype)
    proofs = build(hidden_TH)
    assert build(hidden_TH.cuda()) == proofs
    assert peaks([hidden_TH.cuda()], chunk_tokens=32, top_k=128).bits_BK.is_cuda
    assert verify(other_TH.cuda(), proofs) == verify(other_TH, proofs)


def test_transposed_states_are_read_in_their_own_order() -> None:
    hidden_TH = torch.randn(192, 64, generator=torch.Generator().manual_seed(0)).bfloat16().T
    assert build(hidden_TH) == build(hidden_TH.contiguous())
