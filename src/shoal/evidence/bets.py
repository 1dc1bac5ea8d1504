"""E-values: what a bet against the honest hypothesis pays for one observation. All are logarithms, in nats.

    frequency    events are more frequent than an honest bound per unit of exposure
    share        a figure within [0, 1] is larger on average than an honest bound
    allocation   events fall on places with high values more often than exposure explains

Invariant: under its hypothesis, given the past, the exponential of each has a mean of at most 1, for any distribution that
the hypothesis allows. Nothing is normal, identically distributed or estimated.
Called by the validator, the coordinator and `tasks.missed`. Left out: which bets to place, and what to do with the capital.
Sources: Waudby-Smith and Ramdas 2023 (JRSS B 86:1) for `share`. `frequency` is Freedman's supermartingale (1975).
"""

import math
from collections.abc import Sequence


def frequency(count: float, exposure: float, rate: float, theta: float) -> float:
    """exp(theta * count - (e^theta - 1) * rate * exposure), theta > 0.

    Hypothesis: `count` sums variables in [0, 1] whose conditional means sum to at most rate * exposure. For one such
    variable x of mean m, E exp(theta x) <= 1 + m (e^theta - 1) <= exp(m (e^theta - 1)), as exp is convex.
    """
    return theta * count - math.expm1(theta) * rate * exposure


def share(value: float, mean: float, stake: float) -> float:
    """1 + stake * (value - mean) / mean, for value in [0, 1], 0 < mean <= 1, and a stake in [0, 1).

    Hypothesis: the conditional mean of `value` is at most `mean`. A value of 0 leaves 1 - stake of the capital.
    """
    return math.log1p(stake * (value - mean) / mean)


def allocation(
    counts: Sequence[int], exposures: Sequence[float], values: Sequence[float], tilt: float, stake: float
) -> float:
    """The product over places of (1 + stake * (value - centre) / (centre - lowest value)) ^ count.

    Hypothesis: at place i, `counts[i]` sums independent events whose chances sum to rate * d_i * exposures[i], for any one
    rate and any d_i in [1, tilt]; values are fixed. `centre` is the largest mean of the values under such weights, so the
    factors' weighted mean is at most 1 whatever rate and d are. 0 where all values are equal.

    To bet on low values, negate them.
    """
    lowest = min(values)
    middle = centre(exposures, values, tilt)
    room = middle - lowest
    if room <= 1e-9 * max(1.0, abs(lowest)):
        return 0.0
    return sum(
        count * math.log1p(stake * (value - middle) / room)
        for count, value in zip(counts, values, strict=True)
        if count
    )


def centre(exposures: Sequence[float], values: Sequence[float], tilt: float) -> float:
    """The largest mean of the values under weights exposures[i] * d_i, d_i in [1, tilt].

    It is reached at d = tilt for the values above some threshold and d = 1 for the others: all thresholds are tried.
    """
    total = sum(exposures)
    if total <= 0:
        return max(values)
    weight = total
    weighted = sum(exposure * value for exposure, value in zip(exposures, values, strict=True))
    best = weighted / weight
    for value, exposure in sorted(zip(values, exposures, strict=True), reverse=True):
        weight += (tilt - 1) * exposure
        weighted += (tilt - 1) * exposure * value
        best = max(best, weighted / weight)
    return best
