"""Hidden states for the toploc tests: heavy-tailed as a model's are, or with known, tie-free peaks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def heavy_tailed() -> Callable[..., Tensor]:
    """(tokens, width) float32 whose channels differ much in size, as in a model's final hidden states."""

    def make(tokens: int, width: int, seed: int = 0) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        channel_H = torch.randn(width, generator=random).mul(0.8).exp()
        return torch.randn(tokens, width, generator=random) * channel_H

    return make


@pytest.fixture
def tie_free() -> Callable[..., Tensor]:
    """(tokens, width) bfloat16: 1500 distinct magnitudes, every third negative, over a small constant.

    Made of integers alone, so the same everywhere; `at` places the largest magnitudes at these indices.
    """

    def make(tokens: int, width: int, at: tuple[int, ...] = ()) -> Tensor:
        bits_X = torch.full((tokens * width,), 0x3C00, dtype=torch.int32)
        rank_N = torch.arange(1500)
        bits_X[rank_N * 7919 % bits_X.numel()] = (16000 + rank_N + 0x8000 * (rank_N % 3 == 0)).int()
        bits_X[list(at)] = 17600 + torch.arange(len(at), dtype=torch.int32)
        return bits_X.to(torch.int16).view(torch.bfloat16).reshape(tokens, width)

    return make
