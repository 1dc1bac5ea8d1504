"""What verifying one chunk measured, and the thresholds that judge it.

Invariant: every figure is an error, larger is worse; a result that compares nothing (no exponents agree)
passes nothing.
Called by `verify` and by the validator's checks. Leaves out calibration: what honest machines differ by is
measured elsewhere, and a run may set its own Thresholds.

Paper: TOPLOC section 4 (error metrics and thresholds).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkResult:
    """Differences over a chunk's top_k entries, the verifier's against the proof's.

    exponent_mismatches: entries whose exponent bits differ, 0..top_k.
    mantissa_error_mean, mantissa_error_median: absolute difference of the mantissa bits as integers (units of
    the last place) over the entries whose exponents agree; infinity when none do. The sign bit is ignored.
    """

    exponent_mismatches: int
    mantissa_error_mean: float
    mantissa_error_median: float


@dataclass(frozen=True)
class Thresholds:
    """The largest accepted figures, inclusive."""

    exponent_mismatches: float
    mantissa_error_mean: float
    mantissa_error_median: float

    def passes(self, result: ChunkResult) -> bool:
        """Whether every figure is within its limit (a NaN is not)."""
        return (
            result.exponent_mismatches <= self.exponent_mismatches
            and result.mantissa_error_mean <= self.mantissa_error_mean
            and result.mantissa_error_median <= self.mantissa_error_median
        )


BFLOAT16 = Thresholds(exponent_mismatches=38, mantissa_error_mean=10, mantissa_error_median=8)
"""For bfloat16 at top_k 128 (TOPLOC section 4).

The looser 60/40/40 in use elsewhere accept a constant polynomial, which needs no hidden states at all.
These accept none on heavy-tailed hidden states. On Gaussian ones the 128 largest lie so close together that
a well-chosen constant can pass even here; therefore `verify` fails constants by their degree, whatever the
thresholds.
"""
