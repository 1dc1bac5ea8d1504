"""What a run leaves behind for a person: `summary.json`, `reward.png` and the table shown at its end.

Invariant: every figure comes from the coordinator, except those that only `shoal run` can measure (restarts and memory); a
file appears whole under its name or not at all.
Called once at the end of a run, by `shoal run` or the coordinator of a pool; the docs draw their curves with `draw_curve`.

Left out: `metrics.jsonl` (grows during the run: `record`), comparisons between runs (`plot`), and error
bars over runs (the intervals shown are over held-out tasks).
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal.config import Config
from shoal.files import write_file
from shoal.protocol.history import RunHistory
from shoal.protocol.messages import Evaluation, Status
from shoal.watch.estimates import wilson
from shoal.watch.figures import busy_frac, clean, count, counted, duration, first_of, memory, number, percent, total

SUMMARY = "summary.json"
CURVE = "reward.png"
MODEL = "model"  # the folder of the trained model
INK, REWARD, GREEDY, SAMPLED = "#333333", "#1f6fb4", "#d1495b", "#edae49"


def write_report(
    folder: Path,
    *,
    config: Config,
    status: Status,
    history: RunHistory,
    wall_s: float,
    restarts: dict[str, int] | None = None,
    peak_rss_bytes: dict[str, int] | None = None,
    peak_together_bytes: int | None = None,
) -> dict[str, Any]:
    """Write summary.json and reward.png into `folder`. Returns the summary. Raises OSError."""
    summary = summarize(
        config=config,
        status=status,
        history=history,
        wall_s=wall_s,
        restarts=restarts,
        peak_rss_bytes=peak_rss_bytes,
        peak_together_bytes=peak_together_bytes,
    )
    write_file(folder / SUMMARY, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    draw_curve(history.metrics, history.evaluations, folder / CURVE, status.run)
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """What `write_report` left in `folder`; nothing where there is no such file, or no object in it."""
    try:
        found = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def summarize(
    *,
    config: Config,
    status: Status,
    history: RunHistory,
    wall_s: float,
    restarts: dict[str, int] | None,
    peak_rss_bytes: dict[str, int] | None,
    peak_together_bytes: int | None,
) -> dict[str, Any]:
    """The summary of a run as plain JSON values; null for what is not known.

    `restarts` and `peak_rss_bytes` are per process. `peak_together_bytes` is what all processes held at one moment, shared
    pages counted once. All three are None for a pool on several machines.
    """
    metrics = history.metrics
    workers = [node for node in status.nodes if node.role == "worker"]
    before = [found for found in history.evaluations if found.version == 0 and not found.final]
    after = [found for found in history.evaluations if found.final]
    return {
        "config": config.model_dump(mode="json"),
        "seed": config.run.seed,
        "steps": len(metrics),
        "wall_s": wall_s,
        "heldout_before": _heldout(before[0]) if before else None,
        "heldout_after": _heldout(after[-1]) if after else None,
        "reward_first": first_of(metrics, "reward/mean"),
        "reward_last": first_of(metrics[::-1], "reward/mean"),
        "accepted": {node.name: node.accepted for node in workers},
        "rejected": {node.name: node.rejected for node in workers},
        "reject_reasons": dict(status.reject_reasons),
        "slashed": list(status.slashed),
        "tokens_generated": status.tokens_generated,
        "exact": status.exact.model_dump(),
        "tokens_trained": int(total(metrics, "perf/tokens")),
        "learner_busy_frac": busy_frac(history.metrics),
        "max_staleness": max((m["async/staleness_max"] for m in metrics if "async/staleness_max" in m), default=None),
        "waste": _waste(status),
        "restarts": restarts,
        "peak_rss_bytes": peak_rss_bytes,
        "peak_together_bytes": peak_together_bytes,
    }


def summary_table(summary: dict[str, Any], folder: Path | None = None) -> RenderableType:
    """The end of a run in a dozen lines. `folder`: where its files are."""
    before, after = summary["heldout_before"] or {}, summary["heldout_after"] or {}
    made, trained = count(summary["tokens_generated"]), count(summary["tokens_trained"])
    rows = {
        "held-out greedy": _heldout_change(before, after, "greedy"),
        "held-out sampled": _heldout_change(before, after, "sampled"),
        "reward": f"{number(summary['reward_first'])} → {number(summary['reward_last'])}",
        "steps": f"{summary['steps']} in {duration(summary['wall_s'])}",
        "tokens": f"{made} generated, {trained} trained",
        "learner": f"busy {percent(summary['learner_busy_frac'], 0)}, rollouts at most "
        f"{number(summary['max_staleness'], 0)} versions old",
        "waste": _wasted(summary["waste"]),
        "accepted": _counts(summary["accepted"]),
        "rejected": _counts(summary["rejected"]) + _reasons(summary["reject_reasons"]),
        "exact": _exact(summary["exact"]),
        "slashed": ", ".join(map(clean, summary["slashed"])) or "none",
    }
    if summary["restarts"] is not None:
        rows["restarts"] = _counts(summary["restarts"])
    if summary["peak_together_bytes"] is not None:
        rows["memory"] = f"{memory(summary['peak_together_bytes'])} at most, all processes together"
    if folder is not None:
        rows["written"] = f"{folder}/: {MODEL + '/, ' if (folder / MODEL).is_dir() else ''}{SUMMARY}, {CURVE}"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows.items():
        alarming = label == "slashed" and summary["slashed"]
        table.add_row(label, Text(value, style="bold red" if alarming else ""))
    return table


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
        axes.plot(steps, rewards, color=REWARD, linewidth=1.2, label="reward per step", **look)
        if not few:
            axes.plot(steps, smoothed(rewards), color=REWARD, linewidth=2, label="reward, smoothed")
    for kind, color, shape in (("greedy", GREEDY, "o"), ("sampled", SAMPLED, "s")):
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


def _heldout(found: Evaluation) -> dict[str, Any]:
    return {"greedy": found.greedy, "sampled": found.sampled, "n": found.n}


def _heldout_change(before: dict[str, Any], after: dict[str, Any], kind: str) -> str:
    sizes = list(dict.fromkeys(found["n"] for found in (before, after) if found))
    tasks = f"  (n {', then '.join(map(str, sizes))})" if sizes else ""
    return f"{_accuracy(before, kind)} → {_accuracy(after, kind)}{tasks}"


def _accuracy(found: dict[str, Any], kind: str) -> str:
    """`33.2 % [27.7, 39.2]`: with Wilson's 95 % interval."""
    if found.get(kind) is None:
        return percent(None)
    interval = wilson(found[kind] * found["n"], found["n"])
    return f"{percent(found[kind])} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _waste(status: Status) -> dict[str, Any]:
    """What was generated in vain: useful groups that grew too old, and groups that came too late to be judged."""
    old, late = status.stale_groups, status.late_groups
    made = status.useful_groups + late
    return {"too_old": old, "too_late": late, "of": made, "share": (old + late) / made if made else None}


def _wasted(waste: dict[str, Any]) -> str:
    """`1.2 % of 812 useful groups: 6 grew too old, 4 came too late`."""
    old, late = waste["too_old"], waste["too_late"]
    return f"{percent(waste['share'])} of {waste['of']} useful groups: {old} grew too old, {late} came too late"


def _exact(exact: dict[str, int]) -> str:
    """`80 submissions, 12.3k tokens equal to the last bit, 0 not`."""
    if not exact["submissions"] and not exact["mismatched_tokens"]:
        return "none: numerics are fast, or machines differ; the limits applied"
    equal, other = count(exact["tokens"]), exact["mismatched_tokens"]
    return f"{exact['submissions']} submissions, {equal} tokens equal to the last bit, {other} not"


def _counts(counts: dict[str, int]) -> str:
    """`worker-0 40, worker-1 38 (78 in all)`."""
    names = ", ".join(f"{clean(name)} {n}" for name, n in sorted(counts.items()) if n)
    return f"{names} ({sum(counts.values())} in all)" if names else "none"


def _reasons(reasons: dict[str, int]) -> str:
    return f": {counted(reasons)}" if reasons else ""
