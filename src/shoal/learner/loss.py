"""The policy loss: two-sided clipped GRPO over tokens, as one pure function.

    r_t = exp(logp_t - behaviour_t)
    loss = -1/N * sum_t min( min(r_t, delta) * A_t, clip(r_t, 1-eps, 1+eps) * A_t ) + beta * KL - c * entropy

N is the number of trained tokens of the whole global batch, so micro-batches and ranks simply add up. The bound delta on
the ratio holds for negative advantages only where it bites: for A > 0 the clip at 1 + eps is tighter (delta > 1 + eps).
That makes this dual-clip PPO with c = delta (arXiv 1912.09729); a test says so. Source: INTELLECT-2 (arXiv 2505.07291,
section 3.4). KL is the k3 estimator exp(d) - d - 1 with d = ref - logp, with gradient (Schulman 2020).

Invariant: nothing but tensors in and out. Called by the learner's loop for each micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 80.0  # far beyond any delta; exp of 89 is inf in float32, and its gradient NaN even where clipped


@dataclass(frozen=True)
class LossTerms:
    """The loss to differentiate, and sums (not means) over this micro-batch's tokens to report."""

    loss: Tensor
    clip_low: float  # tokens whose ratio is below 1 - eps while that binds (A < 0)
    clip_high: float  # tokens whose ratio is above 1 + eps while that binds (A > 0)
    clip_delta: float  # tokens whose ratio is above delta while that binds (A < 0)
    mismatch_kl: float  # sum of k3 between behaviour and policy: how far the two have moved apart
    entropy: float  # exact where it was computed; else estimated without bias by -logp of the sampled tokens
    kl: float


def policy_loss(
    logp_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    *,
    denominator: float,
    epsilon: float,
    delta: float,
    beta: float = 0.0,
    reference_N: Tensor | None = None,
    entropy_coef: float = 0.0,
    entropy_N: Tensor | None = None,
) -> LossTerms:
    """Loss of N completion tokens of one micro-batch.

    Args: logp_N, the policy's logprobs with gradient; behaviour_N, those of the version that sampled; advantage_N, each
    token's rollout advantage; denominator, trained tokens of the *global* batch; reference_N where beta > 0.
    All float32, in nats. Raises ValueError for a delta that would cut inside the clip range.
    """
    if delta <= 1 + epsilon:
        raise ValueError(f"delta {delta} must exceed 1 + epsilon = {1 + epsilon}")
    drift_N = (logp_N - behaviour_N).clamp(max=MAX_LOG_RATIO)
    ratio_N = torch.exp(drift_N)
    bounded_N = ratio_N.clamp(max=delta) * advantage_N
    clipped_N = ratio_N.clamp(1 - epsilon, 1 + epsilon) * advantage_N
    loss = -torch.minimum(bounded_N, clipped_N).sum()
    kl = logp_N.new_zeros(())
    if beta > 0:
        if reference_N is None:
            raise ValueError("beta > 0 needs the reference's logprobs")
        difference_N = reference_N - logp_N
        kl = (torch.exp(difference_N) - difference_N - 1).sum()
        loss = loss + beta * kl
    if entropy_coef > 0:
        if entropy_N is None:
            raise ValueError("entropy_coef > 0 needs the policy's entropies")
        loss = loss - entropy_coef * entropy_N.sum()
    loss = loss / denominator
    with torch.no_grad():
        return LossTerms(
            loss=loss,
            clip_low=float(((ratio_N < 1 - epsilon) & (advantage_N < 0)).sum()),
            clip_high=float(((ratio_N > 1 + epsilon) & (advantage_N > 0)).sum()),
            clip_delta=float(((ratio_N > delta) & (advantage_N < 0)).sum()),
            mismatch_kl=float((ratio_N - drift_N - 1).sum()),
            entropy=float((entropy_N if entropy_N is not None else -logp_N).sum()),
            kl=float(kl),
        )
