"""The learning rate of each update: linear warm-up, then constant, or falling in a line or along half a cosine.

    warm-up    lr (u + 1) / W                       for update u < W, the first being 0
    then       lr (f + (1 - f) left)                f: `final_lr_frac`
               left = 1                             constant
                    = 1 - d                         linear
                    = (1 + cos(pi d)) / 2           cosine; d = (u - W) / (schedule_steps - W), at most 1

Invariant: a pure function of the section and the number of updates made, so a resumed run has the rates of an uninterrupted
one. Called by the policy. The cosine: SGDR without restarts (arXiv 1608.03983).
"""

import math

from shoal.config.recipe import LearnerSection


def rate(updates: int, section: LearnerSection) -> float:
    """The learning rate of the next update, after so many."""
    warm_up = section.warmup_steps
    if updates < warm_up:
        return section.lr * ((updates + 1) / warm_up)
    if section.schedule == "constant" or section.schedule_steps is None:
        return section.lr
    done = min(1.0, (updates - warm_up) / (section.schedule_steps - warm_up))
    left = 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.lr * (section.final_lr_frac + (1.0 - section.final_lr_frac) * left)
