"""Were the tokens sampled from the stated distribution? A statistical test that uses no seeds.

For each of a few other ways of sampling, q, the product over tokens of q(token) / p(token) is a martingale of mean 1 under
honest sampling from p. So is the mean of these products. By Ville's inequality it exceeds e^x in at most a share e^-x of
honest submissions, for any length and any p: the limit needs no calibration and no normal approximation.

    sharper      p^2, renormalised: temperature cut in half, greedy, beam search, best of several
    flatter      p^(1/2), renormalised: temperature doubled
    truncated    0.99 * (p where it is more than 2 % of the likeliest, renormalised) + 0.01 * p: top-k, top-p, min-p
    foreign      0.9 * p + 0.1 * uniform: tokens that this model finds absurd, as another model's are

Invariant: pure functions of tensors. Called by `prefill` (per token) and `checks` (per submission).
Sources: betting against a hypothesis, Shafer 2021 (JRSS A 184:407); token-probability shape as evidence, INTELLECT-2
(arXiv 2505.07291, section 2.3).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.model.logprobs import likelihoods, token_logprobs

ALTERNATIVES = ("sharper", "flatter", "truncated", "foreign")
TRUNCATED_BELOW = 0.02


def token_evidence(scaled_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """logprobs_N of the tokens, and evidence_NA = log q(token) - log p(token) for each alternative. float32, nats.

    scaled_NV: logits divided by the temperature, float32.
    """
    found = likelihoods(scaled_NV)
    likelihood_NV, total_N, top_N1 = found
    logp_N = token_logprobs(scaled_NV, tokens_N, found)
    roots_N = likelihood_NV.sqrt().sum(-1)
    squares_N = torch.linalg.vecdot(likelihood_NV, likelihood_NV)
    kept_NV = F.threshold(likelihood_NV, TRUNCATED_BELOW, 0.0, inplace=True)
    kept_N = kept_NV.sum(-1)
    inside_N = kept_NV.gather(-1, tokens_N[:, None])[:, 0] > 0
    chosen_N = (scaled_NV.gather(-1, tokens_N[:, None]) - top_N1)[:, 0]
    uniform_N = torch.exp(-logp_N - math.log(scaled_NV.shape[-1]))
    evidence = [
        2 * chosen_N - squares_N.log() - logp_N,
        chosen_N / 2 - roots_N.log() - logp_N,
        torch.log(0.99 * inside_N * (total_N / kept_N) + 0.01),
        torch.log(0.9 + 0.1 * uniform_N),
    ]
    return logp_N, torch.stack(evidence, dim=-1)


def submission_evidence(evidence_NA: Tensor) -> float:
    """The evidence of all tokens, in nats: an honest submission exceeds x with probability at most e^-x."""
    return float(torch.logsumexp(evidence_NA.double().sum(0), 0)) - math.log(evidence_NA.shape[-1])
