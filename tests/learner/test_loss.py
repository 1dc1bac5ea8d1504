"""Compare every `loss.kind` with a plain loop in float64, and test clipping, micro-batches, extreme values and reports."""

import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.config.recipe import LossKind, LossSection
from shoal.learner.loss import LossTerms, denominator, k3, policy_loss

KINDS: list[LossKind] = ["grpo", "dr_grpo", "gspo", "cispo", "dppo"]
LENGTHS = [1, 2, 5, 32, 60, 100, 100, 100]  # tokens of each rollout; 400 in total
N = sum(LENGTHS)
D = 200.0


def section(kind: LossKind = "grpo", **changed: Any) -> LossSection:
    """Return settings without KL and entropy bonus. gspo's clip range is wide, but random rollouts still leave it."""
    wide = {"epsilon": 0.15} if kind == "gspo" else {}
    return LossSection(**{"kind": kind, "beta": 0.0, "entropy": 0.0} | wide | changed)


def case(seed: int = 0) -> dict[str, Tensor]:
    """Return random data in float64. Ratios from e^-3 to e^3 and advantages of both signs reach every bound."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(N, generator=generator, dtype=torch.float64)

    behaviour_N = -normal().abs() - 0.1
    drift_N = 6 * torch.rand(N, generator=generator, dtype=torch.float64) - 3
    rollout_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    # Whole rollouts drift, too, so that gspo's ratios vary.
    shift_R = 2.5 * torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    return {
        "logp_N": (behaviour_N + 0.5 * drift_N + 0.5 * shift_R[rollout_N]).clamp(max=-1e-3),
        "behaviour_N": behaviour_N,
        "advantage_N": normal(),
        "rollout_N": rollout_N,
        "reference_N": behaviour_N + 0.5 * normal(),
        "entropy_N": normal().abs(),
    }


def loss_of(data: dict[str, Tensor], settings: LossSection | None = None) -> LossTerms:
    return policy_loss(**data, denominator=D, settings=settings or section())


def gradient(data: dict[str, Tensor], settings: LossSection | None = None) -> Tensor:
    logp_N = data["logp_N"].detach().clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(loss_of(data | {"logp_N": logp_N}, settings).loss, logp_N)
    return gradient_N


# ---- plain loops: the loss, and its derivative with respect to each token's logprob


def clipped_loop(r: float, a: float, low: float, high: float, delta: float) -> tuple[float, float]:
    """Return the surrogate, and r times its derivative with respect to r."""
    value = min(min(r, delta) * a, min(max(r, low), high) * a)
    free = (a > 0 and r < high) or (a < 0 and low < r < delta)
    return value, r * a if free else 0.0


def weighted_loop(p: float, r: float, a: float, max_ratio: float, keep: bool) -> tuple[float, float]:
    weight = min(r, max_ratio) * a * keep
    return weight * p, weight


def slow(data: dict[str, Tensor], s: LossSection) -> tuple[float, list[float]]:
    d = {name: tensor.tolist() for name, tensor in data.items()}
    logp, mu, a = d["logp_N"], d["behaviour_N"], d["advantage_N"]
    total, slopes = 0.0, [0.0] * len(logp)
    for rollout in set(d["rollout_N"]):
        tokens = [t for t in range(len(logp)) if d["rollout_N"][t] == rollout]
        share = 1 / len(tokens) if s.kind == "gspo" else 1.0
        mean_ratio = math.exp(sum(logp[t] - mu[t] for t in tokens) / len(tokens))
        for t in tokens:
            r = math.exp(logp[t] - mu[t])
            moved = math.exp(logp[t]) - math.exp(mu[t])
            masked = (a[t] > 0 and moved > s.epsilon) or (a[t] < 0 and moved < -s.epsilon)
            if s.kind in ("grpo", "dr_grpo", "gspo"):
                ratio = mean_ratio if s.kind == "gspo" else r
                value, slope = clipped_loop(ratio, a[t], 1 - s.epsilon, 1 + s.epsilon_high, s.delta)
            elif s.kind == "cispo":
                value, slope = weighted_loop(logp[t], r, a[t], s.delta, True)
            else:
                value, slope = weighted_loop(logp[t], r, a[t], s.delta, not masked)
            log_ref = d["reference_N"][t] - logp[t]
            bound = min(log_ref, 8.0)
            kl = math.exp(bound) * (1 + log_ref - bound) - 1 - log_ref
            total += share * (-value + s.beta * kl - s.entropy * d["entropy_N"][t])
            slopes[t] += share * s.beta * (1 - math.exp(bound))
            for u in tokens if s.kind == "gspo" else [t]:  # a rollout's ratio depends on each of its tokens
                slopes[u] -= share * slope / (len(tokens) if s.kind == "gspo" else 1)
    return total / D, [slope / D for slope in slopes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_a_plain_loop(kind, seed):
    settings = section(kind, beta=0.3, entropy=0.1)
    value, slopes = slow(case(seed), settings)
    assert float(loss_of(case(seed), settings).loss) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(gradient(case(seed), settings), torch.tensor(slopes, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_random_data_reaches_every_bound(kind):
    bounds = {"clip_low", "clip_high", "clip_delta"} - ({"clip_low", "clip_high"} if kind == "cispo" else set())
    settings = section(kind, delta=3.0 if kind == "dppo" else 2.0)
    totals = {name: sum(getattr(loss_of(case(seed), settings), name) for seed in range(3)) for name in bounds}
    assert all(0 < total < 3 * N for total in totals.values()), totals


# ---- grpo: two-sided clipping


def test_two_sided_clipping_is_dual_clip_ppo_with_c_equal_to_delta():
    """The formula is equation 5 of arXiv 1912.09729: max(min(r A, clip(r) A), c A) where A < 0."""
    data = case()
    ratio_N, a_N = torch.exp(data["logp_N"] - data["behaviour_N"]), data["advantage_N"]
    ppo_N = torch.minimum(ratio_N * a_N, ratio_N.clamp(0.8, 1.2) * a_N)
    dual_N = torch.where(a_N < 0, torch.maximum(ppo_N, 4.0 * a_N), ppo_N)
    torch.testing.assert_close(loss_of(data).loss, -dual_N.sum() / D)


def token(logp: float, behaviour: float, advantage: float) -> dict[str, Tensor]:
    return {
        "logp_N": torch.tensor([logp]),
        "behaviour_N": torch.tensor([behaviour]),
        "advantage_N": torch.tensor([advantage]),
        "rollout_N": torch.tensor([0]),
    }


# ---- the other kinds


@pytest.mark.parametrize(
    ("now", "then", "advantage", "moves"),
    [
        (0.75, 0.5, 1.0, False),  # up by 0.25, and pushed further up
        (0.75, 0.5, -1.0, True),  # pushed back
        (0.25, 0.5, -1.0, False),  # down by 0.25, and pushed further down
        (0.25, 0.5, 1.0, True),
        (0.65, 0.5, 1.0, True),  # up by 0.15; PPO would clip this ratio of 1.3
        (0.15, 0.001, 1.0, True),  # a rare token that became 150 times as likely
        (0.75, 0.95, -1.0, True),  # a common token, just within the bound
        (0.74, 0.95, -1.0, False),  # a common token, just beyond the bound, at a ratio of 0.78
    ],
)
def test_dppo_masks_a_token_that_moved_far_in_the_direction_of_its_advantage(now, then, advantage, moves):
    gradient_N = gradient(token(math.log(now), math.log(then), advantage), section("dppo"))
    assert (float(gradient_N) != 0) == moves
    kept_N = gradient(token(math.log(0.1), math.log(0.001), advantage), section("dppo"))
    assert float(kept_N) == pytest.approx(-20.0 * advantage / D), "the weight of a kept token must be cut at delta"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_the_policy_gradient_if_on_policy_and_all_rollouts_have_max_tokens(kind):
    data = {name: tensor[-300:] for name, tensor in case().items()}  # three rollouts of 100
    data["logp_N"] = data["behaviour_N"]
    settings = section(kind)
    logp_N = data["logp_N"].clone().requires_grad_()
    of_batch = denominator(kind, n_tokens=300, n_rollouts=3, max_tokens=100)
    terms = policy_loss(**data | {"logp_N": logp_N}, denominator=of_batch, settings=settings)
    (gradient_N,) = torch.autograd.grad(terms.loss, logp_N)
    expected_N = data["advantage_N"]
    if kind == "gspo":  # gspo averages over a rollout, but in this data each token has its own advantage
        expected_N = expected_N.view(3, 100).mean(1).repeat_interleave(100)
    torch.testing.assert_close(gradient_N, -expected_N / 300)


# ---- sums


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_of_whole_rollouts_add_up_to_the_batch(kind):
    data, settings = case(), section(kind, beta=0.3, entropy=0.1)
    spans = [slice(0, 8), slice(8, 100), slice(100, N)]
    parts = [{name: tensor[span] for name, tensor in data.items()} for span in spans]
    whole = loss_of(data, settings)
    assert float(loss_of({name: tensor[:0] for name, tensor in data.items()}, settings).loss) == 0
    torch.testing.assert_close(sum(loss_of(part, settings).loss for part in parts), whole.loss)
    torch.testing.assert_close(torch.cat([gradient(part, settings) for part in parts]), gradient(data, settings))
    for name in ("clip_low", "clip_high", "clip_delta", "mismatch_kl", "entropy", "kl"):
        assert sum(getattr(loss_of(part, settings), name) for part in parts) == pytest.approx(getattr(whole, name))


@pytest.mark.parametrize(("kind", "figure"), [("grpo", 50), ("dr_grpo", 400), ("cispo", 50), ("dppo", 50), ("gspo", 4)])
def test_the_denominator_counts_what_the_kind_averages_over(kind, figure):
    assert denominator(kind, n_tokens=50, n_rollouts=4, max_tokens=100) == figure
    with pytest.raises(ValueError, match="0 tokens in 4 rollouts"):
        denominator(kind, n_tokens=0, n_rollouts=4, max_tokens=100)


# ---- extremes


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(deadline=None)
@given(
    logp=st.floats(-1e4, 0, width=32),
    behaviour=st.floats(-1e4, 0, width=32),
    reference=st.floats(-1e4, 0, width=32),
    advantage=st.sampled_from([-10.0, -1.0, 0.0, 1.0, 10.0]),
)
def test_loss_and_gradient_are_finite_for_extreme_logprobs(kind, logp, behaviour, reference, advantage):
    data = token(logp, behaviour, advantage) | {"reference_N": torch.tensor([reference])}
    settings = section(kind, beta=0.001)
    assert bool(torch.isfinite(loss_of(data, settings).loss))
    assert bool(torch.isfinite(gradient(data, settings)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_every_reported_sum_is_finite_for_impossible_logprobs(kind):
    """exp(80) per token, summed over thousands of tokens, overflows float32."""
    n = 20_000
    data = {
        "logp_N": torch.full((n,), -1.0),
        "behaviour_N": torch.full((n,), -9999.0),
        "advantage_N": torch.tensor([1.0, -1.0]).repeat(n // 2),
        "rollout_N": torch.arange(n),
        "reference_N": torch.full((n,), -0.5),
    }
    data["logp_N"].requires_grad_()
    terms = policy_loss(**data, denominator=float(n), settings=section(kind, beta=0.001))
    assert {name for name, value in vars(terms).items() if isinstance(value, Tensor)} == {"loss"}, (
        "the reported sums must be plain floats"
    )
    assert all(math.isfinite(float(torch.as_tensor(value).detach())) for value in vars(terms).values())


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_too_large_for_float32_gives_no_gradient_if_ratios_are_clipped(kind, advantage):
    assert gradient(token(0.0, -200.0, advantage), section(kind)).tolist() == [0.0]


# ---- KL and entropy


@pytest.mark.parametrize("d", [-30.0, -1.0, 0.5, 7.9, 8.1, 15.0, 300.0])
def test_the_gradient_of_k3_points_towards_the_reference_and_is_bounded(d):
    """Without a bound, a token at d = 15 would outweigh three million others.

    If k3 were constant beyond the bound, it would have no gradient there.
    """
    logp = torch.tensor(-400.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(k3(logp, torch.tensor(d - 400.0, dtype=torch.float64)), logp)
    assert float(slope) == pytest.approx(1 - math.exp(min(d, 8.0)))


def test_the_mean_of_k3_over_samples_is_the_kl_from_policy_to_reference():
    policy_V, reference_V = torch.log_softmax(torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.5, 0.0]]), -1)
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    torch.testing.assert_close((policy_V.exp() * k3(policy_V, reference_V)).sum(), exact)


# ---- reported figures


def counted_terms(kind: LossKind) -> LossTerms:
    ratio_N = torch.tensor([0.5, 0.5, 0.9, 1.3, 1.3, 5.0, 5.0, 5.0, 1.0])
    advantage_N = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 0.0])
    settings = section(kind, **{"epsilon": 0.07 if kind == "dppo" else 0.2, "delta": 4.0})
    data = {"behaviour_N": torch.full((9,), math.log(0.15)), "advantage_N": advantage_N, "rollout_N": torch.arange(9)}
    return policy_loss(ratio_N.log() + data["behaviour_N"], **data, denominator=1.0, settings=settings)


CLIPPED = {"clip_low": 1, "clip_high": 2, "clip_delta": 2}


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("grpo", CLIPPED),
        ("gspo", CLIPPED),
        ("cispo", {"clip_low": 0, "clip_high": 0, "clip_delta": 3}),
        # All tokens had a probability of 0.15 at sampling. Now it is 0.075, 0.135, 0.15, 0.195 or 0.75.
        ("dppo", {"clip_low": 1, "clip_high": 1, "clip_delta": 2}),
    ],
)
def test_a_clip_counter_counts_only_tokens_without_gradient(kind, counts):
    terms = counted_terms(kind)
    assert {name: getattr(terms, name) for name in counts} == counts


def test_the_reported_sums_are_kl_mismatch_kl_and_entropy():
    data, settings = case(), section(beta=0.3)
    terms = loss_of(data, settings)
    for d_N, figure in (
        (data["reference_N"] - data["logp_N"], terms.kl),
        (data["logp_N"] - data["behaviour_N"], terms.mismatch_kl),
    ):
        assert figure == pytest.approx(float((torch.exp(d_N) - d_N - 1).sum()))
    for each in (settings, section(entropy=0.1)):
        assert loss_of(data, each).entropy == pytest.approx(float(data["entropy_N"].sum()))


# ---- errors


@pytest.mark.parametrize(
    ("settings", "missing", "message"),
    [
        (lambda: section(beta=0.1), "reference_N", "needs the reference's logprobs"),
        (lambda: section(entropy=0.1), "entropy_N", "needs the policy's entropies"),
        (lambda: section("gspo"), "rollout_N", "needs rollout_N"),
    ],
)
def test_a_missing_input_is_refused(settings, missing, message):
    data = {name: tensor for name, tensor in case().items() if name != missing}
    with pytest.raises(ValueError, match=message):
        loss_of(data, settings())


def test_gspo_accepts_any_rollout_numbers_but_only_contiguous_rollouts():
    data = case()
    renamed = data | {"rollout_N": 7 * (len(LENGTHS) - data["rollout_N"])}
    assert loss_of(renamed, section("gspo")) == loss_of(data, section("gspo"))
    with pytest.raises(ValueError, match="returns to an earlier rollout"):
        loss_of(data | {"rollout_N": torch.arange(N) % 2}, section("gspo"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "grpo", "delta": 1.2}, r"delta must exceed 1 \+ 0\.2"),
        ({"kind": "dr_grpo", "delta": 1.1}, r"delta must exceed 1 \+ 0\.2"),
        ({"kind": "gspo", "delta": 1.00035}, r"delta must exceed 1 \+ 0\.0004"),
        ({"kind": "dr_grpo", "normalize_std": True}, "set learner.loss.normalize_std = false"),
    ],
)
def test_contradictory_settings_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        LossSection(**changed)


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ({}, (0.2, 0.2, 4.0)),
        ({"kind": "dr_grpo", "epsilon": 0.1}, (0.1, 0.1, 4.0)),
        ({"kind": "gspo"}, (3e-4, 4e-4, 4.0)),
        ({"kind": "gspo", "epsilon": 1e-3}, (1e-3, 4e-3 / 3, 4.0)),
        ({"kind": "cispo"}, (0.2, 0.2, 5.0)),
        ({"kind": "dppo", "epsilon": 0.3, "delta": 8.0}, (0.3, 0.3, 8.0)),
        ({"kind": "dppo"}, (0.2, 0.2, 20.0)),
    ],
)
def test_unset_bounds_default_to_those_of_the_kind(values, bounds):
    section = LossSection(**values)
    assert (section.epsilon, section.epsilon_high, section.delta) == pytest.approx(bounds)


@pytest.mark.parametrize("kind", ["gspo", "cispo", "dppo"])
def test_a_delta_of_1_1_is_accepted_if_the_kinds_clip_range_does_not_reach_it(kind):
    assert LossSection(kind=kind, delta=1.1).delta == 1.1
