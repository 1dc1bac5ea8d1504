"""What a run leaves in files while it goes on, and in a tracker. Whoever watches its folder reads these and nothing else.

    metrics.jsonl       one line per trained step (docs/pages.md lists the names)
    evaluations.jsonl   one line per held-out evaluation
    rollouts.jsonl      the newest sample completions, one line each
    work.jsonl          one line per settled submission, published version and download of weights
    state.json          what `GET /v1/status` answers, the config, the work that is under way

Invariant: metrics and evaluations always hold the whole run so far, so neither a restart nor a reader finds a gap. A tracker
that fails is reported once and then left alone; training and the files continue.
The coordinator is the one owner of these files.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shoal.files import write_file
from shoal.protocol.history import History, RunHistory, Status, WorkerSample
from shoal.protocol.messages import Evaluation
from shoal.watch.trackers import Tracker

MOST_SAMPLES = 8  # sent to a tracker at once
METRICS, EVALUATIONS, ROLLOUTS = "metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl"
WORK, STATE = "work.jsonl", "state.json"
NOT_TRACKED = ("step", "time_s")  # a tracker has its own
Line = dict[str, Any]


class RunState(BaseModel):
    """`state.json`."""

    status: Status
    config: str  # as TOML, without what is nobody else's matter
    under_way: list[Line]  # submissions that are not settled, oldest first
    ended: bool  # the coordinator stopped by itself


class Lines:
    """The lines of a file of JSON that grows or is replaced. `read` parses only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Line] = []
        self._size_bytes, self._last = 0, b""  # read so far, and its last line

    def read(self) -> list[Line]:
        """All whole lines; none if there is no file."""
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
        self.rows += [json.loads(line) for line in lines]
        self._size_bytes += len(whole)
        self._last = lines[-1] if lines else self._last
        return self.rows


def read_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluations recorded in `folder`; none if there is no file."""
    return [Evaluation.model_validate(line) for line in Lines(folder / EVALUATIONS).read()]


def trained_steps(folder: Path) -> int:
    """How many steps the run in this folder has trained."""
    return len({line["step"] for line in Lines(folder / METRICS).read()})


class RunRecord:
    """The files are in `folder`; `say` takes a line for the person who watches."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self.tracker: Tracker | None = None
        self.history = RunHistory()
        self._tracked: set[tuple[str, int]] = set()
        for name in (METRICS, EVALUATIONS, ROLLOUTS, WORK):
            if not (folder / name).exists():
                self._write(name, [])

    def keep(self, news: History, work: Sequence[Line], state: RunState | None) -> None:
        """All that became known since the last call. Raises OSError if a file cannot be written."""
        self.take(news)
        self.add_work(work)
        if state is not None:
            self.write_state(state)

    def take(self, news: History) -> bool:
        """Add what became known. Return whether there was anything new. Raise OSError if a file cannot be written."""
        if not self.history.add(news):
            return False
        if news.metrics:
            self._write(METRICS, [json.dumps(step) for step in self.history.metrics])
        if news.evaluations:
            self._write(EVALUATIONS, [found.model_dump_json() for found in self.history.evaluations])
        if news.samples:
            self._write(ROLLOUTS, [sample.model_dump_json() for sample in self.history.samples])
        for step in news.metrics:
            values = {name: value for name, value in step.items() if name not in NOT_TRACKED}
            self._track("step", int(step["step"]) + 1, values)
        for found in news.evaluations:
            accuracies = {"heldout/greedy": found.greedy, "heldout/sampled": found.sampled}
            values = {name: value for name, value in accuracies.items() if value is not None}
            self._track("final" if found.final else "evaluation", found.version, values)
        self._track_samples(news.samples)
        return True

    def work(self) -> Iterator[Line]:
        """The lines of `work.jsonl`. An incomplete last line, which a kill left, is dropped from the file."""
        path = self.folder / WORK
        data = path.read_bytes()
        if len(whole := data[: data.rfind(b"\n") + 1]) < len(data):
            os.truncate(path, len(whole))
        return (json.loads(line) for line in whole.splitlines())

    def add_work(self, lines: Sequence[Line]) -> None:
        if lines:
            with (self.folder / WORK).open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))

    def write_state(self, state: RunState) -> None:
        path = self.folder / STATE
        new = path.with_suffix(".new")
        new.write_text(state.model_dump_json())  # not fsynced: it is written again within seconds
        new.replace(path)

    def close(self) -> None:
        """Let the tracker send what it still holds."""
        self._try(lambda tracker: tracker.close(), "did not close")

    def _track(self, kind: str, version: int, values: dict[str, float]) -> None:
        """Send figures once: a step that is reported again is not sent again."""
        if (kind, version) not in self._tracked:
            self._tracked.add((kind, version))
            self._try(lambda tracker: tracker.log(values, version))

    def _track_samples(self, samples: Sequence[WorkerSample]) -> None:
        """Send the newest few of these samples: one request for each look, not one for each group."""
        if samples:
            newest = max(sample.policy_version for sample in samples)
            self._try(lambda tracker: tracker.log_samples(samples[-MOST_SAMPLES:], newest))

    def _try(self, use: Callable[[Tracker], None], failed: str = "failed") -> None:
        if self.tracker is None:
            return
        try:
            use(self.tracker)
        except Exception as error:  # noqa: BLE001 - another package's code: what it may raise is not known
            kind = type(self.tracker).__name__
            self.tracker = None
            self.say(
                f"tracking ended: {kind} {failed}: {type(error).__name__}: {error}. Training continues; every figure is in"
                f" {self.folder / METRICS}"
            )

    def _write(self, name: str, lines: Sequence[str]) -> None:
        write_file(self.folder / name, "".join(line + "\n" for line in lines).encode())
