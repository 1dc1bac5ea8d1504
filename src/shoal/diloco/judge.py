"""Which pseudo-gradients of a round are averaged, by their norms: a broken site must not break the model of all.

Left out is what is not finite, and what is larger than `factor` times the median of this round and of the recent past,
whichever is larger. So small vectors of others cannot make an honest one an outlier while the past says otherwise. A first
round of one or two sites has neither: there the yardstick is the norm of the parameters.
Invariant: what is left out is named with the reason. Called by `meeting`.
Left out: hostile sites. A majority of them can move the median, and one can send a wrong direction of modest length.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

FEWEST = 3  # norms that a median of one round needs; it would follow one of two


def refused(norms: Mapping[str, float], past: Sequence[float], factor: float, parameters: float) -> dict[str, str]:
    """The sites that are left out, and why. `past` are norms that were averaged in recent rounds.

    `parameters`: the parameters' norm when the round began. It replaces the median where there is none.
    """
    why = {name: "not finite" for name, norm in norms.items() if not math.isfinite(norm)}
    usual = [median(past)] if past else []
    if len(norms) - len(why) >= FEWEST:
        usual.append(median(norm for name, norm in norms.items() if name not in why))
    if not usual and parameters:
        usual.append(parameters)
    for name, norm in norms.items():
        if name not in why and usual and norm > factor * max(usual):
            why[name] = f"its norm {norm:.3g} is more than {factor:g} times the usual {max(usual):.3g}"
    return why
