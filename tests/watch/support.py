"""Statuses of a run at its start, midway and at its end, and the screen drawn from them."""

import io
from typing import Any, NamedTuple

from rich.console import Console

from shoal.protocol.history import NodeStatus, RunHistory, Status
from shoal.protocol.messages import Evaluation
from shoal.watch.terminal.screen import Screen


def node(name: str, role: str = "worker", **values: Any) -> NodeStatus:
    stats = values.pop("stats", {})
    defaults = {"url": None, "policy_version": 3, "seen_s": 1000.0, "evicted": False, "accepted": 0, "rejected": 0}
    return NodeStatus.model_validate({"name": name, "role": role, "stats": stats} | defaults | values)


def step(number: int, reward: float) -> dict[str, float]:
    return {
        "step": float(number),
        "time_s": 100.0 + 30 * number,
        "reward/mean": reward,
        "async/staleness_mean": 0.8,
        "async/staleness_max": 2.0,
        "policy/entropy": 0.41,
        "perf/tokens": 5000.0,
        "perf/busy_s": 12.0,
        "perf/waiting_s": 8.0,
    }


class Snapshot(NamedTuple):
    """The status and history of a run at one moment."""

    status: Status
    history: RunHistory


def status(**values: Any) -> Snapshot:
    defaults: dict[str, Any] = {
        "run": "sums", "state": "running", "step": 0, "steps": 30, "have": 0, "need": 16, "newest_version": None,
        "started_s": 70.0, "now_s": 70.0, "nodes": [], "notices": [], "reject_reasons": {}, "slashed": [],
        "stale_groups": 0, "tokens_generated": 0,
    }  # fmt: skip
    samples = values.pop("samples", [])
    history = RunHistory(samples=samples, metrics=values.pop("metrics", []), evaluations=values.pop("evaluations", []))
    trained = {"trained": len(history.metrics)}
    return Snapshot(Status.model_validate(defaults | trained | values), history)


def mid_run(**values: Any) -> Snapshot:
    nodes = [
        node("origin", "origin", seen_s=170.0, stats={"doing": "serving v3"}),
        node("relay-0", "relay", seen_s=165.0, policy_version=2, stats={"doing": "fetching v3"}),
        node("learner", "learner", seen_s=170.0, stats={"doing": "training step 4"}),
        node("worker-0", seen_s=169.5, accepted=41, stats={"doing": "generating", "rss_bytes": 900 << 20}),
        node("worker-1", seen_s=100.0, accepted=38, rejected=1),
        node("worker-liar", seen_s=150.0, rejected=2, evicted=True),
        node("validator", "validator", seen_s=170.0, policy_version=None),
        node("evaluator", "evaluator", seen_s=170.0),
    ]
    evaluations = [
        Evaluation(version=0, greedy=0.12, sampled=0.105, n=256, final=False),
        Evaluation(version=2, greedy=0.52, sampled=None, n=64, final=False),
    ]
    defaults: dict[str, Any] = {
        "step": 3,
        "have": 5,
        "newest_version": 3,
        "now_s": 170.0,
        "nodes": nodes,
        "metrics": [step(0, 0.1), step(1, 0.25), step(2, 0.375)],
        "evaluations": evaluations,
        "reject_reasons": {"proof": 2, "unreadable": 1},
        "slashed": ["worker-liar"],
        "stale_groups": 4,
        "tokens_generated": 40_000,
    }
    return status(**(defaults | values))


def finished() -> Snapshot:
    metrics = [step(i, 0.1 + 0.015 * i) for i in range(30)]
    last = Evaluation(version=30, greedy=0.61, sampled=0.58, n=256, final=True)
    evaluations = [*mid_run().history.evaluations, last]
    return mid_run(state="finished", step=30, metrics=metrics, evaluations=evaluations, now_s=1010.0)


def screen(shown: Snapshot, width: int, height: int | None = None) -> str:
    """Draw the screen for a terminal. Without `height`, draw it for a log."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=height is not None, record=True)
    console.print(Screen(*shown))
    return console.export_text()
