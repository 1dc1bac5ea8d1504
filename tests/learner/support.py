"""A policy to train: the learner's recipe with nothing in it that a test did not ask for."""

from pathlib import Path
from typing import Any

from shoal.learner.policy import Policy
from shoal.recipe import LearnerSection, LossSection


def make_policy(
    folder: Path, *, loss: dict[str, Any] | None = None, temperature: float = 1.0, **changed: Any
) -> Policy:
    """The weights in `folder`, trained from the first update on at a rate of 1e-3; no KL and no entropy bonus."""
    settings = {"lr": 1e-3, "warmup_steps": 0, "grad_clip": 1.0} | changed
    section = LearnerSection(**settings, loss=LossSection(**{"beta": 0.0, "entropy": 0.0} | (loss or {})))
    return Policy(folder, section, "float32", "cpu", temperature)
