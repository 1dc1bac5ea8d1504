"""Exact attention: a token's output has the same bits in every batch, packing, cache and process.

Equal formulas do not give equal bits, because a sum of floats depends on the order of its terms, and PyTorch's
attention kernels choose this order by shape. Here the order is fixed. Queries attend to the keys of their own sequence,
at absolute positions 0, 1, 2, ...:

    scores       one product over the head's depth, float32; keys that a query may not see get -inf
    weights      softmax over all keys; a masked key's weight is exactly 0, so the number of masked keys does not matter
    output       the sum over keys in tiles of `tile()` keys, one tile after the other

Invariant: the result of a row depends only on its query and its visible keys. `numerics.refusal` tests whether this
machine's float32 products and softmax preserve this.
The same functions serve prefill of packed trees (validator, learner) and decoding with a cache (engine). The backward pass
is the cascade's (`attention`), which is not exact. In transformers, `attend` has the name "shoal_exact".
Left out: devices other than the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.model.attention import RowLayout, cascade_backward, restore_index

NAME = "shoal_exact"
TILES = (256, 192, 128)  # candidates for the number of keys that one product sums; see `tile`
KEYS = 16  # a sequence's number of keys is rounded up to a multiple of this
ROWS = 8  # the rows of a product are rounded up to a multiple of this, because few rows would use other kernels
QUERIES = 128  # queries of one sequence that are computed together; keys that none of them sees are left out
NEAR = 64  # sequences whose numbers of keys differ by less are computed together
CACHED = 1 << 18  # the most elements of a tensor that are used at once; they fit the CPU's cache


@dataclass(frozen=True)
class KeyMask:
    """A mask of the keys that queries may not see. All queries see the keys before `start`."""

    start: int
    bias_SM1K: Tensor  # float32, 0 or -inf, added to the scores of M queries in S sequences from key `start` on

    def apply_(self, scores_NRK: Tensor) -> None:
        """Add the bias to the scores. Their N * R rows are S sequences of M queries, with any number of heads each."""
        sequences, queries = self.bias_SM1K.shape[:2]
        scores_NRK.view(sequences, queries, -1, scores_NRK.shape[-1])[..., self.start :].add_(self.bias_SM1K)


def mask_after(last_SM: Tensor, start: int, keys: int) -> KeyMask:
    """Mask the keys after the last key that each query sees. `keys`: the number of all keys."""
    masked_SMK = torch.arange(start, keys) > last_SM[..., None]
    return KeyMask(
        start, torch.zeros(masked_SMK.shape, dtype=torch.float32).masked_fill_(masked_SMK, float("-inf"))[:, :, None]
    )


def attention(
    query_NRD: Tensor, key_NKD: Tensor, value_NKD: Tensor, mask: KeyMask, with_logsumexp: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax attention of one key head in N sequences, with R rows of queries each. All float32.

    The queries are scaled already. R is a multiple of ROWS, and K is a multiple of KEYS. Every query sees at least one
    key. Masked keys and values must be finite. Return output_NRD and, if requested, the scores' logsumexp_NR for the
    backward pass.
    """
    scores_NRK = torch.bmm(query_NRD, key_NKD.transpose(1, 2))
    mask.apply_(scores_NRK)
    top_NR = scores_NRK.amax(-1) if with_logsumexp else None
    weights_NRK = torch.softmax(scores_NRK, -1, out=scores_NRK)
    output_NRD = query_NRD.new_empty(query_NRD.shape)
    weighted_sum_(output_NRD, weights_NRK, value_NKD)
    if top_NR is None:
        return output_NRD, None
    return output_NRD, top_NR - weights_NRK.amax(-1).log_()  # the largest weight is exp(0) / sum


def weighted_sum_(output_NRD: Tensor, weights_NRK: Tensor, value_NKD: Tensor) -> None:
    size = tile()
    torch.bmm(weights_NRK[..., :size], value_NKD[:, :size], out=output_NRD)
    for start in range(size, value_NKD.shape[1], size):
        keys = slice(start, start + size)
        output_NRD.baddbmm_(weights_NRK[..., keys], value_NKD[:, keys])


@cache
def tile() -> int:
    """Return the largest of TILES for which a product over that many keys does not depend on masked keys at the end.

    Libraries split larger products, in places that depend on the number of keys: above 256 keys with MKL on an Intel
    CPU with AVX-512, above 192 on an AMD CPU. If no element of TILES is small enough, `numerics.refusal` says so.
    """
    draw = torch.Generator().manual_seed(0)
    weights_NRK, value_NKD = (
        torch.randn(2, ROWS, TILES[0], generator=draw, dtype=torch.float32),
        torch.randn(2, TILES[0], 64, generator=draw, dtype=torch.float32),
    )
    seen = torch.arange(TILES[0])
    for size in TILES:
        padded = [
            torch.bmm(weights_NRK[..., :size] * (seen[:size] < keys), value_NKD[:, :size])
            for keys in range(KEYS, size, KEYS)
        ]
        alone = [torch.bmm(weights_NRK[..., :keys], value_NKD[:, :keys]) for keys in range(KEYS, size, KEYS)]
        if all(map(torch.equal, padded, alone)):
            return size
    return TILES[-1]


@cache
def min_rows(depth: int) -> int:
    """Return the multiple to which decoding rounds up a sequence's queries: ROWS, or half of it if no bit changes."""
    draw = torch.Generator().manual_seed(0)
    query_NRD = torch.randn(4, ROWS, depth, generator=draw, dtype=torch.float32)
    few = slice(0, ROWS // 2)
    for keys in (KEYS, 3 * KEYS, 9 * KEYS, tile(), 2 * tile() + 5 * KEYS):
        key_NKD, value_NKD = torch.randn(2, 4, keys, depth, generator=draw, dtype=torch.float32)
        mask = KeyMask(keys, torch.zeros(1, 1, 1, 0, dtype=torch.float32))
        fewer_NRD, _ = attention(query_NRD[:, few], key_NKD, value_NKD, mask)
        if not torch.equal(fewer_NRD, attention(query_NRD, key_NKD, value_NKD, mask)[0][:, few]):
            return ROWS
    return ROWS // 2


def rounded(count: int, unit: int) -> int:
    """Round up to a multiple of `unit`."""
    return -(-count // unit) * unit


@dataclass(frozen=True)
class Part:
    """Queries computed together, and the keys that they see."""

    queries: slice  # sequences of a decoding step, or queries of each sequence in a `QueryBatch`
    keys: int  # number of keys, from the start of each sequence
    mask: KeyMask


# --- decoding: every row of a batch has one new token ------------------------------------------------------------------


class Step:
    """One step of decoding B sequences: row b sees the first lengths_B[b] keys of its cache, its own key included.

    All blocks of the model share the step and its buffers.
    """

    def __init__(self, lengths_B: Tensor) -> None:
        self.lengths_B = lengths_B
        self.parts: list[Part] = []
        self.query_BkRD = torch.empty(0, dtype=torch.float32)

    def attend(self, query_BhD: Tensor, key_BkKD: Tensor, value_BkKD: Tensor, scale: float) -> Tensor:
        """Attend to the cache's first keys and values, in any dtype. Return output_BhD, float32.

        Queries after the cache's last row are padding, so their output is 0.
        """
        padded, heads, depth = query_BhD.shape
        batch, key_heads, keys, _ = key_BkKD.shape
        sharing = heads // key_heads
        rows = rounded(sharing, min_rows(depth))
        if self.query_BkRD.shape != (batch, key_heads, rows, depth):
            self.parts = self._parts(max(1, CACHED // (key_heads * keys * depth)))
            self.query_BkRD = torch.zeros(batch, key_heads, rows, depth, dtype=torch.float32)  # rows of padding stay 0
            self.output_BkRD = torch.empty_like(self.query_BkRD)
        self.query_BkRD[:, :, :sharing] = query_BhD[:batch].view(batch, key_heads, sharing, depth)
        self.query_BkRD[:, :, :sharing].mul_(scale)  # after the conversion to float32
        for part in self.parts:  # as in `attention`, but values are converted to float32 only after the scores are done
            query_NRD = self.query_BkRD[part.queries].flatten(0, 1)
            scores_NRK = torch.bmm(query_NRD, _float(key_BkKD, part).transpose(1, 2))
            part.mask.apply_(scores_NRK)
            torch.softmax(scores_NRK, -1, out=scores_NRK)
            weighted_sum_(self.output_BkRD[part.queries].flatten(0, 1), scores_NRK, _float(value_BkKD, part))
        output_BhD = self.output_BkRD.new_zeros(padded, heads, depth)
        output_BhD[:batch].view(batch, key_heads, sharing, depth).copy_(self.output_BkRD[:, :, :sharing])
        return output_BhD

    def _parts(self, step: int) -> list[Part]:
        parts = []
        for at in range(0, len(self.lengths_B), step):
            lengths_N = self.lengths_B[at : at + step]
            keys = rounded(int(lengths_N.max()), KEYS)
            mask = mask_after(lengths_N[:, None] - 1, int(lengths_N.min()), keys)
            parts.append(Part(slice(at, at + len(lengths_N)), keys, mask))
        return parts


def _float(x_BkKD: Tensor, part: Part) -> Tensor:
    """Return the part's keys or values as x_NKD in float32. They are few enough to stay in the CPU's cache."""
    return x_BkKD[part.queries, :, : part.keys].float().flatten(0, 1)


# --- packed trees ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuerySpan:
    """The queries of one root, prompt or completion, as positions in the row of T."""

    queries: range
    before: Sequence[range]  # positions before the queries in their sequence; the queries see these keys, too

    @property
    def n_before(self) -> int:
        return sum(map(len, self.before))

    @property
    def n_keys(self) -> int:
        return self.n_before + len(self.queries)


@dataclass(frozen=True)
class QueryBatch:
    """S sequences of similar size computed together: M queries and K keys each, padded."""

    query_SM: Tensor  # int64, positions in the row; 0 for padding
    padded_SM: Tensor  # bool
    key_SK: Tensor  # int64, positions in the row; 0 for padding
    parts: list[Part]


def batches(layout: RowLayout, heads: int, depth: int) -> list[QueryBatch]:
    """Return batches that together hold every query of the row once. Each fits the CPU's cache if possible.

    `heads`: query heads per key head. `depth`: the size of a head.
    """
    groups: list[list[QuerySpan]] = []
    sequences = [QuerySpan(*part) for part in layout.parts() if len(part[0])]
    for sequence in sorted(sequences, key=lambda s: (-rounded(s.n_keys, NEAR), -len(s.queries))):
        if groups:
            largest = groups[-1][0]
            keys, queries = rounded(largest.n_keys, NEAR), len(largest.queries)
            alike = rounded(sequence.n_keys, NEAR) == keys and 2 * len(sequence.queries) >= queries - ROWS
            size = keys * max(heads * min(queries, QUERIES), depth)
            if alike and (len(groups[-1]) + 1) * size <= CACHED:
                groups[-1].append(sequence)
                continue
        groups.append([sequence])
    return [_batch(group) for group in groups]


def _batch(group: Sequence[QuerySpan]) -> QueryBatch:
    queries = rounded(max(len(sequence.queries) for sequence in group), ROWS)
    keys = rounded(max(sequence.n_keys for sequence in group), KEYS)
    query_SM = torch.zeros(len(group), queries, dtype=torch.long)
    key_SK = torch.zeros(len(group), keys, dtype=torch.long)
    for s, sequence in enumerate(group):
        query_SM[s, : len(sequence.queries)] = torch.arange(sequence.queries.start, sequence.queries.stop)
        keys_K = [torch.arange(part.start, part.stop) for part in (*sequence.before, sequence.queries)]
        key_SK[s, : sequence.n_keys] = torch.cat(keys_K)
    count_S = torch.tensor([len(sequence.queries) for sequence in group])
    first_S = torch.tensor([sequence.n_before for sequence in group])
    parts = [_part(slice(at, min(at + QUERIES, queries)), first_S, count_S) for at in range(0, queries, QUERIES)]
    return QueryBatch(query_SM, torch.arange(queries) >= count_S[:, None], key_SK, parts)


def _part(queries: slice, first_S: Tensor, count_S: Tensor) -> Part:
    keys = rounded(int((first_S + count_S.clamp(max=queries.stop)).max()), KEYS)
    last_SM = first_S[:, None] + torch.arange(queries.start, queries.stop)  # the last key that a query sees
    return Part(queries, keys, mask_after(last_SM, int(first_S.min()) + queries.start + 1, keys))


class Plan:
    """A layout's batches. `restore_T`: the index of each position's output among the batches' outputs."""

    def __init__(self, layout: RowLayout, heads: int, depth: int) -> None:
        self.batches = batches(layout, heads, depth)
        self.outputs = sum(batch.query_SM.numel() for batch in self.batches)
        places = [(batch.query_SM, batch.padded_SM) for batch in self.batches]
        self.restore_T = restore_index(places, layout.length)


def plan(layout: RowLayout, heads: int, depth: int) -> Plan:
    """Return the layout's plan. It is built once, because every block of the model uses it."""
    if (heads, depth) not in layout.derived:
        layout.derived[heads, depth] = Plan(layout, heads, depth)
    result: Plan = layout.derived[heads, depth]
    return result


class _Packed(torch.autograd.Function):
    """Attention within a row of trees. Positions after the layout's last one are padding, so their output is 0."""

    @staticmethod
    def forward(
        ctx: Any, query_ThD: Tensor, key_TkD: Tensor, value_TkD: Tensor, layout: RowLayout, scale: float
    ) -> Tensor:
        length, heads, depth = query_ThD.shape
        key_heads = key_TkD.shape[1]
        sharing = heads // key_heads
        wanted = any(ctx.needs_input_grad)
        own = plan(layout, sharing, depth)
        query_Tx = query_ThD.reshape(length, -1)
        key_Tx, value_Tx = (x.reshape(length, -1).float() for x in (key_TkD, value_TkD))
        output_Qx = query_Tx.new_empty(own.outputs, heads * depth)  # Q: the queries of all batches
        logsumexp_Qkg = key_Tx.new_empty(own.outputs if wanted else 0, key_heads, sharing)
        at = 0
        for batch in own.batches:
            n, queries = batch.query_SM.shape
            query_kSMgD = key_Tx.new_empty(key_heads, n, queries, sharing, depth)
            query_SMkgD = query_Tx.index_select(0, batch.query_SM.flatten()).view(n, queries, key_heads, sharing, depth)
            query_kSMgD.copy_(query_SMkgD.permute(2, 0, 1, 3, 4)).mul_(scale)
            key_SKkD, value_SKkD = (
                x.index_select(0, batch.key_SK.flatten()).view(n, -1, key_heads, depth) for x in (key_Tx, value_Tx)
            )
            done = slice(at, at := at + n * queries)
            output_SMkgD = output_Qx[done].view(n, queries, key_heads, sharing, depth)
            logsumexp_SMkg = logsumexp_Qkg[done].view(-1, queries, key_heads, sharing)
            for part in batch.parts:
                for k in range(key_heads):
                    query_SMgD = query_kSMgD[k, :, part.queries]
                    output_NRD, logsumexp_NR = attention(
                        query_SMgD.flatten(1, 2),
                        key_SKkD[:, : part.keys, k],
                        value_SKkD[:, : part.keys, k],
                        part.mask,
                        wanted,
                    )
                    output_SMkgD[:, part.queries, k] = output_NRD.view(query_SMgD.shape)
                    if logsumexp_NR is not None:
                        logsumexp_SMkg[:, part.queries, k] = logsumexp_NR.view(query_SMgD.shape[:3])
        output_Tx = torch.zeros_like(query_Tx)
        torch.index_select(output_Qx, 0, own.restore_T, out=output_Tx[: layout.length])
        output_ThD = output_Tx.view(query_ThD.shape)
        if wanted:
            logsumexp_Th = logsumexp_Qkg.index_select(0, own.restore_T).flatten(1)
            ctx.save_for_backward(query_ThD, key_TkD, value_TkD, output_ThD, logsumexp_Th)
            ctx.layout, ctx.scale = layout, scale
        return output_ThD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ThD: Tensor) -> tuple[Tensor | None, ...]:
        query_ThD, key_TkD, value_TkD, output_ThD, logsumexp_Th = ctx.saved_tensors
        sharing = query_ThD.shape[1] // key_TkD.shape[1]
        used = slice(0, ctx.layout.length)
        key_ThD, value_ThD = (x[used].repeat_interleave(sharing, 1) for x in (key_TkD, value_TkD))
        gradients = cascade_backward(
            grad_ThD[used], query_ThD[used], key_ThD, value_ThD, output_ThD[used], logsumexp_Th, ctx.layout, ctx.scale
        )
        padding = len(query_ThD) - ctx.layout.length
        query_grad, key_grad, value_grad = (F.pad(grad, (0, 0, 0, 0, 0, padding)) for grad in gradients)
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
    layout: RowLayout | Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface. Return (output_BLhD, None)."""
    scale = query_BhLD.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(layout, Step):
        output_BhD = layout.attend(query_BhLD[:, :, 0], key_BkLD, value_BkLD, scale)
        return output_BhD.to(query_BhLD.dtype)[:, None], None
    if layout is None:
        raise ValueError("exact attention needs a layout: call the model through tree.forward_hidden or the engine")
    parts = (x[0].transpose(0, 1) for x in (query_BhLD, key_BkLD, value_BkLD))
    output_ThD: Tensor = _Packed.apply(*parts, layout, scale)  # type: ignore[no-untyped-call]
    return output_ThD[None], None
