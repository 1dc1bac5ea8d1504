"""Flex attention's block masks, built by tiles: PyTorch's own, without holding all pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.model.attention import RowLayout, Span

CPU = torch.device("cpu")
FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
FIELDS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def layout(*trees: tuple[int, tuple[int, ...]], root: int = 0) -> RowLayout:
    spans: list[Span] = []
    for prompt, completions in trees:
        spans.append(Span(spans[-1].end if spans else root, prompt, completions))
    return RowLayout(spans, CPU, "flex", root)


@pytest.mark.parametrize(
    "row",
    [
        layout((3, (2, 4))),
        layout((128, ())),
        layout((130, (300, 5, 140)), (1, (1,)), (400, (256,))),
        layout((0, (129,)), (640, (128, 128))),
        layout((100, (30, 200)), (10, (5,)), root=300),
    ],
    ids=["short", "one block", "uneven", "whole blocks", "root"],
)
def test_a_mask_by_tiles_is_that_of_pytorch(row: RowLayout) -> None:
    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return row.sees(query, key)

    wanted, found = create_block_mask(sees, None, None, row.length, row.length, device="cpu"), row.block_mask
    for field in FIELDS:
        assert torch.equal(getattr(found, field), getattr(wanted, field)), field
        assert getattr(found, field).dtype == getattr(wanted, field).dtype, field
    assert (found.shape, found.BLOCK_SIZE, found.seq_lengths) == (wanted.shape, wanted.BLOCK_SIZE, wanted.seq_lengths)
    assert torch.equal(found.to_dense(), wanted.to_dense())


class Largest(TorchDispatchMode):
    """The most entries of a tensor made within it."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        self.entries = max(self.entries, *sizes, 0)
        return found


def test_a_mask_holds_one_tile_of_pairs_at_a_time() -> None:
    row = layout((500, (700, 900)), (948, (1000,)))
    with Largest() as largest:
        assert row.block_mask.sparsity() > 50
    assert row.length * 128 <= largest.entries < 2 * row.length * 128


def test_policy_and_reference_share_a_rows_masks() -> None:
    row = layout((4, (3, 3)))
    meta = torch.device("meta")
    moved = row.to(meta)
    assert moved is row.to(meta) is layout((4, (3, 3))).to(meta)
    assert (moved.device, moved.spans) == (meta, row.spans)
    assert layout((4, (3, 4))).to(meta) is not moved
    assert row.to(CPU) is row
