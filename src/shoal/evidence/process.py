"""The capital of several bettors who play one worker's observations, each of whom may begin at any observation.

Bettor b begins at observation j with a share w_j = 1 / (j (j + 1)) of his money and multiplies it by his bet's e-value at
each observation from then on. So a worker that is honest for n observations and then cheats has gained a factor of
n (n + 1), about 2 ln n nats, and not all that the bets before had lost. What has not been staked yet, 1 / (n + 1), stays
1 / (n + 1).

    capital = mean over bets b of ( R_b + 1 / (n + 1) ),      R_b <- (R_b + w_n) * e_b

Invariant: under the honest hypothesis the capital is a nonnegative supermartingale that starts at 1. By Ville's inequality
it ever reaches 1 / alpha with probability at most alpha, however often and whenever it is looked at.
Called by the coordinator, which stores `Process` between observations. Logarithms in nats throughout.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FLOOR = -700.0  # of a stored logarithm; rounding capital up to e^-700 changes no sum


@dataclass(frozen=True)
class Process:
    """What is kept of a worker's observations: how many there were, and each bettor's running money."""

    observations: int = 0
    money: Mapping[str, float] = field(default_factory=dict)  # ln R_b by the bet's name

    def after(self, e_values: Mapping[str, float]) -> "Process":
        """With one more observation: ln e by the bet's name. A bet that was not there before begins now."""
        n = self.observations + 1
        staked = -math.log(n) - math.log(n + 1)
        names = list(self.money) + [name for name in e_values if name not in self.money]
        money = {
            name: max(log_add([self.money.get(name, FLOOR), staked]) + e_values.get(name, 0.0), FLOOR) for name in names
        }
        return Process(n, money)

    @property
    def evidence(self) -> float:
        """ln of the capital: 0 at the start; more than ln(1 / alpha) with probability at most alpha if honest."""
        if not self.money:
            return 0.0
        resting = -math.log(self.observations + 1)
        return log_add([log_add([one, resting]) for one in self.money.values()]) - math.log(len(self.money))

    def strongest(self, most: int = 3) -> list[str]:
        """The bets that won most, best first."""
        return sorted(self.money, key=lambda name: -self.money[name])[:most]


def log_add(logarithms: Sequence[float]) -> float:
    """ln of the sum of exponentials, without overflow."""
    top = max(logarithms)
    return top + math.log(sum(math.exp(one - top) for one in logarithms))
