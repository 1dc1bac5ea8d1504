from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from shoal.model import attention
from shoal.model.attention import Kernel, RowLayout
from shoal.model.logprobs import chosen_logprobs
from shoal.model.tree import SHORTEST_ROOT, Tree, assign_rows, common_beginning, forward_hidden, pack, split

pytestmark = pytest.mark.usefixtures("one_thread")

tokens = st.lists(st.integers(0, 63), min_size=1, max_size=8)
trees = st.builds(Tree, prompt=tokens, completions=st.lists(tokens, max_size=4))
beginnings = st.lists(st.integers(0, 63), max_size=2 * SHORTEST_ROOT)
ROOT = [(7 * n) % 64 for n in range(SHORTEST_ROOT + 5)]


def behind(root: Sequence[int], trees: Sequence[Tree]) -> list[Tree]:
    """The same trees, whose prompts all begin with the root."""
    return [replace(tree, prompt=[*root, *tree.prompt]) for tree in trees]


def some_trees(seed: int = 0) -> list[Tree]:
    """Five groups with prompts and completions of many lengths; two padded rows when packed into 64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(64, (n,), generator=generator).tolist()

    shapes = [(7, [5, 9, 1]), (3, [12, 2]), (11, [4]), (1, [6, 6, 6, 6]), (9, [3, 8])]
    return [Tree(draw(prompt), [draw(n) for n in completions]) for prompt, completions in shapes]


def packed_logprobs(model: Any, trees: Sequence[Tree], kernel: Kernel = "cascade") -> Tensor:
    packed = pack(trees)
    packed = replace(packed, layout=RowLayout(packed.layout.spans, torch.device("cpu"), kernel, packed.layout.root))
    return chosen_logprobs(forward_hidden(model, packed), model.lm_head.weight, packed.target_N)[0]


def plain_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """transformers' own forward of one sequence, with its own causal mask and positions."""
    logits_TV = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits_TV.float(), -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def plain_logprobs_of_all(model: Any, trees: Sequence[Tree]) -> Tensor:
    return torch.cat([plain_logprobs(model, tree.prompt, c) for tree in trees for c in tree.completions])


# ---- packed equals unpacked


@torch.no_grad()
@pytest.mark.parametrize("root", [[], ROOT], ids=["no root", "root"])
@pytest.mark.parametrize("kernel", ["cascade", "masked", "flex", pytest.param("compiled", marks=pytest.mark.slow)])
def test_packed_logprobs_equal_plain_forwards_of_each_completion(
    tiny_model: Any, kernel: str, root: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flex's compilation takes a C++ compiler and 10 s."""
    if kernel != "compiled":
        monkeypatch.setattr(attention, "_flex", lambda: flex_attention)
    rooted = behind(root, some_trees())
    assert pack(rooted).layout.root == len(root)
    got_N = packed_logprobs(tiny_model, rooted, "flex" if kernel == "compiled" else kernel)  # type: ignore[arg-type]
    torch.testing.assert_close(got_N, plain_logprobs_of_all(tiny_model, rooted), atol=1e-4, rtol=0)


@torch.no_grad()
def test_logprobs_of_a_split_tree_are_those_of_the_whole(tiny_model: Any) -> None:
    (whole,) = some_trees()[:1]
    parts = split(whole, 17)
    assert len(parts) == 2
    torch.testing.assert_close(
        packed_logprobs(tiny_model, parts), packed_logprobs(tiny_model, [whole]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("lengths", "first", "in_order"),
    [
        ([8, 8, 8], [0], True),  # side by side: no copy
        ([8, 8, 6], [None], True),  # the last one is padded
        ([6, 8, 8], [None], False),  # another one is padded
        ([12, 4, 4], [0, 12], True),  # two batches
        ([4, 12, 4], [4, None], False),  # another between them
    ],
)
def test_sequences_side_by_side_are_not_copied_and_have_the_same_gradients(
    lengths: list[int], first: list[int | None], in_order: bool
) -> None:
    layout = pack([Tree([1], [range(length - 1)]) for length in lengths]).layout
    assert [batch.start for batch in layout.segments] == first
    assert layout.in_order == in_order
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, layout.length, 8, generator=generator, requires_grad=True) for _ in range(3)]
    wanted = torch.randn(1, layout.length, 2, 8, generator=generator)
    found = []
    for kernel in ("cascade", "masked"):
        output, _ = attention.attend(None, *inputs, None, layout=RowLayout(layout.spans, layout.device, kernel))
        found.append([output, *torch.autograd.grad((output * wanted).sum(), inputs)])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("root", [[], ROOT], ids=["no root", "root"])
@pytest.mark.parametrize("kernel", ["cascade", "masked"])  # PyTorch's flex has no backward on a CPU
def test_packed_gradients_equal_the_sum_over_plain_forwards(tiny_model: Any, kernel: Kernel, root: list[int]) -> None:
    parameters, rooted = list(tiny_model.parameters()), behind(root, some_trees())
    got = torch.autograd.grad(packed_logprobs(tiny_model, rooted, kernel).sum(), parameters)
    expected = torch.autograd.grad(plain_logprobs_of_all(tiny_model, rooted).sum(), parameters)
    for (name, _), mine, plain in zip(tiny_model.named_parameters(), got, expected, strict=True):
        error = float((mine - plain).norm() / plain.norm())
        assert error < 1e-4, f"{name}: relative error {error}"


@torch.no_grad()
def test_smollm2_packed_logprobs_equal_plain_forwards(bundled_model: Any, bundled_tokenizer: Any) -> None:
    def encode(text: str) -> list[int]:
        return list(bundled_tokenizer(text)["input_ids"])

    trees = [
        Tree(encode("The capital of France is"), [encode(" Paris, of course."), encode(" a city on the Seine.")]),
        Tree(encode("12 + 30 ="), [encode(" 42"), encode(" 41, I think")]),
    ]
    got_N = packed_logprobs(bundled_model, trees)
    torch.testing.assert_close(got_N, plain_logprobs_of_all(bundled_model, trees), atol=1e-4, rtol=0)


# ---- nothing leaks


@torch.no_grad()
def test_a_change_reaches_its_own_tree_or_completion_alone(tiny_model: Any) -> None:
    def moved(tokens: Sequence[int]) -> list[int]:
        return [(token + 1) % 64 for token in tokens]

    first, *rest = some_trees()
    a, b, c = first.completions
    n = len(a) + len(b) + len(c)
    before_N = packed_logprobs(tiny_model, [first, *rest])
    for other, changed in (
        (Tree(moved(first.prompt), [moved(a), moved(b), moved(c)]), range(n)),
        (Tree([moved(first.prompt)[0], *first.prompt[1:]], [a, b, c]), range(n)),  # all its completions
        (Tree(first.prompt, [a, moved(b), c]), range(len(a), len(a) + len(b))),
    ):
        difference_N = (packed_logprobs(tiny_model, [other, *rest]) - before_N).abs()
        kept = [at for at in range(len(before_N)) if at not in changed]
        assert float(difference_N[list(changed)].min()) > 1e-6 > float(difference_N[kept].max())


@given(beginnings, st.lists(trees, min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_a_predictor_sees_exactly_its_prompt_and_the_earlier_tokens_of_its_completion(
    root: list[int], trees: list[Tree]
) -> None:
    trees = behind(root, trees)
    packed = pack(trees)
    expected = [[*t.prompt, *c[:k]] for t in trees for c in t.completions for k in range(len(c))]
    assert packed.target_N.tolist() == [token for t in trees for c in t.completions for token in c]
    for predictor, prefix in zip(packed.predictor_N.tolist(), expected, strict=True):
        seen = packed.layout.mask_11TT[0, 0, predictor].nonzero()[:, 0]
        assert packed.tokens_T[seen].tolist() == prefix
        assert packed.positions_T[seen].tolist() == list(range(len(prefix)))


# ---- layout


def test_the_layout_of_the_modules_picture() -> None:
    packed = pack([Tree([10, 11, 12], [[1, 2, 3], [4, 5]]), Tree([20, 21], [[6, 7]])])
    assert packed.tokens_T.tolist() == [10, 11, 12, 1, 2, 3, 4, 5, 20, 21, 6, 7]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2, 3]
    assert packed.predictor_N.tolist() == [2, 3, 4, 2, 6, 9, 10]


def test_what_all_prompts_of_a_row_begin_with_is_computed_once() -> None:
    packed = pack(behind(ROOT, [Tree([10, 11, 12], [[1, 2, 3], [4, 5]]), Tree([20, 21], [[6, 7]])]))
    root = len(ROOT)
    assert packed.tokens_T.tolist() == [*ROOT, 10, 11, 12, 1, 2, 3, 4, 5, 20, 21, 6, 7]
    assert packed.positions_T.tolist() == [*range(root), *(root + n for n in [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2, 3])]
    assert packed.predictor_N.tolist() == [root + n for n in [2, 3, 4, 2, 6, 9, 10]]


@pytest.mark.parametrize(
    ("prompts", "alike"),
    [
        ([[*ROOT, 1, 2], [*ROOT, 3]], len(ROOT)),
        ([[*ROOT, 1, 2], [*ROOT, 3], [*ROOT[:10], 0, 0]], 10),
        ([ROOT, ROOT], len(ROOT) - 1),  # something is left of each
        ([ROOT], 0),
        ([ROOT, ROOT, []], 0),
        ([[*ROOT[: SHORTEST_ROOT - 1], 1], [*ROOT[: SHORTEST_ROOT - 1], 2]], 0),  # not worth it
        ([ROOT, [63, *ROOT[1:]]], 0),
    ],
)
def test_how_much_prompts_have_in_common(prompts: list[list[int]], alike: int) -> None:
    assert common_beginning(prompts) == alike


def test_a_pack_moves_to_a_device_whole() -> None:
    packed = pack(some_trees()).to(torch.device("meta"))
    assert {field.device.type for field in vars(packed).values()} == {"meta"}


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_rows_in_order_meet_the_trees_in_order(sizes: list[int], row_tokens: int) -> None:
    rows = assign_rows(sizes, row_tokens)
    assert [i for row in rows for i in row] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in row) <= row_tokens for row in rows)


# ---- splitting


@given(trees, st.integers(16, 40))
def test_parts_of_a_split_tree_fit_a_row_and_keep_prompt_and_completions(tree: Tree, row_tokens: int) -> None:
    parts = split(tree, row_tokens)
    assert [c for part in parts for c in part.completions] == list(tree.completions)
    assert split(tree, tree.n_tokens) == [tree], "it fits"
    assert all(part.n_tokens <= row_tokens and part.prompt == tree.prompt for part in parts)


def test_a_completion_too_long_for_any_row_is_refused_with_the_sizes() -> None:
    with pytest.raises(ValueError, match="prompt of 3 and a completion of 4 tokens do not fit a row of 6"):
        split(Tree([1, 2, 3], [[4], [5, 6, 7, 8]]), 6)
