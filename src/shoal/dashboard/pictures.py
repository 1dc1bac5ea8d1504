"""Charts of the report as PNGs, for what takes no HTML: a paper, a chat, an issue.

Invariant: a picture shows what `drawing` draws of the same chart, in the light theme. Called by the report.
"""

from pathlib import Path
from typing import Any

from shoal.dashboard.drawing import Chart
from shoal.watch.summary import plain, write_png

COLORS = {
    "accent": "#0b6a72",
    "ink": "#1d2022",
    "ring": "#1d2022",
    "soft-line": "#5d6469",
    "mist": "#a9d0d3",
    "idle": "#d6d8d3",
    "bad": "#b3352b",
    "warn": "#8a5c07",
}  # of static/report.css, by class


def draw(chart: Chart, path: Path) -> Path:
    """A PNG of 1040 x 520 pixels at `path`, which it returns. Raises OSError."""
    from matplotlib.figure import Figure  # half a second; no pyplot, which would keep global state

    figure = Figure(figsize=(6.5, 3.25), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    plain(axes)
    if chart.bars:
        _bars(axes, chart)
    else:
        _lines(axes, chart)
    axes.set_title(chart.title, loc="left", fontsize=10, color=COLORS["ink"], parse_math=False)
    axes.set_xlabel("step", fontsize=8, color=COLORS["soft-line"])
    axes.tick_params(labelsize=8, colors=COLORS["soft-line"])
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), max(high, chart.least) * 1.06)
    handles, names = axes.get_legend_handles_labels()
    if names:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.015), "borderaxespad": 0.0}  # beside the title
        axes.legend(handles, names, frameon=False, fontsize=8, ncols=len(names), **place)
    else:
        axes.text(0.5, 0.5, "Nothing was recorded.", transform=axes.transAxes, ha="center", color=COLORS["soft-line"])
    write_png(figure, path)
    return path


def _lines(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        kind, *more = line.look.split()
        known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        if not known:
            continue
        xs, ys = zip(*known, strict=True)
        if line.dots:
            inside = "white" if kind == "ring" else COLORS[kind]
            axes.plot(xs, ys, "o", color=COLORS[kind], markerfacecolor=inside, markersize=5, label=line.name)
        else:
            thin = "thin" in more
            look = {"linewidth": 1.0 if thin else 1.6, "alpha": 0.45 if thin else 1.0}
            axes.plot(xs, ys, color=COLORS[kind], label=line.name or chart.title, **look)


def _bars(axes: Any, chart: Chart) -> None:
    base = [0.0] * len(chart.x)
    for bar in chart.bars:
        if any(bar.y):
            axes.bar(range(1, len(chart.x) + 1), bar.y, bottom=base, color=COLORS[bar.look], label=bar.name)
            base = [one + more for one, more in zip(base, bar.y, strict=True)]
    axes.set_xlim(0.4, max(len(chart.x), 8) + 0.6)
    every = max(len(chart.x) // 6, 1)
    places = range(every, len(chart.x) + 1, every)
    axes.set_xticks(list(places), [str(chart.x[place - 1]) for place in places])
