"""Training without a pool: the loop and the output folder that supervised fine-tuning and pretraining share.

    run.json       settings that determine the result             metrics.jsonl    one line per step or measurement
    checkpoints/   for resuming the run                            model/           the result
    training.lock  locked by the process that trains

Under torchrun every rank runs the loop; only the leader writes records and logs.
Invariant: a folder holds one training run, and one process at a time trains there. Files of another run are never
overwritten.
"""

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config import Config, ConfigError
from shoal.config.recipe import LossSection
from shoal.files import append_lines, keep_lines, lock, read_json, write_file
from shoal.learner.checkpoint import Checkpoints
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks, from_leader
from shoal.model.dtype import DtypeName

RUN, METRICS, CHECKPOINTS, MODEL = "run.json", "metrics.jsonl", "checkpoints", "model"
LOCK = "training.lock"
GRAD_CLIP = 1.0  # largest gradient norm; larger gradients are scaled down
LOG_EVERY_S = 1.0  # at most one training step per second is logged; metrics.jsonl has all steps

log = logging.getLogger(__name__)


class Training(ABC):
    """A training run in one folder. `step` of its `steps` steps are done."""

    def __init__(self, policy: Policy, folder: Path, steps: int) -> None:
        self.policy, self.ranks, self.leads = policy, policy.ranks, policy.ranks.leads
        self.folder, self.steps, self.step = folder, steps, 0
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, policy)
        self._logged_s = 0.0

    def run(self, stop: threading.Event) -> Path | None:
        """Train to the last step, or until `stop`. Return the model's folder, or None if stopped."""
        self.begin()
        while self.step < self.steps:
            if self.stops(stop):
                self.pause()
                self.end()
                return None
            self.train()
            self.keep(last=self.step >= self.steps)
        self.end()
        self.write_model(self.folder / MODEL)
        return self.folder / MODEL

    @abstractmethod
    def begin(self) -> None:
        """Claim the folder and restore its newest checkpoint."""

    @abstractmethod
    def train(self) -> None:
        """Train one step."""

    @abstractmethod
    def keep(self, *, last: bool) -> None:
        """Measure the held-out loss and write a checkpoint if these are due: every few steps and at the end."""

    @abstractmethod
    def pause(self) -> None:
        """Write a checkpoint before stopping early."""

    def end(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.checkpoints.finish()

    def write_model(self, final: Path) -> None:
        """Write the model as a Hugging Face folder, which replaces any existing one."""
        self.policy.write(final, replace=True)

    def stops(self, stop: threading.Event) -> bool:
        """Return the leader's `stop` on every rank."""
        return bool(self.ranks.broadcast((b"stop" if stop.is_set() else b"") if self.leads else None))

    def claim(self, about: Mapping[str, str], differs: str = "") -> None:
        """Claim the folder with the function `claim`. Raise ConfigError on the leader, ShoalError on the other ranks."""
        from_leader(self.ranks, lambda: claim(self.folder, about, differs), lambda _: b"", lambda _: None)

    def record(self, **figures: Any) -> None:
        """Append one line to metrics.jsonl."""
        if self.leads:
            append_lines(self.folder / METRICS, [{"step": self.step} | figures])

    def log(self, text: str, *, often: bool = False) -> None:
        """Log on the leader. If `often` is set, log at most once per LOG_EVERY_S."""
        if self.leads and not (often and time.monotonic() - self._logged_s <= LOG_EVERY_S):
            self._logged_s = time.monotonic() if often else self._logged_s
            log.info("step %d of %d: %s", self.step, self.steps, text)


def plain_policy(
    folder: Path,
    config: Config,
    dtype: DtypeName,
    ranks: Ranks | None,
    *,
    lr: float,
    warmup_steps: int,
    memory_hint: str,
    **options: Any,
) -> Policy:
    """Load the model in `folder` with an optimizer for next-token training. `options` are arguments of `Policy`."""
    loss = LossSection(beta=0.0, entropy=0.0)
    changes = {"lr": lr, "warmup_steps": warmup_steps, "grad_clip": GRAD_CLIP, "lora": None, "loss": loss}
    section = config.learner.model_copy(update=changes)
    policy = Policy(folder, section, dtype, config.model.device, 1.0, ranks, **options)
    policy.memory_hint = memory_hint
    return policy


def claim(folder: Path, about: Mapping[str, str], differs: str = "") -> None:
    """Mark `folder` as this run's. `differs` replaces the name and values of a differing setting in the error message.

    Raise ConfigError if another process trains there, or if the folder holds another run or other files that this run
    would overwrite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN
    taken = [name for name in (METRICS, CHECKPOINTS, MODEL) if (folder / name).exists()]
    if taken and not path.exists():
        raise ConfigError(
            f"{folder} holds {taken[0]} but no {RUN}: it is not the folder of a training run; choose another --out"
        )
    if not lock(folder / LOCK):
        raise ConfigError(f"another process trains in {folder}: stop it first, or choose another --out")
    if not path.exists():
        write_file(path, (json.dumps(about, indent=1) + "\n").encode())
    recorded = read_json(path)
    for key in sorted({*recorded, *about}):
        if recorded.get(key) != about.get(key):
            what = differs or f"{key} = {recorded.get(key)}, not {about.get(key)}"
            raise ConfigError(
                f"{folder} holds a run with {what}: use its settings to resume that run, or choose another --out"
            )


def drop_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which will be repeated, and an incomplete last line."""
    keep_lines(path, lambda line: step > 0 and line["step"] <= step)
