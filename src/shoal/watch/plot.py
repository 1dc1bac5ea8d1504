"""The curve of one run as a picture: reward per step, and held-out accuracy by version.

Every measured value is a point; lines between points only guide the eye.
The dashboard compares runs (`--compare`), and trackers draw other metrics.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.files import write_file
from shoal.protocol.messages import Evaluation
from shoal.watch.figures import clean

INK = "#333333"
COLORS = ("#1f6fb4", "#d1495b", "#edae49")


def draw_curve(metrics: Sequence[dict[str, float]], evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Draw reward per step and held-out accuracy per version as a PNG of 1200 x 675 pixels at `path`.

    Both share the x axis, because version v is the policy after v trained steps. Raise OSError.
    """
    # matplotlib is imported here, because it costs 0.5 s and 60 MB. pyplot is not used, because it keeps global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    points = [(index, step["reward/mean"]) for index, step in enumerate(metrics, 1) if "reward/mean" in step]
    if points:
        steps, rewards = [list(column) for column in zip(*points, strict=True)]
        is_short = len(points) < 5  # too short to smooth
        style: dict[str, Any] = {"marker": "o", "markersize": 5} if is_short else {"alpha": 0.35}
        axes.plot(steps, rewards, color=COLORS[0], linewidth=1.2, label="reward per step", **style)
        if not is_short:
            axes.plot(steps, smoothed(rewards), color=COLORS[0], linewidth=2, label="reward, smoothed")
    for kind, color, marker in (("greedy", COLORS[1], "o"), ("sampled", COLORS[2], "s")):
        accuracies = {e.version: getattr(e, kind) for e in evaluations if getattr(e, kind) is not None}
        if accuracies:
            versions = sorted(accuracies)
            style = {
                "linestyle": ":",
                "marker": marker,
                "markersize": 7,
                "markeredgecolor": "white",
                "zorder": 3,
            }
            values = [accuracies[version] for version in versions]
            axes.plot(versions, values, color=color, linewidth=1, label=f"held-out, {kind}", **style)
    # The title is not parsed as TeX, because a run may have any name.
    axes.set_title(clean(title), loc="left", color=INK, parse_math=False)
    axes.set_xlabel("steps trained (= policy version)", color=INK)
    axes.set_ylabel("mean reward per completion; accuracy (0 to 1)", color=INK)
    last, (low, high) = max([len(metrics), 1, *(e.version for e in evaluations)]), axes.get_ylim()
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.set_ylim(low if low < -0.05 else 0, max(high, 0.05))  # start at 0, so that a slope is not exaggerated
    style_axes(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    write_png(figure, path)


def style_axes(axes: Any) -> None:
    """Style a panel: integer steps on the x axis, faint grid lines, no box."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def write_png(figure: Any, path: Path) -> None:
    """Write the figure. Raise OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_file(path, image.getvalue())


def smoothed(values: Sequence[float]) -> list[float]:
    """Return a centred moving mean over a tenth of the values, at least three. At both ends the window is shorter."""
    half = max(len(values) // 20, 1)
    windows = [values[max(index - half, 0) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]
