"""Hidden states for the toploc tests: a model's own, heavy-tailed as a model's are, or with known, tie-free peaks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.toploc import Thresholds
from shoal.toploc.chunk import peaks
from shoal.toploc.prove import compare


@pytest.fixture(scope="session")
def real() -> dict[str, Tensor]:
    """(512, 576) float32 by who computed them: SmolLM2's last hidden states, made by make_real_states.py."""
    with np.load(Path(__file__).with_name("real_states.npz"), allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    index_N, shape = arrays.pop("index").long(), tuple(arrays.pop("shape").tolist())
    flat = {name: torch.zeros(shape).flatten() for name in arrays}
    return {name: flat[name].index_copy(0, index_N, value_N).reshape(shape) for name, value_N in arrays.items()}


@pytest.fixture
def accepted_constants() -> Callable[[Tensor, Thresholds], dict[int, int]]:
    """In how many chunks thresholds alone would accept a constant polynomial: by its positive 16-bit value, if any."""

    def count(hidden_TH: Tensor, thresholds: Thresholds) -> dict[int, int]:
        own = peaks([hidden_TH], chunk_tokens=32, top_k=128)
        bits = own.mantissa_bits
        exponents = ((own.bits_BK & 0x7FFF) >> bits).unique()
        constant_C = (exponents[:, None] << bits | torch.arange(1 << bits)).flatten()
        none_C = torch.zeros(len(constant_C), dtype=torch.bool)
        shape = (len(constant_C), own.bits_BK.shape[1])
        found: dict[int, int] = {}
        for own_K in own.bits_BK:
            results = compare(own_K.expand(shape), constant_C[:, None].expand(shape), none_C, mantissa_bits=bits)
            for constant, result in zip(constant_C.tolist(), results, strict=True):
                if thresholds.passes(result):
                    found[constant] = found.get(constant, 0) + 1
        return found

    return count


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
