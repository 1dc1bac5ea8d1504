"""Exact attention: a token's output has the same bits in whatever batch, packing, cache or process it is computed.

Equal formulas do not give equal bits: sums of floats depend on their order, and PyTorch's attention kernels choose it by
shape. Here the order is fixed. Queries meet the keys of their own sequence at absolute positions 0, 1, 2, ...:

    scores       one product over the head's depth, float32; keys a query may not see get -inf
    softmax      over all keys; a hidden key's weight is exactly 0, so how many hidden keys stand behind does not matter
    output       the sum over keys in tiles of TILE, one tile after the other

Invariant: the result of a row depends on its query and its visible keys alone. `numerics.refusal` finds out whether this
machine's float32 products and softmax keep it.
The same function serves prefill of packed trees (validator, learner) and decoding with a cache (engine). The backward need
not be exact: it is the cascade's (`attention`). Registered with transformers as "shoal_exact".
Left out: other devices than the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.model.attention import Layout, cascade_backward

NAME = "shoal_exact"
TILE = (
    256  # keys whose weighted values are summed by one product; larger products are split in ways that depend on shape
)
KEYS = 64  # keys of a sequence are rounded up to multiples of this
ROWS = 8  # rows of every product are rounded up to multiples of this: a product of few rows takes other kernels
QUERIES = 128  # queries of one sequence computed together; keys that none of them sees are left out
SCORES = 1 << 20  # scores in memory at once: what fits the CPU's cache


def attention(
    query_NRD: Tensor, key_NKD: Tensor, value_NKD: Tensor, hidden: "Hidden", with_logsumexp: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of N key heads, R rows of queries each. All float32; the queries carry the scale.

    Returns (output_NRD, logsumexp_NR of the scores, if wanted: for a backward). R is a multiple of ROWS, K of KEYS. Every
    query sees a key. Hidden keys and values must be finite.
    """
    scores_NRK = torch.bmm(query_NRD, key_NKD.transpose(1, 2))
    hidden.hide_(scores_NRK)
    weights_NRK = torch.softmax(scores_NRK, -1)
    output_NRD = torch.bmm(weights_NRK[..., :TILE], value_NKD[:, :TILE])
    for start in range(TILE, key_NKD.shape[1], TILE):
        tile = slice(start, start + TILE)
        output_NRD.baddbmm_(weights_NRK[..., tile], value_NKD[:, tile])
    if not with_logsumexp:
        return output_NRD, None
    return output_NRD, scores_NRK.amax(-1) - weights_NRK.amax(-1).log_()  # the largest weight is exp(0) / sum


@dataclass(frozen=True)
class Hidden:
    """Which keys are hidden: 0 or -inf, added to the scores from key `start` on; every query sees the keys before."""

    start: int
    bias: Tensor  # of the shape below, broadcast
    shape: tuple[int, ...]  # the scores' [N, R] written out, to which bias broadcasts

    def hide_(self, scores_NRK: Tensor) -> None:
        scores_NRK.view(*self.shape, scores_NRK.shape[-1])[..., self.start :].add_(self.bias)


def rounded(count: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-count // unit) * unit


# --- decoding: every row of a batch has one new token ------------------------------------------------------------------


class Step:
    """One step of decoding B sequences: row b sees the first lengths_B[b] keys of its cache, its own key included."""

    def __init__(self, lengths_B: Tensor) -> None:
        self.keys = rounded(int(lengths_B.max()), KEYS)
        self.start = int(lengths_B.min())
        self.query_BkRD = torch.empty(0)
        hidden_BK = torch.arange(self.start, self.keys) >= lengths_B[:, None]
        self.bias_B11K = torch.zeros(hidden_BK.shape).masked_fill_(hidden_BK, float("-inf"))[:, None, None]

    def attend(self, query_BhD: Tensor, key_BkKD: Tensor, value_BkKD: Tensor, scale: float) -> Tensor:
        """The cache's keys and values are float32, K of them. Returns output_BhD, float32."""
        batch, heads, depth = query_BhD.shape
        key_heads = key_BkKD.shape[1]
        sharing = heads // key_heads
        rows = rounded(sharing, ROWS)
        if self.query_BkRD.shape != (batch, key_heads, rows, depth):
            self.query_BkRD = torch.zeros(batch, key_heads, rows, depth)  # of all blocks; rows of padding stay 0
        query_BkRD = self.query_BkRD
        query_BkRD[:, :, :sharing] = query_BhD.view(batch, key_heads, sharing, depth)  # scaled in float32, not before
        query_BkRD[:, :, :sharing].mul_(scale)
        output_NRD, _ = attention(
            query_BkRD.flatten(0, 1),
            key_BkKD.flatten(0, 1),
            value_BkKD.flatten(0, 1),
            Hidden(self.start, self.bias_B11K, (batch, key_heads, rows)),
        )
        return output_NRD.view(batch, key_heads, rows, depth)[:, :, :sharing].reshape(batch, heads, depth)


# --- packed trees ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Consecutive queries of one sequence, as positions in the row of T, and the keys before and among them."""

    queries: range
    keys: tuple[range, ...]  # stretches of the row; together the sequence from its position 0 on
    first: int  # position of the first query within its sequence

    @property
    def n_keys(self) -> int:
        return self.first + len(self.queries)


@dataclass(frozen=True)
class Batch:
    """S blocks of similar size computed together: M queries and K keys each, padded."""

    query_SM: Tensor  # int64, positions in the row; 0 for padding
    padded_SM: Tensor  # bool
    key_SK: Tensor  # int64, positions in the row; 0 for padding
    bias_SM1K: Tensor  # float32, of the keys from `start` on: 0, or -inf where a query does not see the key
    start: int  # every query sees the keys before


def blocks(layout: Layout) -> list[Block]:
    """Every query of the row exactly once."""
    found: list[Block] = []

    def cut(parts: Sequence[range], first: int) -> None:
        """Blocks of the queries of the last part, whose sequence consists of all parts."""
        own = parts[-1]
        for at in range(0, len(own), QUERIES):
            queries = own[at : at + QUERIES]
            found.append(Block(queries, (*parts[:-1], range(own.start, queries.stop)), first + at))

    for span in layout.spans:
        prompt = range(span.start, span.branches)
        if len(span.completions) == 1:
            cut([range(span.start, span.end)], 0)
            continue
        cut([prompt], 0)
        at = span.branches
        for length in span.completions:
            cut([prompt, range(at, at + length)], len(prompt))
            at += length
    return found


def batches(layout: Layout, heads: int) -> list[Batch]:
    """Blocks by their size. A batch is as large as SCORES allows."""
    groups: list[list[Block]] = []
    for block in sorted(blocks(layout), key=lambda b: (-rounded(b.n_keys, KEYS), -len(b.queries))):
        if groups:
            largest = groups[-1][0]
            keys, queries = rounded(largest.n_keys, KEYS), rounded(len(largest.queries), ROWS)
            alike = rounded(block.n_keys, KEYS) == keys and 2 * len(block.queries) >= queries - ROWS
            if alike and (len(groups[-1]) + 1) * heads * queries * keys <= SCORES:
                groups[-1].append(block)
                continue
        groups.append([block])
    return [_batch(group) for group in groups]


def _batch(group: Sequence[Block]) -> Batch:
    queries = rounded(max(len(block.queries) for block in group), ROWS)
    keys = rounded(max(block.n_keys for block in group), KEYS)
    query_SM = torch.zeros(len(group), queries, dtype=torch.long)
    key_SK = torch.zeros(len(group), keys, dtype=torch.long)
    for s, block in enumerate(group):
        query_SM[s, : len(block.queries)] = torch.arange(block.queries.start, block.queries.stop)
        at = 0
        for part in block.keys:
            key_SK[s, at : at + len(part)] = torch.arange(part.start, part.stop)
            at += len(part)
    count_S = torch.tensor([len(block.queries) for block in group])
    first_S = torch.tensor([block.first for block in group])
    start = int(first_S.min()) + 1
    last_SM1 = (first_S[:, None] + torch.arange(queries))[..., None]  # the last key that a query sees
    hidden_SMK = torch.arange(start, keys) > last_SM1
    bias_SMK = torch.zeros(hidden_SMK.shape).masked_fill_(hidden_SMK, float("-inf"))
    return Batch(query_SM, torch.arange(queries) >= count_S[:, None], key_SK, bias_SMK[:, :, None], start)


class Plan:
    """A layout's batches for a model with this many heads, and where each position's output is found."""

    def __init__(self, layout: Layout, heads: int) -> None:
        self.batches = batches(layout, heads)
        index = torch.cat([batch.query_SM.flatten() for batch in self.batches])
        kept = ~torch.cat([batch.padded_SM.flatten() for batch in self.batches])
        self.home_T = torch.empty(layout.length, dtype=torch.long)
        self.home_T[index[kept]] = torch.arange(len(index))[kept]

    def home(self, parts: Sequence[Tensor]) -> Tensor:
        """The batches' results [key heads, S * M, sharing, ...] in the row's order: [T, heads, ...]."""
        return torch.cat(list(parts), 1).index_select(1, self.home_T).transpose(0, 1).flatten(1, 2)


def plan(layout: Layout, heads: int) -> Plan:
    """The layout's plan, made once: every block of the model asks for it."""
    if heads not in layout.derived:
        layout.derived[heads] = Plan(layout, heads)
    made: Plan = layout.derived[heads]
    return made


class _Packed(torch.autograd.Function):
    """Attention within a row of trees. Positions of the row behind the layout's last are padding: their output is 0."""

    @staticmethod
    def forward(
        ctx: Any, query_ThD: Tensor, key_TkD: Tensor, value_TkD: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        _, heads, depth = query_ThD.shape
        key_heads = key_TkD.shape[1]
        sharing = heads // key_heads
        query_kTgD = query_ThD.view(len(query_ThD), key_heads, sharing, depth).transpose(0, 1).float().mul(scale)
        key_kTD, value_kTD = (x.transpose(0, 1).float().contiguous() for x in (key_TkD, value_TkD))
        wanted = any(ctx.needs_input_grad)
        outputs, sums = [], []
        own = plan(layout, heads)
        for batch in own.batches:
            n, queries = batch.query_SM.shape
            query_NRD = query_kTgD.index_select(1, batch.query_SM.flatten()).view(key_heads * n, -1, depth)
            keys = batch.key_SK.flatten()
            key_NKD, value_NKD = (x.index_select(1, keys).view(key_heads * n, -1, depth) for x in (key_kTD, value_kTD))
            hidden = Hidden(batch.start, batch.bias_SM1K, (key_heads, n, queries, sharing))
            output_NRD, logsumexp_NR = attention(query_NRD, key_NKD, value_NKD, hidden, wanted)
            outputs.append(output_NRD.view(key_heads, n * queries, sharing, depth))
            if logsumexp_NR is not None:
                sums.append(logsumexp_NR.view(key_heads, n * queries, sharing))
        output_ThD = torch.zeros_like(query_ThD, memory_format=torch.contiguous_format)
        output_ThD[: layout.length] = own.home(outputs)
        if wanted:
            ctx.save_for_backward(query_ThD, key_TkD, value_TkD, output_ThD, own.home(sums))
            ctx.layout, ctx.scale = layout, scale
        return output_ThD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ThD: Tensor) -> tuple[Tensor | None, ...]:
        query_ThD, key_TkD, value_TkD, output_ThD, logsumexp_Th = ctx.saved_tensors
        sharing = query_ThD.shape[1] // key_TkD.shape[1]
        used = slice(0, ctx.layout.length)
        key_ThD, value_ThD = (x[used].repeat_interleave(sharing, 1) for x in (key_TkD, value_TkD))
        found = cascade_backward(
            grad_ThD[used], query_ThD[used], key_ThD, value_ThD, output_ThD[used], logsumexp_Th, ctx.layout, ctx.scale
        )
        padding = len(query_ThD) - ctx.layout.length
        query_grad, key_grad, value_grad = (F.pad(grad, (0, 0, 0, 0, 0, padding)) for grad in found)
        key_grad, value_grad = (
            grad.view(len(grad), -1, sharing, grad.shape[-1]).sum(2) for grad in (key_grad, value_grad)
        )
        return query_grad, key_grad, value_grad, None, None


# --- transformers' interface -------------------------------------------------------------------------------------------


def attend(
    module: Any,
    query_BhLD: Tensor,
    key_BkLD: Tensor,
    value_BkLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Returns (output_BLhD, None)."""
    scale = query_BhLD.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(layout, Step):
        output_BhD = layout.attend(query_BhLD[:, :, 0], key_BkLD, value_BkLD, scale)
        return output_BhD.to(query_BhLD.dtype)[:, None], None
    if layout is None:
        raise ValueError("exact attention needs a layout: call the model through tree.forward_hidden or the engine")
    parts = (x[0].transpose(0, 1) for x in (query_BhLD, key_BkLD, value_BkLD))
    output_ThD: Tensor = _Packed.apply(*parts, layout, scale)  # type: ignore[no-untyped-call]
    return output_ThD[None], None
