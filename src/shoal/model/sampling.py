"""Seeded sampling: every sampled token can be derived again from the logits and public numbers.

A token is the argmax of `logits / temperature + Gumbel noise` (the Gumbel-max trick: its distribution is the softmax). The
noise is a counter-based hash of (run, step, worker, submission, rollout, nonce, position, token id). So a validator with its
own logits finds the same token, up to numerics, and a worker cannot choose. A run has one of two schemes (`sampling.noise`):

    shoal   splitmix64 of seed and position gives a key of 64 bits; two rounds of MurmurHash3's finaliser add the token
    vllm    what the sampler of vLLM's second model runner draws: MurmurHash3 (32 bits) of seed, position and token

Invariants: engine and validator of a run use the same scheme, and count positions as it does (`Noise.position`). Noise
depends only on integers. The integers and the uniforms are exact; the float32 logarithms that follow are exact on one kind
of machine, and within a few units in the last place elsewhere (GPUs have fast ones).
Left out: top-k, top-p and penalties, because the recipe samples from the full distribution; vLLM's noise in float64 and for
drafted tokens, because Shoal asks vLLM for neither.
Sources: Gumbel-max, Maddison et al. 2014 (arXiv 1411.0030); splitmix64, Steele et al. 2014; MurmurHash3, Appleby (public
domain); vLLM 0.32.0, vllm/v1/worker/gpu/sample/gumbel.py (Apache 2.0), which `tests/model/test_sampling.py` runs, too.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.model.logprobs import token_logprobs

LOWEST_LOGPROB = -50.0  # no sampled token's is below about -26 less the likeliest token's; the rest is for numerics
ROUNDING = 0.01  # nats; more than a sum of logit and noise is rounded by
NoiseName = Literal["shoal", "vllm"]
SERIES = 0.25  # below it vLLM computes log(1 - u) by a series
LEAST = 2.0**-24  # and elsewhere of no smaller number
RARE = 8.0  # nats
RARE_RANK = (
    int(math.exp(-math.exp(-RARE)) * 2**32) - 1024
)  # no noise of RARE or more has a lower rank, in either scheme


def rollout_seed(run: str, step: int, worker: str, submission: int, rollout: int, nonce: str = "") -> int:
    """The 63-bit seed of one rollout: a hash of everything that identifies it.

    `nonce` is the assignment's: nobody can compute the seed before it is given out. Rollouts without assignment have none.
    """
    name = f"shoal/seed\n{run}\n{step}\n{worker}\n{submission}\n{rollout}" + (f"\n{nonce}" if nonce else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


# --- noise -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """A scheme. The rank of a noise is a uint32 number that the hash gives; rank / 2**32 is about its quantile."""

    keys: Callable[[Sequence[int], Sequence[int]], np.ndarray]  # one of each pair of seed and position
    ranks: Callable[[np.ndarray, np.ndarray], np.ndarray]  # of token ids under keys, broadcast together
    of_ranks: Callable[[np.ndarray], Tensor]  # standard Gumbel, float32, on the CPU; never falls as ranks grow
    largest: float  # nats; no noise exceeds it
    sifted: bool  # hashes are sorted out before the logarithms, which cost more than that
    of_sequence: bool  # positions are those in the whole sequence, of the token before: the one that is fed

    def gumbel(self, keys: np.ndarray, ids: np.ndarray) -> Tensor:
        """The noise of token ids under keys, broadcast together."""
        return self.of_ranks(self.ranks(keys, ids))

    def position(self, prompt_tokens: int, at: int) -> int:
        """The noise's position of token `at` of a completion."""
        return prompt_tokens - 1 + at if self.of_sequence else at

    def continued(self, seed: int, at: int) -> int:
        """The seed to use once a completion's first `at` tokens have become part of the prompt. The noise stays the same."""
        return seed if self.of_sequence else (seed + at * 0x9E3779B97F4A7C15) % 2**64


def position_keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One 64-bit key per position: splitmix64 of seed + position times its odd constant (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = np.asarray(seeds, np.uint64)
        x = x + (np.asarray(positions, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys: np.ndarray = x ^ (x >> np.uint64(31))
        return keys


def shoal_ranks(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    bits = ids.astype(np.uint32) * np.uint32(0x9E3779B1)  # 2**32 / golden ratio
    return _fmix32_(_fmix32_(bits + keys.astype(np.uint32)) ^ (keys >> np.uint64(32)).astype(np.uint32))


def shoal_noise(ranks: np.ndarray) -> Tensor:
    """In [-2.9, 16.7]: uniforms carry 23 bits, so a token of probability below about 6e-8 is never drawn."""
    uniform = torch.from_numpy((ranks >> 9).astype(np.float32)).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def vllm_keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One 32-bit key per position: MurmurHash3 of the seed's two words and the position, before the token's word."""
    seed = np.asarray(seeds, np.uint64)
    keys = np.zeros(len(seed), np.uint32)
    for word in (seed, seed >> np.uint64(32), np.asarray(positions, np.uint64)):
        keys = _murmur3_mix(keys, word.astype(np.uint32))
    return keys


def vllm_ranks(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return ~_fmix32_(_murmur3_mix(keys, ids.astype(np.uint32)) ^ np.uint32(16))  # 16: the bytes hashed


def vllm_noise(ranks: np.ndarray) -> Tensor:
    """What vLLM adds to logits: the negative log of -log(1 - u), where u has the hash's 32 bits.

    In [-2.9, 22.9]: small u are exact to 2^-33, so a token of probability below about 1e-10 is never drawn.
    """
    uniform = torch.from_numpy((((~ranks).astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32))
    series = torch.full_like(uniform, 1 / 8)
    for k in range(7, 0, -1):
        series.mul_(uniform).add_(1 / k)
    direct = (1 - uniform).clamp_(min=LEAST).log_()
    return torch.where(uniform < SERIES, series.mul_(uniform).neg_(), direct).neg_().log_().neg_()


SHOAL = Noise(position_keys, shoal_ranks, shoal_noise, largest=16.7, sifted=False, of_sequence=False)
VLLM = Noise(vllm_keys, vllm_ranks, vllm_noise, largest=22.9, sifted=True, of_sequence=True)
NOISES: dict[NoiseName, Noise] = {"shoal": SHOAL, "vllm": VLLM}


def _fmix32_(bits: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finaliser of uint32 numbers, in place."""
    shifted = bits >> 16
    bits ^= shifted
    bits *= np.uint32(0x85EBCA6B)
    bits ^= np.right_shift(bits, 13, out=shifted)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= np.right_shift(bits, 16, out=shifted)
    return bits


def _murmur3_mix(state: np.ndarray, words: np.ndarray) -> np.ndarray:
    """MurmurHash3's round of 32 bits: uint32 states after uint32 words, broadcast together."""
    words = _rotated(words * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(state ^ words, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(words: np.ndarray, left: int) -> np.ndarray:
    return (words << left) | (words >> (32 - left))


# --- drawing, and deriving again ---------------------------------------------------------------------------------------


def choose(
    logits_NV: Tensor, seeds: Sequence[int], positions: Sequence[int], temperature: float, noise: Noise = SHOAL
) -> tuple[Tensor, Tensor]:
    """Sample one token a row. Return tokens_N (int64) and their logprobs_N (float32) at this temperature.

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
    """How far each claimed token is from the token that the seed yields. Return margins_N, float32, >= 0, in nats.

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
