"""Where metrics go besides the run's own files: Weights & Biases, TensorBoard or trackio, by one word in the config.

Invariant: a package is imported only where its tracker is chosen; opening one either works or raises TrackerError, which
says what to install or set. What happens when one fails later is `record`'s. Called by `record`'s owners, `shoal run` and
the coordinator.
Left out: system metrics, pictures and texts; resuming the same remote run (a restart begins a new one and sends all steps).

    wandb         project and account come from its own settings (`wandb login`, WANDB_PROJECT, WANDB_MODE=offline)
    tensorboard   writes to `tensorboard/` in the run's folder; needs neither torch nor TensorFlow
    trackio       a local database by default; TRACKIO_SPACE_ID sends it to a Hugging Face space
"""

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoal.config import Config
from shoal.errors import ShoalError

PROJECT = "shoal"


class TrackerError(ShoalError):
    """A tracker that cannot be used; the message says which, why, and what to do."""

    restart_helps = True  # its server may be away for a moment


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], version: int) -> None:
        """Send figures of the policy after `version` trained steps. May raise anything that its package raises."""

    def close(self) -> None:
        """Send what is left; nothing is logged after. May raise, and take seconds."""


class Nowhere:
    """No tracker was chosen, or the chosen one has failed."""

    def log(self, values: Mapping[str, float], version: int) -> None:
        pass

    def close(self) -> None:
        pass


class Wandb:
    def __init__(self, name: str, folder: Path, config: Config) -> None:
        wandb = _package("wandb", "wandb")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", quiet=True),  # the terminal is the run's view
        )
        # Its own step count refuses a held-out accuracy that comes after newer steps.
        self.run.define_metric("*", step_metric="version")

    def log(self, values: Mapping[str, float], version: int) -> None:
        self.run.log({"version": version, **values})

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    def __init__(self, name: str, folder: Path, config: Config) -> None:
        writer = _package("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self.event = _package("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self.summary = _package("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self.writer = writer.EventFileWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], version: int) -> None:
        told = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.writer.add_event(self.event(step=version, wall_time=time.time(), summary=self.summary(value=told)))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Trackio:
    def __init__(self, name: str, folder: Path, config: Config) -> None:
        trackio = _package("trackio", "trackio")
        self.run = trackio.init(project=PROJECT, name=name, config=config.model_dump(mode="json"))

    def log(self, values: Mapping[str, float], version: int) -> None:
        self.run.log(dict(values), step=version)

    def close(self) -> None:
        self.run.finish()


KINDS: dict[str, type[Wandb] | type[TensorBoard] | type[Trackio]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}


def open_tracker(name: str, folder: Path, config: Config) -> Tracker:
    """The tracker that `config.run.tracker` names, for the run called `name`. Raises TrackerError."""
    kind = config.run.tracker
    if kind == "none":
        return Nowhere()
    try:
        return KINDS[kind](name, folder, config)
    except TrackerError:
        raise
    except Exception as error:  # noqa: BLE001 - someone else's code: what it may raise is not known
        raise TrackerError(
            f'run.tracker = "{kind}" does not start: {type(error).__name__}: {error}; set it up, or run.tracker = "none"'
        ) from error


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrackerError(
            f"run.tracker = \"{extra}\" needs a package that is not here ({error}): pip install 'shoal[{extra}]'"
        ) from error
