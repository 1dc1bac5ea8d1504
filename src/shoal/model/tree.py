"""A group as a tree: one forward pass over a prompt and its G completions, with the prompt computed once.

Trees are packed side by side into one row without padding. A token attends only to its own prompt and to earlier tokens
of its own completion (`attention`), and keeps the position id of its own sequence. So packed and unpacked logprobs are
equal. If all prompts of a row share a prefix, such as a system prompt, that prefix (the root) is also computed once.
Targets are the completion tokens that the model wrote. `predictor_N` holds the position that predicts each target.
Tokens of an environment (`turns`) are attended to, but are not targets.

    row:   p0 p1 p2 | a0 a1 a2 | b0 b1 || q0 q1 | c0 c1
    pos:    0  1  2    3  4  5    3  4     0  1    2  3       a and b are completions of prompt p, c of prompt q

    row:   r0 r1 | p2 | a0 a1 a2 | b0 b1 || q2 q3 | c0 c1
    pos:    0  1    2    3  4  5    3  4     2  3    4  5     both prompts begin with the root r

Invariant: targets keep their order (tree by tree, completion by completion).
Left out: prefixes that only some prompts of a row share; models that packing would compute wrongly (`support`).
The learner (training) and the validator (prefill) compute trees. The engine decodes with a KV cache instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.model import numerics
from shoal.model.attention import RowLayout, Span
from shoal.model.numerics import ROW_UNIT
from shoal.model.turns import Turns, model_positions

Ids = Sequence[int] | np.ndarray[Any, Any]  # token ids
SHORTEST_ROOT = 8  # tokens; sharing fewer saves next to nothing


@dataclass(frozen=True)
class Tree:
    """One prompt and its completions."""

    prompt: Ids
    completions: Sequence[Ids]
    turns: Sequence[Turns] = ()  # each completion's turns; () if all completions are single turns

    def branches(self) -> Iterator[tuple[Ids, Turns]]:
        """Yield each completion with its turns."""
        return zip(self.completions, self.turns or [()] * len(self.completions), strict=True)

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))


@dataclass(frozen=True)
class Pack:
    """Trees in one row of T positions, with N targets in total."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64
    predictor_N: Tensor  # int64, the position whose output predicts each target
    target_N: Tensor  # int64, the completion tokens that the model wrote
    layout: RowLayout

    def to(self, device: torch.device) -> "Pack":
        return Pack(*(field.to(device) for field in vars(self).values()))


def split(tree: Tree, row_tokens: int) -> list[Tree]:
    """Split a tree that does not fit a row into trees with the same prompt. Completions stay whole and in order."""
    branches = list(tree.branches())
    parts = split_lengths(len(tree.prompt), [len(completion) for completion, _ in branches], row_tokens)
    return [_tree(tree.prompt, branches[part.start : part.stop]) for part in parts]


def split_lengths(prompt: int, completions: Sequence[int], row_tokens: int) -> list[range]:
    """Divide completions into ranges that fit a row with the prompt. Raise ValueError if a completion does not fit."""
    parts: list[range] = []
    first, used = 0, prompt
    for number, length in enumerate(completions):
        if prompt + length > row_tokens:
            raise ValueError(
                f"a prompt of {prompt} and a completion of {length} tokens do not fit a row of "
                f"{row_tokens}; raise row_tokens or lower sampling.max_tokens"
            )
        if number > first and used + length > row_tokens:
            parts.append(range(first, number))
            first, used = number, prompt
        used += length
    return [*parts, range(first, len(completions))]


def _tree(prompt: Ids, branches: Sequence[tuple[Ids, Turns]]) -> Tree:
    turns = [turns for _, turns in branches]
    return Tree(prompt, [completion for completion, _ in branches], turns if any(turns) else ())


def assign_rows(sizes: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Assign trees in order to rows of `row_tokens`. Return each row's tree indices. Every size must be <= row_tokens."""
    rows: list[list[int]] = []
    free = 0
    for index, size in enumerate(sizes):
        if not rows or size > free:
            rows.append([])
            free = row_tokens
        rows[-1].append(index)
        free -= size
    return rows


def pack(trees: Sequence[Tree]) -> Pack:
    """Pack trees side by side into one row."""
    root = shared_prefix([tree.prompt for tree in trees])
    predictors, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    tokens, positions = [np.asarray(trees[0].prompt[:root] if root else (), np.int64)], [np.arange(root)]
    spans: list[Span] = []
    at = root
    for tree in trees:
        prompt = len(tree.prompt)
        spans.append(Span(at, prompt - root, tuple(map(len, tree.completions))))
        tokens.append(np.asarray(tree.prompt[root:], np.int64))
        positions.append(np.arange(root, prompt))
        at += prompt - root
        last_of_prompt = at - 1
        for completion, turns in tree.branches():
            length = len(completion)
            tokens.append(np.asarray(completion, np.int64))
            positions.append(np.arange(prompt, prompt + length))
            own = np.asarray(model_positions(turns, length), np.int64) if turns else np.arange(length)
            predictors.append(np.where(own > 0, at + own - 1, last_of_prompt))
            targets.append(tokens[-1][own])
            at += length
    tokens_T, positions_T, predictor_N, target_N = (
        torch.from_numpy(np.concatenate(parts)) for parts in (tokens, positions, predictors, targets)
    )
    return Pack(tokens_T, positions_T, predictor_N, target_N, RowLayout(spans, torch.device("cpu"), root=root))


def shared_prefix(prompts: Sequence[Ids]) -> int:
    """Return how long a prefix the prompts share. Each keeps a token of its own. Return 0 if sharing saves too little."""
    if len(prompts) < 2:
        return 0
    first, shared = np.asarray(prompts[0]), min(map(len, prompts)) - 1
    for prompt in prompts[1:]:
        if shared < SHORTEST_ROOT:
            return 0
        differs = first[:shared] != np.asarray(prompt[:shared])
        shared = int(differs.argmax()) if differs.any() else shared
    return shared if shared >= SHORTEST_ROOT else 0


def forward_hidden(model: nn.Module, packed: Pack) -> Tensor:
    """Compute the final hidden states (after the last norm) that predict each target. Return hidden_NH."""
    return forward_row(model, packed).index_select(0, packed.predictor_N)


def forward_row(model: nn.Module, packed: Pack, cache: Any = None) -> Tensor:
    """Compute the final hidden states of every position. Return hidden_TH, with padding at the end for exact numerics.

    `cache`: a transformers cache, which receives each block's keys and values.
    """
    padding = -len(packed.tokens_T) % ROW_UNIT if numerics.of(model) == "exact" else 0
    output = body(model)(
        input_ids=F.pad(packed.tokens_T, (0, padding))[None],
        position_ids=F.pad(packed.positions_T, (0, padding))[None],
        attention_mask=packed.tokens_T.new_empty(1, 1, 1, 1),  # unused; 4-D, so that transformers builds no mask
        layout=packed.layout,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    hidden_1TH: Tensor = output.last_hidden_state
    return hidden_1TH[0]


def body(model: Any) -> Any:
    """Return the model without its output head."""
    for inner in (model.base_model, model.get_decoder()):
        if inner is not model:
            return inner
    return model.model  # Llama 4's text model has neither


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's blocks: the unit of sharding, recomputation and conversion."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
