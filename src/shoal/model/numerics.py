"""Exact or fast: whether a token's results have the same bits in every batch and process.

    exact   a token's hidden state, logits and logprob depend only on its own prefix and the weights, because products and
            attention sum in a fixed order (`products`, `exact`). Machines with equal fingerprints get the same bits.
    fast    the fastest kernels (`attention`); rounding depends on batch and packing.

Invariant: a model keeps the numerics it was loaded with.
Left out: devices other than the CPU. A GPU needs products and attention that do not depend on the batch, and a test of them.
"""

import logging
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.model import exact, products
from shoal.model.dtype import DtypeName

log = logging.getLogger(__name__)

Numerics = Literal["exact", "fast"]

# A packed row is padded to a multiple of this length, because kernels compute the remainder of a vector differently.
ROW_UNIT = products.UNIT
SHAPES = ((64, 192), (576, 192))  # depths and columns of the products that `refusal` tries


def of(model: Any) -> Numerics:
    """Return the numerics that the model was loaded with."""
    return "exact" if model.config._attn_implementation == exact.NAME else "fast"


def pick(wanted: str, dtype: DtypeName, device: str) -> Numerics:
    """Return the numerics to load a model with. "auto" is exact where possible, and fast elsewhere.

    Raise ShoalError if `wanted` is "exact" and this machine cannot compute exactly.
    """
    if wanted == "fast":
        return "fast"
    why = refusal(dtype, device)
    if why is None:
        return "exact"
    if wanted == "exact":
        raise ShoalError(f'model.numerics = "exact" is not possible: {why}; set model.numerics = "auto" or "fast"')
    log.info("numerics are fast: %s", why)
    return "fast"


@cache
def refusal(dtype: DtypeName, device: str = "cpu") -> str | None:
    """Return why this machine cannot compute exactly; None if it can. Takes a fraction of a second, once per process."""
    if torch.device(device).type != "cpu":
        return f"on {device} products and attention depend on the batch"
    try:
        for depth, width in SHAPES:
            products.check(depth, width, getattr(torch, dtype))
    except products.OrderError as error:
        return str(error)
    return _attention_refusal()


def _attention_refusal() -> str | None:
    """Describe a shape for which a row's attention depends on other rows or masked keys; None if there is none."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(6, n, 64, generator=draw, dtype=torch.float32) for n in (3 * exact.QUERIES, 640, 640)
    )

    def attend(heads: int, rows: int, keys: int, seen: int) -> Tensor:
        mask = exact.mask_after(torch.tensor([[seen - 1]]), 1, keys)
        return exact.attention(query[:heads, :rows], key[:heads, :keys], value[:heads, :keys], mask)[0]

    for seen in (40, 130, 300):
        expected = attend(6, 3 * exact.QUERIES, 640, seen)
        for heads in (1, 6):
            for rows in (exact.ROWS, 24, 128):
                for keys in (exact.rounded(seen, exact.KEYS), 512):
                    if not torch.equal(attend(heads, rows, keys, seen), expected[:heads, :rows]):
                        return f"attention of {heads} heads, {rows} rows and {keys} keys depends on a row's neighbours"
    return None
