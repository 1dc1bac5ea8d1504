"""Seeded sampling: every sampled token can be derived again from the logits and public numbers alone.

A token is the argmax of `logits / temperature + Gumbel noise` (the Gumbel-max trick: its distribution is the softmax).
The noise is not random but a counter-based hash of (run, step, worker, submission, rollout, position, token id), so a
validator with its own logits finds the same token, up to numerics, and a worker has no choice left to make.

Invariant: noise depends on integers only and is exact up to the two float32 logarithms at its end, on every device.
Called by the engine (`choose`) and by the validator's replay check (`replay_margins`).
Left out: top-k, top-p and penalties. The recipe samples from the full distribution.
Sources: Gumbel-max, Maddison et al. 2014 (arXiv 1411.0030); the finaliser is MurmurHash3's fmix32 (public domain).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_AT_ONCE = 2  # rows of noise made together: a few hundred kB, so that the hash runs in cache


def rollout_seed(run: str, step: int, worker: str, submission: int, rollout: int) -> int:
    """The 63-bit seed of one rollout: a hash of everything that names it."""
    name = f"shoal/seed\n{run}\n{step}\n{worker}\n{submission}\n{rollout}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Tensor:
    """Standard Gumbel noise for each (seed, position) and every token id. Returns noise_NV, float32, on the CPU.

    Noise lies in [-2.9, 16.7]: uniforms carry 23 bits, so a token of probability below about 6e-8 is never drawn.
    """
    keys_N = _mix64(np.asarray(seeds, np.uint64), np.asarray(positions, np.uint64))
    low_N1 = torch.from_numpy(keys_N.astype(np.uint32).view(np.int32))[:, None]
    high_N1 = torch.from_numpy((keys_N >> np.uint64(32)).astype(np.uint32).view(np.int32))[:, None]
    ids_1V = torch.arange(vocab_size, dtype=torch.int32)[None, :] * -1640531535  # 2**32 / golden ratio, as int32
    noise_NV = torch.empty(len(keys_N), vocab_size)
    for start in range(0, len(keys_N), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        bits = _fmix32_(_fmix32_(ids_1V + low_N1[rows]).bitwise_xor_(high_N1[rows]))
        bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF)
        uniform = noise_NV[rows].copy_(bits).add_(0.5).mul_(2.0**-23)
        uniform.log_().neg_().log_().neg_()
    return noise_NV


def choose(
    logits_NV: Tensor, seeds: Sequence[int], positions: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample one token a row. Returns tokens_N (int64) and their logprobs_N (float32) at this temperature.

    `temperature` 0 is greedy (no noise; logprobs at temperature 1).
    """
    scaled_NV = logits_NV.float() if temperature in (0.0, 1.0) else logits_NV.float() / temperature
    if temperature == 0.0:
        tokens_N = scaled_NV.argmax(-1)
    else:
        noise_NV = gumbel_noise(seeds, positions, scaled_NV.shape[-1]).to(scaled_NV.device)
        tokens_N = noise_NV.add_(scaled_NV).argmax(-1)
    return tokens_N, token_logprobs(scaled_NV, tokens_N)


def replay_margins(scaled_NV: Tensor, tokens_N: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """How far each claimed token is from being the one that the seed yields. Returns margins_N, float32, >= 0, in nats.

    0 where the token is the argmax of scaled_NV (logits / temperature) plus its noise; otherwise by how much another
    token's score exceeds its own: what numerics would have had to shift for the claim to be honest.
    """
    noise_NV = gumbel_noise(seeds, positions, scaled_NV.shape[-1]).to(scaled_NV.device)
    scores_NV = noise_NV.add_(scaled_NV.float())
    return scores_NV.amax(-1) - scores_NV.gather(-1, tokens_N[:, None])[:, 0]


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """log softmax(logits)[token], float32, without keeping the whole log-softmax. Returns logprobs_N."""
    logits_NV = logits_NV.float()
    return logits_NV.gather(-1, tokens_N[:, None])[:, 0] - torch.logsumexp(logits_NV, dim=-1)


def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, float32. Returns entropy_N."""
    logp_NV = F.log_softmax(logits_NV.float(), dim=-1)
    return -(logp_NV.exp() * logp_NV).sum(-1)


def _mix64(seeds_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """splitmix64 of seed + position times its odd constant (Steele et al. 2014): one 64-bit key for each position."""
    with np.errstate(over="ignore"):
        x = seeds_N + (positions_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = x ^ (x >> np.uint64(31))
        return mixed


def _fmix32_(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser of an int32 tensor on the CPU, in place. numpy's uint32 shifts without masks."""
    bits = x.numpy().view(np.uint32)
    shifted = bits >> 16
    bits ^= shifted
    bits *= np.uint32(0x85EBCA6B)
    bits ^= np.right_shift(bits, 13, out=shifted)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= np.right_shift(bits, 16, out=shifted)
    return x
