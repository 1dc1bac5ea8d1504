"""Arithmetic in GF(65497): batched polynomial interpolation and evaluation.

Invariant: every tensor going in and out holds int64 in [0, PRIME); products stay below 2^32, so int64 never
overflows.
Called by `build` (interpolate) and `verify` (evaluate). Leaves out subquadratic algorithms: at 128 points a
loop over points whose body works on the whole batch costs milliseconds.

Paper: TOPLOC section 3 (polynomial encoding). Shapes: B polynomials, K coefficients or points, N points.
"""

from functools import cache

import torch
from torch import Tensor

PRIME = 65497


@cache
def _inverse_table() -> Tensor:
    """inverse[a] = a^(PRIME-2) by repeated squaring (Fermat); inverse[0] = 0."""
    power = torch.arange(PRIME, dtype=torch.int64, device="cpu")
    table = torch.ones_like(power)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            table = table * power % PRIME
        power = power * power % PRIME
        exponent >>= 1
    return table


def inverse(value: Tensor) -> Tensor:
    """The multiplicative inverse of each entry of `value`, any shape. Raises ZeroDivisionError for a zero."""
    if bool((value == 0).any()):
        raise ZeroDivisionError(f"zero has no inverse in GF({PRIME})")
    return _inverse_table()[value]


def interpolate(x_BK: Tensor, y_BK: Tensor) -> Tensor:
    """Coefficients (B, K), ascending powers, of the polynomials of degree < K through the points of each row.

    Newton's divided differences, then expansion into powers of x. Raises ValueError if a row repeats an x.
    """
    x_sorted_BK = x_BK.sort(dim=1).values
    if bool((x_sorted_BK[:, 1:] == x_sorted_BK[:, :-1]).any()):
        raise ValueError("interpolation points must be distinct within a row")
    points = x_BK.shape[1]
    # The loops below run over points; rows of the transposed layout are contiguous.
    x_KB = x_BK.T.contiguous()
    newton_KB = y_BK.T.contiguous().clone()
    table = _inverse_table()
    for k in range(1, points):
        rise = newton_KB[k:] - newton_KB[k - 1 : -1]
        # A negative difference -d indexes from the end: table[PRIME - d], which is the inverse of -d.
        newton_KB[k:] = (rise * table[x_KB[k:] - x_KB[:-k]]).remainder_(PRIME)

    power_KB = torch.zeros_like(newton_KB)
    power_KB[0] = newton_KB[-1]
    for k in range(points - 2, -1, -1):  # power = power · (X − x_k) + newton_k
        filled = points - 1 - k
        scaled = power_KB[:filled] * x_KB[k]
        power_KB[1 : filled + 1] = power_KB[:filled].clone()
        power_KB[0] = newton_KB[k]
        power_KB[:filled] -= scaled
        power_KB[: filled + 1].remainder_(PRIME)
    return power_KB.T.contiguous()


def evaluate(coefficients_BK: Tensor, x_BN: Tensor) -> Tensor:
    """Values (B, N) of row b's polynomial at row b's points, by Horner's rule."""
    value_BN = torch.zeros_like(x_BN)
    for coefficient_B in coefficients_BK.flip(1).unbind(1):
        value_BN.mul_(x_BN).add_(coefficient_B[:, None]).remainder_(PRIME)
    return value_BN
