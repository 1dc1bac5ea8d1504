"""Arithmetic in GF(65497): batched polynomial interpolation and evaluation, on any device with float64.

Invariant: all values are integers in float64. Residues are below 2^16, products below 2^32, and a sum has at most a few
hundred products. So all values stay far below 2^50, the limit up to which `_reduce` is exact, and no result depends on
rounding, on the order of summation or on the device.
The algorithms are quadratic, because a few matrix products are fast enough at 128 points.

Paper: TOPLOC section 3 (polynomial encoding). Shapes: B polynomials, K coefficients or points, N points.
Powers of x are computed as A powers in steps of 1 times G powers in steps of A, with A · G >= K.
"""

from functools import cache

import torch
from torch import Tensor

PRIME = 65497


def interpolate(x_BK: Tensor, y_BK: Tensor) -> Tensor:
    """Return the coefficients (B, K), ascending powers, of the polynomials of degree < K through the points of each row.

    Inputs and output are int64 in [0, PRIME). Raise ValueError if a row repeats an x.

    The Lagrange form is the sum over i of w_i · M(X) / (X − x_i), where M is the product of all (X − x_i) and
    w_i = y_i / M'(x_i). Because M(X) / (X − x) = sum over j > k of M_j · x^(j−k−1) · X^k, coefficient k is the sum over
    j > k of M_j · S_(j−k−1), where S_m = sum over i of w_i · x_i^m.
    """
    points = x_BK.shape[1]
    step_BKA, stride_BKG = _powers(x_BK.double(), points)
    above_BK = torch.nn.functional.pad(_from_roots(x_BK.double())[:, 1:], (0, 1), value=1)  # M_1 .. M_K
    slope_BK = _combine(_reduce(above_BK * torch.arange(1, points + 1, device=x_BK.device)), step_BKA, stride_BKG)
    if bool((slope_BK == 0).any()):
        raise ValueError("interpolation points must be distinct within a row")
    weight_BK = (y_BK * inverse(slope_BK.long()) % PRIME).double()
    moments_BGA = _reduce(stride_BKG * weight_BK[:, :, None]).transpose(1, 2) @ step_BKA
    moments_BK = _reduce(moments_BGA).flatten(1)[:, :points]
    return _reduce(_product(above_BK, moments_BK.flip(1))[:, points - 1 : -1]).long()


def evaluate(coefficients_BK: Tensor, x_BN: Tensor) -> Tensor:
    """Return the values (B, N) of each row's polynomial at the row's points. All tensors are int64 in [0, PRIME)."""
    return _combine(coefficients_BK.double(), *_powers(x_BN.double(), coefficients_BK.shape[1])).long()


def inverse(value: Tensor) -> Tensor:
    """Return the multiplicative inverse of each entry of an int64 tensor. Raise ZeroDivisionError for a zero."""
    if bool((value == 0).any()):
        raise ZeroDivisionError(f"zero has no inverse in GF({PRIME})")
    return _inverse_table(value.device)[value]


@cache
def _inverse_table(device: torch.device) -> Tensor:
    """Return the table of inverses a^(PRIME-2) (Fermat), computed by repeated squaring. The entry for 0 is 0."""
    power = torch.arange(PRIME, dtype=torch.int64, device=device)
    table = torch.ones_like(power)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            table = table * power % PRIME
        power = power * power % PRIME
        exponent >>= 1
    return table


def _reduce(value: Tensor) -> Tensor:
    """Return value mod PRIME for integers 0 <= value < 2^50.

    The exact quotient (value + 0.5) / PRIME is at least 2^-17 away from any integer, and the two roundings in computing it
    change it by less than 2^-18. So its floor equals the floor of value / PRIME.
    """
    quotient = torch.add(value, 0.5).mul_(1 / PRIME).floor_()
    return torch.add(value, quotient, alpha=-PRIME)


def _powers(x_BN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return x^0 .. x^(A−1) as (B, N, A), and x^0, x^A .. x^((G−1)·A) as (B, N, G), with A · G >= count."""
    steps = 1 << (count.bit_length() // 2)
    step_BNA = _geometric(x_BN, steps)
    return step_BNA, _geometric(_reduce(step_BNA[:, :, -1] * x_BN), -(-count // steps))


def _geometric(x_BN: Tensor, count: int) -> Tensor:
    """Return x^0 .. x^(count−1) along a new last dimension, computed by repeated doubling."""
    power_BNC = torch.ones_like(x_BN)[:, :, None]
    while (have := power_BNC.shape[2]) < count:
        next_BN1 = _reduce(power_BNC[:, :, -1:] * x_BN[:, :, None])
        power_BNC = torch.cat([power_BNC, _reduce(power_BNC[:, :, : count - have] * next_BN1)], dim=2)
    return power_BNC


def _combine(coefficients_BK: Tensor, step_BNA: Tensor, stride_BNG: Tensor) -> Tensor:
    """Return the values (B, N). As x^(g·A+a) = stride_g · step_a, one matrix product gives all inner sums over a."""
    steps, strides = step_BNA.shape[2], stride_BNG.shape[2]
    padding = steps * strides - coefficients_BK.shape[1]
    coefficients_BGA = torch.nn.functional.pad(coefficients_BK, (0, padding)).view(-1, strides, steps)
    inner_BNG = _reduce(step_BNA @ coefficients_BGA.transpose(1, 2))
    return _reduce((inner_BNG * stride_BNG).sum(2))


def _from_roots(x_BK: Tensor) -> Tensor:
    """Return the product of all (X − x_i) without its leading X^K: (B, K), ascending. A tree of products gives it."""
    points = x_BK.shape[1]
    padding = (1 << (points - 1).bit_length()) - points  # extra factors X; they shift the product's powers
    lower_BFC = torch.nn.functional.pad(_reduce(PRIME - x_BK), (0, padding))[:, :, None]  # F factors of X^C + lower
    while (degree := lower_BFC.shape[2]) < points + padding:
        left, right = lower_BFC[:, 0::2], lower_BFC[:, 1::2]
        product = _product(left, right)
        product[:, :, degree:] += left + right
        lower_BFC = _reduce(product)
    return lower_BFC[:, 0, padding:]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products (..., 2C) of polynomials (..., C), not reduced mod PRIME. The last coefficient is 0."""
    count = left.shape[-1]
    product = left.new_zeros(*left.shape[:-1], 2 * count)
    for power in range(count):
        product[..., power : power + count].addcmul_(left[..., power : power + 1], right)
    return product
