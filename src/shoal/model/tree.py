"""A group as a tree: one prompt and its G completions in one forward, the prompt computed once.

Trees are packed side by side into rows of a fixed token budget. A token attends to its own prompt and to what came
before it in its own completion, nothing else: an explicit mask and explicit position ids make that exact, so packed and
unpacked give the same logprobs. `predictor` says from which position of the pack each completion token is predicted.

    row:   p0 p1 p2 | a0 a1 a2 | b0 b1 || q0 q1 | c0 c1
    pos:    0  1  2    3  4  5    3  4     0  1    2  3       a, b: completions of prompt p; c: of prompt q

Invariant: completion tokens come out in the order they went in (tree by tree, completion by completion).
Called by the learner (training) and the validator (prefill). The engine decodes with a KV cache instead.
Left out: block-sparse attention. The mask is dense, so a row costs the square of its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Tree:
    """One prompt and some completions of it, as token ids."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))


@dataclass(frozen=True)
class Pack:
    """Trees laid out in R rows of T positions, N completion tokens in all."""

    tokens_RT: Tensor  # int64, 0 where padded
    positions_RT: Tensor  # int64
    mask_R1TT: Tensor  # bool, True where the row's query may see the column's key
    predictor_N: Tensor  # int64, into the flattened R*T: the position whose output predicts the token
    target_N: Tensor  # int64, the completion tokens themselves

    def to(self, device: torch.device) -> "Pack":
        return Pack(*(tensor.to(device) for tensor in vars(self).values()))


def split(tree: Tree, row_tokens: int) -> list[Tree]:
    """Cut a tree that does not fit a row into several with the same prompt; completions stay whole and in order."""
    parts: list[Tree] = []
    branch: list[Sequence[int]] = []
    used = len(tree.prompt)
    for completion in tree.completions:
        if len(tree.prompt) + len(completion) > row_tokens:
            raise ValueError(
                f"a prompt of {len(tree.prompt)} and a completion of {len(completion)} tokens do not fit a row of "
                f"{row_tokens}; raise row_tokens or lower max_completion_tokens"
            )
        if branch and used + len(completion) > row_tokens:
            parts.append(Tree(tree.prompt, branch))
            branch, used = [], len(tree.prompt)
        branch.append(completion)
        used += len(completion)
    return [*parts, Tree(tree.prompt, branch)]


def assign_rows(sizes: Sequence[int], row_tokens: int, *, in_order: bool = False) -> list[list[int]]:
    """First fit: which trees (by index) share a row. Every size must be <= row_tokens.

    `in_order` fills one row after the other, so that reading the rows in turn meets the trees in the given order.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index, size in enumerate(sizes):
        candidates = range(max(len(rows) - 1, 0), len(rows)) if in_order else range(len(rows))
        row = next((r for r in candidates if free[r] >= size), None)
        if row is None:
            rows.append([])
            free.append(row_tokens)
            row = len(rows) - 1
        rows[row].append(index)
        free[row] -= size
    return rows


def pack(trees: Sequence[Tree], row_tokens: int) -> Pack:
    """Lay trees out in rows of at most `row_tokens` positions; each tree must fit one row (see `split`)."""
    rows = assign_rows([tree.n_tokens for tree in trees], row_tokens)
    width = max(sum(trees[i].n_tokens for i in row) for row in rows)
    tokens_RT = torch.zeros(len(rows), width, dtype=torch.long)
    positions_RT = torch.zeros(len(rows), width, dtype=torch.long)
    tree_RT = torch.full((len(rows), width), -1)  # which tree a position belongs to
    branch_RT = torch.full((len(rows), width), -1)  # which completion of it; 0 is the prompt
    predictors: list[list[int]] = [[] for _ in trees]
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            prompt_end = at + len(trees[i].prompt)
            for branch, segment in enumerate([trees[i].prompt, *trees[i].completions]):
                span = slice(at, at + len(segment))
                first = 0 if branch == 0 else len(trees[i].prompt)
                tokens_RT[r, span] = torch.as_tensor(segment, dtype=torch.long)
                positions_RT[r, span] = torch.arange(first, first + len(segment))
                tree_RT[r, span] = i
                branch_RT[r, span] = branch
                if branch > 0:
                    predictors[i] += [r * width + p for p in (prompt_end - 1, *range(at, at + len(segment) - 1))]
                at += len(segment)
    same_tree = tree_RT[:, :, None] == tree_RT[:, None, :]
    same_branch = (branch_RT[:, :, None] == branch_RT[:, None, :]) | (branch_RT[:, None, :] == 0)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    targets = [token for tree in trees for completion in tree.completions for token in completion]
    return Pack(
        tokens_RT=tokens_RT,
        positions_RT=positions_RT,
        mask_R1TT=(same_tree & same_branch & causal)[:, None],
        predictor_N=torch.tensor([p for tree in predictors for p in tree], dtype=torch.long),
        target_N=torch.tensor(targets, dtype=torch.long),
    )


def forward_hidden(model: nn.Module, packed: Pack) -> Tensor:
    """Final hidden states (after the last norm) from which each completion token is predicted. Returns hidden_NH."""
    output = model.base_model(  # type: ignore[operator]
        input_ids=packed.tokens_RT,
        position_ids=packed.positions_RT,
        attention_mask=packed.mask_R1TT,
        use_cache=False,
    )
    hidden_RTH: Tensor = output.last_hidden_state
    return hidden_RTH.flatten(0, 1)[packed.predictor_N]
