"""With exact numerics, a token's results depend only on its prefix. Another order of summation fails these tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.model import exact, numerics, products
from shoal.model.attention import RowLayout, Span
from shoal.model.dtype import DtypeName, use_threads
from shoal.model.load import load_model
from shoal.model.logprobs import likelihoods, token_logprobs
from shoal.model.training import Scorer, recompute_activations
from shoal.model.tree import Tree, pack

from .exactness import DTYPES, EACH, exact_model, make, random_trees, skip_unless_exact, states

pytestmark = pytest.mark.usefixtures("one_thread")


def branches(trees: list[Tree]) -> list[Tree]:
    """Return one tree for each completion."""
    return [Tree(tree.prompt, [completion]) for tree in trees for completion in tree.completions]


def each_alone(model: Any, trees: list[Tree]) -> tuple[Tensor, Tensor]:
    parts = [states(model, [tree]) for tree in branches(trees)]
    return torch.cat([hidden for hidden, _ in parts]), torch.cat([logp for _, logp in parts])


def assert_same(results: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> None:
    assert all(map(torch.equal, results, others))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", EACH)
def test_packing_changes_no_bit(architecture: str, dtype: DtypeName, tmp_path: Path) -> None:
    model = exact_model(architecture, tmp_path, dtype)
    trees = random_trees(1, model.config.vocab_size)
    together = states(model, trees)
    assert_same(each_alone(model, trees), together)
    assert_same(states(model, branches(trees)), together)
    torch.set_num_threads(2)
    assert_same(states(model, trees), together)


def test_appending_tokens_changes_no_bit_of_earlier_results(tmp_path: Path) -> None:
    model = exact_model("wide", tmp_path, "bfloat16")
    tree = Tree([5], [list(range(5, 90)) * 8])
    long_NH, _ = states(model, [tree])
    for length in (1, 15, 17, 64, 65, 130, 255, 300, 513):
        short_NH, _ = states(model, [Tree([5], [tree.completions[0][:length]])])
        assert torch.equal(short_NH, long_NH[:length]), length


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_learners_forward_pass_has_the_validators_bits(tmp_path: Path, dtype: DtypeName) -> None:
    model = exact_model("three query heads per key head", tmp_path, dtype)
    trees = random_trees(2, model.config.vocab_size)
    _, expected_N = states(model, trees, 0.7)
    scorer = Scorer(model)
    assert torch.equal(scorer(pack(trees), 0.7, with_entropy=True)[0], expected_N)
    recompute_activations(scorer)
    assert torch.equal(scorer(pack(trees), 0.7, with_entropy=False)[0], expected_N)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_changes_no_bit(tmp_path: Path, dtype: DtypeName) -> None:
    model = exact_model("three query heads per key head", tmp_path, dtype)
    for length in (17, 64, 130, 300):
        root = [5 * n % model.config.vocab_size for n in range(length)]
        trees = [
            replace(tree, prompt=[*root, *tree.prompt]) for tree in random_trees(4, model.config.vocab_size, longest=60)
        ]
        assert pack(trees).layout.root >= length
        assert_same(states(model, trees), each_alone(model, trees))


@pytest.mark.parametrize("root", [0, 40])
@pytest.mark.parametrize("architecture", ["three query heads per key head", "biases", "norms of queries and keys"])
def test_logprobs_and_gradients_equal_those_of_fast_numerics_up_to_rounding(
    architecture: str, root: int, tmp_path: Path
) -> None:
    trees = [replace(tree, prompt=[*range(root), *tree.prompt]) for tree in random_trees(3, 96, longest=40)]
    grads, logps = [], []
    model = exact_model(architecture, tmp_path, "float32")
    for own in (model, load_model(tmp_path, "float32", numerics="fast")):
        logp_N, entropy_N = Scorer(own)(pack(trees), 1.0, with_entropy=True)
        (logp_N.sum() + entropy_N.sum()).backward()
        grads.append({name: weight.grad for name, weight in own.named_parameters()})
        logps.append(logp_N.detach())
    torch.testing.assert_close(*logps, rtol=0, atol=1e-4)
    for name, grad in grads[0].items():
        assert float((grad - grads[1][name]).norm() / grads[1][name].norm()) < 1e-4, name


def test_fast_numerics_do_depend_on_packing(tmp_path: Path) -> None:
    make("wide", tmp_path)
    model = load_model(tmp_path, "bfloat16", numerics="fast")
    trees = random_trees(1, 96)
    assert not torch.equal(each_alone(model, trees)[0], states(model, trees)[0])


@pytest.mark.parametrize("changed", ["tile", "order"])
def test_another_order_of_summing_keys_is_noticed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exact_model("wide", tmp_path, "float32")
    trees = random_trees(5, 96, longest=400)
    before = states(model, trees)[0]
    if changed == "tile":
        monkeypatch.setattr(exact, "tile", lambda: 48)
    else:
        forwards = exact.attention

        def backwards(query: Tensor, key: Tensor, value: Tensor, mask: exact.KeyMask, *wanted: bool) -> Any:
            seen = torch.zeros(*mask.bias_SM1K.shape[:-1], mask.start)
            bias_SM1K = torch.cat([seen, mask.bias_SM1K], -1)
            assert bias_SM1K.shape[-1] == key.shape[1]
            return forwards(query, key.flip(1), value.flip(1), exact.KeyMask(0, bias_SM1K.flip(-1)), *wanted)

        monkeypatch.setattr(exact, "attention", backwards)
    assert not torch.equal(states(model, trees)[0], before)


def test_another_order_of_summing_a_products_depth_is_noticed() -> None:
    x_RK, weight_CK = products.cancelling(32, 32, 64, torch.float32)
    whole = x_RK @ weight_CK.T
    halves = x_RK[:, :32] @ weight_CK[:, :32].T + x_RK[:, 32:] @ weight_CK[:, 32:].T
    assert float((whole != halves).float().mean()) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_products_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    skip_unless_exact("float32" if dtype == torch.float32 else "bfloat16")
    x_TK, weight_NK = products.cancelling(1100, 300, 576, dtype)
    whole = products.linear(x_TK, weight_NK)
    for count in (1, 2, 7, 8, 16, 31, 33, 48, 64, 100, 127, 200, 256, 384, 513, 700, 1023):
        assert torch.equal(products.linear(x_TK[:count], weight_NK), whole[:count]), count
    torch.set_num_threads(2)
    assert torch.equal(products.linear(x_TK, weight_NK), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_compute_a_product_gives_the_references_bits(dtype: torch.dtype) -> None:
    """If no way computes a product as a whole, its rows are halved."""
    skip_unless_exact("float32" if dtype == torch.float32 else "bfloat16")
    x_RK, weight_CK, expected_RC = products._reference(576, 300, dtype)
    for count in (16, 48, 96, 176, 256):
        y_RC = torch.empty_like(expected_RC[:count])
        products._write(x_RK[:count], weight_CK, y_RC)
        assert torch.equal(y_RC, expected_RC[:count]), count


def test_rows_are_halved_where_no_way_gives_the_references_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x_RK, weight_CK, expected_RC = products._reference(64, 130, torch.float32)
    written: list[int] = []

    def way(rows: int, *_: Any) -> Any:
        def straight(x: Tensor, weight: Tensor, y: Tensor) -> None:
            written.append(rows)
            products._in_columns(x, weight, y, 128)

        return straight if rows <= 32 else None

    monkeypatch.setattr(products, "_way", way)
    y_RC = torch.empty_like(expected_RC[:176])
    products._write(x_RK[:176], weight_CK, y_RC)
    assert written == [32, 32, 32, 32, 32, 16]
    torch.testing.assert_close(y_RC, expected_RC[:176])


def test_fewer_threads_compute_a_product_whose_depth_the_library_splits_among_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def splits_on_more_than_four(x: Tensor, weight: Tensor, out: Tensor) -> None:
        tried.append(torch.get_num_threads())
        products._in_columns(x, weight, out, products.COLUMNS[-1])
        if torch.get_num_threads() > 4:
            out.add_(1)

    monkeypatch.setattr(products, "ways", lambda *_: [splits_on_more_than_four])
    way = products._way.__wrapped__(16, 64, 130, torch.float32, 12)
    assert way is not None and tried == [12, 8, 4]
    x, weight = products.cancelling(16, 130, 64, torch.float32)
    y, expected = torch.empty(2, 16, 130)
    products._in_columns(x, weight, expected, products.COLUMNS[-1])
    with use_threads(12):
        way(x, weight, y)
        assert torch.get_num_threads() == 12
    assert tried[-1] == 4 and torch.equal(y, expected)


def test_a_way_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(x: Tensor, weight: Tensor, y: Tensor) -> None:
        y.copy_(x[:, :32] @ weight[:, :32].T + x[:, 32:] @ weight[:, 32:].T)

    def straight(x: Tensor, weight: Tensor, y: Tensor) -> None:
        products._in_columns(x, weight, y, 128)

    monkeypatch.setattr(products, "ways", lambda *_: [halves, straight])
    assert products._way.__wrapped__(16, 64, 130, torch.float32, 1) is straight
    monkeypatch.setattr(products, "ways", lambda *_: [halves])
    assert products._way.__wrapped__(32, 64, 130, torch.float32, 1) is None
    with pytest.raises(products.OrderError, match='model.numerics = "fast"'):
        products._way.__wrapped__(16, 64, 130, torch.float32, 1)


def test_a_products_gradients_are_those_of_pytorch() -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((5, 8), (3, 8), (3,)))
    got = torch.autograd.grad(products.linear(x, weight, bias).square().sum(), (x, weight, bias))
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).square().sum(), (x, weight, bias))
    for grad, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(grad, plain)


def test_a_logprob_does_not_depend_on_other_rows() -> None:
    scaled_NV = torch.randn(40, 40_000, generator=torch.Generator().manual_seed(0))
    tokens_N = torch.arange(40)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole = token_logprobs(scaled_NV, tokens_N)
        for count in (1, 2, 3, 16, 33):
            assert torch.equal(token_logprobs(scaled_NV[:count], tokens_N[:count]), whole[:count])
    assert torch.equal(likelihoods(scaled_NV[:1]).total_N, likelihoods(scaled_NV).total_N[:1])


@pytest.mark.parametrize("root", [0, 50])
@pytest.mark.parametrize("heads", [1, 9])
def test_every_query_is_computed_once_and_sees_its_sequence(heads: int, root: int) -> None:
    spans = [Span(root, 300, (5, 140, 1)), Span(root + 446, 7, (200,)), Span(root + 653, 3, ())]
    layout = RowLayout(spans, torch.device("cpu"), root=root)
    seen: dict[int, set[int]] = {}
    for batch in exact.plan(layout, heads, 64).batches:
        for part in batch.parts:
            for m in range(part.queries.start, part.queries.stop):
                for s in torch.nonzero(~batch.padded_SM[:, m])[:, 0].tolist():
                    query = int(batch.query_SM[s, m])
                    assert query not in seen
                    mask = part.mask
                    bias_K = torch.cat([torch.zeros(mask.start), mask.bias_SM1K[s, m - part.queries.start, 0]])
                    seen[query] = set(batch.key_SK[s, : part.keys][bias_K == 0].tolist())
    expected = {query: set(sees_T.nonzero()[:, 0].tolist()) for query, sees_T in enumerate(layout.mask_11TT[0, 0])}
    assert seen == expected


def test_auto_is_fast_where_exact_is_not_possible_and_a_model_keeps_its_numerics(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cuda" in str(numerics.refusal("float32", "cuda"))
    for kind in ("fast", "exact"):
        assert numerics.of(load_model(tiny_folder, numerics=kind)) == kind
    monkeypatch.setattr(numerics, "refusal", lambda dtype, device: "no")
    assert numerics.pick("auto", "float32", "cpu") == "fast"
    with pytest.raises(ShoalError, match='set model.numerics = "auto" or "fast"'):
        numerics.pick("exact", "float32", "cpu")
    monkeypatch.setattr(numerics, "refusal", lambda dtype, device: None)
    assert [numerics.pick(kind, "float32", "cpu") for kind in ("auto", "fast")] == ["exact", "fast"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_smollm2_packing_changes_no_bit(bundled: Path, dtype: DtypeName, seed: int) -> None:
    skip_unless_exact(dtype)
    model = load_model(bundled, dtype, numerics="exact")
    trees = random_trees(seed, model.config.vocab_size, longest=400)
    together = states(model, trees)
    assert_same(each_alone(model, trees), together)
    torch.set_num_threads(2)
    assert_same(states(model, trees), together)
    logp_N, _ = Scorer(model)(pack(trees), 1.0, with_entropy=False)
    assert torch.equal(logp_N, together[1])


def test_tiles_are_smaller_where_larger_products_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD CPUs sum products of more than 192 keys in two halves."""
    whole = torch.bmm

    def halved(left: Tensor, right: Tensor) -> Tensor:
        keys = left.shape[-1]
        if keys <= 192:
            return whole(left, right)
        half = keys // 2
        return whole(left[..., :half], right[:, :half]) + whole(left[..., half:], right[:, half:])

    monkeypatch.setattr(torch, "bmm", halved)
    assert exact.tile.__wrapped__() == 192
