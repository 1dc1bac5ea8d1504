"""Logprobs, entropies and gradients computed in slices equal those of the full log softmax."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shoal.model import logprobs
from shoal.model.logprobs import Scoring, chosen_logprobs, chosen_loss

VOCAB, HIDDEN = 64, 32
PRODUCT, CACHED = 8, 3  # the number of rows in a product, and in a chunk that is exponentiated
SIZES = [1, PRODUCT - 1, PRODUCT, PRODUCT + 1, 2 * PRODUCT + 3]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "PRODUCT_BYTES", PRODUCT * VOCAB * 4)
    monkeypatch.setattr(logprobs, "CACHED_BYTES", CACHED * VOCAB * 4)


def case(n: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n)
    head_VH = torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    return torch.randn(n, HIDDEN, requires_grad=True), head_VH.requires_grad_(), torch.randint(VOCAB, (n,))


def full_logprobs(hidden_NH: Tensor, head_VH: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(hidden_NH @ head_VH.T / temperature, -1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_entropies_equal_the_full_log_softmax(n: int, temperature: float) -> None:
    hidden_NH, head_VH, target_N = case(n)
    logp_N, entropy_N = chosen_logprobs(hidden_NH, head_VH, target_N, Scoring(temperature, with_entropy=True))
    full_NV = full_logprobs(hidden_NH, head_VH, temperature)
    torch.testing.assert_close(logp_N, full_NV[torch.arange(n), target_N])
    torch.testing.assert_close(entropy_N, -(full_NV.exp() * full_NV).sum(-1))


@pytest.mark.parametrize("n", SIZES)
def test_gradients_equal_those_through_the_full_log_softmax(n: int) -> None:
    hidden_NH, head_VH, target_N = case(n)
    weight_N = torch.randn(n)
    logprobs_N, entropy_N = chosen_logprobs(hidden_NH, head_VH, target_N, Scoring(0.6, with_entropy=True))
    assert entropy_N is not None
    full_NV = full_logprobs(hidden_NH, head_VH, 0.6)
    expected = (weight_N * (full_NV[torch.arange(n), target_N] - (full_NV.exp() * full_NV).sum(-1))).sum()
    inputs = (hidden_NH, head_VH)
    grads = torch.autograd.grad((weight_N * (logprobs_N + entropy_N)).sum(), inputs)
    for grad, plain in zip(grads, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(grad, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, *SIZES])
def test_a_sliced_loss_has_the_gradients_of_the_whole_loss_bit_for_bit(n: int, dtype: torch.dtype) -> None:
    hidden_NH, head_VH, target_N = case(n)
    bias_V, weight_N = torch.randn(VOCAB), torch.randn(n)
    inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden_NH, head_VH, bias_V)]

    def loss_of(targets: slice, logp_C: Tensor, entropy_C: Tensor | None) -> Tensor:
        assert entropy_C is not None
        return (weight_N[targets] * (logp_C.square() - 3 * entropy_C)).sum()

    how = Scoring(0.6, with_entropy=True)
    whole = loss_of(slice(None), *chosen_logprobs(inputs[0], inputs[1], target_N, how, inputs[2]))
    sliced = chosen_loss(inputs[0], inputs[1], target_N, loss_of, how, inputs[2])
    torch.testing.assert_close(sliced, whole)
    assert all(map(torch.equal, torch.autograd.grad(2 * sliced, inputs), torch.autograd.grad(2 * whole, inputs)))


def test_a_sliced_loss_computes_the_logits_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, products = 0, logprobs._logits

    def counted(*arguments: Tensor) -> Iterator[tuple[int, Tensor]]:
        nonlocal calls
        calls += 1
        return products(*arguments)

    def sum_of(_: slice, logp_C: Tensor, __: Tensor | None) -> Tensor:
        return logp_C.sum()

    monkeypatch.setattr(logprobs, "_logits", counted)
    chosen_loss(*case(2 * PRODUCT + 3), sum_of).backward()  # type: ignore[no-untyped-call]
    assert calls == 1
    monkeypatch.delattr(logprobs._Scores, "differentiate_")
    with torch.no_grad():
        assert not chosen_loss(*case(5), sum_of).requires_grad, "gradients were computed for a held-out loss"
