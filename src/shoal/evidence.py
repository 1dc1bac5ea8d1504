"""What judges compare with (`within`), and sequential tests by betting: pure mathematics, independent of pools and tokens.

An e-value is the payoff of a bet against the honest hypothesis for one observation. Each function returns the logarithm
of an e-value, in nats. The bets are that:

    frequency    events are more frequent than an honest bound per unit of exposure
    share        a figure within [0, 1] is larger on average than an honest bound
    allocation   among several places, those with high values get more events than their exposure explains

`Process` is the capital of several bets on one worker's observations. Each bet stakes its money in parts. At
observation j it stakes the part w_j = 1 / (j (j + 1)). From then on, each observation multiplies that part by the bet's
e-value. So n honest observations before a lie cost the bets a factor of only n (n + 1), about 2 ln n nats, however much
the earlier parts have lost. The money not yet staked after n observations is 1 / (n + 1).

    capital = mean over bets b of ( R_b + 1 / (n + 1) ),      R_b <- (R_b + w_n) * e_b

Invariants: given the past, each e-value has a mean of at most 1 under every distribution that its hypothesis allows.
No distribution is assumed to be normal or the same for all observations, and nothing is estimated. So an honest
worker's capital is a nonnegative supermartingale that starts at 1. By Ville's inequality, the probability that it ever
reaches 1 / alpha is at most alpha, however often it is checked.
Left out: which bets to place, and what to do with the capital.
Sources: Ramdas, Gruenwald, Vovk, Shafer 2023, "Game-theoretic statistics and safe anytime-valid inference" (arXiv
2210.01948); Waudby-Smith and Ramdas 2023 (JRSS B 86:1) for `share`; `frequency` is Freedman's supermartingale (1975).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ALPHA = 1e-6  # maximum probability that the tests ever accuse an honest worker, however long it works
REWARD_TILT = (
    2.0  # in a group, numerics may change one completion's tokens at most this many times as often as another's
)
TASK_TILT = 4.0  # in a submission, numerics may change one group's tokens at most this many times as often as another's
FLOOR = -700.0  # lowest logarithm stored; capital below e^-700 is so small that it changes no sum


def within(figure: Any, limit: float) -> Any:
    """Return whether a judged figure passes: it is finite, and 0 <= figure <= limit. A tensor gives a tensor.

    Every judge compares with this function, so NaN, infinite and negative figures pass nowhere.
    """
    return (figure >= 0) & (figure <= limit) & (figure < math.inf)


def frequency(count: float, exposure: float, rate: float, theta: float) -> float:
    """Return ln of the e-value exp(theta * count - (e^theta - 1) * rate * exposure), theta > 0.

    Hypothesis: `count` is a sum of variables in [0, 1] whose conditional means sum to at most rate * exposure. For one
    such variable x of mean m, E exp(theta x) <= 1 + m (e^theta - 1) <= exp(m (e^theta - 1)), because exp is convex.
    """
    return theta * count - math.expm1(theta) * rate * exposure


def share(value: float, mean: float, stake: float) -> float:
    """Return ln of the e-value 1 + stake * (value - mean) / mean; value in [0, 1], 0 < mean <= 1, stake in [0, 1).

    Hypothesis: the conditional mean of `value` is at most `mean`. A value of 0 leaves 1 - stake of the capital.
    """
    return math.log1p(stake * (value - mean) / mean)


def allocation(
    counts: Sequence[int], exposures: Sequence[float], values: Sequence[float], tilt: float, stake: float
) -> float:
    """Return ln of the e-value: the product over places of (1 + stake * (value - centre) / (centre - lowest)) ^ count.

    Hypothesis: at place i, `counts[i]` counts independent events whose probabilities sum to rate * d_i * exposures[i],
    for any single rate and any d_i in [1, tilt]. The values are fixed. `centre` is the largest mean of the values under
    such weights, so the weighted mean of the factors is at most 1 for any rate and d. If all values are equal, the
    result is 0.

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
    """Return the largest mean of the values under weights exposures[i] * d_i, d_i in [1, tilt].

    The maximum has d = tilt for the values above some threshold and d = 1 for the others, so all thresholds are tried.
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


@dataclass(frozen=True)
class Process:
    """The state of a worker's test: the number of observations, and each bet's staked capital."""

    observations: int = 0
    money: Mapping[str, float] = field(default_factory=dict)  # ln R_b by name of the bet

    def after(self, e_values: Mapping[str, float]) -> "Process":
        """Return the state after one more observation. `e_values` maps bets' names to ln e. A new name starts a bet."""
        n = self.observations + 1
        staked = -math.log(n) - math.log(n + 1)
        names = list(self.money) + [name for name in e_values if name not in self.money]
        money = {
            name: max(log_add([self.money.get(name, FLOOR), staked]) + e_values.get(name, 0.0), FLOOR) for name in names
        }
        return Process(n, money)

    @property
    def evidence(self) -> float:
        """The ln of the capital, which starts at 0. For an honest worker, P(it ever exceeds -ln(alpha)) <= alpha."""
        if not self.money:
            return 0.0
        unstaked = -math.log(self.observations + 1)
        return log_add([log_add([staked, unstaked]) for staked in self.money.values()]) - math.log(len(self.money))

    def strongest(self, n: int = 3) -> list[str]:
        """Return the names of the n bets with the most money, richest first."""
        return sorted(self.money, key=lambda name: -self.money[name])[:n]


def log_add(logarithms: Sequence[float]) -> float:
    """Return ln of the sum of exponentials, without overflow."""
    top = max(logarithms)
    return top + math.log(sum(math.exp(value - top) for value in logarithms))
