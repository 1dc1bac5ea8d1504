"""Is it learning, is it healthy, is anyone cheating: the three answers, and the figures behind them.

Invariant: an answer is drawn from figures that stand next to it, and where they do not suffice it says so. It holds no key
and no address. Called by the feed and the report.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shoal.config import Config
from shoal.dashboard.queries import Queries
from shoal.dashboard.words import is_hard, said
from shoal.protocol.history import RunHistory
from shoal.protocol.messages import Evaluation, NodeStatus, Status
from shoal.watch.estimates import wilson
from shoal.watch.figures import (
    SILENT_S,
    busy_frac,
    clean,
    count,
    duration,
    eta_s,
    grader_errors,
    no_signal,
    number,
    percent,
    rejections,
    total,
)
from shoal.watch.sites import SiteRow, sites_of

LEAST_STEPS = 6  # before a trend is worth a word
CLEAR = 2.0  # standard errors between the two ends of the reward, before it counts as a trend
STATED = 3  # problems named in one answer
KEY_PART = re.compile(r"-[0-9a-f]{16}$")
Tone = Literal["good", "warn", "bad", "none"]


@dataclass(frozen=True)
class Answer:
    question: str
    answer: str
    tone: Tone
    detail: str


def overview(
    status: Status,
    history: RunHistory,
    *,
    config: Config | None,
    queries: Queries | None,
    running: bool,
    wall_s: float,
) -> dict[str, Any]:
    """`wall_s`: what the run has taken so far."""
    state = status.state if status.state == "finished" else "running" if running else "stopped"
    accepted, rejected = sum(node.accepted for node in status.nodes), sum(node.rejected for node in status.nodes)
    waits = queries.waits_s(64) if queries else []
    found: dict[str, Any] = {
        "name": run_name(status.run),
        "state": state,
        "trained": len(history.metrics),
        "steps": status.steps,
        "version": status.newest_version,
        "have": status.have,
        "need": status.need,
        "elapsed_s": _about(wall_s, 10.0 if state == "running" else 0.1),
        "left_s": _about(eta_s(status, history.metrics), 5.0) if state == "running" else None,
        "answers": [
            asdict(_learning(history)),
            asdict(_healthy(status, history, state, wall_s)),
            asdict(_cheating(status, accepted, rejected)),
        ],
        "tokens": status.tokens_generated,
        "tokens_trained": int(total(history.metrics, "perf/tokens")),
        "busy": busy_frac(history.metrics),
        "useful": status.useful_groups,
        "stale": status.stale_groups,
        "late": status.late_groups,
        "accepted": accepted,
        "rejected": rejected,
        "reasons": {reason: [number_, is_hard(reason)] for reason, number_ in sorted(status.reject_reasons.items())},
        "slashed": [clean(name) for name in status.slashed],
        "exact": status.exact.model_dump(),
        "grading": {"recent": status.grading.recent, "errors": status.grading.errors},
        "sites": [_site(site) for site in sites_of(history.metrics)],
        "notices": [said(notice) for notice in status.notices],
        "nodes": _counts(status, state),
        "queue": queries.states() if queries else {},
        "verdict_s": round(sum(wait for wait, _ in waits) / len(waits), 2) if waits else None,
    }
    if config:
        found["model"] = clean(config.model.name)
        found["async_level"] = config.coordinator.async_level
        found["group_size"] = config.sampling.group_size
        found["epsilon"] = config.learner.loss.epsilon
        found["loss"] = config.learner.loss.kind
        found["sources"] = [clean(source.label) for source in config.tasks.sources]
    return found


def _site(site: SiteRow) -> dict[str, Any]:
    times_s = {"computing": site.computed_s, "waiting": site.waited_s, "syncing": site.synced_s}
    return {
        "name": said(site.name),
        "state": site.state,
        "tone": "good" if site.well else "warn",
        "loss": site.loss,
        "sent": site.sent_bytes,
        "received": site.received_bytes,
        **{name: site.share(seconds) for name, seconds in times_s.items()},
    }


def _about(seconds: float | None, grain_s: float) -> float | None:
    """Rounded, so that a clock that ticks is no news to every page."""
    return None if seconds is None else round(round(seconds / grain_s) * grain_s, 1)


def run_name(run: str) -> str:
    """The run's name without the part that its coordinator's key adds.

    >>> run_name("quickstart-0-7715741485d6412d")
    'quickstart-0'
    """
    return said(KEY_PART.sub("", run))


def _learning(history: RunHistory) -> Answer:
    question = "Is it learning?"
    rewards = [step["reward/mean"] for step in history.metrics if "reward/mean" in step]
    held = _heldout(history.evaluations)
    if held:
        before, after = held
        a, b = (_interval(found) for found in held)
        change = f"Held-out {percent(_value(before))} → {percent(_value(after))}"
        if b[0] > a[1]:
            return Answer(question, "Yes", "good", f"{change}; the 95 % intervals do not overlap.")
        if b[1] < a[0]:
            return Answer(question, "No, it got worse", "bad", f"{change}; the 95 % intervals do not overlap.")
    if len(rewards) < LEAST_STEPS:
        return Answer(
            question, "Too early to say", "none", f"{len(rewards)} steps so far; a trend needs {LEAST_STEPS}."
        )
    first, last, error = _ends(rewards)
    change = f"Reward {number(first)} → {number(last)} over {len(rewards)} steps"
    if last - first > CLEAR * error:
        return Answer(question, "Yes", "good", f"{change}, more than its noise.")
    if first - last > CLEAR * error:
        return Answer(question, "No, reward falls", "bad", f"{change}, more than its noise.")
    return Answer(question, "Not visibly", "warn", f"{change}, within its noise.")


def _healthy(status: Status, history: RunHistory, state: str, wall_s: float) -> Answer:
    question, problems = "Is it healthy?", []
    if state == "stopped":
        return Answer(question, "It has stopped", "bad", f"After {status.trained} of {status.steps} steps.")
    silent = [node for node in status.nodes if is_silent(node, status, state)]
    if silent:
        names = ", ".join(clean(node.name) for node in silent[:STATED])
        problems.append(f"{len(silent)} silent: {names}{' …' if len(silent) > STATED else ''}")
    if words := no_signal(status.signal):
        problems.append(words)
    if words := grader_errors(status.grading):
        problems.append(words)
    skipped = int(total(history.metrics, "optim/skipped"))
    if skipped:
        problems.append(f"{skipped} updates skipped by the guard")
    problems += [f"{site.name} {site.state}" for site in sites_of(history.metrics) if not site.well]
    suspended = [node for node in status.nodes if node.suspended_s]
    if suspended:
        problems.append(f"{len(suspended)} suspended: {', '.join(clean(node.name) for node in suspended[:STATED])}")
    if problems:
        return Answer(question, "Look here", "warn", "; ".join(problems[:STATED]) + ".")
    here = sum(not node.evicted and node.state != "left" for node in status.nodes)
    pace = _pace(history)
    if state == "finished":
        return Answer(question, "Yes, and finished", "good", f"{status.trained} steps in {duration(wall_s)}{pace}.")
    return Answer(question, "Yes", "good", f"All {here} nodes answer{pace}.")


def _cheating(status: Status, accepted: int, rejected: int) -> Answer:
    question = "Is anyone cheating?"
    hard = {reason: n for reason, n in status.reject_reasons.items() if is_hard(reason)}
    if status.slashed:
        names = ", ".join(clean(name) for name in status.slashed[:STATED])
        why = f" ({rejections(sum(hard.values()), hard)})" if hard else ""
        return Answer(question, "Caught", "bad", f"Slashed: {names}{why}. Rejected work is never trained on.")
    if hard:
        return Answer(question, "Suspected", "bad", f"Provably false: {rejections(sum(hard.values()), hard)}.")
    if not accepted and not rejected:
        return Answer(question, "Nothing checked yet", "none", "The first verdict is still to come.")
    exact = status.exact
    bits = f", {count(exact.tokens)} tokens equal to the last bit" if exact.submissions else ""
    soft = f"; {rejected} rejected for reasons that are no proof" if rejected else ""
    return Answer(question, "Nobody was caught", "good", f"{accepted} submissions accepted{bits}{soft}.")


def is_silent(node: NodeStatus, status: Status, state: str) -> bool:
    trained = status.newest_version == status.steps  # from now on nodes end when they are done
    away = status.now_s - node.seen_s > SILENT_S
    return state == "running" and away and not node.evicted and node.state != "left" and not trained


def _counts(status: Status, state: str) -> dict[str, int]:
    found = {"all": len(status.nodes), "evicted": 0, "silent": 0, "left": 0, "suspended": 0}
    for node in status.nodes:
        found["evicted"] += node.evicted
        found["left"] += node.state == "left"
        found["suspended"] += bool(node.suspended_s)
        found["silent"] += is_silent(node, status, state)
    return found


def _pace(history: RunHistory) -> str:
    busy = busy_frac(history.metrics)
    return "" if busy is None else f"; the learner computes {percent(busy, 0)} of its time"


def _heldout(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """The first and the newest evaluation, if there are two."""
    known = [found for found in evaluations if _value(found) is not None]
    return (known[0], known[-1]) if len(known) > 1 and known[0].version != known[-1].version else None


def _value(found: Evaluation) -> float | None:
    return found.greedy if found.greedy is not None else found.sampled


def _interval(found: Evaluation) -> tuple[float, float]:
    estimate = wilson((_value(found) or 0.0) * found.n, found.n)
    return estimate.low, estimate.high


def _ends(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Means of the first and the last third, and the standard error of their difference."""
    size = len(rewards) // 3
    first, last = rewards[:size], rewards[-size:]
    means = [sum(part) / size for part in (first, last)]
    spread = [
        sum((value - mean) ** 2 for value in part) / max(size - 1, 1)
        for part, mean in zip((first, last), means, strict=True)
    ]
    return means[0], means[1], (sum(spread) / size) ** 0.5
