"""Seeded sampling: every sampled token can be derived again from the logits and public numbers.

A token is the argmax of `logits / temperature + Gumbel noise` (the Gumbel-max trick: its distribution is the softmax).
The noise is a counter-based hash of (run, step, worker, submission, rollout, nonce, position, token id), by one of the
schemes in `noise`. So a validator with its own logits finds the same token, up to numerics, and a worker cannot choose.

Invariant: engine and validator of a run use the same scheme, and count positions as it does (`Noise.position`).
Called by the engine (`choose`) and by the validator's replay check (`replay_margins`).
Left out: top-k, top-p and penalties. The recipe samples from the full distribution.
Source: Gumbel-max, Maddison et al. 2014 (arXiv 1411.0030).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.model.logprobs import token_logprobs
from shoal.model.noise import RARE, RARE_RANK, SHOAL, Noise

LOWEST_LOGPROB = -50.0  # no sampled token's is below about -26 less the likeliest token's; the rest is for numerics
ROUNDING = 0.01  # nats; more than a sum of logit and noise is rounded by


def rollout_seed(run: str, step: int, worker: str, submission: int, rollout: int, nonce: str = "") -> int:
    """The 63-bit seed of one rollout: a hash of everything that identifies it.

    `nonce` is the assignment's: nobody can compute the seed before it is given out. Rollouts without assignment have none.
    """
    name = f"shoal/seed\n{run}\n{step}\n{worker}\n{submission}\n{rollout}" + (f"\n{nonce}" if nonce else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def choose(
    logits_NV: Tensor, seeds: Sequence[int], positions: Sequence[int], temperature: float, noise: Noise = SHOAL
) -> tuple[Tensor, Tensor]:
    """Sample one token a row. Returns tokens_N (int64) and their logprobs_N (float32) at this temperature.

    `positions` are the noise's own (`Noise.position`). `temperature` 0 is greedy (no noise; logprobs at temperature 1).
    """
    scaled_NV = logits_NV.float() if temperature in (0.0, 1.0) else logits_NV.float() / temperature
    tokens_N = torch.from_numpy(scaled_NV.numpy(force=True).argmax(-1)).to(
        logits_NV.device
    )  # torch takes ten times as long
    if temperature != 0.0:
        _, tokens_N = _outscore(scaled_NV, tokens_N, seeds, positions, noise)
    return tokens_N, token_logprobs(scaled_NV, tokens_N)


def replay_margins(
    scaled_NV: Tensor, tokens_N: Tensor, seeds: Sequence[int], positions: Sequence[int], noise: Noise = SHOAL
) -> Tensor:
    """How far each claimed token is from the token that the seed yields. Returns margins_N, float32, >= 0, in nats.

    The margin is 0 if the token is the argmax of scaled_NV (logits / temperature) plus its noise. Otherwise it is the
    amount by which the best token's score exceeds its own, which numerics would have to explain for an honest claim.
    """
    return _outscore(scaled_NV.float(), tokens_N, seeds, positions, noise)[0]


def _outscore(
    scaled_NV: Tensor, tokens_N: Tensor, seeds: Sequence[int], positions: Sequence[int], noise: Noise
) -> tuple[Tensor, Tensor]:
    """The amount by which the best score of a row (logit plus noise) exceeds the given token's, and the best token.

    Noise is computed only for tokens whose logit plus the largest possible noise reaches the given token's score. A scheme
    with larger noise leaves most of the vocabulary; where it is `sifted`, those that need rare noise and lack it drop out.
    """
    scaled, given_N = scaled_NV.numpy(force=True), tokens_N.numpy(force=True)
    n_rows, vocabulary = scaled.shape
    keys_N, row_N = noise.keys(seeds, positions), np.arange(n_rows)
    given_score_N = scaled[row_N, given_N] + noise.gumbel(keys_N, given_N).numpy()
    could_win = scaled > (given_score_N - noise.largest)[:, None]
    could_win[row_N, given_N] = True
    # The candidates of all rows in one list, row by row.
    flat_C = np.flatnonzero(could_win)
    first_N = np.searchsorted(flat_C, row_N * vocabulary)
    row_C = np.repeat(row_N, np.diff(first_N, append=len(flat_C)))
    id_C = flat_C - row_C * vocabulary
    rank_C = noise.ranks(keys_N[row_C], id_C)
    if noise.sifted:
        near_C = scaled.ravel()[flat_C] > (given_score_N - RARE - ROUNDING)[row_C]
        able_C = (rank_C >= RARE_RANK) | near_C | (id_C == given_N[row_C])
        flat_C, row_C, id_C, rank_C = flat_C[able_C], row_C[able_C], id_C[able_C], rank_C[able_C]
        first_N = np.searchsorted(flat_C, row_N * vocabulary)
    score_C = noise.of_ranks(rank_C).numpy()
    score_C += scaled.ravel()[flat_C]
    best_N = np.maximum.reduceat(score_C, first_N)
    margin_N = best_N - score_C[np.searchsorted(flat_C, row_N * vocabulary + given_N)]
    # Reversed: of equal scores, the lowest id is written last.
    winner_W = np.flatnonzero(score_C == best_N[row_C])[::-1]
    best_token_N = given_N.copy()
    best_token_N[row_C[winner_W]] = id_C[winner_W]
    return torch.from_numpy(margin_N).to(scaled_NV.device), torch.from_numpy(best_token_N).to(scaled_NV.device)


def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, float32. Returns entropy_N."""
    logp_NV = F.log_softmax(logits_NV.float(), dim=-1)
    return -(logp_NV.exp() * logp_NV).sum(-1)
