"""The block mask of flex attention, built a tile of queries at a time.

PyTorch's `create_block_mask` first holds all pairs of query and key: 17 GB at 40,960 positions, eagerly. Here the largest
tensor is BLOCK rows of them.
Invariant: the tensors of the mask equal those of `create_block_mask`. Called by `attention`, once for each row.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # queries, and keys, that are computed or skipped together: PyTorch's default


def block_mask(length: int, sees: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Any:
    """Of `length` queries and keys; `sees(query, key)` tells which attends to which, broadcast over int64 positions."""
    from torch.nn.attention.flex_attention import BlockMask

    tiles = -(-length // BLOCK)
    at_T = torch.arange(length, device=device)
    pairs_QK = torch.zeros(tiles, tiles, dtype=torch.int64, device=device)  # that are seen, of each block
    for tile, query_L in enumerate(torch.split(at_T, BLOCK)):
        sees_LT = F.pad(sees(query_L[:, None], at_T), (0, -length % BLOCK))
        pairs_QK[tile] = sees_LT.view(len(query_L), tiles, BLOCK).sum((0, 2))
    all_QK = pairs_QK == BLOCK * BLOCK
    some_QK = (pairs_QK > 0) & ~all_QK

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query, key)

    return BlockMask.from_kv_blocks(
        *_ordered(some_QK), *_ordered(all_QK), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(length, length)
    )


def _ordered(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and all key blocks, the chosen ones first, in order; int32."""
    chosen_11QK = chosen_QK[None, None].to(torch.int32)
    order_11QK = torch.argsort(chosen_11QK, dim=-1, descending=True, stable=True)
    return chosen_11QK.sum(-1, dtype=torch.int32), order_11QK.to(torch.int32)
