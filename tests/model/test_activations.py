"""An activation function has the same bits on any number of threads, because every thread's share is whole vectors."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.activations import ACT2FN

from shoal.model.activations import GRAIN, SERIAL, VECTOR, WholeVectors, in_whole_vectors, use_exact_activations_
from shoal.model.dtype import use_threads
from shoal.model.load import load_model
from shoal.model.tree import Tree, forward_hidden, pack
from tests.model.exactness import skip_unless_exact

pytestmark = pytest.mark.usefixtures("one_thread")
THREADS = (1, 2, 3, 5, 6, 7, 12, 31)


@example(2 * GRAIN // VECTOR + 1, 3)  # what fills three shares' vectors is small enough for two shares
@given(st.integers(1, 5 * GRAIN // VECTOR), st.sampled_from(THREADS))
def test_every_share_is_whole_vectors(vectors: int, threads: int) -> None:
    x, calls = torch.arange(float(vectors * VECTOR)), list[int]()

    def recorded(part: Tensor) -> Tensor:
        calls.append(part.numel())
        return part + 1.0

    with use_threads(threads):
        assert torch.equal(in_whole_vectors(recorded, x), x + 1.0)
    for count in calls:
        # How PyTorch splits a tensor; GELU's own rule gives each thread the same share.
        for shares in (max(1, min(threads, -(-count // GRAIN))), threads if count > SERIAL else 1):
            assert -(-count // shares) % VECTOR == 0, f"a share of {count} on {threads} threads ends within a vector"
    assert all(count <= SERIAL for count in calls[1:]), "the rest must not be split"


def test_an_activation_with_weights_keeps_their_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU())
    names = set(model.state_dict())
    use_exact_activations_(model)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    function = ACT2FN[name]
    x_TI = torch.randn(997, 1536, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = in_whole_vectors(function, x_TI)
    torch.testing.assert_close(expected, function(x_TI))
    gate_TI = torch.cat([x_TI, x_TI], -1)[:992, 100:200]  # as in models whose gate is a part of one product
    part = in_whole_vectors(function, gate_TI)
    for threads in THREADS:
        with use_threads(threads):
            assert torch.equal(in_whole_vectors(function, x_TI), expected), f"{threads} threads"
            assert torch.equal(in_whole_vectors(function, gate_TI), part), f"{threads} threads, a part of a tensor"


def test_gradients_flow_through_both_parts() -> None:
    x = torch.randn(3 * GRAIN + VECTOR, requires_grad=True)
    with use_threads(3):
        in_whole_vectors(torch.tanh, x).sum().backward()
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)


def test_the_activations_of_a_model_are_replaced_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), ACT2FN["silu"], nn.Sequential(ACT2FN["gelu_pytorch_tanh"], nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    expected = model(x)
    for _ in range(2):
        use_exact_activations_(model)
        assert [type(layer) for layer in model.modules()].count(WholeVectors) == 2
        assert torch.equal(model(x), expected)


def test_a_prefill_has_the_same_bits_on_any_number_of_threads(tiny_folder: Path) -> None:
    skip_unless_exact("float32")
    model = load_model(tiny_folder, "float32", "cpu", "exact")
    draw = torch.Generator().manual_seed(0)
    tokens = iter(torch.randint(3, 15, (1200,), generator=draw).tolist())
    trees = [Tree(list(islice(tokens, 40)), [list(islice(tokens, 20)) for _ in range(4)]) for _ in range(10)]
    with torch.inference_mode():
        expected = forward_hidden(model, pack(trees))
        for threads in THREADS:
            with use_threads(threads):
                assert torch.equal(forward_hidden(model, pack(trees)), expected), f"{threads} threads"
