"""Attention over trees packed into one row: a token attends to its prompt and to earlier tokens of its completion.

If all prompts share a prefix, the row contains this prefix once, before all trees. It is called the root.

Three kernels compute the same result; the device decides which one runs:

    cascade  CPU. The root, each prompt and each completion attend causally to themselves, in batches of similar length.
             Then the completions of a tree attend to its prompt, and all trees attend to the root. The root's keys are
             read once for all trees. A query's results are merged by their log-sum-exps. No masked score is computed.
    flex     CUDA. PyTorch's flex_attention with a block mask, compiled. Masked blocks are skipped.
    masked   other devices, and the reference in tests. The mask is dense, so the cost grows with the length squared.

The backward pass of a merged softmax needs no new formula: the flash backward of each part, given the *merged* output and
log-sum-exp, yields that part's share of the gradients, as in ring attention (Liu et al. 2023, arXiv 2310.01889).
In transformers, `attend` has the name "shoal". Without a layout (decoding with a cache) it calls transformers' SDPA.

Invariant: a token's output depends only on its prompt and its completion, whatever else is in the row.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

NAME = "shoal"
BLOCK = 128  # flex attention computes or skips tiles of 128 queries and 128 keys, as by default in PyTorch
SHORT = 256  # up to this many queries, gradients are computed in fp32, which is 1.2 to 5 times faster than bf16
UNEVEN = 0.75  # a segment shorter than this share of its batch's longest one starts a new batch

Kernel = Literal["cascade", "flex", "masked"]

_flexing = threading.Lock()  # PyTorch builds and compiles block masks with global variables
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Span:
    """One tree's place in the row: its prompt without the root, then its completions, without gaps."""

    start: int
    prompt: int  # tokens, without the root
    completions: tuple[int, ...]  # tokens of each completion

    @property
    def branches(self) -> int:
        """The position where the completions begin."""
        return self.start + self.prompt

    @property
    def end(self) -> int:
        return self.branches + sum(self.completions)

    def parts(self) -> Iterator[tuple[range, range]]:
        """Yield each causal part (the prompt, each completion), and the prompt range that it also attends to.

        A tree of one completion is one part.
        """
        if len(self.completions) == 1:
            yield range(self.start, self.end), range(0)
            return
        prompt = range(self.start, self.branches)
        yield prompt, range(0)
        at = self.branches
        for length in self.completions:
            yield range(at, at + length), prompt
            at += length


@dataclass(frozen=True)
class Segments:
    """Segments of similar length as one batch, padded at the end."""

    index_BL: Tensor  # int64, positions in the row; 0 for padding
    padded_BL11: Tensor  # bool
    start: int | None  # the first segment's position, if all are contiguous in the row and none is padded


class RowLayout:
    """The attention pattern of a row of T positions, and the kernel that computes it on `device`.

    `root`: positions at the start of the row that belong to every tree's prompt.
    """

    def __init__(
        self, spans: Sequence[Span], device: torch.device, kernel: Kernel | None = None, root: int = 0
    ) -> None:
        self.spans, self.root = list(spans), root
        self.device = device
        self.kernel = kernel or {"cpu": "cascade", "cuda": "flex"}.get(device.type, "masked")
        self.length = spans[-1].end if spans else 0
        self.derived: dict[tuple[int, int], Any] = {}  # the plans of exact attention, by heads and depth

    def to(self, device: torch.device) -> "RowLayout":
        """Return this layout on a device. The newest results are cached, so policy and reference share masks."""
        return self if device == self.device else _moved(tuple(self.spans), device, self.root)

    def parts(self) -> Iterator[tuple[range, tuple[range, range]]]:
        """Yield each causal range, and the ranges of root and prompt that come before it in its sequence."""
        if self.root:
            yield range(self.root), (range(0), range(0))
        for span in self.spans:
            for own, prompt in span.parts():
                yield own, (range(self.root), prompt)

    @cached_property
    def segments(self) -> list[Segments]:
        """The causal ranges, in batches of similar length."""
        segments = [(own.start, len(own)) for own, _ in self.parts()]
        segments.sort(key=lambda segment: -segment[1])
        batches: list[list[tuple[int, int]]] = []
        for segment in segments:
            if not batches or segment[1] < UNEVEN * batches[-1][0][1]:
                batches.append([])
            batches[-1].append(segment)
        return [self._batch(batch) for batch in batches if batch[0][1]]

    def _batch(self, segments: list[tuple[int, int]]) -> Segments:
        start_B, length_B = torch.tensor(segments, device=self.device).T
        offset_L = torch.arange(segments[0][1], device=self.device)
        padded_BL = offset_L >= length_B[:, None]
        index_BL = (start_B[:, None] + offset_L).masked_fill(padded_BL, 0)
        first, length = segments[0]
        together = segments == [(first + number * length, length) for number in range(len(segments))]
        return Segments(index_BL, padded_BL[:, :, None, None], first if together else None)

    @cached_property
    def restore_T(self) -> Tensor:
        return restore_index([(batch.index_BL, batch.padded_BL11) for batch in self.segments], self.length)

    @cached_property
    def in_order(self) -> bool:
        """Whether `restore_T` leaves everything in place."""
        return bool((self.restore_T == torch.arange(self.length, device=self.device)).all())

    def restore(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the batches' results back into the row's order."""
        together = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        return together[: self.length] if self.in_order else together.index_select(0, self.restore_T)

    @cached_property
    def across(self) -> list[tuple[slice, slice]]:
        """The (queries, keys) of non-causal attention: completions to their tree's prompt, and trees to the root."""
        pairs = [
            (slice(span.branches, span.end), slice(span.start, span.branches))
            for span in self.spans
            if len(span.completions) > 1 and span.prompt and span.end > span.branches
        ]
        if self.root:
            pairs.append((slice(self.root, self.length), slice(self.root)))
        return pairs

    @cached_property
    def owners(self) -> tuple[Tensor, Tensor]:
        """Each position's tree (-1: the root) and its branch of that tree (0: the prompt): tree_T and branch_T."""
        tree, branch = [-1] * self.root, [0] * self.root
        for i, span in enumerate(self.spans):
            tree += [i] * (span.end - span.start)
            for b, length in enumerate([span.prompt, *span.completions]):
                branch += [b] * length
        return torch.tensor(tree, device=self.device), torch.tensor(branch, device=self.device)

    @cached_property
    def mask_11TT(self) -> Tensor:
        """Whether each query (row) attends to each key (column)."""
        at_T = torch.arange(self.length, device=self.device)
        return self.sees(at_T[:, None], at_T)[None, None]

    @cached_property
    def block_mask(self) -> Any:
        return block_mask(self.length, self.sees, self.device)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether queries attend to keys. Both are given by their positions (int64), which are broadcast."""
        tree_T, branch_T = self.owners
        same_branch = (branch_T[query] == branch_T[key]) | (branch_T[key] == 0)
        same_tree = (tree_T[query] == tree_T[key]) & same_branch
        return (same_tree | (tree_T[key] < 0)) & (key <= query)


def restore_index(batches: Sequence[tuple[Tensor, Tensor]], length: int) -> Tensor:
    """For each position of a row, return its index among the positions of all batches, flattened and concatenated.

    A batch is two tensors of the same shape: positions, and whether each is padding.
    """
    index = torch.cat([positions.flatten() for positions, _ in batches])
    kept = ~torch.cat([padded.flatten() for _, padded in batches])
    restore_T = torch.empty(length, dtype=torch.long, device=index.device)
    restore_T[index[kept]] = torch.arange(len(index), device=index.device)[kept]
    return restore_T


@lru_cache(maxsize=2)
def _moved(spans: tuple[Span, ...], device: torch.device, root: int) -> RowLayout:
    return RowLayout(spans, device, root=root)


def attend(
    module: Any,
    query_1hTD: Tensor,
    key_1kTD: Tensor,
    value_1kTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface. Return (output_1ThD, None)."""
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1hTD, key_1kTD, value_1kTD, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return plain
    scale = query_1hTD.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.kernel == "flex":
        with _flexing:
            output_1hTD = _flex()(
                query_1hTD, key_1kTD, value_1kTD, block_mask=layout.block_mask, scale=scale, enable_gqa=True
            )
        return output_1hTD.transpose(1, 2), None
    sharing = query_1hTD.shape[1] // key_1kTD.shape[1]  # query heads per key head
    key_1hTD, value_1hTD = (x.repeat_interleave(sharing, 1) if sharing > 1 else x for x in (key_1kTD, value_1kTD))
    if layout.kernel == "masked":
        output_1hTD = F.scaled_dot_product_attention(
            query_1hTD, key_1hTD, value_1hTD, attn_mask=layout.mask_11TT, scale=scale
        )
        return output_1hTD.transpose(1, 2), None
    parts = (x[0].transpose(0, 1) for x in (query_1hTD, key_1hTD, value_1hTD))
    output_ThD: Tensor = _Cascade.apply(*parts, layout, scale)  # type: ignore[no-untyped-call]
    return output_ThD[None], None


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_ThD: Tensor, key_ThD: Tensor, value_ThD: Tensor, layout: RowLayout, scale: float
    ) -> Tensor:
        outputs, sums = [], []
        for batch in layout.segments:
            inputs = (_gather(x, batch) for x in (query_ThD, key_ThD, value_ThD))
            output_BhLD, logsumexp_BhL = _flash(*inputs, 0.0, True, scale=scale)
            outputs.append(output_BhLD.transpose(1, 2).flatten(0, 1))
            sums.append(logsumexp_BhL.transpose(1, 2).flatten(0, 1))
        output_ThD, logsumexp_Th = layout.restore(outputs), layout.restore(sums)
        for queries, keys in layout.across:
            output_1hQD, logsumexp_1hQ = _flash(
                _row(query_ThD, queries), _row(key_ThD, keys), _row(value_ThD, keys), 0.0, False, scale=scale
            )
            other_Qh = logsumexp_1hQ[0].T
            own_Qh = logsumexp_Th[queries]
            merged_Qh = torch.logaddexp(own_Qh, other_Qh)
            output_ThD[queries] = (
                output_ThD[queries] * (own_Qh - merged_Qh).exp()[..., None]
                + output_1hQD[0].transpose(0, 1) * (other_Qh - merged_Qh).exp()[..., None]
            )
            logsumexp_Th[queries] = merged_Qh
        ctx.save_for_backward(query_ThD, key_ThD, value_ThD, output_ThD, logsumexp_Th)
        ctx.layout, ctx.scale = layout, scale
        return output_ThD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ThD: Tensor) -> tuple[Tensor | None, ...]:
        query_ThD, key_ThD, value_ThD, output_ThD, logsumexp_Th = ctx.saved_tensors
        gradients = cascade_backward(
            grad_ThD, query_ThD, key_ThD, value_ThD, output_ThD, logsumexp_Th, ctx.layout, ctx.scale
        )
        return (*gradients, None, None)


def cascade_backward(
    grad_ThD: Tensor,
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    output_ThD: Tensor,
    logsumexp_Th: Tensor,
    layout: RowLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from the output and the log-sum-exp of each query's scores."""
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for batch in layout.segments:
        grad_BhLD = _gather(grad_ThD, batch)
        if batch.start is None:
            grad_BhLD = grad_BhLD.masked_fill(batch.padded_BL11.transpose(1, 2), 0)
        gradients = _flash_backward(
            grad_BhLD,
            _gather(query_ThD, batch),
            _gather(key_ThD, batch),
            _gather(value_ThD, batch),
            _gather(output_ThD, batch),
            _gather(logsumexp_Th[..., None], batch)[..., 0],
            True,
            scale,
        )
        for collected, grad in zip(grads, gradients, strict=True):
            collected.append(grad.transpose(1, 2).flatten(0, 1))
    query_grad, key_grad, value_grad = map(layout.restore, grads)
    for queries, keys in layout.across:
        gradients = _flash_backward(
            _row(grad_ThD, queries),
            _row(query_ThD, queries),
            _row(key_ThD, keys),
            _row(value_ThD, keys),
            _row(output_ThD, queries),
            logsumexp_Th[queries].T[None],
            False,
            scale,
        )
        for total, where, grad in zip(
            (query_grad, key_grad, value_grad), (queries, keys, keys), gradients, strict=True
        ):
            total[where] += grad[0].transpose(0, 1)
    return query_grad, key_grad, value_grad


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> Sequence[Tensor]:
    """Return the gradients of query, key and value, in their dtype."""
    inputs = [grad, query, key, value, output]
    if query.shape[2] <= SHORT:
        inputs = [x.float() for x in inputs]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: Sequence[Tensor] = backward(*inputs, logsumexp, 0.0, causal, scale=scale)
    return [x.to(query.dtype) for x in gradients]


def _gather(x_ThD: Tensor, batch: Segments) -> Tensor:
    """Gather a batch's segments, as a view if they are contiguous. Return x_BhLD."""
    size = batch.index_BL.shape
    if batch.start is None:
        x_NhD = x_ThD.index_select(0, batch.index_BL.flatten())
    else:
        x_NhD = x_ThD[batch.start : batch.start + size.numel()]
    return x_NhD.view(*size, *x_ThD.shape[1:]).transpose(1, 2)


def _row(x_ThD: Tensor, where: slice) -> Tensor:
    """Return a range of a row as a batch of one, x_1hLD."""
    return x_ThD[where].transpose(0, 1)[None]


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def block_mask(length: int, sees: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Any:
    """Build flex attention's block mask, like PyTorch's `create_block_mask`, but one tile of queries at a time.

    Without compilation, `create_block_mask` first allocates all pairs of query and key: 17 GB at 40,960 positions. Here
    the largest tensor has only the pairs of BLOCK queries. `sees(query, key)` tells whether queries attend to keys. The
    arguments are int64 positions, broadcast.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tiles = -(-length // BLOCK)
    at_T = torch.arange(length, device=device)
    pairs_QK = torch.zeros(tiles, tiles, dtype=torch.int64, device=device)  # visible pairs of each block
    for tile, query_L in enumerate(torch.split(at_T, BLOCK)):
        sees_LT = F.pad(sees(query_L[:, None], at_T), (0, -length % BLOCK))
        pairs_QK[tile] = sees_LT.view(len(query_L), tiles, BLOCK).sum((0, 2))
    all_QK = pairs_QK == BLOCK * BLOCK
    some_QK = (pairs_QK > 0) & ~all_QK

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query, key)

    return BlockMask.from_kv_blocks(
        *_ordered(some_QK), *_ordered(all_QK), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(length, length)
    )


def _ordered(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen key blocks per query block, and all key blocks, chosen ones first; int32."""
    chosen_11QK = chosen_QK[None, None].to(torch.int32)
    order_11QK = torch.argsort(chosen_11QK, dim=-1, descending=True, stable=True)
    return chosen_11QK.sum(-1, dtype=torch.int32), order_11QK.to(torch.int32)
