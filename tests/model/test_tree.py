from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.model.logprobs import chosen_logprobs
from shoal.model.tree import Tree, assign_rows, forward_hidden, pack, split

tokens = st.lists(st.integers(0, 63), min_size=1, max_size=8)
trees = st.builds(Tree, prompt=tokens, completions=st.lists(tokens, max_size=4))


def some_trees(seed: int = 0) -> list[Tree]:
    """Five groups with prompts and completions of many lengths; two padded rows when packed into 64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(64, (n,), generator=generator).tolist()

    shapes = [(7, [5, 9, 1]), (3, [12, 2]), (11, [4]), (1, [6, 6, 6, 6]), (9, [3, 8])]
    return [Tree(draw(prompt), [draw(n) for n in completions]) for prompt, completions in shapes]


def packed_logprobs(model: Any, trees: Sequence[Tree], row_tokens: int = 64) -> Tensor:
    packed = pack(trees, row_tokens)
    return chosen_logprobs(model, forward_hidden(model, packed), packed.target_N)[0]


def plain_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """transformers' own forward of one sequence, with its own causal mask and positions."""
    logits_TV = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits_TV.float(), -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def plain_logprobs_of_all(model: Any, trees: Sequence[Tree]) -> Tensor:
    return torch.cat([plain_logprobs(model, tree.prompt, c) for tree in trees for c in tree.completions])


# ---- packed equals unpacked


@torch.no_grad()
def test_packed_logprobs_equal_plain_forwards_of_each_completion(tiny_model: Any) -> None:
    got_N = packed_logprobs(tiny_model, some_trees())
    torch.testing.assert_close(got_N, plain_logprobs_of_all(tiny_model, some_trees()), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("row_tokens", [25, 40, 1000])
def test_logprobs_do_not_depend_on_the_row_length(tiny_model: Any, row_tokens: int) -> None:
    got_N = packed_logprobs(tiny_model, some_trees(), row_tokens)
    torch.testing.assert_close(got_N, packed_logprobs(tiny_model, some_trees()), atol=1e-4, rtol=0)


@torch.no_grad()
def test_logprobs_of_a_split_tree_are_those_of_the_whole(tiny_model: Any) -> None:
    (whole,) = some_trees()[:1]
    parts = split(whole, 17)
    assert len(parts) == 2
    torch.testing.assert_close(
        packed_logprobs(tiny_model, parts, 17), packed_logprobs(tiny_model, [whole]), atol=1e-4, rtol=0
    )


def test_packed_gradients_equal_the_sum_over_plain_forwards(tiny_model: Any) -> None:
    parameters = list(tiny_model.parameters())
    got = torch.autograd.grad(packed_logprobs(tiny_model, some_trees()).sum(), parameters)
    expected = torch.autograd.grad(plain_logprobs_of_all(tiny_model, some_trees()).sum(), parameters)
    for (name, _), mine, plain in zip(tiny_model.named_parameters(), got, expected, strict=True):
        error = float((mine - plain).norm() / plain.norm())
        assert error < 1e-4, f"{name}: relative error {error}"


@torch.no_grad()
def test_smollm2_packed_logprobs_equal_plain_forwards(bundled_model: Any, bundled_tokenizer: Any) -> None:
    def encode(text: str) -> list[int]:
        return list(bundled_tokenizer(text)["input_ids"])

    trees = [
        Tree(
            encode("The capital of France is"),
            [encode(" Paris, of course."), encode(" a city on the river Seine.")],
        ),
        Tree(encode("12 + 30 ="), [encode(" 42"), encode(" 41, I think")]),
    ]
    got_N = packed_logprobs(bundled_model, trees, 40)
    torch.testing.assert_close(got_N, plain_logprobs_of_all(bundled_model, trees), atol=1e-4, rtol=0)


# ---- nothing leaks


@torch.no_grad()
def test_changing_one_tree_leaves_the_others_logprobs(tiny_model: Any) -> None:
    first, *rest = some_trees()
    other = Tree([(t + 1) % 64 for t in first.prompt], [[(t + 1) % 64 for t in c] for c in first.completions])
    n = sum(map(len, first.completions))
    before_N, after_N = (
        packed_logprobs(tiny_model, [first, *rest]),
        packed_logprobs(tiny_model, [other, *rest]),
    )
    torch.testing.assert_close(before_N[n:], after_N[n:], atol=1e-6, rtol=0)
    assert float((before_N[:n] - after_N[:n]).abs().min()) > 1e-6  # and the changed ones did change


@torch.no_grad()
def test_changing_a_completion_leaves_its_siblings_logprobs(tiny_model: Any) -> None:
    (tree,) = some_trees()[:1]
    a, b, c = tree.completions
    other = Tree(tree.prompt, [a, [(t + 1) % 64 for t in b], c])
    before_N, after_N = packed_logprobs(tiny_model, [tree]), packed_logprobs(tiny_model, [other])
    kept = [*range(len(a)), *range(len(a) + len(b), len(before_N))]
    torch.testing.assert_close(before_N[kept], after_N[kept], atol=1e-6, rtol=0)


@torch.no_grad()
def test_changing_a_prompt_changes_every_completion_of_it(tiny_model: Any) -> None:
    (tree,) = some_trees()[:1]
    other = Tree([(tree.prompt[0] + 1) % 64, *tree.prompt[1:]], tree.completions)
    difference_N = packed_logprobs(tiny_model, [tree]) - packed_logprobs(tiny_model, [other])
    assert float(difference_N.abs().min()) > 1e-6


@given(st.lists(trees, min_size=1, max_size=6), st.integers(40, 100))
@settings(deadline=None, max_examples=60)
def test_a_predictor_sees_exactly_its_prompt_and_the_earlier_tokens_of_its_completion(
    trees: list[Tree], row_tokens: int
) -> None:
    packed = pack(trees, row_tokens)
    width = packed.tokens_RT.shape[1]
    expected = [[*t.prompt, *c[:k]] for t in trees for c in t.completions for k in range(len(c))]
    for predictor, prefix in zip(packed.predictor_N.tolist(), expected, strict=True):
        r, p = divmod(predictor, width)
        seen = packed.mask_R1TT[r, 0, p].nonzero()[:, 0]
        assert packed.tokens_RT[r, seen].tolist() == prefix
        assert packed.positions_RT[r, seen].tolist() == list(range(len(prefix)))


# ---- layout


@given(st.lists(trees, min_size=1, max_size=6), st.integers(40, 100))
@settings(deadline=None, max_examples=60)
def test_targets_come_out_in_the_order_they_went_in(trees: list[Tree], row_tokens: int) -> None:
    expected = [token for tree in trees for completion in tree.completions for token in completion]
    assert pack(trees, row_tokens).target_N.tolist() == expected


@given(st.lists(trees, min_size=1, max_size=6), st.integers(40, 100))
@settings(deadline=None, max_examples=60)
def test_no_row_of_a_pack_exceeds_the_budget(trees: list[Tree], row_tokens: int) -> None:
    assert pack(trees, row_tokens).tokens_RT.shape[1] <= row_tokens


def test_the_layout_of_the_modules_picture() -> None:
    packed = pack([Tree([10, 11, 12], [[1, 2, 3], [4, 5]]), Tree([20, 21], [[6, 7]])], 12)
    assert packed.tokens_RT.tolist() == [[10, 11, 12, 1, 2, 3, 4, 5, 20, 21, 6, 7]]
    assert packed.positions_RT.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2, 3]]
    assert packed.predictor_N.tolist() == [2, 3, 4, 2, 6, 9, 10]


def test_a_prompt_is_computed_once_for_all_its_completions() -> None:
    assert pack([Tree(range(30), [[1]] * 8)], 64).tokens_RT.numel() == 38


def test_every_query_sees_something_so_that_no_softmax_is_undefined() -> None:
    assert bool(pack(some_trees(), 64).mask_R1TT.any(-1).all())


def test_a_pack_moves_to_a_device_whole() -> None:
    packed = pack(some_trees(), 64).to(torch.device("meta"))
    assert {tensor.device.type for tensor in vars(packed).values()} == {"meta"}


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_no_row_overflows(sizes: list[int], row_tokens: int) -> None:
    assert all(sum(sizes[i] for i in row) <= row_tokens for row in assign_rows(sizes, row_tokens))


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_every_tree_is_assigned_to_one_row(sizes: list[int], row_tokens: int) -> None:
    assert sorted(i for row in assign_rows(sizes, row_tokens) for i in row) == list(range(len(sizes)))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_neighbouring_rows_would_not_have_fitted_one(sizes: list[int], row_tokens: int) -> None:
    rows = [sum(sizes[i] for i in row) for row in assign_rows(sizes, row_tokens)]
    assert all(a + b > row_tokens for a, b in pairwise(rows))


# ---- splitting


@given(trees, st.integers(16, 40))
def test_splitting_keeps_completions_whole_and_in_order(tree: Tree, row_tokens: int) -> None:
    assert [c for part in split(tree, row_tokens) for c in part.completions] == list(tree.completions)


@given(trees, st.integers(16, 40))
def test_every_part_of_a_split_tree_fits_a_row(tree: Tree, row_tokens: int) -> None:
    assert all(part.n_tokens <= row_tokens for part in split(tree, row_tokens))


@given(trees, st.integers(16, 40))
def test_every_part_of_a_split_tree_has_its_prompt(tree: Tree, row_tokens: int) -> None:
    assert all(part.prompt == tree.prompt for part in split(tree, row_tokens))


def test_a_tree_that_fits_is_not_split() -> None:
    tree = Tree([1, 2, 3], [[4], [5, 6]])
    assert split(tree, 6) == [tree]


def test_a_completion_too_long_for_any_row_is_refused_with_the_sizes() -> None:
    with pytest.raises(ValueError, match="prompt of 3 and a completion of 4 tokens do not fit a row of 6"):
        split(Tree([1, 2, 3], [[4], [5, 6, 7, 8]]), 6)
