"""What rounding explains. Honest machines that compute alike differ by rounding alone, within limits that were measured.

`shoal calibrate` measures the limits. The checks of submissions and of reply files (`serve/proof`) both use these rules.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shoal import toploc
from shoal.config.sections import ValidatorSection

FAR = 4.0  # numerics cannot cause a margin of more than this many times `sampling_margin`
WORST_MANTISSA = 127.0  # replaces the infinite mantissa error of a proof without any equal exponent


class Margins(NamedTuple):
    """How far tokens are from those that their seeds yield."""

    beyond: float  # share of tokens beyond `sampling_margin`
    mean: float  # nats; tokens beyond count as 0, because `beyond` counts them
    largest: float  # nats
    explained: bool


def of_margins(margins_N: Tensor, limits: ValidatorSection) -> Margins:
    """Judge the margins of N tokens, in nats (`model.sampling.replay_margins`)."""
    limit = limits.sampling_margin
    beyond, far = int((margins_N > limit).sum()), int((margins_N > FAR * limit).sum())
    mean = float(margins_N.where(margins_N <= limit, 0.0).mean())
    few = far == 0 and beyond <= limits.allowed_mismatches(len(margins_N))
    explained = few and mean <= limits.sampling_margin_mean
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
    explained = not failed and exponents <= limits.proof_exponent_mean and mantissas <= limits.proof_mantissa_mean
    return Proofs(failed, max(chunk.exponent_mismatches for chunk in chunks), exponents, mantissas, explained)
