"""What rounding explains. Honest machines that compute alike differ by rounding alone, within limits that were measured.

`shoal calibrate` measures the limits. The checks of submissions and of reply files (`serve/proof`) both use these rules.
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from shoal import toploc
from shoal.config.sections import MISMATCH_SHARE, ValidatorSection
from shoal.evidence import ALPHA, within

FAR = 4.0  # numerics cannot cause a margin of more than this many times `sampling_margin`
# Upper bound (95 %) on the rate of honest tokens beyond `sampling_margin`. None was beyond in all calibrations of
# benchmarks/results, which have an exposure of 149,911 tokens, and 3 / 149,911 is 2e-5.
MISMATCH_RATE = 2e-5
WORST_MANTISSA = 127.0  # replaces the infinite mantissa error of a proof without any equal exponent


class Margins(NamedTuple):
    """How far tokens are from those that their seeds yield."""

    beyond: float  # share of tokens beyond `sampling_margin`
    mean: float  # nats; tokens beyond count as 0, because `beyond` counts them
    largest: float  # nats
    explained: bool


def chance_mismatches(tokens: int, tail: float) -> int:
    """Return the number of mismatches that this many honest tokens exceed with probability at most `tail`."""
    mean = torch.tensor(MISMATCH_RATE * tokens, dtype=torch.float64)
    # gammainc(k + 1, mean) is the probability that a Poisson count exceeds k.
    return next(k for k in count() if torch.special.gammainc(torch.tensor(k + 1.0), mean) <= tail)


def allowed_mismatches(tokens: int, limits: ValidatorSection) -> int:
    """Return how many mismatches a submission may have. Few tokens get only what chance explains: one of up to 70."""
    return min(limits.sampling_mismatches, chance_mismatches(tokens, ALPHA)) + int(MISMATCH_SHARE * tokens)


def of_margins(margins_N: Tensor, limits: ValidatorSection, allowed: int) -> Margins:
    """Judge the margins of N tokens, in nats (`model.sampling.replay_margins`), of which `allowed` may be mismatches."""
    near_N = within(margins_N, limits.sampling_margin)
    beyond = int((~near_N).sum())
    mean = float(margins_N.where(near_N, 0.0).mean())
    few = bool(within(margins_N, FAR * limits.sampling_margin).all()) and beyond <= allowed
    explained = few and bool(within(mean, limits.sampling_margin_mean))
    return Margins(beyond / len(margins_N), mean, float(margins_N.max()), explained)


class Proofs(NamedTuple):
    """How far proofs are from the recomputed hidden states."""

    failed: int
    largest: int  # differing exponents of one proof
    exponents: float  # mean number of differing exponents
    mantissas: float  # mean of the proofs' mean mantissa errors
    explained: bool


def of_proofs(chunks: Sequence[toploc.ChunkResult], limits: ValidatorSection) -> Proofs:
    """Judge verified proofs."""
    failed = sum(not toploc.BFLOAT16.passes(chunk) for chunk in chunks)
    exponents = sum(chunk.exponent_mismatches for chunk in chunks) / len(chunks)
    mantissas = sum(min(chunk.mantissa_error_mean, WORST_MANTISSA) for chunk in chunks) / len(chunks)
    near = within(exponents, limits.proof_exponent_mean) and within(mantissas, limits.proof_mantissa_mean)
    explained = not failed and bool(near)
    return Proofs(failed, max(chunk.exponent_mismatches for chunk in chunks), exponents, mantissas, explained)
