"""The final report of a run: `summary.json`, `reward.png` and the table printed at the end; and the run's legs.

A leg is one execution of `shoal run`, from start to stop. `legs.json` holds the measurements that only `shoal run` can
make: time, restarts, memory.
Invariant: all other figures come from the coordinator. Files are written atomically.
The intervals shown are over held-out tasks, not over several runs.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal.config import Config
from shoal.files import DamagedFileError, read_json, write_file
from shoal.protocol.history import RunHistory, Status
from shoal.protocol.messages import Evaluation
from shoal.watch.estimates import wilson
from shoal.watch.figures import (
    busy_frac,
    clean,
    count,
    duration,
    first_value,
    format_counts,
    memory,
    number,
    percent,
    ratio,
    total,
)
from shoal.watch.plot import draw_curve

SUMMARY = "summary.json"
CURVE = "reward.png"
LEGS = "legs.json"
ENDED_S = 60.0  # a leg whose file is older than this has ended
MODEL = "model"  # the folder of the trained model


@dataclass
class Leg:
    wall_s: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)  # by process
    peak_together_bytes: int = 0  # peak of all processes together, with shared pages counted once
    cpu_s: dict[str, float] = field(default_factory=dict)  # CPU time by process


def write_report(
    folder: Path, *, config: Config, status: Status, history: RunHistory, measured: Leg | None = None
) -> dict[str, Any]:
    """Write summary.json and reward.png into `folder`. Return the summary. Raise OSError.

    `measured`: all legs of `shoal run` merged into one, or None for a pool on several machines.
    """
    summary = summarize(config, status, history, measured)
    write_file(folder / SUMMARY, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    draw_curve(history.metrics, history.evaluations, folder / CURVE, status.run)
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary in `folder`, or {} if the file is missing or is not a JSON object."""
    try:
        summary = read_json(folder / SUMMARY)
    except (OSError, DamagedFileError):
        return {}
    return summary if isinstance(summary, dict) else {}


def summarize(config: Config, status: Status, history: RunHistory, measured: Leg | None) -> dict[str, Any]:
    """Return the summary of a run as JSON values. Unknown values are null."""
    metrics = history.metrics
    workers = [node for node in status.nodes if node.role == "worker"]
    before = [evaluation for evaluation in history.evaluations if evaluation.version == 0 and not evaluation.final]
    after = [evaluation for evaluation in history.evaluations if evaluation.final]
    return {
        "config": config.public().model_dump(mode="json"),
        "seed": config.run.seed,
        "steps": len(metrics),
        "wall_s": measured.wall_s if measured else status.now_s - status.started_s,
        "heldout_before": _heldout(before[0]) if before else None,
        "heldout_after": _heldout(after[-1]) if after else None,
        "reward_first": first_value(metrics, "reward/mean"),
        "reward_last": first_value(metrics[::-1], "reward/mean"),
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
        "restarts": measured.restarts if measured else None,
        "peak_rss_bytes": measured.peak_rss_bytes if measured else None,
        "peak_together_bytes": measured.peak_together_bytes if measured else None,
        "cpu_s": measured.cpu_s if measured else None,
    }


def summary_table(summary: dict[str, Any], folder: Path | None = None) -> RenderableType:
    """Draw the summary in a dozen lines. `folder`: the folder that holds its files."""
    before, after = summary["heldout_before"] or {}, summary["heldout_after"] or {}
    generated, trained = count(summary["tokens_generated"]), count(summary["tokens_trained"])
    reasons = format_counts(summary["reject_reasons"])
    rows = {
        "held-out greedy": _heldout_change(before, after, "greedy"),
        "held-out sampled": _heldout_change(before, after, "sampled"),
        "reward": f"{number(summary['reward_first'])} → {number(summary['reward_last'])}",
        "steps": f"{summary['steps']} in {duration(summary['wall_s'])}",
        "tokens": f"{generated} generated, {trained} trained",
        "learner": f"busy {percent(summary['learner_busy_frac'], 0)}, rollouts at most "
        f"{number(summary['max_staleness'], 0)} versions old",
        "waste": _waste_text(summary["waste"]),
        "accepted": _counts(summary["accepted"]),
        "rejected": _counts(summary["rejected"]) + (f": {reasons}" if reasons else ""),
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


def _heldout(evaluation: Evaluation) -> dict[str, Any]:
    return {"greedy": evaluation.greedy, "sampled": evaluation.sampled, "n": evaluation.n}


def _heldout_change(before: dict[str, Any], after: dict[str, Any], kind: str) -> str:
    sizes = list(dict.fromkeys(figures["n"] for figures in (before, after) if figures))
    tasks = f"  (n {', then '.join(map(str, sizes))})" if sizes else ""
    return f"{_accuracy(before, kind)} → {_accuracy(after, kind)}{tasks}"


def _accuracy(figures: dict[str, Any], kind: str) -> str:
    """Return text like `33.2 % [27.7, 39.2]`, with Wilson's 95 % interval."""
    if figures.get(kind) is None:
        return percent(None)
    interval = wilson(figures[kind] * figures["n"], figures["n"])
    return f"{percent(figures[kind])} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _waste(status: Status) -> dict[str, Any]:
    """Count the wasted groups: useful groups that grew too old, and groups that came too late to be judged."""
    old, late = status.stale_groups, status.late_groups
    groups = status.useful_groups + late
    return {"too_old": old, "too_late": late, "of": groups, "share": ratio(old + late, groups)}


def _waste_text(waste: dict[str, Any]) -> str:
    """Return text like `1.2 % of 812 useful groups: 6 grew too old, 4 came too late`."""
    old, late = waste["too_old"], waste["too_late"]
    return f"{percent(waste['share'])} of {waste['of']} useful groups: {old} grew too old, {late} came too late"


def _exact(exact: dict[str, int]) -> str:
    """Return text like `80 submissions, 12.3k tokens recomputed bit for bit, 0 tokens rejected as inexact`."""
    if not exact["submissions"] and not exact["mismatched_tokens"]:
        return "none; the checks allowed small differences, because numerics are fast or machines differ"
    equal, unequal = count(exact["tokens"]), exact["mismatched_tokens"]
    recomputed = f"{exact['submissions']} submissions, {equal} tokens recomputed bit for bit"
    return f"{recomputed}, {unequal} tokens rejected as inexact"


def _counts(counts: dict[str, int]) -> str:
    """Return text like `worker-0 40, worker-1 38 (78 in all)`."""
    names = ", ".join(f"{clean(name)} {n}" for name, n in sorted(counts.items()) if n)
    return f"{names} ({sum(counts.values())} in all)" if names else "none"


def read_legs(folder: Path) -> list[Leg]:
    """Return the legs of the run in `folder`. A new run has none. Version 0.2.0 also wrote a forecast into each leg."""
    path, known = folder / LEGS, Leg.__dataclass_fields__
    legs = read_json(path) if path.exists() else []
    return [Leg(**{name: value for name, value in leg.items() if name in known}) for leg in legs]


def wall_s(folder: Path, now_s: float, *, running: bool) -> float | None:
    """Return the run's time, summed over all its legs. Return None if no leg was recorded."""
    path = folder / LEGS
    if not path.exists():
        return None
    since_s = now_s - path.stat().st_mtime  # time since the current leg was last written
    return all_legs(read_legs(folder)).wall_s + (since_s if running and 0 < since_s < ENDED_S else 0.0)


def write_legs(folder: Path, legs: list[Leg]) -> None:
    write_file(folder / LEGS, (json.dumps([asdict(leg) for leg in legs]) + "\n").encode())


def all_legs(legs: list[Leg]) -> Leg:
    """Merge all legs into one. Sum times and restarts, and keep the highest peaks."""
    restarts: Counter[str] = Counter()
    peaks: Counter[str] = Counter()
    cpu_s: dict[str, float] = {}
    for leg in legs:
        restarts.update(leg.restarts)
        cpu_s |= {name: cpu_s.get(name, 0.0) + seconds for name, seconds in leg.cpu_s.items()}
        peaks |= Counter(leg.peak_rss_bytes)
    names = [name for leg in legs for name in leg.restarts]
    return Leg(
        wall_s=sum(leg.wall_s for leg in legs),
        restarts={name: restarts[name] for name in names},
        peak_rss_bytes=dict(peaks),
        peak_together_bytes=max((leg.peak_together_bytes for leg in legs), default=0),
        cpu_s=cpu_s,
    )
