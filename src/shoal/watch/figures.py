"""Figures derived from a run, and their text formats. The terminal, the page and the pictures share them.

Invariant: every reported number is formatted as a short text, and control characters in reported text are replaced.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from shoal.errors import printable
from shoal.protocol.history import Exactness, Grading, NodeStatus, Signal, Status
from shoal.protocol.messages import Reason, Role

SILENT_S = 30.0  # a node is shown as silent after this long without a heartbeat
ETA_STEPS = 10  # the ETA is extrapolated from this many newest steps
NO_SIGNAL_GROUPS = 32  # warn after this many consecutive accepted groups, each with equal rewards
BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "–"
SERVERS: tuple[Role, ...] = ("origin", "relay")
MAX_DEPTH = 4  # largest number of indentation levels in the weights tree
Tone = Literal["good", "warn", "bad", "none"]
LONG_HEX = re.compile(r"\b[0-9a-f]{16,}\b")
ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", re.IGNORECASE)
SITE_STEPS = 64  # this many newest steps are searched for sites
SITE_KEPT = re.compile(r"^sites/(.+)/kept$")
SITE_FIGURES = ("loss", "computed_s", "waited_s", "synced_s", "sent_bytes", "received_bytes")
REASONS: dict[str, str] = {
    Reason.UNREADABLE: "The file could not be read as rollouts. It is damaged, cut off, or larger than allowed.",
    Reason.SIGNATURE: "The file is not signed by the worker that has the task, or its rows were changed after signing.",
    Reason.CONTEXT: "The file was made for a different task than the one it was uploaded for.",
    Reason.TASKS: "The worker used other length targets or seeds than those of its task.",
    Reason.BOUNDS: "Token ids, lengths or numbers are outside their range, or proofs are missing.",
    Reason.ENVIRONMENT: "The file holds a tool answer that the tool does not give, or lacks one.",
    Reason.UNREPEATABLE: (
        "The validator could not repeat the work: a tool gave another answer, or a figure was not finite. This can happen"
        " to an honest worker."
    ),
    Reason.PROOF: "The proofs do not match the stated weights. The model may be another one, older, or quantised.",
    Reason.LOGPROBS: "The stated probabilities are not those of the stated weights.",
    Reason.SAMPLING: "The tokens are not those that the seeds yield: they were sampled in another way or by another model.",
    Reason.TERMINATION: "Completions stop earlier than the model would have stopped.",
    Reason.DISTRIBUTION: "The tokens are too likely, or too unlikely, to be samples at the stated temperature.",
    Reason.SPECIAL_TOKENS: "The text contains tokens that only templates use and that the seeds do not yield.",
    Reason.INEXACT: (
        "The work is within the limits, but not equal bit for bit as it must be within an exactness class."
    ),
    Reason.SPENDING: "Over all submissions, the worker exploited the tolerance of the checks; honest machines do not.",
}


def is_silent(node: NodeStatus, status: Status, *, running: bool) -> bool:
    """Return whether a node's heartbeats are overdue. After the last version return False, because nodes then exit."""
    away = status.now_s - node.seen_s > SILENT_S
    return running and away and not node.evicted and node.state != "left" and status.newest_version != status.steps


def node_condition(node: NodeStatus, status: Status, *, running: bool) -> tuple[str, Tone]:
    """Return a node's condition as one word, and its severity."""
    if node.evicted:
        return ("slashed" if node.name in status.slashed else "evicted"), "bad"
    if is_silent(node, status, running=running):
        return "silent", "bad"
    if node.suspended_s:
        return "suspended", "warn"
    if node.state == "left" or not running:
        return ("left" if node.state == "left" else "ended"), "none"
    return ("here", "good") if node.state == "active" else (node.state, "warn")


def activity(node: NodeStatus) -> str:
    """Return what a node says it is doing. The caller must clean the text."""
    doing = node.stats.doing
    return f"waiting for {doing}" if node.stats.waiting and doing else doing


def verdict_totals(status: Status) -> tuple[int, int]:
    """Return how many submissions were accepted and how many rejected."""
    return sum(node.accepted for node in status.nodes), sum(node.rejected for node in status.nodes)


def eta_s(status: Status, metrics: Sequence[dict[str, float]]) -> float | None:
    """Return the seconds left at the pace of the newest trained steps; None if no step is trained."""
    times_s = [step["time_s"] for step in metrics if "time_s" in step][-ETA_STEPS - 1 :]
    left = status.steps - len(metrics)
    if not times_s:
        return None
    start_s, steps = (times_s[0], len(times_s) - 1) if len(times_s) > 1 else (status.started_s, 1)
    step_s = max(times_s[-1] - start_s, 0.0) / steps
    # The learner's clock may differ from the coordinator's, so the time since the last step counts as one step at most.
    in_progress_s = min(max(status.now_s - times_s[-1], 0.0), step_s)
    return max(left * step_s - in_progress_s, 0.0)


def no_signal_warning(signal: Signal) -> str:
    """Return text like `39 of the newest 39 groups had equal rewards, all 0.0`, or "" if these groups are few."""
    if signal.flat < NO_SIGNAL_GROUPS or signal.lowest is None or signal.highest is None:
        return ""
    low, high = f"{signal.lowest:.4g}", f"{signal.highest:.4g}"
    values = f"all {signal.lowest:.4}" if low == high else f"from {low} to {high}"
    return f"{signal.flat} of the newest {signal.flat} groups had equal rewards, {values}: nothing to learn from"


def grader_warning(grading: Grading) -> str:
    """Return text like `the grader failed for 70 of the newest 512 completions ...`, or "" if none."""
    if not grading.errors:
        return ""
    return f"the grader failed for {grading.errors} of the newest {grading.recent} completions (why: a validator's log)"


def format_exactness(exact: Exactness) -> str:
    """Return text like `exact  80 of these, 12.3k tokens`. "These" are the accepted submissions, shown before."""
    unequal = f", {count(exact.mismatched_tokens)} unequal tokens rejected" if exact.mismatched_tokens else ""
    return f"exact  {exact.submissions} of these, {count(exact.tokens)} tokens{unequal}"


def means_by_name(metrics: dict[str, float], kind: str) -> dict[str, float]:
    """Return those metrics of a step that are called `kind/NAME/mean`, by NAME (a source or a target length)."""
    split = [(name.split("/"), value) for name, value in metrics.items()]
    return {parts[1]: value for parts, value in split if len(parts) == 3 and (parts[0], parts[2]) == (kind, "mean")}


def useful_share(signal: Signal) -> str:
    """Return text like `63 % of 40 useful` about the groups accepted for the open step; "" if there are none."""
    share = ratio(signal.useful, signal.groups)
    return "" if share is None else f"{percent(share, 0)} of {signal.groups} useful"


def busy_frac(metrics: Sequence[dict[str, float]]) -> float | None:
    """Return the share of the learner's time spent computing, not waiting for rollouts, over all steps."""
    busy_s, waiting_s = total(metrics, "perf/busy_s"), total(metrics, "perf/waiting_s")
    return ratio(busy_s, busy_s + waiting_s)


def first_value(metrics: Sequence[dict[str, float]], key: str) -> float | None:
    return next((step[key] for step in metrics if key in step), None)


def total(metrics: Sequence[dict[str, float]], key: str) -> float:
    return sum(step.get(key, 0.0) for step in metrics)


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def clamp(value: int) -> int:
    """Bound an integer that a node reported, so that it converts to a float."""
    return min(value, 10**15)


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw `values` as block characters scaled to their range. If they are more than `cells`, average neighbours."""
    cells = min(max(cells, 4), len(values))
    edges = [index * len(values) // cells for index in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * cells
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def clean(text: str) -> str:
    """Make untrusted text safe to print in one line."""
    return printable(text, keep="")


def number(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def count(value: float | None) -> str:
    """Format as 812, 81.2k, 8.1M: at most five characters up to a trillion."""
    if value is None:
        return NONE
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if value < limit * 0.9995:
            shown = value / limit * 1e3
            return f"{shown:.0f}{unit}" if not unit or shown >= 100 else f"{shown:.1f}{unit}"
    return f"{value / 1e12:.1f}T"


def memory(size_bytes: int, short: bool = False) -> str:
    mebibytes = clamp(size_bytes) / (1 << 20)
    if not mebibytes:
        return NONE
    value, unit = (f"{mebibytes:.0f}", "MiB") if mebibytes < 1000 else (f"{mebibytes / 1024:.1f}", "GiB")
    return f"{value}{unit[0]}" if short else f"{value} {unit}"


def duration(seconds: float | None) -> str:
    """Format as 42s, 6m 12s, 3h 05m, 2d 04h."""
    if seconds is None:
        return NONE
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def format_counts(counts: dict[str, int], of: str = "") -> str:
    """Return text like `2 proof, 1 reward`, most frequent first. With `of="of "`, it is like `2 of worker-0`."""
    return ", ".join(f"{n} {of}{clean(name)}" for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n)


def format_rejections(rejected: int, reasons: dict[str, int]) -> str:
    """Return text like `1 rejected: proof` or `3 rejected: 2 proof, 1 unreadable`."""
    nonzero = [name for name, n in reasons.items() if n]
    why = clean(nonzero[0]) if len(nonzero) == 1 else format_counts(reasons)
    return f"{rejected} rejected" + (f": {why}" if why else "")


def and_more(hidden: int) -> str:
    """Return text like `+2 more` if rows or items are hidden, else ""."""
    return f"+{hidden} more" if hidden else ""


def ellipsize(text: str, cells: int) -> str:
    """Shorten `text` to `cells` characters by cutting its middle, because names differ at their start and end.

    >>> ellipsize("words-of-seven-letters-3", 16)
    'words-of…tters-3'
    """
    end = (cells - 1) // 2
    return text if len(text) <= cells else f"{text[: cells - 1 - end]}…{text[len(text) - end :]}"


def redact(text: str) -> str:
    """Clean text from another machine for the page, and remove keys, digests and addresses.

    >>> redact("cannot reach http://10.0.0.7:81 as 0123456789abcdef")
    'cannot reach [address] as [key]'
    """
    return LONG_HEX.sub("[key]", ADDRESS.sub("[address]", clean(text)))


def tokens_per_s(node: NodeStatus) -> float | None:
    """Return a node's mean speed since its start; None if unknown."""
    return ratio(clamp(node.stats.tokens), node.stats.busy_s + node.stats.waiting_s)


def weights_tree(nodes: Sequence[NodeStatus], receivers: int) -> tuple[list[tuple[int, NodeStatus]], int]:
    """Return (depth, node) in display order, each below its main sender, and the number of omitted receivers."""
    servers = [node for role in SERVERS for node in nodes if node.role == role]
    urls = {node.url: node for node in servers if node.url}

    def parent(node: NodeStatus) -> str | None:
        edges = {url: rate for url, rate in node.stats.intake.bytes_per_s.items() if url in urls}
        return urls[max(edges, key=lambda url: edges[url])].name if edges else None

    receiving = [node for node in nodes if node.role not in SERVERS and parent(node)]
    unplaced = [*servers, *receiving[:receivers]]
    rows: list[tuple[int, NodeStatus]] = []

    def attach(above: str | None, depth: int) -> None:
        for node in [node for node in unplaced if parent(node) == above]:
            if node in unplaced:  # two servers may be each other's main sender
                unplaced.remove(node)
                rows.append((depth, node))
                attach(node.name, min(depth + 1, MAX_DEPTH))

    attach(None, 0)
    return [*rows, *((0, node) for node in unplaced)], len(receiving[receivers:])


# --- the learner's sites -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteRow:
    name: str
    state: str
    healthy: bool
    loss: float | None = None  # loss of the last update
    computed_s: float = 0.0  # this number and those below are totals since the site's start
    waited_s: float = 0.0
    synced_s: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    def share(self, seconds: float) -> float | None:
        """Return these seconds as a share of the site's time."""
        return ratio(seconds, self.computed_s + self.waited_s + self.synced_s)


def site_rows(metrics: Sequence[Mapping[str, float]]) -> list[SiteRow]:
    """Return each site's state from the newest step that names it, sorted by name."""
    rows: dict[str, SiteRow] = {}
    newest = metrics[-1].get("step") if metrics else None
    for step in reversed(metrics[-SITE_STEPS:]):
        names = [SITE_KEPT.match(key) for key in step] if "sites/kept" in step else []
        for name in (match[1] for match in names if match and match[1] not in rows):
            rows[name] = _site(name, step, newest=step.get("step") == newest)
    return [rows[name] for name in sorted(rows)]


def _site(name: str, step: Mapping[str, float], *, newest: bool) -> SiteRow:
    kept = bool(step[f"sites/{name}/kept"])
    state = "counts" if kept else "left out" if step.get(f"sites/{name}/left_out") else "missing"
    if not newest:
        state = f"away since step {step.get('step', 0.0) + 1 + kept:.0f}"
    values = {key: step.get(f"sites/{name}/{key}") for key in SITE_FIGURES}
    finite = {key: value for key, value in values.items() if value is not None and isfinite(value)}
    return SiteRow(clean(name), state, newest and kept, **finite)


def sites_summary(sites: Sequence[SiteRow]) -> list[str]:
    """Return texts like `1 of 2 count` and `site-1 away since step 12`."""
    problems = [f"{site.name} {site.state}" for site in sites if not site.healthy]
    return [f"{len(sites) - len(problems)} of {len(sites)} count", *problems]
