"""Sums of gradients over replicas: started during the backward pass, in one order, whatever is ready first."""

import pytest
import torch
from torch import Tensor, nn

from shoal.learner.pretrain import replicas
from shoal.learner.pretrain.replicas import GradientSums, buckets

WIDTH = 8


class Doubled:
    """As if another rank had the same gradients. They arrive when they are waited for."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def wait(self) -> None:
        self.flat.mul_(2)


@pytest.fixture(autouse=True)
def each_layer_is_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(replicas, "BUCKETS", 3)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def test_buckets_are_equal_parts_of_what_is_trained_and_the_last_come_first() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    model[3].weight.requires_grad_(False)
    number = {layer.weight: n for n, layer in enumerate(model)}
    found = [[number[each] for each in bucket] for bucket in buckets(list(model.parameters()))]
    assert found == [[5, 4], [2, 1], [0]]


def test_the_last_layers_gradients_travel_before_the_first_layers_are_computed() -> None:
    model, started = layers(), list[int]()
    when: dict[int, int] = {}  # number of all-reduces that had begun when a layer's gradients were ready
    for number, layer in enumerate(model):

        def note(_: Tensor, number: int = number) -> None:
            when[number] = len(started)

        layer.weight.register_post_accumulate_grad_hook(note)

    def start(flat: Tensor) -> Doubled:
        started.append(flat.numel())
        return Doubled(flat)

    loss = model(torch.ones(1, WIDTH)).sum()
    with GradientSums(model.parameters(), start).backward(torch.zeros(1)):
        loss.backward()
    assert started == [1, WIDTH**2, WIDTH**2, WIDTH**2]  # the loss, then each layer
    assert when == {2: 1, 1: 2, 0: 3}


def test_loss_and_gradients_are_those_of_all_ranks_and_steps_before_the_last_stay_here() -> None:
    model, one = layers(), layers()
    sums, total = GradientSums(model.parameters(), Doubled), torch.tensor([1.5])
    model(torch.ones(1, WIDTH)).sum().backward()
    with sums.backward(total):
        model(torch.full((1, WIDTH), 2.0)).sum().backward()
    one(torch.full((1, WIDTH), 3.0)).sum().backward()
    for found, expected in zip(model.parameters(), one.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, 2 * expected.grad)
    assert float(total) == 3.0
    assert sums.summed_bytes == 4 * (1 + 3 * WIDTH**2)
    model.zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()  # nothing is left behind: an ordinary pass is not summed
    assert sums.summed_bytes == 4 * (1 + 3 * WIDTH**2)


def test_the_order_of_the_sums_does_not_depend_on_which_gradient_is_ready_first() -> None:
    orders = list[list[int]]()
    for swapped in (False, True):
        first, second = (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3)))
        order = list[int]()

        def start(flat: Tensor, order: list[int] = order) -> Doubled:
            order.append(flat.numel())
            return Doubled(flat)

        with GradientSums([first, second], start).backward(torch.zeros(1)):
            for each in (first, second) if swapped else (second, first):
                each.sum().backward()
        orders.append(order)
    assert orders == [[1, 3, 2], [1, 3, 2]]


def test_a_parameter_that_the_loss_does_not_need_has_no_gradient_and_holds_nothing_up() -> None:
    model = layers()
    with GradientSums(model.parameters(), Doubled).backward(torch.zeros(1)):
        model[1](model[0](torch.ones(1, WIDTH))).sum().backward()
    assert model[2].weight.grad is None
    assert model[0].weight.grad is not None
