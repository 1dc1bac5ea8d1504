"""What a run's figures are kept in while it goes on: `metrics.jsonl`, `evaluations.jsonl`, and the tracker.

    metrics.jsonl       one line a trained step, as the coordinator knows it (docs/metrics.md has the names)
    evaluations.jsonl   one line a held-out evaluation

Invariant: both files always hold the whole run so far, so a restart, or a reader at any moment, finds no gap. A tracker
that fails is told of once and then left alone: training and the files go on.
Called by `shoal run`, and by a coordinator that nobody watches. `shoal plot` reads the files.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.files import write_file
from shoal.protocol.messages import Evaluation
from shoal.tracking.trackers import Nowhere, Tracker

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
NOT_TRACKED = ("step", "time_s")  # when it was: a tracker has its own


class Record:
    """The files are in `folder`; `say` takes a line for the person who watches."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self.tracker: Tracker = Nowhere()
        self._metrics: list[dict[str, float]] | None = None
        self._evaluations: list[Evaluation] | None = None
        self._tracked: set[tuple[int, bool]] = set()

    def take(self, metrics: Sequence[dict[str, float]], evaluations: Sequence[Evaluation]) -> None:
        """Take in all steps and evaluations so far. Raises OSError where the files cannot be written."""
        if metrics != self._metrics:
            self._write(METRICS, [json.dumps(step) for step in metrics])
            for step in metrics[len(self._metrics or []) :]:
                told = {name: value for name, value in step.items() if name not in NOT_TRACKED}
                self._track(told, int(step["step"]) + 1)
            self._metrics = list(metrics)
        if evaluations != self._evaluations:
            self._write(EVALUATIONS, [found.model_dump_json() for found in evaluations])
            for found in evaluations:
                if (found.version, found.final) not in self._tracked:
                    self._tracked.add((found.version, found.final))
                    accuracies = {"heldout/greedy": found.greedy, "heldout/sampled": found.sampled}
                    self._track({name: v for name, v in accuracies.items() if v is not None}, found.version)
            self._evaluations = list(evaluations)

    def close(self) -> None:
        """Let the tracker send what it holds."""
        try:
            self.tracker.close()
        except Exception as error:  # noqa: BLE001 - someone else's code: what it may raise is not known
            self._gave_up("did not close", error)

    def _track(self, values: dict[str, float], version: int) -> None:
        try:
            self.tracker.log(values, version)
        except Exception as error:  # noqa: BLE001 - likewise
            self._gave_up("failed", error)

    def _gave_up(self, how: str, error: Exception) -> None:
        kind = type(self.tracker).__name__
        self.tracker = Nowhere()
        self.say(
            f"tracking ended: {kind} {how}: {type(error).__name__}: {error}. Training goes on; every figure is in "
            f"{self.folder / METRICS}"
        )

    def _write(self, name: str, lines: Sequence[str]) -> None:
        write_file(self.folder / name, "".join(line + "\n" for line in lines).encode())
