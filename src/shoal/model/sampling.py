"""Seeded sampling: anyone can re-derive every sampled token from the logits and public numbers.

A token is the argmax of `logits / temperature + Gumbel noise` (the Gumbel-max trick: its distribution is the softmax). The
noise is a counter-based hash of (run, step, worker, submission, rollout, nonce, position, token id): splitmix64 of seed and
position gives a 64-bit key, and two rounds of MurmurHash3's finaliser mix in the token. So a validator derives the
same token from its own logits, up to numerics, and a worker cannot choose tokens.

Invariants: noise depends only on integers. The integers, and the uniform numbers made from them, are exact. The float32
logarithms are equal on machines of one kind, and differ by a few units in the last place between kinds.
Left out: top-k, top-p and penalties, because the recipe samples from the full distribution.
Sources: Gumbel-max, Maddison et al. 2014 (arXiv 1411.0030); splitmix64, Steele et al. 2014; MurmurHash3, Appleby (public
domain).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.model.logprobs import token_logprobs

# Noise spans 19.6 nats, so a sampled token's logprob is at least -19.6 - ln(vocabulary). The rest is a margin.
LOWEST_LOGPROB = -50.0
LARGEST_NOISE = 16.7  # nats; the largest that uniform numbers of 23 bits give
UINT32 = 0xFFFFFFFF


def rollout_seed(run: str, step: int, worker: str, submission: int, rollout: int, nonce: str = "") -> int:
    """Return the 63-bit seed of one rollout: a hash of everything that identifies it.

    `nonce`: the assignment's nonce, or "" without an assignment. Nobody can predict the seed before the nonce is known.
    """
    name = f"shoal/seed\n{run}\n{step}\n{worker}\n{submission}\n{rollout}" + (f"\n{nonce}" if nonce else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


# --- noise -----------------------------------------------------------------------------------------------------------


def position_keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return one 64-bit key per position: the output of splitmix64 at that position, with the seed as initial state."""
    with np.errstate(over="ignore"):
        x = np.asarray(seeds, np.uint64)
        x = x + (np.asarray(positions, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys: np.ndarray = x ^ (x >> np.uint64(31))
        return keys


def gumbel(keys: np.ndarray, ids: np.ndarray) -> Tensor:
    """Return standard Gumbel noise, one float32 for each pair of a key and a token id, broadcast together, on the CPU.

    It is in [-2.9, LARGEST_NOISE], because the uniform numbers have 23 bits. So a token of probability below about 6e-8
    is never sampled.
    """
    bits = ids.astype(np.uint32) * np.uint32(0x9E3779B1)  # 2**32 / golden ratio
    bits = _fmix32_(_fmix32_(bits + keys.astype(np.uint32)) ^ (keys >> np.uint64(32)).astype(np.uint32))
    uniform = torch.from_numpy((bits >> 9).astype(np.float32)).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _fmix32_(bits: np.ndarray) -> np.ndarray:
    """Apply MurmurHash3's 32-bit finaliser to uint32 numbers, in place."""
    shifted = bits >> 16
    bits ^= shifted
    bits *= np.uint32(0x85EBCA6B)
    bits ^= np.right_shift(bits, 13, out=shifted)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= np.right_shift(bits, 16, out=shifted)
    return bits


# --- sampling and replay -----------------------------------------------------------------------------------------------


def choose(
    logits_NV: Tensor, seeds: Sequence[int], positions: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample one token per row. Return tokens_N (int64) and their logprobs_N (float32) at this temperature.

    `positions` are within the completion. `temperature` 0 is greedy (no noise; logprobs at temperature 1).
    """
    scaled_NV = logits_NV.float() if temperature in (0.0, 1.0) else logits_NV.float() / temperature
    if scaled_NV.device.type == "cpu":
        tokens_N = torch.from_numpy(scaled_NV.numpy(force=True).argmax(-1))  # torch's argmax takes ten times as long
    else:
        tokens_N = scaled_NV.argmax(-1)
    if temperature != 0.0:
        _, tokens_N = _outscore(scaled_NV, tokens_N, seeds, positions)
    return tokens_N, token_logprobs(scaled_NV, tokens_N)


def replay_margins(scaled_NV: Tensor, tokens_N: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return how far each claimed token is from the token that the seed yields: margins_N, float32, >= 0, in nats.

    The margin is 0 if the token is the argmax of scaled_NV (logits / temperature) plus its noise. Otherwise it is the
    amount by which the best token's score exceeds the claimed token's. Only numerics give an honest token a margin.
    """
    return _outscore(scaled_NV.float(), tokens_N, seeds, positions)[0]


def _outscore(
    scaled_NV: Tensor, tokens_N: Tensor, seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the margin of each row's best score (logit plus noise) over the given token's score, and the best token."""
    outscore = _outscore_by_candidates if scaled_NV.device.type == "cpu" else _outscore_by_all
    return outscore(scaled_NV, tokens_N, seeds, positions)


def _outscore_by_candidates(
    scaled_NV: Tensor, tokens_N: Tensor, seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Compute noise only for tokens whose logit plus the largest possible noise reaches the given token's score."""
    scaled, given_N = scaled_NV.numpy(force=True), tokens_N.numpy(force=True)
    n_rows, vocabulary = scaled.shape
    keys_N, row_N = position_keys(seeds, positions), np.arange(n_rows)
    given_score_N = scaled[row_N, given_N] + gumbel(keys_N, given_N).numpy()
    could_win = scaled > (given_score_N - LARGEST_NOISE)[:, None]
    could_win[row_N, given_N] = True
    # The candidates of all rows in one list, row by row.
    flat_C = np.flatnonzero(could_win)
    first_N = np.searchsorted(flat_C, row_N * vocabulary)
    row_C = np.repeat(row_N, np.diff(first_N, append=len(flat_C)))
    id_C = flat_C - row_C * vocabulary
    score_C = gumbel(keys_N[row_C], id_C).numpy()
    score_C += scaled.ravel()[flat_C]
    best_N = np.maximum.reduceat(score_C, first_N)
    margin_N = best_N - score_C[np.searchsorted(flat_C, row_N * vocabulary + given_N)]
    # In reverse order, so that among equal scores the lowest id is written last and wins.
    winner_W = np.flatnonzero(score_C == best_N[row_C])[::-1]
    best_token_N = given_N.copy()
    best_token_N[row_C[winner_W]] = id_C[winner_W]
    return torch.from_numpy(margin_N), torch.from_numpy(best_token_N)


def _outscore_by_all(
    scaled_NV: Tensor, tokens_N: Tensor, seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Compute noise for all tokens, where the logits are. A GPU does this faster than it sends logits to the CPU."""
    score_NV = scaled_NV + _gumbel_for_all(position_keys(seeds, positions), scaled_NV)
    best_N, best_token_N = score_NV.max(-1)
    return best_N - score_NV.gather(-1, tokens_N[:, None])[:, 0], best_token_N


def _gumbel_for_all(keys_N: np.ndarray, like_NV: Tensor) -> Tensor:
    """Return `gumbel` of each key and every token id, on the device of `like_NV`. Its int64 numbers stand for uint32."""
    key_N1 = torch.from_numpy(keys_N.view(np.int64)).to(like_NV.device)[:, None]
    id_V = torch.arange(like_NV.shape[1], device=like_NV.device)
    bits_NV = _fmix32_of((id_V * 0x9E3779B1 + key_N1) & UINT32)
    bits_NV = _fmix32_of(bits_NV ^ (key_N1 >> 32 & UINT32))
    uniform_NV = (bits_NV >> 9).float().add_(0.5).mul_(2.0**-23)
    return uniform_NV.log_().neg_().log_().neg_()


def _fmix32_of(bits: Tensor) -> Tensor:
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & UINT32
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & UINT32
    return bits ^ bits >> 16
