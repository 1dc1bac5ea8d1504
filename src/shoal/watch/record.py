"""The files that a run writes, and the tracker that gets its metrics. Views of a folder read only these files.

    metrics.jsonl       one line per trained step (docs/pages.md lists the names)
    evaluations.jsonl   one line per held-out evaluation
    rollouts.jsonl      the newest sample completions, one line each
    work.jsonl          one line per settled submission, published version and download of weights
    state.json          the response of `GET /v1/status`, the config, the work in progress

Invariant: the files of metrics and evaluations always cover the whole run so far, even after a restart. If the tracker
fails, its error is reported once and it is not used again. Training and the files continue.
Only the coordinator writes these files.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shoal.files import append_lines, named_errors, parse_json, write_file
from shoal.protocol.history import History, RunHistory, Status, WorkerSample
from shoal.protocol.messages import Evaluation
from shoal.watch.trackers import Tracker

MAX_SAMPLES = 8  # largest number of samples sent to a tracker at once
METRICS, EVALUATIONS, ROLLOUTS = "metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl"
WORK, STATE = "work.jsonl", "state.json"
NOT_TRACKED = ("step", "time_s")  # trackers record their own step and time
Line = dict[str, Any]


class RunState(BaseModel):
    """The contents of `state.json`."""

    status: Status
    config: str  # as TOML, without private fields
    under_way: list[Line]  # unsettled submissions, oldest first
    ended: bool  # whether the coordinator exited cleanly


class Lines:
    """A JSON-lines file that grows or is replaced. `read` parses only new lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Line] = []
        self._size_bytes, self._last = 0, b""  # number of bytes read so far, and the last line read

    def read(self) -> list[Line]:
        """Return all complete lines. Return an empty list if there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._size_bytes - len(self._last), 0))
                if file.read(len(self._last)) != self._last:
                    file.seek(0)
                    self.rows, self._size_bytes = [], 0
                new = file.read()
        except FileNotFoundError:
            return self.rows
        whole = new[: new.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        self.rows += [parse_json(line, self.path) for line in lines]
        self._size_bytes += len(whole)
        self._last = lines[-1] if lines else self._last
        return self.rows


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Return the evaluations recorded in `folder`. Return an empty list if there is no file."""
    return [Evaluation.model_validate(line) for line in Lines(folder / EVALUATIONS).read()]


class RunRecord:
    """Write the files in `folder`; `say` prints a line for the user."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self.tracker: Tracker | None = None
        self.history = RunHistory()
        self._tracked: set[tuple[str, int]] = set()
        for name in (METRICS, EVALUATIONS, ROLLOUTS, WORK):
            if not (folder / name).exists():
                self._write(name, [])

    def write(self, history: History, work: Sequence[Line], state: RunState | None) -> None:
        """Write everything new since the last call. Raise OSError if a file cannot be written."""
        self.add_history(history)
        self.add_work(work)
        if state is not None:
            self.write_state(state)

    def add_history(self, new: History) -> bool:
        """Write new history. Return whether there was any. Raise OSError if a file cannot be written."""
        if not self.history.add(new):
            return False
        if new.metrics:
            self._write(METRICS, [json.dumps(step) for step in self.history.metrics])
        if new.evaluations:
            self._write(EVALUATIONS, [evaluation.model_dump_json() for evaluation in self.history.evaluations])
        if new.samples:
            self._write(ROLLOUTS, [sample.model_dump_json() for sample in self.history.samples])
        for step in new.metrics:
            values = {name: value for name, value in step.items() if name not in NOT_TRACKED}
            self._track("step", int(step["step"]) + 1, values)
        for evaluation in new.evaluations:
            accuracies = {"heldout/greedy": evaluation.greedy, "heldout/sampled": evaluation.sampled}
            values = {name: value for name, value in accuracies.items() if value is not None}
            self._track("final" if evaluation.final else "evaluation", evaluation.version, values)
        self._track_samples(new.samples)
        return True

    def work(self) -> Iterator[Line]:
        """Return the lines of `work.jsonl`. First cut off an incomplete last line, which a killed process leaves."""
        path = self.folder / WORK
        data = path.read_bytes()
        if len(whole := data[: data.rfind(b"\n") + 1]) < len(data):
            os.truncate(path, len(whole))
        return (parse_json(line, path) for line in whole.splitlines())

    def add_work(self, lines: Sequence[Line]) -> None:
        if lines:
            append_lines(self.folder / WORK, lines)

    def write_state(self, state: RunState) -> None:
        path = self.folder / STATE
        temporary = path.with_suffix(".new")
        with named_errors(temporary):
            temporary.write_text(state.model_dump_json())  # no fsync, because the file is rewritten within seconds
        temporary.replace(path)

    def close(self) -> None:
        """Flush the tracker."""
        self._try(lambda tracker: tracker.close(), "did not close")

    def _track(self, kind: str, version: int, values: dict[str, float]) -> None:
        """Send figures to the tracker, once per kind and version."""
        if (kind, version) not in self._tracked:
            self._tracked.add((kind, version))
            self._try(lambda tracker: tracker.log(values, version))

    def _track_samples(self, samples: Sequence[WorkerSample]) -> None:
        """Send the newest MAX_SAMPLES samples, all in one request."""
        if samples:
            newest = max(sample.policy_version for sample in samples)
            self._try(lambda tracker: tracker.log_samples(samples[-MAX_SAMPLES:], newest))

    def _try(self, use: Callable[[Tracker], None], failed: str = "failed") -> None:
        if self.tracker is None:
            return
        try:
            use(self.tracker)
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            kind = type(self.tracker).__name__
            self.tracker = None
            self.say(
                f"tracking ended: {kind} {failed}: {type(error).__name__}: {error}. Training continues; every figure is in"
                f" {self.folder / METRICS}"
            )

    def _write(self, name: str, lines: Sequence[str]) -> None:
        write_file(self.folder / name, "".join(line + "\n" for line in lines).encode())
