"""The table of nodes, and the tree along which weights spread.

Invariant: names and figures only; no key, no fingerprint, and an address only for the operator. What a node reports about
itself is marked so on the page. Called by the server and the report.
"""

import math
from collections.abc import Mapping
from typing import Any

from shoal.dashboard.overview import is_silent
from shoal.dashboard.queries import Queries
from shoal.dashboard.words import said
from shoal.protocol.messages import NodeStatus, Status
from shoal.watch.figures import clean
from shoal.watch.pace import Pace
from shoal.watch.tree import weights_tree

SHOWN_TAKERS = 64


def node_table(
    status: Status,
    pace: Pace,
    queries: Queries | None,
    *,
    state: str,
    alpha: float | None,
    stakes: Mapping[str, int] | None = None,
    public: bool = False,
) -> list[dict[str, Any]]:
    """One row per node, problems first. `alpha`: evidence of 1 / alpha dismisses a worker. `stakes`: by name."""
    trust = queries.trust() if queries else {}
    rows = [_row(node, status, pace, trust, state, alpha) for node in status.nodes]
    for row, node in zip(rows, status.nodes, strict=True):
        row["stake"] = stakes.get(node.name, 0) if stakes else None
    if not public:
        for row, node in zip(rows, status.nodes, strict=True):
            row |= _machine(node)
    return sorted(rows, key=lambda row: (ORDER[row["tone"]], row["role"], row["name"]))


ORDER = {"bad": 0, "warn": 1, "good": 2, "none": 3}


def _row(
    node: NodeStatus, status: Status, pace: Pace, trust: dict[str, tuple[int, int]], state: str, alpha: float | None
) -> dict[str, Any]:
    silent = is_silent(node, status, state)
    condition, tone = "here", "good"
    if node.evicted:
        condition, tone = ("slashed" if node.name in status.slashed and node.role == "worker" else "evicted"), "bad"
    elif silent:
        condition, tone = "silent", "bad"
    elif node.suspended_s:
        condition, tone = "suspended", "warn"
    elif node.state == "left" or state != "running":
        condition, tone = ("left" if node.state == "left" else "ended"), "none"
    elif node.state != "active":
        condition, tone = node.state, "warn"
    worked_s = node.stats.busy_s + node.stats.waiting_s
    speed = node.tokens_per_s or pace.tokens_per_s(node)
    behind = None
    if node.policy_version is not None and status.newest_version is not None:
        behind = max(status.newest_version - node.policy_version, 0)
    streak, checks = trust.get(node.name, (0, 0))
    return {
        "name": clean(node.name),
        "role": node.role,
        "condition": condition,
        "tone": tone,
        "why": said(node.reason or node.suspension),
        "doing": said(("waiting for " if node.stats.waiting else "") + node.stats.doing) if node.stats.doing else "",
        "version": node.policy_version,
        "behind": behind,
        "arrived_s": finite(node.stats.intake.behind_s),
        "speed": finite(speed),
        "busy": finite(node.stats.busy_s / worked_s) if worked_s > 0 else None,
        "seen_s": round(max(status.now_s - node.seen_s, 0.0), 1),
        "accepted": node.accepted,
        "rejected": node.rejected,
        "missed": node.missed,
        "credited": node.credited,
        "pending": node.pending,
        "streak": streak,
        "checks": checks,
        "evidence": finite(node.evidence),
        "limit": finite(math.log(1 / alpha)) if alpha else None,
        "class": bool(node.fingerprint),
    }


def _machine(node: NodeStatus) -> dict[str, Any]:
    """What the operator sees and the public does not."""
    return {
        "memory": node.stats.rss_bytes,
        "device": clean(f"{node.capability.engine} on {node.capability.device}") if node.capability.device else "",
        "address": clean(node.url or ""),
    }


def broadcast(status: Status) -> dict[str, Any]:
    """The tree of weights: each node below the one that sent it most, with the rate of every sender."""
    names = {node.url: clean(node.name) for node in status.nodes if node.url}
    rows, left_out = weights_tree(status.nodes, SHOWN_TAKERS)
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


def finite(value: float | None) -> float | None:
    """A number that JSON can carry, whatever a node reports."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
