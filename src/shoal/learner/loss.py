"""The policy loss: one surrogate a `loss.kind`, with a KL penalty and an entropy bonus common to all, as pure functions.

    r_t = exp(logp_t - behaviour_t)
    loss = 1/D * sum_t w_t * ( -J_t + beta * KL_t - c * entropy_t )

J_t is the kind's surrogate below. D is a figure of the whole global batch (`denominator`), so the losses of micro-batches
and ranks simply add up. w_t is 1; for gspo, which counts rollouts instead of tokens, 1 / length of the token's rollout.
KL is the k3 estimator exp(d) - d - 1 with d = reference - logp, with gradient (Schulman 2020).

Invariant: nothing but tensors in and out; finite logprobs, however far apart, give a loss and gradient that are no NaN.
Called by the learner's policy for each micro-batch.
Left out: PPO's ratio to a policy between the sampling one and the current; here the ratio spans the whole staleness.
"""

from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from shoal.config.recipe import LossKind, LossSection

MAX_LOG_RATIO = 80.0  # far beyond any delta; exp of 89 is inf in float32, and its gradient NaN even where clipped
MAX_LOG_REFERENCE = 20.0  # k3 grows linearly from there: exp would overflow where the policy left its reference behind


class Surrogate(NamedTuple):
    """Of each token: what to maximise, and which bound holds it (bool)."""

    objective_N: Tensor
    low_N: Tensor  # A < 0 and the probability has fallen far enough: no gradient
    high_N: Tensor  # A > 0 and the probability has risen far enough: no gradient
    bounded_N: Tensor  # the ratio has hit its upper bound (delta, or the kind's max_weight)


@dataclass(frozen=True)
class LossTerms:
    """The loss to differentiate, and sums (not means) over this micro-batch's tokens to report."""

    loss: Tensor
    clip_low: float  # tokens that their kind's lower clip or mask leaves without gradient (A < 0)
    clip_high: float  # tokens that its upper clip or mask leaves without gradient (A > 0)
    clip_delta: float  # tokens whose ratio is cut at delta (grpo, dr_grpo, gspo; A < 0) or max_weight (cispo, dppo)
    mismatch_kl: float  # sum of k3 between behaviour and policy: how far the two have moved apart
    entropy: float  # exact where it was computed; else estimated without bias by -logp of the sampled tokens
    kl: float


def denominator(kind: LossKind, n_tokens: int, n_rollouts: int, max_tokens: int) -> float:
    """D of the whole global batch: `n_tokens` trained tokens in `n_rollouts` rollouts of at most `max_tokens`.

    grpo, cispo, dppo   trained tokens: every token counts alike
    dr_grpo             max_tokens * n_rollouts: a token's weight depends on nobody's length
    gspo                rollouts: every rollout counts alike

    Raises ValueError for a batch in which nothing is trained on.
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
    """Loss of N completion tokens of one micro-batch.

    Args: logp_N, the policy's logprobs with gradient; behaviour_N, those of the version that sampled; advantage_N, each
    token's rollout advantage; denominator, `denominator()` of the *global* batch; rollout_N, int64, which rollout a
    token is of, whole rollouts one after the other, needed by gspo; reference_N where settings.beta > 0; entropy_N where
    settings.entropy > 0. The others float32, in nats. Raises ValueError where one that is needed is missing.
    """
    weight_N = torch.ones_like(logp_N)
    match settings.kind:
        case "grpo" | "dr_grpo":
            surrogate = grpo(logp_N, behaviour_N, advantage_N, epsilon=settings.epsilon, delta=settings.delta)
        case "gspo":
            if rollout_N is None:
                raise ValueError('loss.kind = "gspo" needs to know which rollout each token is of')
            surrogate = gspo(
                logp_N,
                behaviour_N,
                advantage_N,
                rollout_N,
                epsilon_low=settings.gspo_epsilon_low,
                epsilon_high=settings.gspo_epsilon_high,
                delta=settings.delta,
            )
            index_N, length_R = _rollouts(rollout_N)
            weight_N = (1 / length_R.to(logp_N.dtype))[index_N]
        case "cispo":
            surrogate = cispo(logp_N, behaviour_N, advantage_N, max_weight=settings.cispo_max_weight)
        case "dppo":
            surrogate = dppo(
                logp_N,
                behaviour_N,
                advantage_N,
                threshold=settings.dppo_threshold,
                max_weight=settings.dppo_max_weight,
            )
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
        drift_N = (logp_N - behaviour_N).clamp(max=MAX_LOG_RATIO)
        return LossTerms(
            loss=loss,
            clip_low=float(surrogate.low_N.sum()),
            clip_high=float(surrogate.high_N.sum()),
            clip_delta=float(surrogate.bounded_N.sum()),
            mismatch_kl=float((torch.exp(drift_N) - drift_N - 1).sum()),
            entropy=float((entropy_N if entropy_N is not None else -logp_N).sum()),
            kl=float(kl_N.sum()),
        )


def grpo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, *, epsilon: float, delta: float) -> Surrogate:
    """Two-sided clipping: J = min( min(r, delta) * A, clip(r, 1-epsilon, 1+epsilon) * A ).

    PPO's clip leaves one corner open: for A < 0 and a large r, J and its gradient grow with r. delta > 1 + epsilon closes
    it, and changes nothing else. It is dual-clip PPO with c = delta (arXiv 1912.09729). Source: INTELLECT-2 (arXiv
    2505.07291, section 3.4). dr_grpo (Dr. GRPO, arXiv 2503.20783) has the same J; its own are `denominator` and
    advantages without std.
    """
    return _clipped(_ratio(logp_N - behaviour_N), advantage_N, 1 - epsilon, 1 + epsilon, delta)


def gspo(
    logp_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    rollout_N: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float,
) -> Surrogate:
    """J = min( min(s, delta) * A, clip(s, 1-epsilon_low, 1+epsilon_high) * A ), s = exp(mean over the rollout of log r).

    Source: GSPO (arXiv 2507.18071, equations 5 to 7). Every token of a rollout carries the rollout's J. delta is not in
    the paper: the corner that it closes is open here too (A < 0, large s), and s reaches it only where a whole rollout
    has become likelier.
    """
    index_N, length_R = _rollouts(rollout_N)
    drift_N = logp_N - behaviour_N
    drift_R = drift_N.new_zeros(len(length_R)).index_add(0, index_N, drift_N) / length_R.to(drift_N.dtype)
    return _clipped(_ratio(drift_R)[index_N], advantage_N, 1 - epsilon_low, 1 + epsilon_high, delta)


def cispo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, *, max_weight: float) -> Surrogate:
    """J = detached(min(r, max_weight)) * A * logp: the weight is clipped, and every token keeps its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585, equations 4 and 5), whose lower bound is off as there; max_weight is its
    1 + epsilon_high. It names no value; ScaleRL (arXiv 2510.13786) finds 4 to 8 alike. Both signs are bounded, so delta
    would have nothing to add.
    """
    ratio_N = _ratio(logp_N.detach() - behaviour_N)
    nowhere_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    objective_N = ratio_N.clamp(max=max_weight) * advantage_N * logp_N
    return Surrogate(objective_N, nowhere_N, nowhere_N, ratio_N > max_weight)


def dppo(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, *, threshold: float, max_weight: float) -> Surrogate:
    """J = M * detached(min(r, max_weight)) * A * logp; pi, mu: the token's probability now and when it was sampled.

    M = 0 where A > 0 and pi - mu > threshold, or A < 0 and pi - mu < -threshold; else 1. So a token is dropped once it has
    gone far enough the way its advantage pushes it. |pi - mu| is the total variation between the two policies with all
    other tokens taken as one ("binary TV"): a rare token may change by a large factor, a common one only a little.
    Source: DPPO (arXiv 2602.04879, equations 11 to 13), written with J = M * r * A: the same gradient up to max_weight.
    The mask leaves a large r with A < 0 unbounded, as PPO's clip does; max_weight is what the authors' code bounds it by.
    """
    ratio_N = _ratio(logp_N.detach() - behaviour_N)
    moved_N = torch.exp(logp_N.detach()) - torch.exp(behaviour_N)
    low_N = (advantage_N < 0) & (moved_N < -threshold)
    high_N = (advantage_N > 0) & (moved_N > threshold)
    kept_N = ~(low_N | high_N)
    objective_N = kept_N * ratio_N.clamp(max=max_weight) * advantage_N * logp_N
    return Surrogate(objective_N, low_N, high_N, kept_N & (ratio_N > max_weight))


def k3(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - logp: >= 0, and its mean over the policy's own samples is KL(policy, reference).

    Beyond d = MAX_LOG_REFERENCE the exponential goes on as its tangent, so that a token lost from sight is pulled back
    with a large gradient instead of inf. Source: Schulman, "Approximating KL divergence" (2020).
    """
    d_N = reference_N - logp_N
    beyond_N = (d_N - MAX_LOG_REFERENCE).clamp(min=0)
    return torch.exp(d_N - beyond_N) * (1 + beyond_N) - d_N - 1


def _clipped(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float, delta: float) -> Surrogate:
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
    """Rollouts numbered as they come: each token's, and how many tokens each has. Raises ValueError for scattered ones."""
    _, index_N, length_R = torch.unique_consecutive(rollout_N, return_inverse=True, return_counts=True)
    if len(torch.unique(rollout_N)) != len(length_R):
        raise ValueError("a rollout's tokens must lie next to each other: rollout_N comes back to an earlier one")
    return index_N, length_R
