"""Pictures: the metrics of runs side by side, one panel a metric, one line a run; and the curve of one run.

Invariant: it only reads, and draws what `metrics.jsonl` and `evaluations.jsonl` hold at that moment, so a running run can be
drawn. Every measured value is a point; the line between two points only guides the eye.
Left out: means over seeds.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import UserError
from shoal.files import write_file
from shoal.protocol.messages import Evaluation
from shoal.watch.figures import clean
from shoal.watch.record import EVALUATIONS, METRICS, Line, Lines

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
SOURCE_REWARDS = re.compile(r"reward/[^/]+/mean")  # drawn where there are several
LENGTHS = "length/*/mean"  # one panel for all target lengths
OF_TARGET = re.compile(r"length/(\d+)/mean")
INK = "#333333"
COLORS = ("#1f6fb4", "#d1495b", "#edae49", "#2a9d8f", "#7b5ea7", "#8d6e63", "#e377c2", "#555555")
COLUMNS = 3
SPARSE = ("heldout/greedy", "heldout/sampled")  # measured at a few versions: large points, faint lines


@dataclass(frozen=True)
class RunLog:
    """One run's figures: the values of each metric by the number of trained steps."""

    name: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def plot(folders: Sequence[Path], out: Path) -> list[str]:
    """Draw the runs in `folders` as a PNG at `out`. Return the metrics drawn. Raise UserError, OSError."""
    runs = [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    known = sorted({name for run in runs for name in run.series})
    if not known:
        raise UserError(f"nothing to draw yet in {', '.join(map(str, folders))}: no step was trained")
    drawn = watched(known) or known
    draw(runs, drawn, out)
    return drawn


def watched(known: Sequence[str]) -> list[str]:
    """What is drawn of these: WATCHED, rewards of several sources, and length budgets."""
    sources = [name for name in known if SOURCE_REWARDS.fullmatch(name)]
    has_targets = any(OF_TARGET.fullmatch(name) for name in known)
    lengths = ["score/mean", "length_penalty/mean", LENGTHS] if has_targets else []
    essential = [name for name in WATCHED if name in known]
    return [*essential[:1], *(sources if len(sources) > 1 else []), *lengths, *essential[1:]]


def read_run(folder: Path, name: str) -> RunLog:
    """What a run has recorded so far. Raises UserError for a folder without a run, or a damaged file."""
    if not (folder / METRICS).is_file():
        raise UserError(
            f"{folder} is not a run: it holds no {METRICS}; give the folder of `shoal run` or of a coordinator"
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
    """Each run by its folder's name; by its whole path if two have the same name."""
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
        draw_panel(panel, runs, metric)
    for panel in panels[len(metrics) :]:
        panel.set_visible(False)
    lines = [Line2D([], [], color=COLORS[index % len(COLORS)], label=clean(run.name)) for index, run in enumerate(runs)]
    legend = figure.legend(handles=lines, loc="outside upper left", ncols=columns, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a run may be called anything
    write_png(figure, out)


def draw_panel(panel: Any, runs: Sequence[RunLog], metric: str) -> None:
    for index, run in enumerate(runs):
        names = sorted(filter(OF_TARGET.fullmatch, run.series)) if metric == LENGTHS else [metric]
        for name in names:
            draw_points(panel, run.series.get(name, ()), COLORS[index % len(COLORS)], sparse=metric in SPARSE)
    if metric == LENGTHS:
        mark_targets(panel, runs)
    panel.set_title(metric, loc="left", color=INK, fontsize=10)
    panel.set_xlabel("steps trained", color=INK, fontsize=8)
    plain(panel)


def draw_points(panel: Any, points: Sequence[tuple[float, float]], color: str, *, sparse: bool) -> None:
    if points:
        at, values = zip(*points, strict=True)
        panel.plot(at, values, color=color, linewidth=0.8, alpha=0.4, linestyle=":" if sparse else "-")
        panel.plot(at, values, color=color, linestyle="none", marker="o", markersize=6 if sparse else 2.5)


def mark_targets(panel: Any, runs: Sequence[RunLog]) -> None:
    """A dashed line at each target, and the target at the end of the line of what was produced for it."""
    found = {(name, points[-1]) for run in runs for name, points in run.series.items() if OF_TARGET.fullmatch(name)}
    for name, last in found:
        target = name.split("/")[1]
        panel.axhline(float(target), color=INK, linewidth=0.6, linestyle="--", alpha=0.5)
        panel.annotate(target, last, xytext=(3, 0), textcoords="offset points", fontsize=6, color=INK)


def _lines(path: Path) -> list[Line]:
    try:
        return Lines(path).read()
    except ValueError as error:
        raise UserError(f"{path} holds a line that is not JSON ({error}); is it a run's own file?") from error


def draw_curve(metrics: Sequence[dict[str, float]], evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Draw reward per step and held-out accuracy per version as a PNG of 1200 x 675 pixels at `path`.

    Both share the x axis: version v is what v trained steps made. Raises OSError.
    """
    # Half a second and 60 MB that only the end of a run needs; no pyplot, which would keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    points = [(index, step["reward/mean"]) for index, step in enumerate(metrics, 1) if "reward/mean" in step]
    if points:
        steps, rewards = [list(column) for column in zip(*points, strict=True)]
        few = len(points) < 5  # too few to smooth
        look: dict[str, Any] = {"marker": "o", "markersize": 5} if few else {"alpha": 0.35}
        axes.plot(steps, rewards, color=COLORS[0], linewidth=1.2, label="reward per step", **look)
        if not few:
            axes.plot(steps, smoothed(rewards), color=COLORS[0], linewidth=2, label="reward, smoothed")
    for kind, color, shape in (("greedy", COLORS[1], "o"), ("sampled", COLORS[2], "s")):
        accuracies = {e.version: getattr(e, kind) for e in evaluations if getattr(e, kind) is not None}
        if accuracies:
            versions = sorted(accuracies)
            look = {
                "linestyle": ":",
                "marker": shape,
                "markersize": 7,
                "markeredgecolor": "white",
                "zorder": 3,
            }
            values = [accuracies[version] for version in versions]
            axes.plot(versions, values, color=color, linewidth=1, label=f"held-out, {kind}", **look)
    # A title is text, never TeX: a run may be called anything.
    axes.set_title(clean(title), loc="left", color=INK, parse_math=False)
    axes.set_xlabel("steps trained (= policy version)", color=INK)
    axes.set_ylabel("mean reward per completion; accuracy (0 to 1)", color=INK)
    last, (low, high) = max([len(metrics), 1, *(e.version for e in evaluations)]), axes.get_ylim()
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.set_ylim(low if low < -0.05 else 0, max(high, 0.05))  # from 0, so that a slope is not exaggerated
    plain(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    write_png(figure, path)


def plain(axes: Any) -> None:
    """The look of every panel: whole steps on the x axis, faint grid lines, no box."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def write_png(figure: Any, path: Path) -> None:
    """Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_file(path, image.getvalue())


def smoothed(values: Sequence[float]) -> list[float]:
    """A centred mean over about a tenth of the values and at least three, fewer near both ends."""
    half = max(len(values) // 20, 1)
    windows = [values[max(index - half, 0) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]
