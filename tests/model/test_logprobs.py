from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.model.logprobs import CHUNK, chosen_logprobs

VOCAB, HIDDEN = 64, 32
SIZES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


def case(n: int) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(n)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    return (
        SimpleNamespace(lm_head=head),
        torch.randn(n, HIDDEN, requires_grad=True),
        torch.randint(VOCAB, (n,)),
    )


def full_logprobs(model: Any, hidden_NH: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(model.lm_head(hidden_NH) / temperature, -1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_equal_the_full_log_softmax(n: int, temperature: float) -> None:
    model, hidden_NH, target_N = case(n)
    logprobs_N, _ = chosen_logprobs(model, hidden_NH, target_N, temperature=temperature)
    expected_N = full_logprobs(model, hidden_NH, temperature)[torch.arange(n), target_N]
    torch.testing.assert_close(logprobs_N, expected_N)


@pytest.mark.parametrize("n", SIZES)
def test_gradients_equal_those_through_the_full_log_softmax(n: int) -> None:
    model, hidden_NH, target_N = case(n)
    weight_N = torch.randn(n)
    logprobs_N, entropy_N = chosen_logprobs(model, hidden_NH, target_N, temperature=0.6, with_entropy=True)
    assert entropy_N is not None
    full_NV = full_logprobs(model, hidden_NH, 0.6)
    expected = (weight_N * (full_NV[torch.arange(n), target_N] - (full_NV.exp() * full_NV).sum(-1))).sum()
    inputs = (hidden_NH, model.lm_head.weight)
    got = torch.autograd.grad((weight_N * (logprobs_N + entropy_N)).sum(), inputs)
    for mine, plain in zip(got, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


def test_values_without_gradient_equal_those_with() -> None:
    model, hidden_NH, target_N = case(CHUNK + 5)
    with torch.no_grad():
        quick_N, _ = chosen_logprobs(model, hidden_NH, target_N)
    assert torch.equal(quick_N, chosen_logprobs(model, hidden_NH, target_N)[0])


def test_entropy_equals_its_definition() -> None:
    model, hidden_NH, target_N = case(CHUNK + 5)
    _, entropy_N = chosen_logprobs(model, hidden_NH, target_N, temperature=0.6, with_entropy=True)
    p_NV = full_logprobs(model, hidden_NH, 0.6).exp()
    torch.testing.assert_close(entropy_N, -(p_NV * p_NV.log()).sum(-1))


def test_entropy_is_left_out_unless_asked_for() -> None:
    assert chosen_logprobs(*case(5))[1] is None


def test_logprobs_from_bfloat16_hidden_states_are_float32() -> None:
    model, hidden_NH, target_N = case(5)
    model.lm_head.to(torch.bfloat16)
    assert chosen_logprobs(model, hidden_NH.bfloat16(), target_N)[0].dtype == torch.float32


def test_no_tokens_give_no_logprobs() -> None:
    model, hidden_NH, target_N = case(0)
    assert chosen_logprobs(model, hidden_NH, target_N)[0].shape == (0,)
