"""The dashboard's overview: nodes, curves, and answers to three questions.

The questions are: Is the run learning? Is it healthy? Is anyone cheating?

Invariant: each answer follows from the figures shown with it, or says that they do not suffice. No key, fingerprint or
address appears. The page marks text that a node reports about itself.

A curve of more than MAX_POINTS steps is divided into buckets. Each point is then the mean of a bucket, and `low` and
`high` are the bucket's extremes, so no spike disappears.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shoal import config as config_module
from shoal.evidence import ALPHA
from shoal.protocol.history import NodeStatus, RunHistory, Status
from shoal.protocol.messages import HARD, Evaluation
from shoal.watch.estimates import wilson
from shoal.watch.figures import (
    SiteRow,
    Tone,
    activity,
    busy_frac,
    clean,
    count,
    duration,
    eta_s,
    format_rejections,
    grader_warning,
    no_signal_warning,
    node_condition,
    number,
    percent,
    ratio,
    redact,
    site_rows,
    tokens_per_s,
    total,
    verdict_totals,
    weights_tree,
)
from shoal.watch.run import Run
from shoal.watch.summary import read_summary

MIN_TREND_STEPS = 6  # steps needed before a trend is reported
TREND_ERRORS = 2.0  # a change of this many standard errors counts as a trend
MAX_PROBLEMS = 3  # largest number of problems or nodes in one answer
MAX_RECEIVERS = 64  # largest number of receiving nodes in the weights tree
ORDER = {"bad": 0, "warn": 1, "good": 2, "none": 3}
KEY_PART = re.compile(r"-[0-9a-f]{16}$")
MAX_POINTS = 360  # largest number of points in a curve
MAX_SAMPLES = 12
AUDIT = "audit.txt"  # output of `shoal audit`
HIDDEN = ("database", "endpoint", "url", "listen", "token")  # config keys that may hold addresses or secrets
NAMES = {  # the page's names of metrics in metrics.jsonl
    "reward": "reward/mean",
    "entropy": "policy/entropy",
    "mismatch": "policy/mismatch_kl",
    "clip_low": "policy/clip_low",
    "clip_high": "policy/clip_high",
    "grad_norm": "optim/grad_norm",
    "tokens_per_s": "perf/tokens_per_s",
    "stale_mean": "async/staleness_mean",
    "stale_max": "async/staleness_max",
}
SITE_LOSS = re.compile(r"^sites/(.+)/loss$")


def _answer(question: str, answer: str, tone: Tone, detail: str) -> dict[str, str]:
    return {"question": question, "answer": answer, "tone": tone, "detail": detail}


def run_state(run: Run, status: Status) -> str:
    """Return `finished`, `running` or `stopped`."""
    return status.state if status.state == "finished" else "running" if run.running() else "stopped"


def overview(run: Run, status: Status, *, reachable: bool = True) -> dict[str, Any]:
    """Return the overview. `reachable` says whether the run can still be read."""
    history, config = run.history, run.config
    state, wall_s = run_state(run, status), run.wall_s(status)
    if state == "running" and not reachable:
        state = "stopped"
    accepted, rejected = verdict_totals(status)
    fields: dict[str, Any] = {
        "name": display_name(status.run),
        "state": state,
        "trained": len(history.metrics),
        "steps": status.steps,
        "elapsed_s": _round_s(wall_s, 10.0 if state == "running" else 0.1),
        "left_s": _round_s(eta_s(status, history.metrics), 5.0) if state == "running" else None,
        "answers": [
            _learning(history),
            _healthy(status, history, state, wall_s),
            _cheating(status, accepted, rejected),
        ],
        "tokens": status.tokens_generated,
        "tokens_trained": int(total(history.metrics, "perf/tokens")),
        "busy": busy_frac(history.metrics),
        "stale": status.stale_groups,
        "accepted": accepted,
        "rejected": rejected,
        "reasons": {reason: [n, reason in HARD] for reason, n in sorted(status.reject_reasons.items())},
        "exact": status.exact.model_dump(),
        "sites": [_site(site) for site in site_rows(history.metrics)],
        "nodes": _counts(status, state),
    }
    if config:
        fields["model"] = clean(config.model.name)
        fields["async_level"] = config.coordinator.async_level
        fields["loss"] = config.learner.loss.kind
        fields["sources"] = [clean(source.label) for source in config.tasks.sources]
    return fields


def _site(site: SiteRow) -> dict[str, Any]:
    times_s = {"computing": site.computed_s, "waiting": site.waited_s, "syncing": site.synced_s}
    return {
        "name": redact(site.name),
        "state": site.state,
        "tone": "good" if site.healthy else "warn",
        "loss": site.loss,
        "sent": site.sent_bytes,
        "received": site.received_bytes,
        **{name: site.share(seconds) for name, seconds in times_s.items()},
    }


def _round_s(seconds: float | None, grain_s: float) -> float | None:
    """Round to a multiple of `grain_s`, so that the response does not change every second."""
    return None if seconds is None else round(round(seconds / grain_s) * grain_s, 1)


def display_name(run: str) -> str:
    """Return the run's name without its suffix, which is part of the coordinator's key.

    >>> display_name("quickstart-0-7715741485d6412d")
    'quickstart-0'
    """
    return redact(KEY_PART.sub("", run))


def _learning(history: RunHistory) -> dict[str, str]:
    question = "Is it learning?"
    rewards = [step["reward/mean"] for step in history.metrics if "reward/mean" in step]
    pair = _heldout(history.evaluations)
    if pair:
        before, after = pair
        a, b = (_interval(evaluation) for evaluation in pair)
        change = f"Held-out {percent(_value(before))} → {percent(_value(after))}"
        if b[0] > a[1]:
            return _answer(question, "Yes", "good", f"{change}; the 95 % intervals do not overlap.")
        if b[1] < a[0]:
            return _answer(question, "No, it got worse", "bad", f"{change}; the 95 % intervals do not overlap.")
    if len(rewards) < MIN_TREND_STEPS:
        return _answer(
            question, "Too early to say", "none", f"{len(rewards)} steps so far; a trend needs {MIN_TREND_STEPS}."
        )
    first, last, error = _first_and_last_third(rewards)
    change = f"Reward {number(first)} → {number(last)} over {len(rewards)} steps"
    if last - first > TREND_ERRORS * error:
        return _answer(question, "Yes", "good", f"{change}, more than its noise.")
    if first - last > TREND_ERRORS * error:
        return _answer(question, "No, reward falls", "bad", f"{change}, more than its noise.")
    return _answer(question, "Not visibly", "warn", f"{change}, within its noise.")


def _healthy(status: Status, history: RunHistory, state: str, wall_s: float) -> dict[str, str]:
    question, problems = "Is it healthy?", []
    if state == "stopped":
        return _answer(question, "It has stopped", "bad", f"After {status.trained} of {status.steps} steps.")
    conditions = [(node, node_condition(node, status, running=state == "running")[0]) for node in status.nodes]
    problems += _list_nodes("silent", [node for node, condition in conditions if condition == "silent"])
    problems += filter(None, (no_signal_warning(status.signal), grader_warning(status.grading)))
    if skipped := int(total(history.metrics, "optim/skipped")):
        problems.append(f"{skipped} steps skipped, with no group left to train on")
    problems += [f"{site.name} {site.state}" for site in site_rows(history.metrics) if not site.healthy]
    problems += _list_nodes("suspended", [node for node in status.nodes if node.suspended_s])
    if problems:
        return _answer(question, "Look here", "warn", "; ".join(problems[:MAX_PROBLEMS]) + ".")
    here = sum(not node.evicted and node.state != "left" for node in status.nodes)
    pace = _pace(history)
    if state == "finished":
        return _answer(question, "Yes, and finished", "good", f"{status.trained} steps in {duration(wall_s)}{pace}.")
    return _answer(question, "Yes", "good", f"All {here} nodes answer{pace}.")


def _list_nodes(condition: str, nodes: Sequence[NodeStatus]) -> list[str]:
    """Return a list like `["4 silent: worker-0, worker-1, worker-2 …"]`; empty without nodes."""
    names = ", ".join(clean(node.name) for node in nodes[:MAX_PROBLEMS])
    return [f"{len(nodes)} {condition}: {names}{' …' if len(nodes) > MAX_PROBLEMS else ''}"] if nodes else []


def _cheating(status: Status, accepted: int, rejected: int) -> dict[str, str]:
    question = "Is anyone cheating?"
    hard = {reason: n for reason, n in status.reject_reasons.items() if reason in HARD}
    if status.slashed:
        names = ", ".join(clean(name) for name in status.slashed[:MAX_PROBLEMS])
        why = f" ({format_rejections(sum(hard.values()), hard)})" if hard else ""
        return _answer(question, "Caught", "bad", f"Slashed: {names}{why}. Rejected work is never trained on.")
    if hard:
        return _answer(question, "Suspected", "bad", f"Provably false: {format_rejections(sum(hard.values()), hard)}.")
    if not accepted and not rejected:
        return _answer(question, "Nothing checked yet", "none", "There is no verdict yet.")
    exact = status.exact
    bits = f", {count(exact.tokens)} tokens recomputed bit for bit" if exact.submissions else ""
    soft = f"; {rejected} rejected for reasons that prove nothing" if rejected else ""
    return _answer(question, "Nobody was caught", "good", f"{accepted} submissions accepted{bits}{soft}.")


def _counts(status: Status, state: str) -> dict[str, int]:
    counts = {"all": len(status.nodes), "evicted": 0, "silent": 0, "left": 0, "suspended": 0}
    for node in status.nodes:
        counts["evicted"] += node.evicted
        counts["left"] += node.state == "left"
        counts["suspended"] += bool(node.suspended_s)
        counts["silent"] += node_condition(node, status, running=state == "running")[0] == "silent"
    return counts


def _pace(history: RunHistory) -> str:
    busy = busy_frac(history.metrics)
    return "" if busy is None else f"; the learner was busy {percent(busy, 0)} of the time"


def _heldout(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """Return the first and the newest evaluation, if their versions differ."""
    measured = [evaluation for evaluation in evaluations if _value(evaluation) is not None]
    return (measured[0], measured[-1]) if measured and measured[0].version != measured[-1].version else None


def _value(evaluation: Evaluation) -> float | None:
    return evaluation.greedy if evaluation.greedy is not None else evaluation.sampled


def _interval(evaluation: Evaluation) -> tuple[float, float]:
    estimate = wilson((_value(evaluation) or 0.0) * evaluation.n, evaluation.n)
    return estimate.low, estimate.high


def _first_and_last_third(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Return the means of the first and last third, and the standard error of their difference."""
    size = len(rewards) // 3
    first, last = rewards[:size], rewards[-size:]
    means = [sum(part) / size for part in (first, last)]
    spread = [
        sum((value - mean) ** 2 for value in part) / max(size - 1, 1)
        for part, mean in zip((first, last), means, strict=True)
    ]
    return means[0], means[1], (sum(spread) / size) ** 0.5


def node_table(run: Run, status: Status, checks: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return one row per node, problems first. `checks`: the result of `count_checks`."""
    state = run_state(run, status)
    limit = finite(math.log(1 / ALPHA)) if run.config else None  # log evidence at which a worker is dismissed
    rows = [_row(node, status, checks, state, limit) for node in status.nodes]
    return sorted(rows, key=lambda row: (ORDER[row["tone"]], row["role"], row["name"]))


def _row(
    node: NodeStatus,
    status: Status,
    checks: Mapping[str, tuple[int, int]],
    state: str,
    limit: float | None,
) -> dict[str, Any]:
    condition, tone = node_condition(node, status, running=state == "running")
    behind = None
    if node.policy_version is not None and status.newest_version is not None:
        behind = max(status.newest_version - node.policy_version, 0)
    streak, n_checks = checks.get(node.name, (0, 0))
    return {
        "name": clean(node.name),
        "role": node.role,
        "condition": condition,
        "tone": tone,
        "why": redact(node.reason or node.suspension),
        "doing": redact(activity(node)),
        "version": node.policy_version,
        "behind": behind,
        "speed": finite(tokens_per_s(node)),
        "busy": finite(ratio(node.stats.busy_s, node.stats.busy_s + node.stats.waiting_s)),
        "seen_s": round(max(status.now_s - node.seen_s, 0.0), 1),
        "accepted": node.accepted,
        "rejected": node.rejected,
        "missed": node.missed,
        "credited": node.credited,
        "streak": streak,
        "checks": n_checks,
        "evidence": finite(node.evidence),
        "limit": limit,
        "memory": node.stats.rss_bytes,
    }


def broadcast(status: Status) -> dict[str, Any]:
    """Return the weights tree: each node below its main sender, with the rate of every sender."""
    names = {node.url: clean(node.name) for node in status.nodes if node.url}
    rows, left_out = weights_tree(status.nodes, MAX_RECEIVERS)
    tree = [
        {
            "depth": depth,
            "name": clean(node.name),
            "role": node.role,
            "version": node.policy_version,
            "behind_s": finite(node.stats.intake.behind_s),
            "from": [
                {"name": names.get(url, "another address"), "bytes_per_s": finite(rate)}
                for url, rate in sorted(node.stats.intake.bytes_per_s.items(), key=lambda item: -item[1])
            ],
        }
        for depth, node in rows
    ]
    return {"tree": tree, "left_out": left_out}


def about(run: Run) -> dict[str, Any]:
    """Return sample completions, the run's config, its peak memory, and its audit."""
    assert run.folder is not None and run.config is not None
    samples = run.history.samples
    stride = max(len(samples) // MAX_SAMPLES, 1)
    audit = run.folder / AUDIT
    config = config_module.dumps(run.config).splitlines()
    return {
        "memory": read_summary(run.folder).get("peak_together_bytes"),
        "samples": [
            {
                **{name: _by_line(clean, getattr(sample, name)) for name in ("task", "prompt", "completion", "worker")},
                **{name: getattr(sample, name) for name in ("policy_version", "reward", "tokens")},
            }
            for sample in samples[::-1][::stride][:MAX_SAMPLES]
        ],
        "audit": _by_line(redact, audit.read_text(errors="replace")[:20_000]) if audit.is_file() else None,
        "config": "\n".join(redact(line) for line in config if line.split(" = ")[0].strip() not in HIDDEN),
    }


def _by_line(cleaner: Callable[[str], str], text: str) -> str:
    return "\n".join(map(cleaner, text.splitlines()))


def finite(value: float | None) -> float | None:
    """Round to five digits, which are enough for a chart and halve the bytes. Return None if it is not finite."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


# --- curves ------------------------------------------------------------------------------------------------------------


def select_metrics(keys: Collection[str]) -> dict[str, str]:
    """Return the keys of the metrics that the page draws, by display name: those in NAMES, and each site's loss."""
    losses = {f"loss {clean(site[1])}": key for key in sorted(keys) if (site := SITE_LOSS.match(key))}
    return {name: key for name, key in NAMES.items() if key in keys} | losses


def curves(history: Sequence[Mapping[str, float]], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return all curves: `x` (trained steps) and values by name, with `low` and `high` if points are buckets."""
    names = select_metrics({key for step in history for key in step})
    spans = buckets(len(history), max_points)
    bucketed = len(spans) < len(history)
    x = [int(history[last - 1]["step"]) + 1 for _, last in spans]
    result: dict[str, Any] = {"x": x, "values": {}, "low": {}, "high": {}}
    for name, key in names.items():
        parts = [[step[key] for step in history[first:last] if key in step] for first, last in spans]
        result["values"][name] = [finite(sum(part) / len(part)) if part else None for part in parts]
        if bucketed:
            result["low"][name] = [finite(min(part)) if part else None for part in parts]
            result["high"][name] = [finite(max(part)) if part else None for part in parts]
    return result


def accuracy(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "x": evaluation.version,
        "greedy": finite(evaluation.greedy),
        "sampled": finite(evaluation.sampled),
        "n": evaluation.n,
        "final": evaluation.final,
    }


def buckets(count: int, max_points: int) -> list[tuple[int, int]]:
    """Split `count` steps into at most `max_points` ranges of about equal size."""
    size = max(-(-count // max_points), 1)
    return [(first, min(first + size, count)) for first in range(0, count, size)]
