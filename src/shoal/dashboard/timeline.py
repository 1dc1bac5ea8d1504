"""Who did what when, as lanes: the learner, each relay, worker and validator, and when versions were published.

This is the figure of asynchrony in the paper (INTELLECT-2, section 2): workers generate with one version while the learner
trains the next. Invariant: every bar comes from times that the coordinator recorded, with two exceptions. The learner's
follow from its own report: when a step ended, how long it computed and waited. The lengths of downloads are the nodes'
statements. A validator that holds several claims is shown at the one that it judged next. At most MOST submissions are
told; `cut_s` says from when on they are complete. Called by the server.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shoal.config import Config
from shoal.dashboard.queries import Queries
from shoal.watch.figures import clean

MOST = 3_000  # submissions
LANES = 40  # of one role; the busiest
ORDER = ("learner", "origin", "relay", "worker", "validator", "evaluator")
Bar = dict[str, Any]


def timeline(
    queries: Queries, metrics: Sequence[Mapping[str, float]], config: Config, from_s: float, to_s: float
) -> dict[str, Any]:
    """Bars between these moments, in seconds of unix time."""
    work = queries.work(from_s, to_s, MOST)
    lanes: dict[tuple[str, str], list[Bar]] = {("learner", "learner"): _learner(metrics, from_s, to_s)}
    for row in work:
        _seq, worker, validator, *_ = row
        if (bar := _generation(row, to_s)) is not None:
            lanes.setdefault(("worker", clean(worker)), []).append(bar)
        if validator is not None and (bar := _check(row, to_s, config.coordinator.claim_lease_s)) is not None:
            lanes.setdefault(("validator", clean(validator)), []).append(bar)
    for (role, _), bars in lanes.items():
        if role == "validator":
            _one_by_one(bars)
    for name, role, version, start_s, end_s, size in queries.transfers(from_s, to_s, MOST):
        bar = {"kind": "receive", "from_s": start_s, "to_s": end_s, "version": version, "bytes": size}
        lanes.setdefault((role, clean(name)), []).append(bar)
    names = sorted(lanes, key=lambda lane: (-len(lanes[lane]), lane[1]))
    kept = [name for role in ORDER for name in [lane for lane in names if lane[0] == role][:LANES]]
    kept.sort(key=lambda lane: (ORDER.index(lane[0]), lane[1]))
    return {
        "from_s": from_s,
        "to_s": to_s,
        "cut_s": work[-1][8] if len(work) == MOST else None,
        "left_out": len(names) - len(kept),
        "lanes": [{"role": role, "name": name, "bars": lanes[role, name]} for role, name in kept],
        "published": [
            {"version": version, "at_s": at_s, "bytes": size}
            for version, at_s, size in queries.published(from_s, to_s, MOST)
        ],
    }


def _learner(metrics: Sequence[Mapping[str, float]], from_s: float, to_s: float) -> list[Bar]:
    bars: list[Bar] = []
    for step in metrics:
        end_s = step.get("time_s", 0.0)
        start_s = end_s - step.get("perf/busy_s", 0.0)
        waited_s = start_s - step.get("perf/waiting_s", 0.0)
        if end_s < from_s or waited_s > to_s:
            continue
        number = int(step["step"])
        bars.append({"kind": "wait", "from_s": waited_s, "to_s": start_s, "step": number, "version": number})
        bars.append({"kind": "train", "from_s": start_s, "to_s": end_s, "step": number, "version": number + 1})
    return bars


def _generation(row: Sequence[Any], now_s: float) -> Bar | None:
    state, assigned_s, uploaded_s, judged_s = row[6], row[8], row[9], row[11]
    if uploaded_s is None and state != "open":
        return None  # missed, or refused: when the worker stopped is not recorded
    bar = {"kind": "generate", "from_s": assigned_s, "to_s": uploaded_s or now_s, "judged_s": judged_s}
    return bar | _submission(row)


def _check(row: Sequence[Any], now_s: float, claim_lease_s: float) -> Bar | None:
    worker, uploaded_s, lease_s, judged_s = row[1], row[9], row[10], row[11]
    if lease_s is None:
        return None
    from_s = max(lease_s - claim_lease_s, uploaded_s or 0.0)
    bar = {"kind": "check", "from_s": from_s, "to_s": judged_s or now_s, "queued_s": uploaded_s}
    return bar | _submission(row) | {"worker": clean(worker)}


def _submission(row: Sequence[Any]) -> Bar:
    seq, _, _, step, version, groups, state, reason, *_ = row
    return {"step": step, "version": version, "submission": seq, "groups": groups, "state": state, "reason": reason}


def _one_by_one(checks: list[Bar]) -> None:
    """Claims are taken together and judged one after another: each bar begins when the one before it ended."""
    checks.sort(key=lambda bar: float(bar["to_s"]))
    for earlier, bar in pairwise(checks):
        bar["from_s"] = min(max(bar["from_s"], earlier["to_s"]), bar["to_s"])
