"""The policy loss as pure functions: one surrogate per `loss.kind`, plus the KL penalty and entropy bonus that all share.

    r_t = exp(logp_t - behaviour_t)
    loss = 1/D * sum_t w_t * ( -J_t + beta * KL_t - c * entropy_t )

J_t is the surrogate of `loss.kind`. D counts the whole global batch (`denominator`), so the losses of micro-batches and
ranks add up. w_t is 1, or 1 / length of the rollout for gspo, which averages over rollouts instead of tokens.
KL is the k3 estimator exp(d) - d - 1 with d = reference - logp (Schulman 2020). It is differentiated, too.

Invariant: for finite logprobs, however far apart, loss and gradient contain no NaN, and the reported sums are finite.
Left out: a proximal policy. The ratio compares the current policy directly with the sampling policy.
"""

from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from shoal.config.recipe import LossKind, LossSection

# Log ratios are cut here, far beyond the log of any delta, because exp must not overflow. In float32, exp(89) is inf,
# and its gradient is NaN even where J is clipped.
MAX_LOG_RATIO = 80.0
MAX_LOG_REFERENCE = 8.0  # k3 is linear beyond this; its slope there times the default beta is 3, less than delta


class Surrogate(NamedTuple):
    """For each token, the objective to maximise, and bools that say which bounds apply."""

    objective_N: Tensor
    low_N: Tensor  # whether the lower clip removes the gradient: A < 0, and the probability fell too far
    high_N: Tensor  # whether the upper clip removes the gradient: A > 0, and the probability rose too far
    bounded_N: Tensor  # the ratio reached its upper bound (delta)


@dataclass(frozen=True)
class LossTerms:
    """The loss to differentiate, and sums (not means) over this micro-batch's tokens to report."""

    loss: Tensor
    clip_low: float  # tokens without gradient because of the kind's lower clip or mask (A < 0)
    clip_high: float  # tokens without gradient because of the kind's upper clip or mask (A > 0)
    clip_delta: float  # tokens whose ratio is cut at delta; for grpo, dr_grpo and gspo, only those with A < 0
    mismatch_kl: float  # k3 estimate of KL(behaviour policy, current policy)
    entropy: float  # exact if it was computed; otherwise the unbiased estimate -logp of the sampled tokens
    kl: float


def denominator(kind: LossKind, n_tokens: int, n_rollouts: int, max_tokens: int) -> float:
    """Return D for a global batch of `n_tokens` trained tokens in `n_rollouts` rollouts of at most `max_tokens`.

    grpo, cispo, dppo   trained tokens: every token has the same weight
    dr_grpo             max_tokens * n_rollouts: a token's weight does not depend on any rollout's length
    gspo                rollouts: every rollout has the same weight

    Raise ValueError for an empty batch.
    """
    if min(n_tokens, n_rollouts, max_tokens) < 1:
        raise ValueError(f"{n_tokens} tokens in {n_rollouts} rollouts of up to {max_tokens}: nothing to train on")
    match kind:
        case "grpo" | "cispo" | "dppo":
            return float(n_tokens)
        case "dr_grpo":
            return float(max_tokens * n_rollouts)
        case "gspo":
            return float(n_rollouts)
        case _:
            assert_never(kind)


def policy_loss(
    logp_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    *,
    denominator: float,
    settings: LossSection,
    rollout_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
) -> LossTerms:
    """Compute the loss of N completion tokens of one micro-batch.

    logp_N are the policy's logprobs, with gradient, and behaviour_N those under the sampling version. advantage_N holds
    the advantage of each token's rollout. `denominator` is the result of `denominator()` for the *global* batch. gspo
    needs rollout_N (int64), the rollout of each token; a rollout's tokens are contiguous. reference_N is needed if
    settings.beta > 0, and entropy_N is needed if settings.entropy > 0. All but rollout_N are float32. Logprobs are in
    nats. Raise ValueError if an input is missing.
    """
    weight_N = torch.ones_like(logp_N)
    match settings.kind:
        case "grpo" | "dr_grpo":
            surrogate = grpo(logp_N, behaviour_N, advantage_N, settings)
        case "gspo":
            if rollout_N is None:
                raise ValueError('loss.kind = "gspo" needs rollout_N, the rollout of each token')
            surrogate = gspo(logp_N, behaviour_N, advantage_N, rollout_N, settings)
            index_N, length_R = _rollouts(rollout_N)
            weight_N = (1 / length_R.to(logp_N.dtype))[index_N]
        case "cispo":
            surrogate = cispo(logp_N, behaviour_N, advantage_N, settings)
        case "dppo":
            surrogate = dppo(logp_N, behaviour_N, advantage_N, settings)
        case _:
            assert_never(settings.kind)
    loss_N = -surrogate.objective_N
    kl_N = torch.zeros_like(logp_N)
    if settings.beta > 0:
        if reference_N is None:
            raise ValueError("beta > 0 needs the reference's logprobs")
        kl_N = k3(logp_N, reference_N)
        loss_N = loss_N + settings.beta * kl_N
    if settings.entropy > 0:
        if entropy_N is None:
            raise ValueError("entropy > 0 needs the policy's entropies")
        loss_N = loss_N - settings.entropy * entropy_N
    loss = (weight_N * loss_N).sum() / denominator
    with torch.no_grad():
        return LossTerms(
            loss=loss,
            clip_low=float(surrogate.low_N.sum()),
            clip_high=float(surrogate.high_N.sum()),
            clip_delta=float(surrogate.bounded_N.sum()),
            mismatch_kl=float(k3(behaviour_N, logp_N).sum()),
            entropy=float((entropy_N if entropy_N is not None else -logp_N).sum()),
            kl=float(kl_N.sum()),
        )


def grpo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, settings: LossSection) -> Surrogate:
    """Two-sided clipping: J = min( min(r, delta) * A, clip(r, 1-epsilon, 1+epsilon_high) * A ).

    PPO's clip leaves one case unbounded: for A < 0 and a large r, J and its gradient grow with r. A delta above
    1 + epsilon_high bounds this case and changes nothing else. This is dual-clip PPO with c = delta (arXiv 1912.09729).
    Source: INTELLECT-2 (arXiv 2505.07291, section 3.4). dr_grpo (Dr. GRPO, arXiv 2503.20783) has the same J; it differs
    in `denominator` and in advantages without std.
    """
    return _clipped(_ratio(logp_N - behaviour_N), advantage_N, settings)


def gspo(
    logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, rollout_N: Tensor, settings: LossSection
) -> Surrogate:
    """J = min( min(s, delta) * A, clip(s, 1-epsilon, 1+epsilon_high) * A ), s = exp(mean over the rollout of log r).

    Source: GSPO (arXiv 2507.18071, equations 5 to 7), which has no delta. Every token of a rollout has the rollout's J.
    delta bounds the same case as in `grpo` (A < 0, large s). s reaches delta only if a whole rollout got likelier.
    """
    index_N, length_R = _rollouts(rollout_N)
    drift_N = logp_N - behaviour_N
    drift_R = drift_N.new_zeros(len(length_R)).index_add(0, index_N, drift_N) / length_R.to(drift_N.dtype)
    return _clipped(_ratio(drift_R)[index_N], advantage_N, settings)


def cispo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, settings: LossSection) -> Surrogate:
    """J = detached(min(r, delta)) * A * logp: the weight is clipped, but every token keeps its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585, equations 4 and 5), without a lower bound, as in the paper. delta is the
    paper's 1 + epsilon_high. The paper gives no value; ScaleRL (arXiv 2510.13786) finds values from 4 to 8 equally
    good. The weight is bounded for both signs of A.
    """
    ratio_N = _ratio(logp_N.detach() - behaviour_N)
    nowhere_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    objective_N = ratio_N.clamp(max=settings.delta) * advantage_N * logp_N
    return Surrogate(objective_N, nowhere_N, nowhere_N, ratio_N > settings.delta)


def dppo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, settings: LossSection) -> Surrogate:
    """J = M * detached(min(r, delta)) * A * logp, with a mask M.

    The token's probability is pi now and was mu at sampling. M = 0 if A > 0 and pi - mu > epsilon, or A < 0 and
    pi - mu < -epsilon; otherwise 1. So a token is dropped once it has moved far enough in its advantage's direction.
    |pi - mu| is the total variation between the two policies if all other tokens are merged into one ("binary TV"). M
    lets a rare token change by a large factor, and a common token only by a small factor. Source: DPPO (arXiv
    2602.04879, equations 11 to 13). The paper's J = M * r * A has the same gradient as long as r < delta.
    Like PPO's clip, the mask does not bound J for A < 0 and a large r. delta bounds it, as in the authors' code.
    """
    ratio_N = _ratio(logp_N.detach() - behaviour_N)
    moved_N = torch.exp(logp_N.detach()) - torch.exp(behaviour_N)
    low_N = (advantage_N < 0) & (moved_N < -settings.epsilon)
    high_N = (advantage_N > 0) & (moved_N > settings.epsilon)
    kept_N = ~(low_N | high_N)
    objective_N = kept_N * ratio_N.clamp(max=settings.delta) * advantage_N * logp_N
    return Surrogate(objective_N, low_N, high_N, kept_N & (ratio_N > settings.delta))


def k3(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = reference - logp, which is never negative.

    Its mean over the policy's own samples is KL(policy, reference). Beyond d = MAX_LOG_REFERENCE, the exponential is
    replaced by its tangent at that point. So a token that the policy abandoned does not dominate an update, but keeps a
    gradient towards the reference. Sources: Schulman, "Approximating KL divergence" (2020); for the bound,
    benchmarks/learning/kl_bound.py.
    """
    d_N = reference_N - logp_N
    beyond_N = (d_N - MAX_LOG_REFERENCE).clamp(min=0)
    return torch.exp(d_N - beyond_N) * (1 + beyond_N) - d_N - 1


def _clipped(ratio_N: Tensor, advantage_N: Tensor, settings: LossSection) -> Surrogate:
    low, high, delta = 1 - settings.epsilon, 1 + settings.epsilon_high, settings.delta
    bounded_N = ratio_N.clamp(max=delta) * advantage_N
    clipped_N = ratio_N.clamp(low, high) * advantage_N
    return Surrogate(
        objective_N=torch.minimum(bounded_N, clipped_N),
        low_N=(ratio_N < low) & (advantage_N < 0),
        high_N=(ratio_N > high) & (advantage_N > 0),
        bounded_N=(ratio_N > delta) & (advantage_N < 0),
    )


def _ratio(drift_N: Tensor) -> Tensor:
    return torch.exp(drift_N.clamp(max=MAX_LOG_RATIO))


def _rollouts(rollout_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's rollout index and each rollout's length. Raise ValueError if a rollout is not contiguous."""
    _, index_N, length_R = torch.unique_consecutive(rollout_N, return_inverse=True, return_counts=True)
    if len(torch.unique(rollout_N)) != len(length_R):
        raise ValueError("a rollout's tokens must be contiguous: rollout_N returns to an earlier rollout")
    return index_N, length_R
