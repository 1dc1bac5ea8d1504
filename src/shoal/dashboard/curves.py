"""Figures per step, with no more points than a chart shows.

Invariant: a curve of more than MOST points is cut into buckets of steps; a point is the mean of its bucket, and `low` and
`high` are the bucket's extremes, so no spike disappears. Called by the feed and the report.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal.dashboard.queries import Queries
from shoal.protocol.messages import Evaluation
from shoal.watch.figures import clean

MOST = 360  # points
NAMES = {  # of metrics.jsonl, by what the page calls them
    "reward": "reward/mean",
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "mismatch": "policy/mismatch_kl",
    "clip_low": "policy/clip_low",
    "clip_high": "policy/clip_high",
    "clip_delta": "policy/clip_delta",
    "grad_norm": "optim/grad_norm",
    "loss": "loss",
    "tokens_per_s": "perf/tokens_per_s",
    "busy": "perf/busy_s",
    "waiting": "perf/waiting_s",
    "stale_mean": "async/staleness_mean",
    "stale_max": "async/staleness_max",
    "length": "completion/length_mean",
    "truncated": "completion/truncated_frac",
    "penalty": "length_penalty/mean",
    "sync_bytes": "sync/bytes",
    "memory": "memory/rss_peak_bytes",
    "skipped": "optim/skipped",
}
SITE_LOSS = re.compile(r"^sites/(.+)/loss$")
Curve = dict[str, Any]


def names_in(keys: Collection[str]) -> dict[str, str]:
    """Those of these metrics that the page draws, by what it calls them: NAMES, and the loss at each of several sites."""
    losses = {f"loss {clean(site[1])}": key for key in sorted(keys) if (site := SITE_LOSS.match(key))}
    return {name: key for name, key in NAMES.items() if key in keys} | losses


def point(metrics: Mapping[str, float]) -> dict[str, float]:
    """One step as the page calls its figures; `x` counts trained steps from 1."""
    found = {name: short(metrics[key]) for name, key in names_in(metrics).items()}
    return {"x": int(metrics["step"]) + 1, "t": round(metrics.get("time_s", 0.0), 2)} | found


def curves(history: Sequence[Mapping[str, float]], most: int = MOST) -> Curve:
    """All curves: `x`, `t`, and for each name its values, with `low` and `high` where steps were put together."""
    names = names_in({key for step in history for key in step})
    spans = buckets(len(history), most)
    together = len(spans) < len(history)
    ends = [point(history[last - 1]) for _, last in spans]
    found: Curve = {
        "x": [end["x"] for end in ends],
        "t": [end["t"] for end in ends],
        "values": {},
        "low": {},
        "high": {},
    }
    for name, key in names.items():
        parts = [[step[key] for step in history[first:last] if key in step] for first, last in spans]
        found["values"][name] = [short(sum(part) / len(part)) if part else None for part in parts]
        if together:
            found["low"][name] = [short(min(part)) if part else None for part in parts]
            found["high"][name] = [short(max(part)) if part else None for part in parts]
    return found


def accuracy(found: Evaluation) -> dict[str, Any]:
    greedy, sampled = (None if value is None else short(value) for value in (found.greedy, found.sampled))
    return {"x": found.version, "greedy": greedy, "sampled": sampled, "n": found.n, "final": found.final}


def flow(queries: Queries, most: int = MOST // 4) -> Curve:
    """Per step, or per bucket of steps, summed: what became of groups, and verdicts by reason."""
    groups = {int(row[0]): [int(value) for value in row[1:]] for row in queries.groups_by_step()}
    verdicts = queries.verdicts_by_step()
    late = {int(step): int(number) for step, number in queries.lost_by_step()}
    reasons = sorted({reason for _, reason, _, _ in verdicts if reason})
    last = max([*groups, *late, *(int(row[0]) for row in verdicts), -1]) + 1
    spans = buckets(last, most)
    bucket_of = {step: index for index, (first, until) in enumerate(spans) for step in range(first, until)}
    empty = [0] * len(spans)
    waste = {name: list(empty) for name in ("useful", "filtered", "stale", "late", "rejected")}
    judged = {name: list(empty) for name in ("", *reasons)}
    tokens = list(empty)
    for step, (_, useful, filtered, stale, made) in groups.items():
        index = bucket_of[step]
        waste["useful"][index] += useful
        waste["filtered"][index] += filtered
        waste["stale"][index] += stale
        tokens[index] += made
    for step, number in late.items():
        waste["late"][bucket_of[step]] += number
    for step, reason, submissions, lost in verdicts:
        judged[reason][bucket_of[int(step)]] += int(submissions)
        if reason:
            waste["rejected"][bucket_of[int(step)]] += int(lost)
    return {
        "x": [until for _, until in spans],
        "per": max((until - first for first, until in spans), default=1),
        "groups": waste,
        "tokens": tokens,
        "verdicts": judged,
    }


def buckets(count: int, most: int) -> list[tuple[int, int]]:
    """At most `most` ranges of about equal size that cover `count` steps, empty ones left out."""
    size = max(-(-count // most), 1)
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def short(value: float) -> float:
    """Five digits: what a chart can show, and half the bytes."""
    return float(f"{value:.5g}")
