"""The errors measured for one chunk, and the thresholds that decide whether it passes.

Invariant: every figure is an error, so larger is worse. A result without any agreeing exponent never passes.
Called by `verify` and by the validator's checks. Leaves out calibration: the differences between honest machines are
measured elsewhere (`shoal calibrate`), and a run may set its own Thresholds.

Paper: TOPLOC section 4 (error metrics and thresholds).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class ChunkResult:
    """Differences over a chunk's top_k entries, the verifier's against the proof's.

    exponent_mismatches: entries whose exponent bits differ, 0..top_k.
    mantissa_error_mean, mantissa_error_median: absolute difference of the mantissa bits as integers (units of the last
    place), over the entries whose exponents agree; infinity if none do. The sign bit is ignored. The median of an even
    number of entries is the mean of the middle two (the public package's tensor path takes the upper one).
    """

    exponent_mismatches: int
    mantissa_error_mean: float
    mantissa_error_median: float


@dataclass(frozen=True)
class Thresholds:
    """The largest accepted errors, inclusive."""

    exponent_mismatches: float
    mantissa_error_mean: float
    mantissa_error_median: float

    def passes(self, result: ChunkResult) -> bool:
        """Whether every figure is within its limit. NaN is not."""
        return (
            result.exponent_mismatches <= self.exponent_mismatches
            and result.mantissa_error_mean <= self.mantissa_error_mean
            and result.mantissa_error_median <= self.mantissa_error_median
        )


BFLOAT16 = Thresholds(exponent_mismatches=38, mantissa_error_mean=10, mantissa_error_median=8)
"""For bfloat16 at top_k 128 (TOPLOC section 4).

SmolLM2-135M decoded by a worker and prefilled by a validator differed by at most 6 / 2.1 / 2 (exponents, mean, median;
32 chunks of two texts, arithmetic in bfloat16, float16 or float32 on either side); weights rounded to 4 bits by at
least 19 / 12.4 / 6, and every such chunk failed. Weights rounded to 8 bits, at most 8 / 3.9 / 2, pass.

The looser 60/40/40 used elsewhere accept a constant polynomial, which needs no hidden states. Most peaks lie in one or two
binades, so a constant in the right one agrees with more than half of the exponents, and random 7-bit mantissas differ by
about 40. The same constant passes in 15 of 16 real chunks (tests/toploc/test_toploc_real.py). These thresholds accept no
constant on heavy-tailed hidden states. On Gaussian ones the 128 largest values are so close together that a well-chosen
constant can pass. Therefore `verify` rejects constants by their degree, with any thresholds.
"""

FLOAT16 = Thresholds(exponent_mismatches=38, mantissa_error_mean=40, mantissa_error_median=32)
"""For float16 at top_k 128; measured, as the paper has none.

A unit of its 10-bit mantissa is an eighth of bfloat16's, so at the same relative error BFLOAT16's limits would be 80 and
64. But float16 arithmetic is more precise too: the 32 chunks above differed by at most 2 / 2 / 2 between float16 and
float32, by 6 / 18.1 / 13 if one side computed in bfloat16, and with 4-bit weights by at least 18 / 100 / 47. These limits
are half of BFLOAT16's relative error: twenty times the first, twice the second, and well below the third. Weights
rounded to 8 bits, at most 8 / 30.7 / 19, pass here too.
"""

PRESETS: Mapping[torch.dtype, Thresholds] = MappingProxyType(
    {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: BFLOAT16}
)
"""By the dtype of the hidden states. float32 is rounded to bfloat16 before the comparison."""
