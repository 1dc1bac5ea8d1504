"""Packed trees give the results of separate forward passes, and nothing leaks. Turns, splitting and masks are right."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.model import attention
from shoal.model.attention import BLOCK, Kernel, RowLayout, Span
from shoal.model.logprobs import chosen_logprobs
from shoal.model.tree import SHORTEST_ROOT, Tree, assign_rows, forward_hidden, pack, shared_prefix, split
from shoal.model.turns import fit, last_turn, model_positions, model_spans, model_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
tokens = st.lists(st.integers(0, 63), min_size=1, max_size=8)
trees = st.builds(Tree, prompt=tokens, completions=st.lists(tokens, max_size=4))
prefixes = st.lists(st.integers(0, 63), max_size=2 * SHORTEST_ROOT)
ROOT = [(7 * n) % 64 for n in range(SHORTEST_ROOT + 5)]


def rooted(root: Sequence[int], trees: Sequence[Tree]) -> list[Tree]:
    """Return the same trees with the root before every prompt."""
    return [replace(tree, prompt=[*root, *tree.prompt]) for tree in trees]


def some_trees(seed: int = 0) -> list[Tree]:
    """Return five trees with prompts and completions of many lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(64, (n,), generator=generator).tolist()

    shapes = [(7, [5, 9, 1]), (3, [12, 2]), (11, [4]), (1, [6, 6, 6, 6]), (9, [3, 8])]
    return [Tree(draw(prompt), [draw(n) for n in completions]) for prompt, completions in shapes]


def packed_logprobs(model: Any, trees: Sequence[Tree], kernel: Kernel = "cascade") -> Tensor:
    packed = pack(trees)
    packed = replace(packed, layout=RowLayout(packed.layout.spans, CPU, kernel, packed.layout.root))
    return chosen_logprobs(forward_hidden(model, packed), model.lm_head.weight, packed.target_N)[0]


def plain_logprobs(model: Any, trees: Sequence[Tree]) -> Tensor:
    """Return the targets' logprobs, computed by transformers' own forward pass of one sequence at a time."""
    parts = []
    for tree in trees:
        for completion, turns in tree.branches():
            logits_TV = model(torch.tensor([[*tree.prompt, *completion]])).logits[0, len(tree.prompt) - 1 : -1]
            logp_T = torch.log_softmax(logits_TV.float(), -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            parts.append(logp_T[model_positions(turns, len(completion))])
    return torch.cat(parts)


# ---- packed equals unpacked


@torch.no_grad()
@pytest.mark.parametrize("root", [[], ROOT], ids=["no root", "root"])
@pytest.mark.parametrize("kernel", ["cascade", "masked", "flex", pytest.param("compiled", marks=pytest.mark.slow)])
def test_packed_logprobs_equal_those_of_plain_forward_passes(
    tiny_model: Any, kernel: str, root: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling flex attention takes a C++ compiler and 10 s."""
    if kernel != "compiled":
        monkeypatch.setattr(attention, "_flex", lambda: flex_attention)
    trees = rooted(root, some_trees())
    assert pack(trees).layout.root == len(root)
    packed_N = packed_logprobs(tiny_model, trees, "flex" if kernel == "compiled" else kernel)  # type: ignore[arg-type]
    torch.testing.assert_close(packed_N, plain_logprobs(tiny_model, trees), atol=1e-4, rtol=0)


@torch.no_grad()
def test_logprobs_of_a_split_tree_equal_those_of_the_whole_tree(tiny_model: Any) -> None:
    whole, *_ = some_trees()
    parts = split(whole, 17)
    assert len(parts) == 2
    torch.testing.assert_close(
        packed_logprobs(tiny_model, parts), packed_logprobs(tiny_model, [whole]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("lengths", "first", "in_order"),
    [
        ([8, 8, 8], [0], True),  # contiguous: no copy
        ([8, 8, 6], [None], True),  # the last sequence is padded
        ([6, 8, 8], [None], False),  # the first sequence is padded
        ([12, 4, 4], [0, 12], True),  # two batches
        ([4, 12, 4], [4, None], False),  # another sequence lies between two of the same length
    ],
)
def test_contiguous_sequences_are_not_copied_and_have_the_same_gradients(
    lengths: list[int], first: list[int | None], in_order: bool
) -> None:
    layout = pack([Tree([1], [range(length - 1)]) for length in lengths]).layout
    assert [batch.start for batch in layout.segments] == first
    assert layout.in_order == in_order
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, layout.length, 8, generator=generator, requires_grad=True) for _ in range(3)]
    weight = torch.randn(1, layout.length, 2, 8, generator=generator)
    results = []
    for kernel in ("cascade", "masked"):
        output, _ = attention.attend(None, *inputs, None, layout=RowLayout(layout.spans, layout.device, kernel))
        results.append([output, *torch.autograd.grad((output * weight).sum(), inputs)])
    for cascade, masked in zip(*results, strict=True):
        torch.testing.assert_close(cascade, masked, atol=1e-5, rtol=0)


@pytest.mark.parametrize("root", [[], ROOT], ids=["no root", "root"])
@pytest.mark.parametrize("kernel", ["cascade", "masked"])  # PyTorch's flex has no backward on a CPU
def test_packed_gradients_equal_the_sum_over_plain_forwards(tiny_model: Any, kernel: Kernel, root: list[int]) -> None:
    parameters, trees = list(tiny_model.parameters()), rooted(root, some_trees())
    packed = torch.autograd.grad(packed_logprobs(tiny_model, trees, kernel).sum(), parameters)
    plain = torch.autograd.grad(plain_logprobs(tiny_model, trees).sum(), parameters)
    for (name, _), grad, expected in zip(tiny_model.named_parameters(), packed, plain, strict=True):
        error = float((grad - expected).norm() / expected.norm())
        assert error < 1e-4, f"{name}: relative error {error}"


@torch.no_grad()
def test_smollm2_packed_logprobs_equal_plain_forwards(bundled_model: Any, bundled_tokenizer: Any) -> None:
    def encode(text: str) -> list[int]:
        return list(bundled_tokenizer(text)["input_ids"])

    trees = [
        Tree(encode("The capital of France is"), [encode(" Paris, of course."), encode(" a city on the Seine.")]),
        Tree(encode("12 + 30 ="), [encode(" 42"), encode(" 41, I think")]),
    ]
    packed_N = packed_logprobs(bundled_model, trees)
    torch.testing.assert_close(packed_N, plain_logprobs(bundled_model, trees), atol=1e-4, rtol=0)


# ---- nothing leaks


@torch.no_grad()
def test_a_change_affects_only_its_own_tree_or_completion(tiny_model: Any) -> None:
    def moved(tokens: Sequence[int]) -> list[int]:
        return [(token + 1) % 64 for token in tokens]

    first, *rest = some_trees()
    a, b, c = first.completions
    n = len(a) + len(b) + len(c)
    before_N = packed_logprobs(tiny_model, [first, *rest])
    for other, changed in (
        (Tree(moved(first.prompt), [moved(a), moved(b), moved(c)]), range(n)),
        (Tree([moved(first.prompt)[0], *first.prompt[1:]], [a, b, c]), range(n)),  # the first token of the prompt
        (Tree(first.prompt, [a, moved(b), c]), range(len(a), len(a) + len(b))),
    ):
        difference_N = (packed_logprobs(tiny_model, [other, *rest]) - before_N).abs()
        unchanged = [at for at in range(len(before_N)) if at not in changed]
        assert float(difference_N[list(changed)].min()) > 1e-6 > float(difference_N[unchanged].max())


@given(prefixes, st.lists(trees, min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_a_predictor_sees_exactly_its_prompt_and_the_earlier_tokens_of_its_completion(
    root: list[int], trees: list[Tree]
) -> None:
    trees = rooted(root, trees)
    packed = pack(trees)
    expected = [[*t.prompt, *c[:k]] for t in trees for c in t.completions for k in range(len(c))]
    assert packed.target_N.tolist() == [token for t in trees for c in t.completions for token in c]
    for predictor, prefix in zip(packed.predictor_N.tolist(), expected, strict=True):
        seen = packed.layout.mask_11TT[0, 0, predictor].nonzero()[:, 0]
        assert packed.tokens_T[seen].tolist() == prefix
        assert packed.positions_T[seen].tolist() == list(range(len(prefix)))


# ---- layout


@pytest.mark.parametrize("root", [[], ROOT], ids=["the_picture", "shared_prefix_of_a_row"])
def test_the_layout_equals_the_picture_in_the_modules_docstring(root: list[int]) -> None:
    packed = pack(rooted(root, [Tree([10, 11, 12], [[1, 2, 3], [4, 5]]), Tree([20, 21], [[6, 7]])]))
    n = len(root)
    assert packed.tokens_T.tolist() == [*root, 10, 11, 12, 1, 2, 3, 4, 5, 20, 21, 6, 7]
    assert packed.positions_T.tolist() == [*range(n), *(n + at for at in [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2, 3])]
    assert packed.predictor_N.tolist() == [n + at for at in [2, 3, 4, 2, 6, 9, 10]]


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([[*ROOT, 1, 2], [*ROOT, 3]], len(ROOT)),
        ([[*ROOT, 1, 2], [*ROOT, 3], [*ROOT[:10], 0, 0]], 10),
        ([ROOT, ROOT], len(ROOT) - 1),  # each prompt keeps a token of its own
        ([ROOT], 0),
        ([ROOT, ROOT, []], 0),
        ([[*ROOT[: SHORTEST_ROOT - 1], 1], [*ROOT[: SHORTEST_ROOT - 1], 2]], 0),  # too short to be worth sharing
        ([ROOT, [63, *ROOT[1:]]], 0),
    ],
)
def test_a_shared_prefix_is_shorter_than_every_prompt_and_long_enough(prompts: list[list[int]], shared: int) -> None:
    assert shared_prefix(prompts) == shared


def test_all_tensors_of_a_pack_move_to_a_device() -> None:
    packed = pack(some_trees()).to(torch.device("meta"))
    assert {field.device.type for field in vars(packed).values()} == {"meta"}


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_rows_hold_the_trees_in_order(sizes: list[int], row_tokens: int) -> None:
    rows = assign_rows(sizes, row_tokens)
    assert [i for row in rows for i in row] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in row) <= row_tokens for row in rows)


@given(trees, st.integers(16, 40))
def test_the_parts_of_a_split_tree_fit_a_row_and_keep_its_prompt_and_completions(tree: Tree, row_tokens: int) -> None:
    parts = split(tree, row_tokens)
    assert [c for part in parts for c in part.completions] == list(tree.completions)
    assert split(tree, tree.n_tokens) == [tree], "a tree that fits must not be split"
    assert all(part.n_tokens <= row_tokens and part.prompt == tree.prompt for part in parts)


def test_the_error_for_a_completion_too_long_for_a_row_gives_the_sizes() -> None:
    with pytest.raises(ValueError, match="prompt of 3 and a completion of 4 tokens do not fit a row of 6"):
        split(Tree([1, 2, 3], [[4], [5, 6, 7, 8]]), 6)


# ---- turns

lengths = st.lists(st.integers(1, 6), min_size=1, max_size=9).filter(lambda turns: len(turns) % 2 == 1)


@given(lengths)
def test_model_spans_are_the_turns_of_the_model(all_lengths: list[int]) -> None:
    written = [number for number, length in enumerate(all_lengths) for _ in range(length)]
    turns, n = all_lengths[:-1], len(written)  # each token of `written` is the number of its turn
    assert fit(turns, n)
    assert [written[start:end] for start, end in model_spans(turns, n)] == [
        [number] * length for number, length in enumerate(all_lengths) if number % 2 == 0
    ]
    assert [written[at] for at in model_positions(turns, n)] == [number for number in written if number % 2 == 0]
    assert model_tokens(turns, n) == len(model_positions(turns, n))
    assert last_turn(turns, written) == [len(all_lengths) - 1] * all_lengths[-1]


IMPOSSIBLE = [[3], [3, 2, 1], [0, 3], [3, 0], [-1, 3], [3, -1], [5, 4], [6, 4], [2**31 - 1] * 2, [1, 1, 3, 4]]


def test_impossible_turns_do_not_fit_and_an_empty_list_is_a_single_turn() -> None:
    assert [turns for turns in IMPOSSIBLE if fit(turns, 9)] == []
    assert fit([], 0) and fit([], 7)
    assert model_spans([], 7) == [(0, 7)] and model_positions([], 0) == []


@given(st.lists(st.integers(-3, 12), max_size=8), st.integers(0, 30))
def test_turns_that_fit_cover_all_tokens_and_are_not_empty(turns: list[int], n: int) -> None:
    if fit(turns, n) and n:
        spans = model_spans(turns, n)
        assert spans[0][0] == 0 and spans[-1][1] == n
        assert all(start < end for start, end in spans)
        assert all(before < after for (_, before), (after, _) in zip(spans, spans[1:], strict=False))


PROMPT = [5, 6, 7]
COMPLETIONS = [[10, 11, 12, 13, 14, 15, 16], [20, 21, 22], [30, 31, 32, 33, 34]]
TURNS = Tree(PROMPT, COMPLETIONS, [[2, 3], [], [1, 1, 1, 1]])
MODELS_TOKENS = [10, 11, 15, 16, 20, 21, 22, 30, 32, 34]


@torch.no_grad()
def test_only_the_models_tokens_are_targets_and_each_is_predicted_by_the_token_before_it(tiny_model: Any) -> None:
    packed = pack([TURNS])
    assert packed.tokens_T.tolist() == [*PROMPT, *COMPLETIONS[0], *COMPLETIONS[1], *COMPLETIONS[2]]
    assert packed.target_N.tolist() == MODELS_TOKENS
    assert packed.tokens_T[packed.predictor_N].tolist() == [7, 10, 14, 15, 7, 20, 21, 7, 31, 33]
    trees = [Tree([1, 2], [[3, 4]]), TURNS]
    torch.testing.assert_close(packed_logprobs(tiny_model, trees), plain_logprobs(tiny_model, trees), atol=1e-4, rtol=0)


def test_a_split_tree_keeps_every_completions_turns() -> None:
    parts = split(TURNS, 10)
    assert [part.completions for part in parts] == [[COMPLETIONS[0]], [COMPLETIONS[1]], [COMPLETIONS[2]]]
    assert torch.cat([pack([part]).target_N for part in parts]).tolist() == MODELS_TOKENS


# ---- flex attention's block masks


def flex_layout(*trees: tuple[int, tuple[int, ...]], root: int = 0) -> RowLayout:
    spans: list[Span] = []
    for prompt, completions in trees:
        spans.append(Span(spans[-1].end if spans else root, prompt, completions))
    return RowLayout(spans, CPU, "flex", root)


@pytest.mark.parametrize(
    "row",
    [
        flex_layout((3, (2, 4))),
        flex_layout((128, ())),
        flex_layout((130, (300, 5, 140)), (1, (1,)), (400, (256,))),
        flex_layout((0, (129,)), (640, (128, 128))),
        flex_layout((100, (30, 200)), (10, (5,)), root=300),
    ],
    ids=["short", "one block", "uneven", "whole blocks", "root"],
)
def test_a_mask_built_by_tiles_equals_pytorchs(row: RowLayout) -> None:
    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return row.sees(query, key)

    expected, mask = create_block_mask(sees, None, None, row.length, row.length, device="cpu"), row.block_mask
    for field in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for name in (field, f"full_{field}"):
            own, theirs = getattr(mask, name), getattr(expected, name)
            assert torch.equal(own, theirs) and own.dtype == theirs.dtype, name
    for name in ("shape", "BLOCK_SIZE", "seq_lengths"):
        assert getattr(mask, name) == getattr(expected, name), name
    assert torch.equal(mask.to_dense(), expected.to_dense())


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor created within the block."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.entries = max(self.entries, *sizes, 0)
        return result


def test_building_a_mask_keeps_only_one_tile_of_pairs_in_memory() -> None:
    row = flex_layout((500, (700, 900)), (948, (1000,)))
    with Largest() as largest:
        assert row.block_mask.sparsity() > 50
    assert row.length * BLOCK <= largest.entries < 2 * row.length * BLOCK


def test_policy_and_reference_share_a_rows_masks() -> None:
    row = flex_layout((4, (3, 3)))
    meta = torch.device("meta")
    moved = row.to(meta)
    assert moved is row.to(meta) is flex_layout((4, (3, 3))).to(meta)
    assert (moved.device, moved.spans) == (meta, row.spans)
    assert flex_layout((4, (3, 4))).to(meta) is not moved
    assert row.to(CPU) is row
