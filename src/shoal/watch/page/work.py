"""Views of `work.jsonl`: a timeline of the nodes, the outcomes of submissions, and the reasons of rejections.

The timeline follows a figure in section 2 of the INTELLECT-2 paper. It shows that workers generate with one version
while the learner trains the next.
Invariant: every bar comes from times that the coordinator recorded, with two exceptions. The learner reports when a step
ended and how long it computed and waited. The nodes report how long downloads took. A validator may have claimed
several submissions, but it is shown checking only the one that it judges next.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shoal.protocol.messages import HARD, LEASE_S
from shoal.watch.figures import REASONS, clean, redact
from shoal.watch.page.overview import MAX_POINTS, buckets
from shoal.watch.record import Line
from shoal.watch.run import Run

MAX_BARS = 3_000  # largest number of submissions in a timeline, and of downloads; the newest are shown
MAX_LANES = 40  # largest number of nodes per role; the busiest are shown
ORDER = ("learner", "origin", "relay", "worker", "validator", "evaluator")
MAX_QUEUE = 50  # largest number of waiting submissions; the oldest are shown
MAX_REJECTED = 100  # largest number of rejections; the newest are shown
RECENT = 256  # the wait statistics cover this many newest verdicts
Bar = dict[str, Any]


def submissions(work: Sequence[Line]) -> list[Line]:
    return [line for line in work if line["kind"] == "submission"]


def count_checks(work: Sequence[Line]) -> dict[str, tuple[int, int]]:
    """Return two counts for each worker: full checks passed since its last rejection, and all its full checks."""
    counts: dict[str, tuple[int, int]] = {}
    for line in work:
        if line["kind"] == "submission" and line["state"] in ("accepted", "rejected"):
            streak, checks = counts.get(line["worker"], (0, 0))
            streak = 0 if line["state"] == "rejected" else streak + bool(line["full"])
            counts[line["worker"]] = (streak, checks + bool(line["full"]))
    return counts


def flow(work: Sequence[Line], max_points: int = MAX_POINTS // 4) -> dict[str, Any]:
    """Count groups by outcome, and verdicts by reason, for each step or bucket of steps."""
    settled = [line for line in submissions(work) if line["state"] in ("accepted", "rejected", "stale")]
    spans = buckets(max((line["step"] for line in settled), default=-1) + 1, max_points)
    size = spans[0][1] - spans[0][0] if spans else 1
    groups = {name: [0] * len(spans) for name in ("useful", "filtered", "late", "rejected")}
    verdicts: dict[str, list[int]] = {"": [0] * len(spans)}
    for line in settled:
        bucket = line["step"] // size
        if line["state"] == "stale":
            groups["late"][bucket] += line["groups"]
            continue
        verdicts.setdefault(line["reason"] or "", [0] * len(spans))[bucket] += 1
        if line["state"] == "rejected":
            groups["rejected"][bucket] += line["groups"]
        for group in line.get("group_list", []):
            groups["useful" if group["useful"] else "filtered"][bucket] += 1
    return {"x": [end for _, end in spans], "per": size, "groups": groups, "verdicts": dict(sorted(verdicts.items()))}


def validation(run: Run) -> dict[str, Any]:
    """Return the validators' queue, how long verdicts take, and why submissions were rejected."""
    settled, under_way = submissions(run.work()), run.under_way()
    states: dict[str, int] = {}
    for line in [*settled, *under_way]:
        states[line["state"]] = states.get(line["state"], 0) + 1
    judged = [line for line in settled if line["judged_s"] and line["uploaded_s"]][-RECENT:]
    waits = sorted(line["judged_s"] - line["uploaded_s"] for line in judged)
    rejected = [line for line in settled if line["state"] == "rejected"][: -MAX_REJECTED - 1 : -1]
    return {
        "states": states,
        "wait_s": {"median": _quantile(waits, 0.5), "p95": _quantile(waits, 0.95), "of": len(waits)},
        "queue": [_submission_row(line) for line in under_way if line["state"] != "open"][:MAX_QUEUE],
        "rejected": [_submission_row(line) | _rejection(line) for line in rejected],
    }


def _rejection(line: Line) -> dict[str, Any]:
    """Return the reason of a rejection, its explanation, and the validator's detail."""
    reason, detail = line["reason"], redact(line.get("detail", ""))
    return {"reason": reason, "hard": reason in HARD, "words": REASONS.get(reason, reason), "detail": detail}


def _submission_row(line: Line) -> dict[str, Any]:
    names = ("submission", "groups", "version", "step", "state", "uploaded_s", "judged_s")
    validator = clean(line["validator"]) if line["validator"] else None
    return {name: line[name] for name in names} | {"worker": clean(line["worker"]), "validator": validator}


def _quantile(ordered: list[float], share: float) -> float | None:
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2) if ordered else None


# --- timeline ----------------------------------------------------------------------------------------------------------


def timeline(run: Run, from_s: float, to_s: float) -> dict[str, Any]:
    """Return lanes of bars between two Unix times, in seconds. Bars before `cut_s`, if set, are left out."""
    work = run.work()
    all_work = [*submissions(work), *run.under_way()]
    during = [line for line in all_work if line["assigned_s"] <= to_s and (_ended_s(line) or to_s) >= from_s]
    shown = sorted(during, key=lambda line: int(line["submission"]))[-MAX_BARS:]
    lanes: dict[tuple[str, str], list[Bar]] = {("learner", "learner"): _learner(run.history.metrics, from_s, to_s)}
    for line in shown:
        if line["uploaded_s"] is not None or line["state"] == "open":  # otherwise the end of generating is unknown
            bar = {"kind": "generate", "from_s": line["assigned_s"], "to_s": line["uploaded_s"] or to_s}
            lanes.setdefault(("worker", clean(line["worker"])), []).append(bar | _submission_fields(line))
        if line["validator"] is not None and line["lease_s"] is not None:
            # The time of a claim is not stored, but its lease ends LEASE_S later.
            start_s, queued_s = max(line["lease_s"] - LEASE_S, line["uploaded_s"] or 0.0), line["uploaded_s"]
            bar = {"kind": "check", "from_s": start_s, "to_s": line["judged_s"] or to_s, "queued_s": queued_s}
            bar |= _submission_fields(line) | {"worker": clean(line["worker"])}
            lanes.setdefault(("validator", clean(line["validator"])), []).append(bar)
    for (role, _), bars in lanes.items():
        if role == "validator":
            _make_sequential(bars)
    downloads = [
        line for line in work if line["kind"] == "download" and line["to_s"] >= from_s and line["from_s"] <= to_s
    ]
    for line in downloads[-MAX_BARS:]:
        bar = {"kind": "receive"} | {name: line[name] for name in ("from_s", "to_s", "version", "bytes")}
        lanes.setdefault((line["role"], clean(line["node"])), []).append(bar)
    names = sorted(lanes, key=lambda lane: (-len(lanes[lane]), lane[1]))
    kept = [name for role in ORDER for name in [lane for lane in names if lane[0] == role][:MAX_LANES]]
    kept.sort(key=lambda lane: (ORDER.index(lane[0]), lane[1]))
    versions = [line for line in work if line["kind"] == "version" and from_s <= line["at_s"] <= to_s]
    return {
        "from_s": from_s,
        "to_s": to_s,
        "cut_s": shown[0]["assigned_s"] if len(during) > MAX_BARS else None,
        "left_out": len(names) - len(kept),
        "lanes": [{"role": role, "name": name, "bars": lanes[role, name]} for role, name in kept],
        "published": [
            {name: line[name] for name in ("version", "at_s", "bytes")} for line in versions[: -MAX_BARS - 1 : -1]
        ],
    }


def _ended_s(line: Line) -> float | None:
    ended_s: float | None = line["judged_s"] or line["uploaded_s"]
    return ended_s


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


def _submission_fields(line: Line) -> Bar:
    return {name: line[name] for name in ("step", "version", "submission", "groups", "state")} | {
        "reason": line["reason"] or ""
    }


def _make_sequential(checks: list[Bar]) -> None:
    """Start each bar where the previous bar ended. A validator claims several submissions and judges them in turn."""
    checks.sort(key=lambda bar: float(bar["to_s"]))
    for earlier, bar in pairwise(checks):
        bar["from_s"] = min(max(bar["from_s"], earlier["to_s"]), bar["to_s"])
