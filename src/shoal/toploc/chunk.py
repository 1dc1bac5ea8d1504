"""Split hidden states into chunks of `chunk_tokens` tokens, and find each chunk's top_k largest magnitudes.

Invariant: each chunk covers chunk_tokens tokens, and only the last chunk of a sequence may be shorter. The selected
magnitudes are those that a full sort would select. The selection among equal magnitudes depends only on the values, not
on the device or on torch.topk, because all compared keys are distinct. The public package may select other entries of
equal magnitude, and its proofs still pass `verify`. At an entry that only one side selected, the proof's value is
random and counts as a mismatch. Such entries are few, because few magnitudes are equal.

Paper: TOPLOC section 3 (top-k selection). Shapes: T tokens, H hidden size, B chunks, X = values in a chunk, K = top_k,
S = chunks searched together (a slab), N columns of the search, C candidates of the search.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.toploc.proof import ProofError

MAGNITUDE = 0x7FFF  # clears the sign bit: then a float's bits sort like its magnitude, with infinity and NaN last
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
_FAN = 8  # values per column; of 4, 8, 16 and 32, this is the fastest at X = 131072, K = 128
_SLAB_VALUES = 2**18  # number of magnitudes computed together, so that they fit into a core's cache


@dataclass(frozen=True)
class Peaks:
    """Every chunk's top_k entries: their indices in the flattened chunk, and their raw 16 bits.

    The tensors are on the device of the hidden states.
    """

    index_BK: Tensor
    bits_BK: Tensor
    chunks_per_sequence: list[int]
    mantissa_bits: int


def peaks(hiddens: Sequence[Tensor], *, chunk_tokens: int, top_k: int) -> Peaks:
    """Split every (T, H) tensor into chunks and select each chunk's top_k entries by magnitude.

    float32 is rounded to bfloat16 first; bfloat16 and float16 are unchanged. Raise ProofError if no proof exists,
    because a sequence has no tokens or a chunk has fewer than top_k values. Raise ValueError for a caller's error: a
    wrong rank, dtype or count, mixed dtypes or devices, values that are not finite, or an empty list of sequences.
    """
    if chunk_tokens < 1 or top_k < 1:
        raise ValueError(f"chunk_tokens and top_k must be at least 1, got {chunk_tokens} and {top_k}")
    if not hiddens:
        raise ValueError("no sequences")
    rounded = [_sixteen_bit(hidden_TH, sequence) for sequence, hidden_TH in enumerate(hiddens)]
    if len({hidden_TH.dtype for hidden_TH in rounded}) > 1:
        raise ValueError(f"sequences differ in dtype: {[str(hidden_TH.dtype) for hidden_TH in rounded]}")
    if len({hidden_TH.device for hidden_TH in rounded}) > 1:
        raise ValueError(f"sequences differ in device: {[str(hidden_TH.device) for hidden_TH in rounded]}")

    # All chunks of the same size are searched together, whichever sequence they come from.
    pieces: dict[int, list[Tensor]] = defaultdict(list)
    places: dict[int, list[int]] = defaultdict(list)
    counts: list[int] = []
    for sequence, hidden_TH in enumerate(rounded):
        cut = _cut(hidden_TH, chunk_tokens, top_k, sequence)
        first = sum(counts)
        for bits_BX in cut:
            pieces[bits_BX.shape[1]].append(bits_BX)
            places[bits_BX.shape[1]] += range(first, first + len(bits_BX))
            first += len(bits_BX)
        counts.append(first - sum(counts))

    index_BK = torch.empty(sum(counts), top_k, dtype=torch.int64, device=rounded[0].device)
    bits_BK = torch.empty_like(index_BK)
    for size, same in pieces.items():
        bits_BX = same[0] if len(same) == 1 else torch.cat(same)
        index_BK[places[size]] = largest_BK = largest(bits_BX, top_k)
        bits_BK[places[size]] = bits_BX.gather(1, largest_BK).long() & 0xFFFF
    mantissa_bits = _MANTISSA_BITS[rounded[0].dtype]
    # Infinity and NaN have the largest magnitudes, so it is enough to check the selected entries.
    finite_B = ((bits_BK & MAGNITUDE) < MAGNITUDE >> mantissa_bits << mantissa_bits).all(dim=1)
    if not bool(finite_B.all()):
        raise ValueError(f"hidden states are not finite in chunk {int(finite_B.int().argmin())} of the batch")
    return Peaks(index_BK, bits_BK, counts, mantissa_bits)


def _cut(hidden_TH: Tensor, chunk_tokens: int, top_k: int, sequence: int) -> list[Tensor]:
    """Return the raw bits of one sequence's chunks in order, as one (B, X) int16 tensor per chunk size."""
    tokens, width = hidden_TH.shape
    if tokens == 0:
        raise ProofError("no tokens", sequence=sequence)
    remainder = tokens % chunk_tokens
    parts = torch.split(hidden_TH.view(torch.int16), [tokens - remainder, remainder])
    sizes = [chunk_tokens * width, remainder * width]
    present = [(part, size) for part, size in zip(parts, sizes, strict=True) if len(part)]
    shortest = min(size for _, size in present)
    if shortest < top_k:
        reason = f"a chunk has only {shortest} values: choose a top_k of at most {shortest} (now {top_k})"
        raise ProofError(reason, sequence=sequence)
    return [part.reshape(-1, size) for part, size in present]


def _sixteen_bit(hidden_TH: Tensor, sequence: int) -> Tensor:
    if hidden_TH.ndim != 2:
        raise ValueError(f"sequence {sequence}: expected (tokens, hidden), got {tuple(hidden_TH.shape)}")
    if hidden_TH.dtype == torch.float32:
        return hidden_TH.detach().to(torch.bfloat16)
    if hidden_TH.dtype not in _MANTISSA_BITS:
        raise ValueError(f"sequence {sequence}: {hidden_TH.dtype} is not bfloat16, float16 or float32")
    return hidden_TH.detach()


def largest(bits_BX: Tensor, top_k: int) -> Tensor:
    """Return the indices, (B, K) int64 in any order, of the largest magnitudes in each row of 16-bit floats (int16).

    Each row is laid out as a grid of 8 rows and N = X / 8 columns. The K columns with the largest maxima contain K
    magnitudes that are at least as large as any in other columns. So only the 8 · K values of these columns can be
    among the K largest. A recursive call on the N maxima finds these columns.
    """
    rows, values = bits_BX.shape
    columns = values // _FAN
    everywhere_X = torch.arange(values, device=bits_BX.device)
    if columns < top_k:
        return _best(bits_BX, everywhere_X.expand(rows, -1), top_k)
    maxima_BN = bits_BX.new_empty(rows, columns)
    slab = max(1, _SLAB_VALUES // values)
    for bits_SX, maxima_SN in zip(torch.split(bits_BX, slab), torch.split(maxima_BN, slab), strict=True):
        magnitude_SX = bits_SX[:, : _FAN * columns] & MAGNITUDE
        torch.amax(magnitude_SX.view(-1, _FAN, columns), 1, out=maxima_SN)
    column_BK = largest(maxima_BN, top_k)
    member_BC = (column_BK[:, None, :] + everywhere_X[: _FAN * columns : columns, None]).flatten(1)
    left_over_BC = everywhere_X[_FAN * columns :].expand(rows, -1)
    return _best(bits_BX, torch.cat([member_BC, left_over_BC], dim=1), top_k)


def _best(bits_BX: Tensor, candidate_BC: Tensor, top_k: int) -> Tensor:
    """Return the candidates with the largest magnitudes; among equal magnitudes, those with the lowest index."""
    magnitude_BC = bits_BX.gather(1, candidate_BC).long() & MAGNITUDE
    key_BC = magnitude_BC * bits_BX.shape[1] - candidate_BC
    return candidate_BC.gather(1, key_BC.topk(top_k, dim=1, sorted=False).indices)
