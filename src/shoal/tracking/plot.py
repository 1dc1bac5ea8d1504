"""`shoal plot RUN...`: the metrics of several runs side by side, one panel a metric, one line a run.

Invariant: it only reads; what is drawn is what the runs' `metrics.jsonl` and `evaluations.jsonl` hold at that moment, so
a run that goes on can be drawn. Called by `cli`.
Left out: smoothing (a spike is what one looks for), means over seeds, and the curve of one finished run (`report`).
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.tracking.record import EVALUATIONS, METRICS
from shoal.tracking.report import INK, plain, write_png
from shoal.view import clean

WATCHED = (
    "reward/mean",
    "heldout/greedy",
    "heldout/sampled",
    "policy/entropy",
    "policy/clip_low",
    "policy/clip_high",
    "policy/clip_delta",
    "policy/mismatch_kl",
    "optim/grad_norm",
    "async/staleness_mean",
    "perf/tokens_per_s",
)
COLORS = ("#1f6fb4", "#d1495b", "#edae49", "#2a9d8f", "#7b5ea7", "#8d6e63", "#e377c2", "#555555")
COLUMNS = 3
FEW = 10  # points: so few are marked, for a line of one point is nothing


class PlotError(ShoalError):
    """A run or metric that cannot be drawn; the message says which, and what there is."""


@dataclass(frozen=True)
class RunLog:
    """One run's figures: of each metric, its values by how many steps were trained."""

    name: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def plot(folders: Sequence[Path], metrics: Sequence[str], out: Path) -> list[str]:
    """Draw the runs in `folders` as a PNG at `out`; `metrics` none: those worth watching. Returns what was drawn.

    Metrics that no run has are left out, unless asked for by name. Raises PlotError, OSError.
    """
    runs = [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    known = sorted({name for run in runs for name in run.series})
    for name in metrics:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise PlotError(f"no run has the metric {name}; {hint}")
    drawn = list(metrics) or [name for name in WATCHED if name in known]
    if not drawn:
        raise PlotError(f"nothing to draw yet in {', '.join(map(str, folders))}: no step was trained")
    draw(runs, drawn, out)
    return drawn


def read_run(folder: Path, name: str) -> RunLog:
    """What a run has noted so far. Raises PlotError for a folder that is no run's, or a file that is no record."""
    if not (folder / METRICS).is_file():
        raise PlotError(
            f"{folder} is no run: it holds no {METRICS}; give the folder of `shoal run` or of a coordinator"
        )
    series: dict[str, list[tuple[float, float]]] = {}
    for step in _lines(folder / METRICS):
        for metric in step.keys() - {"step", "time_s"}:
            series.setdefault(metric, []).append((step["step"] + 1, step[metric]))
    evaluations = _lines(folder / EVALUATIONS) if (folder / EVALUATIONS).is_file() else []
    for kind in ("greedy", "sampled"):
        # The last version's final evaluation, on more tasks, comes after any other of that version.
        if accuracies := {found["version"]: found[kind] for found in evaluations if found[kind] is not None}:
            series[f"heldout/{kind}"] = sorted(accuracies.items())
    return RunLog(name, series)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Each run by its folder's name; by its whole path where two are called alike."""
    short = [folder.resolve().name for folder in folders]
    return [name if short.count(name) == 1 else str(folder) for folder, name in zip(folders, short, strict=True)]


def draw(runs: Sequence[RunLog], metrics: Sequence[str], out: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(COLUMNS, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.4), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, metric in zip(panels, metrics, strict=False):
        _draw_panel(panel, runs, metric)
    for panel in panels[len(metrics) :]:
        panel.set_visible(False)
    lines = [Line2D([], [], color=COLORS[index % len(COLORS)], label=clean(run.name)) for index, run in enumerate(runs)]
    legend = figure.legend(handles=lines, loc="outside upper left", ncols=columns, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a run may be called anything
    write_png(figure, out)


def _draw_panel(panel: Any, runs: Sequence[RunLog], metric: str) -> None:
    for index, run in enumerate(runs):
        if points := run.series.get(metric):
            at, values = zip(*points, strict=True)
            marked = {"marker": "o", "markersize": 3} if len(points) < FEW else {}
            panel.plot(at, values, color=COLORS[index % len(COLORS)], linewidth=1.4, **marked)
    panel.set_title(metric, loc="left", color=INK, fontsize=10)
    plain(panel)


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise PlotError(f"{path}, line {number}, is no JSON ({error}); is it a run's own file?") from error
    return found
