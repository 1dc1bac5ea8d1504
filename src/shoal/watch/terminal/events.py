"""Turn the differences between successive statuses into lines for a log or a pipe.

Invariant: each event is reported once. While a step is open, a progress line appears at least once per minute of the
coordinator's clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.protocol.history import RunHistory, Status
from shoal.protocol.messages import Evaluation
from shoal.watch.figures import (
    NONE,
    clean,
    count,
    duration,
    first_value,
    format_counts,
    grader_warning,
    no_signal_warning,
    node_condition,
    number,
    percent,
    ratio,
    site_rows,
    sites_summary,
    useful_share,
)

PROGRESS_S = 60.0


@dataclass
class OpenStep:
    """The step that waits for groups, as it was when first seen. Later statuses give its pace."""

    step: int
    have: int
    now_s: float


class Events:
    """Turn successive statuses into lines of text."""

    def __init__(self) -> None:
        self._steps = 0
        self._reported: set[str] = set()  # lines to report only once
        self._rejected: dict[str, int] = {}
        self._reasons: dict[str, int] = {}
        self._sites: list[str] = []  # what the last report said of the sites
        self._suspended: set[str] = set()
        self._flat = 0  # number of groups with equal rewards in the last report
        self._grader_errors = 0  # number of grader errors in the last report
        self._open: OpenStep | None = None
        self._progress_s: float | None = None  # time of the last report of progress
        self._nodes: dict[str, tuple[int, str]] = {}  # by name: (pid, here | silent | left | evicted)

    def new(self, status: Status, history: RunHistory) -> list[str]:
        """Return the lines for events since the last call."""
        return [
            *self._membership(status),
            *self._training(status, history),
            *self._learner_sites(history),
            *self._once(map(_heldout, history.evaluations)),
            *self._rejections(status),
            *self._once(f"slashed: {name}" for name in status.slashed),
            *self._once(status.notices),
            *self._signal(status),
            *self._grader(status),
            *self._progress(status),
        ]

    def _once(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            if line not in self._reported:
                self._reported.add(line)
                yield line

    def _membership(self, status: Status) -> Iterator[str]:
        for node in status.nodes:
            condition, _ = node_condition(node, status, running=status.state == "running")
            now = "evicted" if node.evicted else condition if condition in ("left", "silent") else "here"
            pid, before = self._nodes.get(node.name, (0, ""))
            self._nodes[node.name] = (node.stats.pid or pid, now)
            who = f"{node.name} ({node.role})"
            if not before:
                yield f"joined: {who}"
            elif pid and node.stats.pid not in (0, pid):
                yield f"restarted: {who}"
            elif now == "here" != before:
                yield f"rejoined: {who}"
            if now == before:
                pass
            elif now == "evicted":
                yield f"evicted: {who}"
            elif now == "left":
                yield f"left: {who}, {clean(node.reason)}"
            elif now == "silent":
                yield f"silent: {who}, last seen {duration(status.now_s - node.seen_s)} ago"
            if node.suspended_s and node.name not in self._suspended:
                yield f"suspended: {who} for {duration(node.suspended_s)}: {clean(node.suspension)}"
        self._suspended = {node.name for node in status.nodes if node.suspended_s}

    def _training(self, status: Status, history: RunHistory) -> Iterator[str]:
        first = first_value(history.metrics, "reward/mean")
        for index in range(self._steps, len(history.metrics)):
            self._progress_s = status.now_s
            step = history.metrics[index]
            reward, length_penalty = step.get("reward/mean"), step.get("length_penalty/mean")
            penalty = "" if length_penalty is None else f"length penalty {number(length_penalty)}, "
            since = ""
            if index and reward is not None and first is not None:
                since = f" ({reward - first:+.3f} since step 1)"
            yield (
                f"step {index + 1} of {status.steps}: reward {number(reward)}{since}, "
                f"{count(step.get('perf/tokens'))} tokens, {penalty}"
                f"rollout age mean {number(step.get('async/staleness_mean'), 1)} "
                f"max {number(step.get('async/staleness_max'), 0)}, "
                f"entropy {number(step.get('policy/entropy'))}, busy {number(step.get('perf/busy_s'), 1)} s, "
                f"waiting {number(step.get('perf/waiting_s'), 1)} s"
            )
        self._steps = max(self._steps, len(history.metrics))

    def _learner_sites(self, history: RunHistory) -> Iterator[str]:
        """Whenever the set of sites whose results are used changes, report it."""
        summary = sites_summary(sites) if (sites := site_rows(history.metrics)) else []
        if summary != self._sites:
            self._sites = summary
            yield f"sites: {', '.join(summary)}"

    def _rejections(self, status: Status) -> Iterator[str]:
        rejected = {node.name: node.rejected for node in status.nodes if node.role == "worker"}
        by_worker, by_reason = _increases(self._rejected, rejected), _increases(self._reasons, status.reject_reasons)
        self._rejected |= rejected
        self._reasons |= status.reject_reasons
        if by_worker or by_reason:
            yield f"rejected: {format_counts(by_worker, 'of ') or NONE}; reason: {format_counts(by_reason) or NONE}"

    def _signal(self, status: Status) -> Iterator[str]:
        """Report groups with equal rewards each time their number doubles."""
        if status.signal.flat < self._flat:
            self._flat = 0
        if (warning := no_signal_warning(status.signal)) and status.signal.flat >= 2 * self._flat:
            self._flat = status.signal.flat
            yield warning

    def _grader(self, status: Status) -> Iterator[str]:
        """Report grader errors each time their number doubles, and the first one after none."""
        errors = status.grading.errors
        if not errors:
            self._grader_errors = 0
        elif errors >= 2 * self._grader_errors:
            self._grader_errors = errors
            yield grader_warning(status.grading)

    def _progress(self, status: Status) -> Iterator[str]:
        if self._open is None or self._open.step != status.step or status.have < self._open.have:
            self._open = OpenStep(status.step, status.have, status.now_s)
        if self._progress_s is None:
            self._progress_s = status.now_s
        if status.state != "running" or status.now_s - self._progress_s < PROGRESS_S:
            return
        self._progress_s = status.now_s
        if status.step >= status.steps:
            yield f"progress: {status.trained} of {status.steps} steps trained; every step has its rollouts"
            return
        pace = ratio(status.have - self._open.have, status.now_s - self._open.now_s)
        text = f"progress: step {status.step + 1} of {status.steps}: {status.have} of {status.need} groups accepted"
        if share := useful_share(status.signal):
            text += f", {share}"
        if pace:
            text += f", the rest expected in {duration((status.need - status.have) / pace)}"
        yield text


def _heldout(evaluation: Evaluation) -> str:
    return (
        f"held-out at v{evaluation.version}{' (final)' if evaluation.final else ''}: "
        f"greedy {percent(evaluation.greedy)}, sampled {percent(evaluation.sampled)}, n {evaluation.n}"
    )


def _increases(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {name: n - before.get(name, 0) for name, n in now.items() if n > before.get(name, 0)}
