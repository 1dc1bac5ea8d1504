"""Read the state, history and work of a run for the views, from its folder or its coordinator's public routes.

Invariant: reading changes nothing. A folder can be read during the run and after it; `record` lists its files. A
coordinator's URL gives only state, curves, nodes and samples.
"""

import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx

from shoal.config import Config, parse
from shoal.errors import UserError
from shoal.protocol.history import PoolWatch, RunHistory, Status, WorkerSample
from shoal.protocol.invite import server_url
from shoal.protocol.messages import Evaluation
from shoal.watch.record import EVALUATIONS, METRICS, ROLLOUTS, STATE, WORK, Line, Lines, RunState
from shoal.watch.summary import read_summary, wall_s

ENDED_S = 60.0  # a run whose coordinator has written nothing for this long has ended


class FolderRun:
    """A run that is read from its folder, or from the folder of a pool's coordinator."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Open a run's folder. Raise UserError, or ConfigError for a config of another version."""
        if not (folder / STATE).is_file():
            raise UserError(
                f"no {STATE} in {folder}: name the folder of a run or of a coordinator, or a coordinator's URL"
            )
        self.folder: Path | None = folder
        self.path, self.clock = folder, clock
        self.history = RunHistory()
        self._files = {name: Lines(folder / name) for name in (METRICS, EVALUATIONS, ROLLOUTS, WORK)}
        self._state: RunState | None = None
        self.name = self.refresh().run
        assert self._state is not None
        self.config: Config | None = parse(tomllib.loads(self._state.config), source=f"{folder / STATE}")

    def refresh(self) -> Status:
        """Read new lines and return the current status. Raise UserError."""
        try:
            self._state = RunState.model_validate_json((self.path / STATE).read_bytes())
        except OSError as error:
            raise UserError(f"{self.path / STATE} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{self.path / STATE} is not from a run of this version: {error}") from error
        steps = {step["step"]: step for step in self._files[METRICS].read()}
        self.history.metrics = [steps[number] for number in sorted(steps)]
        self.history.evaluations = [Evaluation.model_validate(line) for line in self._files[EVALUATIONS].read()]
        self.history.samples = [WorkerSample.model_validate(line) for line in self._files[ROLLOUTS].read()]
        return self._state.status

    def running(self) -> bool:
        assert self._state is not None
        if self._state.ended or self._state.status.state == "finished":
            return False
        return bool(self.clock() - (self.path / STATE).stat().st_mtime < ENDED_S)

    def wall_s(self, status: Status) -> float:
        if status.state == "finished" and (total_s := read_summary(self.path).get("wall_s")):
            return float(total_s)
        measured = wall_s(self.path, self.clock(), running=self.running())
        return status.now_s - status.started_s if measured is None else measured

    def work(self) -> list[Line]:
        return self._files[WORK].read()

    def under_way(self) -> list[Line]:
        return self._state.under_way if self._state else []


class PoolRun:
    """A run that is read from its coordinator's URL, which gives no work and no config."""

    config: Config | None = None
    folder: Path | None = None

    def __init__(self, url: str, client: httpx.Client, legs: Path | None = None) -> None:
        """`legs`: the folder where `shoal run` records its legs, if it runs on this machine."""
        self.pool = PoolWatch(server_url(url), client)
        self.legs = legs
        self.history = self.pool.history
        self.name = url
        self._state = "running"

    def refresh(self) -> Status:
        """Fetch new history and return the current status. Raise UnreachableError."""
        status = self.pool.look()
        self.name, self._state = status.run, status.state
        return status

    def running(self) -> bool:
        return self._state == "running"

    def wall_s(self, status: Status) -> float:
        measured = wall_s(self.legs, time.time(), running=True) if self.legs else None
        return status.now_s - status.started_s if measured is None else measured

    def work(self) -> list[Line]:
        return []

    def under_way(self) -> list[Line]:
        return []


Run = FolderRun | PoolRun


def open_run(where: str) -> Run:
    """Open the run in a folder or at a URL. Raise UserError or AddressError."""
    if where.startswith(("http://", "https://")):
        return PoolRun(where, httpx.Client(timeout=5))
    return FolderRun(Path(where))
