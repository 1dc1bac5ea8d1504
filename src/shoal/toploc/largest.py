"""The top_k largest magnitudes of every row of raw 16-bit floats, all rows at once.

Invariant: the chosen magnitudes are those of a full sort. The choice among equal ones depends only on the values, not on
the device or on torch.topk, because all compared keys are distinct.
Called by `chunk`. Ignores the sign (bit 15). Without it, the bits of floats have the order of their magnitudes, with
infinity and NaN at the top.

A tournament, without a source. Shapes: B rows, X values, N columns, K = top_k, C candidates.
"""

import torch
from torch import Tensor

MAGNITUDE = 0x7FFF

_FAN = 8  # values per column; the fastest of 4, 8, 16, 32 at X = 131072, K = 128
_SLAB_VALUES = 2**18  # magnitudes computed together: they fit a core's cache


def largest(bits_BX: Tensor, top_k: int) -> Tensor:
    """Indices (B, K) int64, in no particular order, of each row's largest magnitudes; bits are int16.

    X is laid out as 8 rows of N = X / 8. The K columns with the largest maxima hold K magnitudes at least as large as
    any outside them, so only their 8 · K values compete. A recursive call on the N maxima finds these columns.
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
    """The candidates with the largest magnitudes. Of equal ones, those with the lowest index."""
    magnitude_BC = bits_BX.gather(1, candidate_BC).long() & MAGNITUDE
    key_BC = magnitude_BC * bits_BX.shape[1] - candidate_BC
    return candidate_BC.gather(1, key_BC.topk(top_k, dim=1, sorted=False).indices)
