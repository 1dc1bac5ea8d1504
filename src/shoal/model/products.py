"""Matrix products that give a row the same bits beside any number of other rows, at any number of threads.

A product's bits depend on the order of the sum over its depth, and libraries choose that order by shape: with AMX, oneDNN
cuts the depth of some bf16 products in two, and MKL takes other float32 kernels for few rows. Small products are not cut: 16
rows on one thread are the reference here. A large product is computed in tiles of rows and columns, of sizes whose bits were
found equal to the reference's on this machine. `tiles` measures them once for a process, dtype, shape and thread count.

The data of the measurement shows every difference of order: the products of each sum cancel in pairs, at random places, so
that what is left is rounding alone.
Invariant: `linear` returns the reference's bits, or `OrderError` names the product that this machine cannot repeat.
Called by every linear layer of a model with exact numerics, and by the learner's logprobs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.errors import ShoalError
from shoal.model.threads import temporarily_on

UNIT = 16  # rows of the smallest product; counts of rows are padded to multiples of it
ROWS = (1024, 512, 256, 128, 64, 32)  # of the tiles that are tried
COLUMNS = (4096, 512, 256, 128)  # of the tiles that are tried

Tile = tuple[int, int]  # rows, columns


class OrderError(ShoalError):
    """A matrix product whose bits differ with threads or columns on this machine; the message says what to do."""


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, differentiable. Returns y_TN. Raises OrderError."""
    if not torch.is_grad_enabled():
        return _product(x_TK, weight_NK, bias_N)
    y_TN: Tensor = _Linear.apply(x_TK, weight_NK, bias_N)  # type: ignore[no-untyped-call]
    return y_TN


class Linear(nn.Linear):
    """nn.Linear with the reference's bits."""

    packed: Tensor | None = None  # the weights as oneDNN reads them, see `packed`

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is not None and input.shape[:-1].numel() % UNIT == 0:
            x_TK = input.flatten(0, -2)
            rows = _packed_rows(self.in_features, self.out_features, x_TK.dtype, torch.get_num_threads())
            if len(x_TK) <= 4 * rows:
                y_TN = [_packed_product(x, self.packed, self.bias) for x in torch.split(x_TK, rows)]
                return (y_TN[0] if len(y_TN) == 1 else torch.cat(y_TN)).view(*input.shape[:-1], -1)
        return linear(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], -1)


def repeatable_(model: nn.Module) -> None:
    """Replace every linear layer, sharing its weights."""
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear:
                with torch.device("meta"):
                    own = Linear(layer.in_features, layer.out_features, layer.bias is not None)
                own.weight, own.bias = layer.weight, layer.bias
                setattr(parent, name, own.train(layer.training))


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Within it, products of few rows read copies of the bf16 weights in oneDNN's layout, without arranging them each time.

    The weights must not change within it. Without oneDNN, or where the bits would differ, nothing is copied.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    try:
        for layer in layers:
            dtype = layer.weight.dtype
            if _packed_rows(layer.in_features, layer.out_features, dtype, torch.get_num_threads()):
                layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 2 * UNIT)
        yield
    finally:
        for layer in layers:
            layer.packed = None


@cache
def _packed_rows(depth: int, width: int, dtype: torch.dtype, threads: int) -> int:
    """The most rows whose product with packed weights has the reference's bits; 0: none."""
    if dtype != torch.bfloat16 or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    x_RK, weight_CK = cancelling(4 * UNIT, width, depth, dtype)
    copied = torch.ops.mkldnn._reorder_linear_weight(weight_CK, 2 * UNIT)
    expected_RC = _product(x_RK, weight_CK)
    for rows in (4 * UNIT, 2 * UNIT, UNIT):
        found = torch.cat([_packed_product(x, copied, None) for x in torch.split(x_RK, rows)])
        if torch.equal(found, expected_RC):
            counts = range(UNIT, rows, UNIT)  # what is left over may be fewer
            if all(torch.equal(_packed_product(x_RK[:n], copied, None), expected_RC[:n]) for n in counts):
                return rows
    return 0


def _packed_product(x_RK: Tensor, copied: Tensor, bias_N: Tensor | None) -> Tensor:
    y_RN: Tensor = torch.ops.mkldnn._linear_pointwise(x_RK, copied, None, "none", [], "")
    return y_RN if bias_N is None else y_RN.add_(bias_N)


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
    allowed = tiles(x_TK.shape[1], len(weight_NK), x_TK.dtype, torch.get_num_threads())
    parts = cut(len(x_TK), allowed)
    if len(parts) == 1 and parts[0][0] == len(x_TK) and parts[0][1] >= len(weight_NK):
        y_TN = torch.mm(x_TK, weight_NK.T)
        return y_TN if bias_N is None else y_TN.add_(bias_N)  # in every case after rounding
    y_TN = x_TK.new_empty(len(x_TK), len(weight_NK))
    start = 0
    for rows, columns in parts:
        x_RK = x_TK[start : start + rows]
        if missing := rows - len(x_RK):
            y_TN[start:] = _in_columns(
                F.pad(x_RK, (0, 0, 0, missing)), weight_NK, columns, y_TN.new_empty(rows, len(weight_NK))
            )[: len(x_RK)]
        else:
            _in_columns(x_RK, weight_NK, columns, y_TN[start : start + rows])
        start += rows
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def _in_columns(x_RK: Tensor, weight_NK: Tensor, columns: int, y_RN: Tensor) -> Tensor:
    for weight_CK, y_RC in zip(torch.split(weight_NK, columns), torch.split(y_RN, columns, 1), strict=True):
        torch.mm(x_RK, weight_CK.T, out=y_RC)
    return y_RN


def cut(count: int, allowed: tuple[Tile, ...]) -> list[Tile]:
    """Tiles, largest first, that together hold `count` rows; the last one may be up to half empty."""
    parts: list[Tile] = []
    for tile, smaller in zip_longest(allowed, allowed[1:]):
        worth = max(smaller[0], tile[0] // 2) if smaller else 0  # more rows than this are worth a tile
        while count > worth:
            parts.append(tile)
            count -= tile[0]
    return parts


@cache
def tiles(depth: int, width: int, dtype: torch.dtype, threads: int) -> tuple[Tile, ...]:
    """The tiles with the reference's bits, by rows, descending; for each count of rows the widest. Raises OrderError."""
    most = COLUMNS[0] + width % COLUMNS[0] if width > COLUMNS[0] else width  # every width of a piece occurs
    x_RK, weight_CK = cancelling(ROWS[0], most, depth, dtype)
    with temporarily_on(1):
        parts = [_in_columns(x, weight_CK, COLUMNS[1], x.new_empty(UNIT, most)) for x in torch.split(x_RK, UNIT)]
        expected_RC = torch.cat(parts)
    found: list[Tile] = []
    with temporarily_on(threads):
        for rows in (*ROWS, UNIT):
            for wide in COLUMNS:
                if wide >= width and wide != COLUMNS[0]:  # one piece in any case
                    continue
                parts = [_in_columns(x, weight_CK, wide, x.new_empty(rows, most)) for x in torch.split(x_RK, rows)]
                if torch.equal(torch.cat(parts), expected_RC):
                    found.append((rows, wide))
                    break
    if not found or found[-1][0] != UNIT:
        raise OrderError(
            f"{dtype} products of depth {depth} and {width} columns do not repeat to the bit at {threads} threads on this "
            'machine; set model.numerics = "fast" or another model.dtype'
        )
    return tuple(found)


def cancelling(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x_RK, weight_CK) whose product is 0 but for rounding: another order of summing gives other bits almost everywhere."""
    draw = torch.Generator().manual_seed(0)
    half = (depth + 1) // 2
    x_RK = torch.randn(rows, half, generator=draw).to(dtype)
    weight_CK = torch.randn(columns, half, generator=draw).to(dtype)
    mixed_K = torch.randperm(2 * half, generator=draw)[:depth]
    return torch.cat([x_RK, -x_RK], 1)[:, mixed_K].contiguous(), torch.cat([weight_CK] * 2, 1)[:, mixed_K].contiguous()
