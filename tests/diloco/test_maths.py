"""The formulas of DiLoCo compared with plain training, data-parallel training and torch's own optimizer."""

from math import prod

import pytest
import torch
from torch import Tensor

from shoal.diloco import codec
from shoal.diloco.agreed import Agreed, Shapes, digest, outer_step, pseudo_gradient
from shoal.diloco.codec import KINDS, CodecError, Encoded, ErrorFeedback, max_size_bytes
from shoal.diloco.meeting import refused

from .support import decode, encode

ROUNDING = {"fp64": 0.0, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}  # largest relative error of a float


def numbers(count: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def gradient(weights: Tensor, seed: int) -> Tensor:
    """Return the gradient of a least-squares problem with 16 random rows."""
    rows, wanted = numbers(16 * len(weights), seed).view(16, -1), numbers(16, seed + 1000)
    return rows.T @ (rows @ weights - wanted) / 16


def adam_step(weights: Tensor, optimizer: torch.optim.Optimizer, seed: int) -> None:
    weights.grad = gradient(weights.detach(), seed)
    optimizer.step()


def test_one_site_with_one_inner_step_and_no_momentum_is_plain_training_bit_for_bit():
    plain, local = numbers(400, 0).requires_grad_(), numbers(400, 0).requires_grad_()
    agreed, velocity = local.detach().clone(), torch.zeros(400)
    optimizers = [torch.optim.AdamW([each], lr=0.05, weight_decay=0.1) for each in (plain, local)]
    for seed in range(30):
        adam_step(plain, optimizers[0], seed)
        adam_step(local, optimizers[1], seed)
        sent = decode(encode(pseudo_gradient(agreed, local.detach()), "fp64"), "fp64", 400)
        agreed, velocity = outer_step(agreed, velocity, sent, lr=1.0, momentum=0.0)
        local.data = agreed.clone()
    assert torch.equal(plain, agreed)


@pytest.mark.parametrize("sites", [2, 3, 8])
def test_several_sites_with_one_inner_step_of_sgd_are_data_parallel_within_rounding(sites):
    dense, agreed, velocity = numbers(50, 0), numbers(50, 0), torch.zeros(50)
    for step in range(20):
        seeds = [sites * step + site for site in range(sites)]
        dense = dense - 0.05 * torch.stack([gradient(dense, seed) for seed in seeds]).mean(0)
        sent = [pseudo_gradient(agreed, agreed - 0.05 * gradient(agreed, seed)) for seed in seeds]
        agreed, velocity = outer_step(agreed, velocity, torch.stack(sent).mean(0), lr=1.0, momentum=0.0)
    # Each of the 20 steps makes about four rounding errors. Each error is at most 4 * 2^-24, because the numbers are
    # below 4. The updates do not amplify the errors.
    assert (dense - agreed).abs().max() < 20 * 4 * 4 * 2.0**-24


def test_the_outer_step_is_torchs_nesterov_sgd():
    weights = numbers(100, 0).double().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    agreed, velocity = numbers(100, 0), torch.zeros(100)
    for seed in range(10):
        weights.grad = numbers(100, seed + 1, 0.01).double()
        optimizer.step()
        agreed, velocity = outer_step(agreed, velocity, weights.grad, lr=0.7, momentum=0.9)
    assert torch.allclose(agreed.double(), weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 511, 1025])
def test_decoded_numbers_are_within_half_a_unit_of_the_encoded_ones(kind, count):
    values = numbers(count, 1, 1e-3)
    data = encode(values, kind)
    decoded = decode(data, kind, count)
    assert len(data) <= max_size_bytes(kind, count)
    if kind in ROUNDING:
        assert ((decoded - values).abs() <= values.abs() * ROUNDING[kind] + 2.0**-25).all()
    else:
        block, largest = (1024, 127) if kind == "int8" else (512, 7)
        for at in range(0, count, block):
            unit = values[at : at + block].abs().max() / largest
            assert ((decoded - values)[at : at + block].abs() <= unit * 0.5001).all()


def test_zeros_and_non_finite_numbers_are_preserved_and_int4_packs_two_numbers_per_byte():
    assert len(encode(torch.zeros(1 << 16), "int4")) < (1 << 15) * 1.02 + 200
    assert decode(encode(torch.tensor([7.0, -7.0, 3.0]), "int4"), "int4", 3).tolist() == [7.0, -7.0, 3.0]
    for kind in KINDS:
        assert decode(encode(torch.zeros(7), kind), kind, 7).tolist() == [0.0] * 7
        for bad in (float("nan"), float("inf")):
            assert not decode(encode(torch.tensor([1.0, bad]), kind), kind, 2).isfinite().all()


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "int4"])
def test_error_feedback_keeps_the_sum_of_decoded_vectors_exact(kind):
    feedback = ErrorFeedback(torch.zeros(2000))
    exact, arrived, without = (torch.zeros(2000, dtype=torch.float64) for _ in range(3))
    for seed in range(50):
        values = numbers(2000, seed, 1e-3) + 2e-5  # a drift below the resolution of 4 bits
        exact += values.double()
        arrived += feedback.encode(values.__getitem__, kind).get(slice(0, 2000)).double()
        without += decode(encode(values, kind), kind, 2000).double()
    assert (exact - arrived - feedback.left.double()).abs().max() < 1e-8  # the difference is the stored rounding error
    assert (exact - arrived).abs().max() < 1e-3  # this error stays as small as that of one rounding
    assert (exact - arrived).norm() < 0.5 * (exact - without).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_computing_vectors_in_parts_gives_the_same_bits(kind, monkeypatch):
    def computed() -> tuple[bytes, Tensor, Tensor, str]:
        feedback = ErrorFeedback(numbers(5000, 1, 1e-4))
        encoded = feedback.encode(numbers(5000, 2, 1e-3).__getitem__, kind)
        agreed = Agreed(numbers(5000, 3), numbers(5000, 4, 1e-3))
        agreed.step(encoded, lr=0.7, momentum=0.9)
        return encoded.to_bytes(), decode(encoded.to_bytes(), kind, 5000), feedback.left, agreed.digest

    whole = computed()
    monkeypatch.setattr(codec, "PART", 2048)
    data, decoded, left, agreed_digest = computed()
    assert data == whole[0] and agreed_digest == whole[3]
    assert torch.equal(decoded, whole[1]) and torch.equal(left, whole[2])
    norm = Encoded.from_bytes(data, kind, 5000).norm()
    assert norm == pytest.approx(float(decoded.double().norm()))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors"),
        (b"\xff" * 100, "not a safetensors"),
        (encode(torch.zeros(9), "fp16"), "expected 8 numbers"),
        (encode(torch.zeros(8), "fp32"), "as fp16"),
        (encode(torch.zeros(8), "int8"), "as fp16"),
    ],
)
def test_malformed_bytes_are_refused(data, message):
    with pytest.raises(CodecError, match=message):
        decode(data, "fp16", 8)


SHAPES = {"model.layers.0.q": (4, 3), "embed": (50, 2), "norm": (3,)}


def test_every_parameter_is_restored_and_the_order_of_names_does_not_matter():
    tensors = {name: numbers(prod(shape), i).view(shape) for i, (name, shape) in enumerate(SHAPES.items())}
    shapes, turned = Shapes.of(tensors), Shapes(dict(reversed(SHAPES.items())))
    copies = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    values = shapes.gather(tensors)
    assert len(values) == shapes.size == turned.size and torch.equal(values, turned.gather(tensors))
    turned.scatter_(copies, values)
    assert all(torch.equal(copies[name], tensors[name]) for name in SHAPES)
    assert digest(values) == digest(values.clone()) and digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("norms", "past", "left_out"),
    [
        ({"a": 1.0, "b": 1.2, "c": 30.0}, [], {"c"}),
        ({"a": 1.0, "b": float("nan")}, [], {"b"}),
        ({"a": 1.0, "b": 30.0}, [], {"b"}),  # of two sites, the smaller norm cannot break the parameters
        ({"a": 1.0, "b": 0.0}, [], set()),  # b had no work
        ({"a": 1.0, "b": 30.0}, [{"a": 1.0}, {"a": 1.1}], {"b"}),
        ({"a": 1.0, "b": 30.0}, [{"a": 1.0, "b": 20.0}, {"a": 1.1, "b": 20.0}], {"b"}),
        ({"a": 1.0, "b": 1e-9, "c": 1e-9}, [{"a": 1.0}], set()),  # newcomers must not make an honest norm an outlier
        ({"a": 1.0, "b": 1e-9, "c": 1e-9}, [{"a": 1.0, "b": 1.0, "c": 1.0}], set()),
        ({"a": float("inf")}, [], {"a"}),
    ],
)
def test_a_broken_vector_is_left_out(norms, past, left_out):
    assert set(refused(norms, past, 10.0, 0.0)) == left_out
