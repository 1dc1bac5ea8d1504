"""The run's figures as files and in a tracker: `metrics.jsonl`, `evaluations.jsonl`, `rollouts.jsonl`.

    metrics.jsonl       one line per trained step (docs/metrics.md lists the names)
    evaluations.jsonl   one line per held-out evaluation
    rollouts.jsonl      the newest sample completions, one line each

Invariant: the first two files always hold the whole run so far, so neither a restart nor a reader finds a gap. A tracker
that fails is reported once and then left alone; training and the files continue.
Called by the coordinator, the one owner of these files. `shoal plot` reads them.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.files import write_file
from shoal.protocol.history import RunHistory
from shoal.protocol.messages import Evaluation, History, WorkerSample
from shoal.watch.trackers import Nowhere, Tracker

MOST_SAMPLES = 8  # sent to a tracker at once
METRICS, EVALUATIONS, ROLLOUTS = "metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl"
NOT_TRACKED = ("step", "time_s")  # a tracker has its own


def read_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluations recorded in `folder`; none if there is no file."""
    path = folder / EVALUATIONS
    lines = path.read_text().splitlines() if path.exists() else []
    return [Evaluation.model_validate_json(line) for line in lines]


def trained_steps(folder: Path) -> int:
    """How many steps the run in this folder has trained."""
    path = folder / METRICS
    return len({json.loads(line)["step"] for line in path.read_text().splitlines()}) if path.exists() else 0


class Record:
    """The files are in `folder`; `say` takes a line for the person who watches."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self.tracker: Tracker = Nowhere()
        self.history = RunHistory()
        self._tracked: set[tuple[str, int]] = set()
        for name in (METRICS, EVALUATIONS, ROLLOUTS):
            if not (folder / name).exists():
                self._write(name, [])

    def take(self, news: History) -> bool:
        """Add what became known. Returns whether there was anything new. Raises OSError if a file cannot be written."""
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

    def close(self) -> None:
        """Let the tracker send what it still holds."""
        try:
            self.tracker.close()
        except Exception as error:  # noqa: BLE001 - another package's code: what it may raise is not known
            self._gave_up("did not close", error)

    def _track(self, kind: str, version: int, values: dict[str, float]) -> None:
        """Send figures once: a step that is reported again is not sent again."""
        if (kind, version) in self._tracked:
            return
        self._tracked.add((kind, version))
        try:
            self.tracker.log(values, version)
        except Exception as error:  # noqa: BLE001 - likewise
            self._gave_up("failed", error)

    def _track_samples(self, samples: Sequence[WorkerSample]) -> None:
        """Send the newest few of these samples: one request for each look, not one for each group."""
        if not samples:
            return
        try:
            self.tracker.log_samples(samples[-MOST_SAMPLES:], max(sample.policy_version for sample in samples))
        except Exception as error:  # noqa: BLE001 - likewise
            self._gave_up("failed", error)

    def _gave_up(self, how: str, error: Exception) -> None:
        kind = type(self.tracker).__name__
        self.tracker = Nowhere()
        self.say(
            f"tracking ended: {kind} {how}: {type(error).__name__}: {error}. Training continues; every figure is in "
            f"{self.folder / METRICS}"
        )

    def _write(self, name: str, lines: Sequence[str]) -> None:
        write_file(self.folder / name, "".join(line + "\n" for line in lines).encode())
