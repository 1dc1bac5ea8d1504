"""Chunks: hidden states cut every `chunk_tokens` tokens, each piece reduced to its top_k largest magnitudes.

Invariant: chunk c covers tokens [c * chunk_tokens, (c+1) * chunk_tokens); only a sequence's last one may be
shorter.
Called by `build` and `verify`, which therefore cut and pick alike. Leaves out any rule for ties: which of
several equal magnitudes torch.topk takes at the k-th place is unspecified and may differ between devices.
That is harmless as long as few values tie there: the entries that differ evaluate at random and count as
mismatches, the rest agree.

Paper: TOPLOC section 3 (top-k selection). Shapes: T tokens, H hidden size, B chunks, K = top_k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.toploc.proof import ProofError

_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}


@dataclass(frozen=True)
class Peaks:
    """Every chunk's top_k entries, on the CPU: `index_BK` in the flattened chunk and raw 16-bit `bits_BK`."""

    index_BK: Tensor
    bits_BK: Tensor
    chunks_per_sequence: list[int]
    mantissa_bits: int


def peaks(hiddens: Sequence[Tensor], *, chunk_tokens: int, top_k: int) -> Peaks:
    """Cut every (T, H) tensor into chunks and take each one's top_k entries by magnitude.

    float32 is rounded to bfloat16 first; bfloat16 and float16 are taken as they are. Raises ProofError where
    no proof exists (no tokens, or fewer than top_k values in a chunk) and ValueError for what is the caller's
    own fault: rank, dtype, mixed dtypes, non-finite values, counts below one, no sequences.
    """
    if chunk_tokens < 1 or top_k < 1:
        raise ValueError(f"chunk_tokens and top_k must be at least 1, got {chunk_tokens} and {top_k}")
    if not hiddens:
        raise ValueError("no sequences")
    rounded = [_sixteen_bit(hidden_TH, sequence) for sequence, hidden_TH in enumerate(hiddens)]
    dtypes = {hidden_TH.dtype for hidden_TH in rounded}
    if len(dtypes) > 1:
        raise ValueError(f"sequences differ in dtype: {sorted(map(str, dtypes))}")

    indices, values, counts = [], [], []
    for sequence, hidden_TH in enumerate(rounded):
        tokens, width = hidden_TH.shape
        shortest = (tokens % chunk_tokens or chunk_tokens) * width
        if tokens == 0 or shortest < top_k:
            reason = f"{shortest} values in a chunk: choose a top_k of at most {width} (now {top_k})"
            raise ProofError("no tokens" if tokens == 0 else reason, sequence=sequence)
        whole = tokens - tokens % chunk_tokens
        parts = [hidden_TH[:whole].reshape(-1, chunk_tokens * width), hidden_TH[whole:].reshape(1, -1)]
        for part_BX in parts:
            if part_BX.numel():
                index_BK = part_BX.abs().topk(top_k, dim=1).indices
                indices.append(index_BK)
                values.append(part_BX.gather(1, index_BK))
        counts.append(-(-tokens // chunk_tokens))

    value_BK = torch.cat(values).cpu()
    # topk ranks NaN and infinity first, so looking at the peaks is enough.
    finite_B = value_BK.isfinite().all(dim=1)
    if not bool(finite_B.all()):
        raise ValueError(f"hidden states are not finite in chunk {int(finite_B.int().argmin())} of the batch")
    bits_BK = value_BK.view(torch.int16).to(torch.int64) & 0xFFFF
    return Peaks(torch.cat(indices).cpu(), bits_BK, counts, _MANTISSA_BITS[value_BK.dtype])


def _sixteen_bit(hidden_TH: Tensor, sequence: int) -> Tensor:
    if hidden_TH.ndim != 2:
        raise ValueError(f"sequence {sequence}: expected (tokens, hidden), got {tuple(hidden_TH.shape)}")
    if hidden_TH.dtype == torch.float32:
        return hidden_TH.detach().to(torch.bfloat16)
    if hidden_TH.dtype not in _MANTISSA_BITS:
        raise ValueError(f"sequence {sequence}: {hidden_TH.dtype} is not bfloat16, float16 or float32")
    return hidden_TH.detach()
