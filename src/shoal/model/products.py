"""Matrix products that give a row the same bits beside any number of other rows, on any number of threads.

A product's bits depend on the order of the sum over its depth, and libraries choose that order by shape: with AMX, oneDNN
splits the depth of some bf16 products in two, and MKL uses other float32 kernels for few rows. Small products are not
split, so the reference here is a product of UNIT rows and the narrowest of COLUMNS on one thread. A larger product is
computed in the first way that gives the reference's bits: as a whole, in wide columns, or transposed. A transposed
product is weights times rows. In bf16 it saves time, because libraries first rearrange weights that are the second
factor, but not the first. If no way gives the reference's bits, fewer threads are tried (some libraries split the depth
among 12 threads, but not among 8), and then half the rows.
`_way` finds the way by measuring, once per process, shape, dtype and number of threads.

The measurement's data reveals every difference in order: the terms of each sum cancel in pairs, at random places, so that
only rounding errors remain.
Invariant: `linear` returns the reference's bits, or raises an `OrderError` that names the product.
"""

from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.errors import ShoalError
from shoal.model.dtype import use_threads

UNIT = 16  # rows of the smallest product; counts of rows are padded to multiples of it
MAX_ROWS = 4096  # largest number of rows in one product
FEW = 128  # up to this many rows, a bf16 product is transposed if possible
COLUMNS = (4096, 512, 256, 128)  # limits on the columns of one product, to be tried in this order
DISTINCT = 256  # different rows in the measurement's data; larger products repeat them

Way = Callable[[Tensor, Tensor, Tensor], None]  # (x_RK, weight_NK, y_RN): writes y


class OrderError(ShoalError):
    """A matrix product's bits depend on threads or columns on this machine. The message says what to do."""


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return y_TN = x @ weight.T + bias, differentiable. Raise OrderError."""
    if not torch.is_grad_enabled():
        return _product(x_TK, weight_NK, bias_N)
    y_TN: Tensor = _Linear.apply(x_TK, weight_NK, bias_N)  # type: ignore[no-untyped-call]
    return y_TN


class Linear(nn.Linear):
    """nn.Linear with the reference's bits."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], -1)


def use_exact_products_(model: nn.Module) -> None:
    """Replace every linear layer by a `Linear` that shares its weights."""
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear:
                with torch.device("meta"):
                    own = Linear(layer.in_features, layer.out_features, layer.bias is not None)
                own.weight, own.bias = layer.weight, layer.bias
                setattr(parent, name, own.train(layer.training))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return _product(x_TK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            grad_TN @ weight_NK if wants_x else None,
            grad_TN.T @ x_TK if wants_weight else None,
            grad_TN.sum(0) if wants_bias else None,
        )


def _product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    count = len(x_TK)
    if missing := -count % UNIT:
        x_TK = F.pad(x_TK, (0, 0, 0, missing))
    y_TN = x_TK.new_empty(len(x_TK), len(weight_NK))
    for start in range(0, len(x_TK), MAX_ROWS):
        _write(x_TK[start : start + MAX_ROWS], weight_NK, y_TN[start : start + MAX_ROWS])
    if missing:
        y_TN = y_TN[:count]
    return y_TN if bias_N is None else y_TN.add_(bias_N)  # the bias is always added after rounding


def _write(x_RK: Tensor, weight_NK: Tensor, y_RN: Tensor) -> None:
    rows = len(x_RK)
    way = _way(rows, x_RK.shape[1], len(weight_NK), x_RK.dtype, torch.get_num_threads())
    if way is not None:
        way(x_RK, weight_NK, y_RN)
        return
    first = 1 << (rows - 1).bit_length() - 1  # the largest power of two below `rows`
    _write(x_RK[:first], weight_NK, y_RN[:first])
    _write(x_RK[first:], weight_NK, y_RN[first:])


def _in_columns(x_RK: Tensor, weight_NK: Tensor, y_RN: Tensor, columns: int) -> None:
    for weight_CK, y_RC in _pieces(weight_NK, y_RN, columns):
        torch.mm(x_RK, weight_CK.T, out=y_RC)


def _transposed(x_RK: Tensor, weight_NK: Tensor, y_RN: Tensor, columns: int) -> None:
    for weight_CK, y_RC in _pieces(weight_NK, y_RN, columns):
        y_RC.copy_(torch.mm(weight_CK, x_RK.T).T)


def _pieces(weight_NK: Tensor, y_RN: Tensor, columns: int) -> Iterable[tuple[Tensor, Tensor]]:
    if len(weight_NK) <= columns:  # most products
        return [(weight_NK, y_RN)]
    return zip(torch.split(weight_NK, columns), torch.split(y_RN, columns, 1), strict=True)


def _on_threads(way: Way, threads: int, x_RK: Tensor, weight_NK: Tensor, y_RN: Tensor) -> None:
    with use_threads(threads):
        way(x_RK, weight_NK, y_RN)


@cache
def _way(rows: int, depth: int, width: int, dtype: torch.dtype, threads: int) -> Way | None:
    """Return the first way that gives the reference's bits. Otherwise return None, or raise OrderError at UNIT rows."""
    # Enough columns for a full piece and for the last piece of a wide product.
    columns = COLUMNS[0] + width % COLUMNS[0] if width > COLUMNS[0] else width
    x_DK, weight_CK, expected_DC = _reference(depth, columns, dtype)
    x_RK = x_DK.repeat(-(-rows // DISTINCT), 1)[:rows]
    y_RC = x_RK.new_empty(rows, columns)
    fewer = [1 << bits for bits in reversed(range(1, (threads - 1).bit_length()))]  # powers of two, without 1
    for count in (threads, *fewer):
        for way in ways(rows, width, dtype):
            _on_threads(way, count, x_RK, weight_CK, y_RC)
            if all(torch.equal(y_DC, expected_DC[: len(y_DC)]) for y_DC in torch.split(y_RC, DISTINCT)):
                return way if count == threads else partial(_on_threads, way, count)
    if rows > UNIT:
        return None
    raise OrderError(
        f"{dtype} products of depth {depth} and {width} columns on {threads} threads do not have the same bits each time "
        'on this machine; set model.numerics = "fast" or another model.dtype'
    )


def ways(rows: int, width: int, dtype: torch.dtype) -> list[Way]:
    """Return the ways to try, fastest first."""
    columns = [c for n, c in enumerate(COLUMNS) if n == 0 or c < width]
    result: list[Way] = [partial(_in_columns, columns=c) for c in columns]
    if dtype == torch.bfloat16:  # libraries do not rearrange float32 weights, so transposing saves nothing
        result.insert(0 if rows <= FEW else min(3, len(result)), partial(_transposed, columns=COLUMNS[0]))
    return result


@lru_cache(maxsize=8)  # enough for the shapes of one model
def _reference(depth: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return cancelling rows and weights, and their product, computed in the smallest pieces on one thread."""
    x_DK, weight_CK = cancelling(DISTINCT, columns, depth, dtype)
    y_DC = x_DK.new_empty(DISTINCT, columns)
    with use_threads(1):
        for x_RK, y_RC in zip(torch.split(x_DK, UNIT), torch.split(y_DC, UNIT), strict=True):
            _in_columns(x_RK, weight_CK, y_RC, COLUMNS[-1])
    return x_DK, weight_CK, y_DC


def check(depth: int, width: int, dtype: torch.dtype) -> None:
    """Raise OrderError if products of this shape cannot have the reference's bits on this machine."""
    _way(UNIT, depth, width, dtype, torch.get_num_threads())


def cancelling(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (x_RK, weight_CK) whose product is only rounding errors, so that another order of summing changes it."""
    draw = torch.Generator().manual_seed(0)
    half = (depth + 1) // 2
    x_RK = torch.randn(rows, half, generator=draw, dtype=torch.float32).to(dtype)
    weight_CK = torch.randn(columns, half, generator=draw, dtype=torch.float32).to(dtype)
    mixed_K = torch.randperm(2 * half, generator=draw)[:depth]
    return torch.cat([x_RK, -x_RK], 1)[:, mixed_K].contiguous(), torch.cat([weight_CK] * 2, 1)[:, mixed_K].contiguous()
