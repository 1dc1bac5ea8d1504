"""Hidden states for these tests: from a real model, random with heavy tails, and with distinct known peaks."""

import struct
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.toploc import ChunkResult, Thresholds
from shoal.toploc.chunk import peaks
from shoal.toploc.field import PRIME
from shoal.toploc.prove import compare

EXACT = ChunkResult(0, 0.0, 0.0)


@cache
def real_states() -> dict[str, Tensor]:
    """Return SmolLM2's last hidden states, (512, 576) float32, by how each was computed (see make_real_states.py)."""
    with np.load(Path(__file__).with_name("real_states.npz"), allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    index_N, shape = arrays.pop("index").long(), tuple(arrays.pop("shape").tolist())
    zeros_N = torch.zeros(shape).flatten()
    return {name: zeros_N.index_copy(0, index_N, value_N).reshape(shape) for name, value_N in arrays.items()}


def heavy_tailed(tokens: int, width: int, seed: int = 0) -> Tensor:
    """Return (tokens, width) float32 whose channels differ much in scale, as in a model's final hidden states."""
    random = torch.Generator().manual_seed(seed)
    channel_H = torch.randn(width, generator=random).mul(0.8).exp()
    return torch.randn(tokens, width, generator=random) * channel_H


def tie_free(tokens: int, width: int, at: tuple[int, ...] = ()) -> Tensor:
    """Return (tokens, width) bfloat16 with 1500 distinct magnitudes, every third negative. All other values are a small
    constant.

    The result is the same on every machine, because only integers are computed. `at`: indices of the largest
    magnitudes.
    """
    bits_X = torch.full((tokens * width,), 0x3C00, dtype=torch.int32)
    rank_N = torch.arange(1500)
    bits_X[rank_N * 7919 % bits_X.numel()] = (16000 + rank_N + 0x8000 * (rank_N % 3 == 0)).int()
    bits_X[list(at)] = 17600 + torch.arange(len(at), dtype=torch.int32)
    return bits_X.to(torch.int16).view(torch.bfloat16).reshape(tokens, width)


def accepted_constants(hidden_TH: Tensor, thresholds: Thresholds) -> dict[int, int]:
    """Return the constant polynomials that the thresholds accept in some chunk, each with the number of such chunks."""
    own = peaks([hidden_TH], chunk_tokens=32, top_k=128)
    bits = own.mantissa_bits
    exponents = ((own.bits_BK & 0x7FFF) >> bits).unique()
    constant_C = (exponents[:, None] << bits | torch.arange(1 << bits)).flatten()
    none_C = torch.zeros(len(constant_C), dtype=torch.bool)
    shape = (len(constant_C), own.bits_BK.shape[1])
    accepted: Counter[int] = Counter()
    for own_K in own.bits_BK:
        results = compare(own_K.expand(shape), constant_C[:, None].expand(shape), none_C, mantissa_bits=bits)
        accepted.update(c for c, result in zip(constant_C.tolist(), results, strict=True) if thresholds.passes(result))
    return accepted


def constant_proof(bits: int) -> bytes:
    return struct.pack(">129H", PRIME, bits, *[0] * 127)
