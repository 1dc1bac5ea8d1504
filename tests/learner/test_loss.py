import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.learner.loss import LossTerms, policy_loss

RECIPE: dict[str, Any] = {"denominator": 200.0, "epsilon": 0.2, "delta": 4.0}
N = 400


def case(seed: int = 0) -> dict[str, Tensor]:
    """Ratios from e^-3 to e^3, so every clip binds somewhere, with both signs of advantage. float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(N, generator=generator, dtype=torch.float64)

    behaviour_N = -normal().abs() - 0.1
    drift_N = 6 * torch.rand(N, generator=generator, dtype=torch.float64) - 3
    return {
        "logp_N": behaviour_N + drift_N,
        "behaviour_N": behaviour_N,
        "advantage_N": normal(),
        "reference_N": behaviour_N + 0.5 * normal(),
        "entropy_N": normal().abs(),
    }


def surrogate(data: dict[str, Tensor], **recipe: Any) -> LossTerms:
    tensors = {name: data[name] for name in ("logp_N", "behaviour_N", "advantage_N")}
    return policy_loss(**tensors, **(RECIPE | recipe))


def whole(data: dict[str, Tensor]) -> LossTerms:
    return policy_loss(**data, **RECIPE, beta=0.3, entropy_coef=0.1)


def numpy_loss(data: dict[str, Tensor], *, beta: float = 0.0, entropy_coef: float = 0.0) -> float:
    """The formula of DESIGN section 4, one token at a time."""
    d = {name: tensor.detach().numpy() for name, tensor in data.items()}
    total = 0.0
    for t in range(len(d["logp_N"])):
        ratio, a = np.exp(d["logp_N"][t] - d["behaviour_N"][t]), d["advantage_N"][t]
        total -= min(min(ratio, 4.0) * a, min(max(ratio, 0.8), 1.2) * a)
        log_ref = d["reference_N"][t] - d["logp_N"][t]
        total += beta * (np.exp(log_ref) - 1 - log_ref)
        total -= entropy_coef * d["entropy_N"][t]
    return float(total / 200.0)


# ---- values


@pytest.mark.parametrize(("low", "high"), [(0, 0.8), (0.8, 1.2), (1.2, 4), (4, math.inf)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_random_data_covers_every_regime_of_the_ratio(low: float, high: float, sign: int) -> None:
    data = case()
    ratio_N = torch.exp(data["logp_N"] - data["behaviour_N"])
    assert int(((ratio_N > low) & (ratio_N < high) & (sign * data["advantage_N"] > 0)).sum()) > 5


@pytest.mark.parametrize("seed", range(3))
def test_the_surrogate_equals_a_numpy_implementation(seed: int) -> None:
    assert float(surrogate(case(seed)).loss) == pytest.approx(numpy_loss(case(seed)), rel=1e-12)


def test_the_whole_loss_equals_a_numpy_implementation() -> None:
    assert float(whole(case()).loss) == pytest.approx(numpy_loss(case(), beta=0.3, entropy_coef=0.1), rel=1e-12)


def test_two_sided_clipping_is_dual_clip_ppo_with_c_equal_to_delta() -> None:
    """arXiv 1912.09729, equation 5: max(min(r A, clip(r) A), c A) where A < 0."""
    data = case()
    ratio_N, a_N = torch.exp(data["logp_N"] - data["behaviour_N"]), data["advantage_N"]
    ppo_N = torch.minimum(ratio_N * a_N, ratio_N.clamp(0.8, 1.2) * a_N)
    dual_N = torch.where(a_N < 0, torch.maximum(ppo_N, 4.0 * a_N), ppo_N)
    torch.testing.assert_close(surrogate(data).loss, -dual_N.sum() / 200)


def test_on_policy_the_loss_is_minus_the_mean_advantage() -> None:
    data = case() | {"logp_N": case()["behaviour_N"]}
    torch.testing.assert_close(surrogate(data).loss, -data["advantage_N"].sum() / 200)


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    data = case()
    spans = [slice(0, 7), slice(7, 150), slice(150, N)]
    parts = [whole({name: tensor[span] for name, tensor in data.items()}).loss for span in spans]
    torch.testing.assert_close(sum(parts), whole(data).loss)


def test_an_empty_micro_batch_adds_nothing() -> None:
    assert float(whole({name: tensor[:0] for name, tensor in case().items()}).loss) == 0


# ---- gradients


@pytest.mark.parametrize("terms", ["surrogate", "whole"])
def test_the_gradient_equals_finite_differences(terms: str) -> None:
    data = case()
    logp_N = data["logp_N"].requires_grad_()
    loss = {"surrogate": surrogate, "whole": whole}[terms]
    (gradient_N,) = torch.autograd.grad(loss(data).loss, logp_N)
    h = 1e-6
    for t in range(0, N, 7):
        up, down = (logp_N.detach().clone() for _ in range(2))
        up[t] += h
        down[t] -= h
        slope = (loss(data | {"logp_N": up}).loss - loss(data | {"logp_N": down}).loss) / (2 * h)
        assert float(gradient_N[t]) == pytest.approx(float(slope), abs=1e-7)


@pytest.mark.parametrize(
    ("drift", "advantage", "moves"),
    [(1.0, 1.0, False), (-1.0, 1.0, True), (1.0, -1.0, True), (-1.0, -1.0, False), (2.0, -1.0, False)],
)
def test_a_token_beyond_its_clip_has_no_gradient_and_one_within_has(
    drift: float, advantage: float, moves: bool
) -> None:
    logp_N = torch.tensor([drift - 3], requires_grad=True)
    terms = policy_loss(logp_N, torch.tensor([-3.0]), torch.tensor([advantage]), **RECIPE)
    (gradient_N,) = torch.autograd.grad(terms.loss, logp_N)
    assert (float(gradient_N) != 0) == moves


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    data = case()
    logp_N = data["behaviour_N"].clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(surrogate(data | {"logp_N": logp_N}).loss, logp_N)
    torch.testing.assert_close(gradient_N, -data["advantage_N"] / 200)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_too_large_for_float32_gives_a_finite_gradient(advantage: float) -> None:
    logp_N = torch.zeros(1, requires_grad=True)
    terms = policy_loss(logp_N, torch.tensor([-200.0]), torch.tensor([advantage]), **RECIPE)
    (gradient_N,) = torch.autograd.grad(terms.loss, logp_N)
    assert gradient_N.tolist() == [0.0]


# ---- KL and entropy


def test_the_kl_term_has_a_gradient() -> None:
    """The original computed it without: beta then did nothing."""
    data = case() | {"advantage_N": torch.zeros(N, dtype=torch.float64)}
    logp_N = data["logp_N"].requires_grad_()
    (gradient_N,) = torch.autograd.grad(policy_loss(**data, **RECIPE, beta=0.3).loss, logp_N)
    expected_N = 0.3 / 200 * (1 - torch.exp(data["reference_N"] - data["logp_N"]))
    torch.testing.assert_close(gradient_N, expected_N)


def test_the_kl_reported_is_the_sum_of_k3() -> None:
    data = case()
    d_N = data["reference_N"] - data["logp_N"]
    assert whole(data).kl == pytest.approx(float((torch.exp(d_N) - d_N - 1).sum()))


def test_the_mean_of_k3_over_samples_is_the_kl_from_policy_to_reference() -> None:
    policy_V, reference_V = torch.log_softmax(torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.5, 0.0]]), -1)
    k3_V = torch.stack([
        torch.tensor(policy_loss(
            p[None], p[None], torch.zeros(1), **RECIPE, beta=1.0, reference_N=r[None]).kl)
        for p, r in zip(policy_V, reference_V, strict=True)
    ])  # fmt: skip
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    torch.testing.assert_close((policy_V.exp() * k3_V).sum(), exact)


def test_a_policy_equal_to_its_reference_has_no_kl() -> None:
    data = case()
    assert whole(data | {"reference_N": data["logp_N"]}).kl == 0


def test_more_entropy_lowers_the_loss_by_its_coefficient() -> None:
    data = case()
    more = data | {"entropy_N": data["entropy_N"] + 1}
    assert float(whole(data).loss - whole(more).loss) == pytest.approx(0.1 * N / 200)


def test_the_entropy_bonus_has_a_gradient() -> None:
    data = case()
    entropy_N = data["entropy_N"].requires_grad_()
    (gradient_N,) = torch.autograd.grad(whole(data).loss, entropy_N)
    torch.testing.assert_close(gradient_N, torch.full_like(entropy_N, -0.1 / 200))


def test_the_entropy_reported_is_the_sum() -> None:
    assert whole(case()).entropy == pytest.approx(float(case()["entropy_N"].sum()))


def test_the_entropy_is_reported_where_it_is_not_rewarded() -> None:
    data = case()
    assert policy_loss(**data, **RECIPE).entropy == pytest.approx(float(data["entropy_N"].sum()))


# ---- what is reported


def hand_made() -> LossTerms:
    ratios = torch.tensor([0.5, 0.5, 0.9, 1.3, 1.3, 5.0, 5.0, 5.0, 1.0])
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 0.0])
    return policy_loss(ratios.log(), torch.zeros(9), advantages, **RECIPE)


@pytest.mark.parametrize(("counter", "tokens"), [("clip_low", 1), ("clip_high", 2), ("clip_delta", 2)])
def test_a_counter_counts_only_tokens_whose_clip_binds(counter: str, tokens: int) -> None:
    assert getattr(hand_made(), counter) == tokens


def test_the_mismatch_is_the_sum_of_k3_between_behaviour_and_policy() -> None:
    data = case()
    drift_N = data["logp_N"] - data["behaviour_N"]
    assert whole(data).mismatch_kl == pytest.approx(float((torch.exp(drift_N) - drift_N - 1).sum()))


def test_the_reported_figures_hold_no_graph() -> None:
    data = case()
    data["logp_N"].requires_grad_()
    terms = whole(data)
    assert {name for name, value in vars(terms).items() if isinstance(value, Tensor)} == {"loss"}


# ---- errors


@pytest.mark.parametrize("delta", [0.5, 1.0, 1.2])
def test_a_delta_inside_the_clip_range_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match=f"delta {delta} must exceed"):
        surrogate(case(), delta=delta)


def test_a_kl_without_the_references_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the reference's logprobs"):
        surrogate(case(), beta=0.1)


def test_an_entropy_bonus_without_entropies_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the policy's entropies"):
        surrogate(case(), entropy_coef=0.1)
