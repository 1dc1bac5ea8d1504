"""Group advantages: a pure function of rewards.

Source: GRPO (arXiv 2402.03300); without the division by std as in Dr. GRPO (arXiv 2503.20783).
"""

from torch import Tensor

EPSILON = 1e-6  # added to the std


def group_advantages(rewards_G: Tensor, *, normalize_std: bool) -> Tensor:
    """Reward minus the group's mean, optionally over the group's std. Returns advantages_G, float32.

    The std is the sample's (over G - 1), as in TRL and verl.
    """
    exact_G = rewards_G.float().double()  # float32s sum exactly in float64: equal rewards give exactly 0
    advantages_G = exact_G - exact_G.mean()
    if normalize_std:
        advantages_G = advantages_G / (exact_G.std(correction=min(1, len(exact_G) - 1)) + EPSILON)
    return advantages_G.float()
