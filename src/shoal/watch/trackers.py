"""Trackers for metrics, chosen in the config: Weights & Biases or TensorBoard.

Invariant: a package is imported only if its tracker is chosen. Opening a tracker succeeds or raises an error
that says what to install or set; `record` handles later failures.
Trackers get no system metrics or pictures. A restart does not resume the remote run: it creates a new one and sends all
steps again.

    wandb         project and account come from wandb's settings (`wandb login`, WANDB_PROJECT, WANDB_MODE=offline)
    tensorboard   writes curves to `tensorboard/` in the run's folder; needs neither torch nor TensorFlow
"""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shoal.config import Config
from shoal.errors import ShoalError, check_extra
from shoal.protocol.history import WorkerSample

PROJECT = "shoal"
# Columns of the table of samples.
COLUMNS = ("policy_version", "worker", "task", "prompt", "completion", "reward", "tokens")


class TrackerError(ShoalError):
    """A tracker cannot be used; the message says which, why, and what to do."""

    restart_helps = True  # the tracker's server may be briefly unreachable


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], version: int) -> None:
        """Send metrics of the policy after `version` trained steps. May raise anything."""

    def log_samples(self, samples: Sequence[WorkerSample], version: int) -> None:
        """Send completions of policies up to `version`. May raise anything."""

    def close(self) -> None:
        """Flush and close. May raise, and may take seconds."""


class Wandb:
    def __init__(self, name: str, folder: Path, config: Config) -> None:
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            dir=str(folder),
            config=config.public().model_dump(mode="json"),
            settings=wandb.Settings(console="off", quiet=True),  # the terminal shows the run's own view
        )
        self.table = wandb.Table
        # wandb's own step must increase, but a held-out accuracy may arrive after newer steps.
        self.run.define_metric("*", step_metric="version")

    def log(self, values: Mapping[str, float], version: int) -> None:
        self.run.log({"version": version, **values})

    def log_samples(self, samples: Sequence[WorkerSample], version: int) -> None:
        rows = [[getattr(sample, name) for name in COLUMNS] for sample in samples]
        self.run.log({"version": version, "samples": self.table(columns=list(COLUMNS), data=rows)})

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    def __init__(self, name: str, folder: Path, config: Config) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self.event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self.summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self.writer = writer.EventFileWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], version: int) -> None:
        scalars = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self.event(step=version, wall_time=time.time(), summary=self.summary(value=scalars))
        self.writer.add_event(event)
        self.writer.flush()

    def log_samples(self, samples: Sequence[WorkerSample], version: int) -> None:
        """Do nothing, because only curves are written."""

    def close(self) -> None:
        self.writer.close()


KINDS: dict[str, type[Wandb] | type[TensorBoard]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def open_tracker(name: str, folder: Path, config: Config) -> Tracker | None:
    """Open the tracker named by `config.run.tracker`, if any, for the run called `name`. Raise TrackerError, UserError."""
    kind = config.run.tracker
    if kind == "none":
        return None
    check_extra(kind, f'run.tracker = "{kind}"')
    try:
        return KINDS[kind](name, folder, config)
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything
        raise TrackerError(
            f'run.tracker = "{kind}" does not start: {type(error).__name__}: {error}; set it up, or choose "none"'
        ) from error
