"""Figures derived from a run, and their text formats."""

from shoal.protocol.history import Exactness, NodeStatus
from shoal.watch.figures import (
    clean,
    count,
    duration,
    eta_s,
    format_exactness,
    memory,
    sparkline,
    tokens_per_s,
    weights_tree,
)

from .support import Snapshot, node, status, step


def test_a_nodes_speed_is_the_mean_since_its_start() -> None:
    assert tokens_per_s(node("w", stats={"tokens": 1000, "busy_s": 40.0, "waiting_s": 10.0})) == 20
    assert tokens_per_s(node("idle")) is None


def eta(shown: Snapshot) -> float | None:
    return eta_s(shown.status, shown.history.metrics)


def test_the_eta_uses_the_pace_of_the_last_steps_and_tolerates_a_wrong_clock() -> None:
    assert eta(status()) is None
    assert (
        eta(status(metrics=[step(0, 0.1)], steps=3, now_s=100.0)) == 60
    )  # the run started at 70 s and the step was trained at 100 s
    slow_start = [{"time_s": 0.0}, *({"time_s": 1000.0 + 10 * i} for i in range(11))]
    assert eta(status(metrics=slow_start, steps=20, now_s=1104.0)) == 8 * 10 - 4
    assert eta(status(metrics=slow_start, steps=20, now_s=9e9)) == 7 * 10
    assert eta(status(metrics=slow_start, steps=20, now_s=0.0)) == 8 * 10


def test_a_sparkline_is_scaled_to_its_lowest_and_highest_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 1], 8) == "▄▄▄"
    assert sparkline([-5.0], 8) == "▄"
    assert sparkline([0, 0, 1, 1, 2, 2, 7, 7], 4) == "▁▂▃█"
    assert len(sparkline(list(range(1000)), 30)) == 30


def test_figures_have_short_formats() -> None:
    assert [count(n) for n in (None, 0, 812.4, 999.9, 81_234, 812_345, 5e6, 1e15)] == [
        *("–", "0", "812", "1.0k", "81.2k", "812k", "5.0M", "1000.0T")
    ]
    assert [duration(s) for s in (None, -3, 59.4, 59.6, 3599, 3 * 3600 + 300, 180_000)] == [
        *("–", "0s", "59s", "1m 00s", "59m 59s", "3h 05m", "2d 02h")
    ]
    assert [memory(b) for b in (0, 900 << 20, 1 << 30)] == ["–", "900 MiB", "1.0 GiB"]
    assert clean("a\tb\x7f\u200bé漢") == "a?b??é漢"


def test_unequal_tokens_are_shown_only_if_there_are_any() -> None:
    assert format_exactness(Exactness(submissions=80, tokens=12_300)) == "exact  80 of these, 12.3k tokens"
    assert "3 unequal tokens" in format_exactness(Exactness(submissions=80, tokens=12_300, mismatched_tokens=3))


def receiver(name: str, role: str = "worker", url: str | None = None, **rates: float) -> NodeStatus:
    intake = {"bytes_per_s": {f"http://{sender}": rate for sender, rate in rates.items()}}
    return node(name, role, url=url, stats={"intake": intake})


def test_each_node_of_the_weights_tree_is_below_its_main_sender() -> None:
    nodes = [
        receiver("worker-0", relay_b=3e6, relay_a=2e6),
        receiver("relay-b", "relay", "http://relay_b", relay_a=9e6, origin=1e6),
        receiver("relay-a", "relay", "http://relay_a", origin=12e6),
        receiver("origin", "origin", "http://origin"),
    ]
    rows, hidden = weights_tree(nodes, 100)
    assert [(depth, row.name) for depth, row in rows] == [
        (0, "origin"),
        (1, "relay-a"),
        (2, "relay-b"),
        (3, "worker-0"),
    ]
    workers = [receiver(f"worker-{n}", origin=5e6) for n in range(9)]
    rows, hidden = weights_tree([*workers, nodes[-1]], 4)
    assert (len(rows), hidden) == (5, 5)


def test_servers_that_are_each_others_main_sender_are_in_the_tree_once() -> None:
    rows, _ = weights_tree([receiver("a", "relay", "http://a", b=1.0), receiver("b", "relay", "http://b", a=1.0)], 4)
    assert sorted(row.name for _, row in rows) == ["a", "b"]
