"""What a person sees: the words and figures are there, no line is too long, and no node can break it."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from shoal.messages import Evaluation, NodeStatus, Status
from shoal.view import LiveView, Pace, clean, count, duration, eta_s, memory, render, sparkline

WIDTHS = [40, 70, 100, 160]


def node(name: str, role: str = "worker", **values: Any) -> NodeStatus:
    stats = values.pop("stats", {})
    known = {
        "url": None,
        "policy_version": 3,
        "seen_s": 1000.0,
        "evicted": False,
        "accepted": 0,
        "rejected": 0,
    }
    return NodeStatus.model_validate({"name": name, "role": role, "stats": stats} | known | values)


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


def status(**values: Any) -> Status:
    known: dict[str, Any] = {"run": "sums", "state": "running", "step": 0, "steps": 30, "have": 0, "need": 16}
    times: dict[str, Any] = {
        "newest_version": None,
        "started_s": 70.0,
        "now_s": 70.0,
        "nodes": [],
        "metrics": [],
    }
    rest: dict[str, Any] = {
        "evaluations": [],
        "reject_reasons": {},
        "slashed": [],
        "stale_groups": 0,
        "tokens_generated": 0,
    }
    return Status.model_validate(known | times | rest | values)


def mid_run(**values: Any) -> Status:
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
    found = [
        Evaluation(version=0, greedy=0.12, sampled=0.105, n=256, final=False),
        Evaluation(version=2, greedy=0.52, sampled=None, n=64, final=False),
    ]
    known: dict[str, Any] = {
        "step": 3,
        "have": 5,
        "newest_version": 3,
        "now_s": 170.0,
        "nodes": nodes,
        "metrics": [step(0, 0.1), step(1, 0.25), step(2, 0.375)],
        "evaluations": found,
        "reject_reasons": {"proof": 2, "unreadable": 1},
        "slashed": ["worker-liar"],
        "stale_groups": 4,
        "tokens_generated": 40_000,
    }
    return status(**(known | values))


def finished() -> Status:
    metrics = [step(i, 0.1 + 0.015 * i) for i in range(30)]
    last = Evaluation(version=30, greedy=0.61, sampled=0.58, n=256, final=True)
    evaluations = [*mid_run().evaluations, last]
    return mid_run(state="finished", step=30, metrics=metrics, evaluations=evaluations, now_s=1010.0)


def screen(shown: Status, width: int, pace: Pace | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(shown, pace))
    return console.export_text()


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if re.search(rf"│ {name}\b", line))


# --- the screen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shown", [status(), mid_run(), finished()], ids=["empty", "mid-run", "finished"])
def test_no_line_is_wider_than_the_console(shown: Status, width: int) -> None:
    assert max(len(line) for line in screen(shown, width).splitlines()) <= width


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_an_empty_status_says_that_nothing_is_known_yet(width: int) -> None:
    text = screen(status(), width)
    for words in ("sums", "running", "step 0 of 30", "ETA –", "no step trained yet", "not evaluated yet"):
        assert words in text
    for words in (
        "no origin or relay yet",
        "no learner, worker",
        "0 of 16 groups accepted for step 1",
        "none",
    ):
        assert words in text


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_run_under_way_shows_where_it_stands(width: int) -> None:
    text = screen(mid_run(), width)
    for words in (
        "step 3 of 30",
        "elapsed 1m 40s",
        "ETA 13m 20s",
        "0.375  ▁▅█  +0.275 since step 1",
        "greedy 12.0 % → 52.0 %",
        "sampled 10.5 % → –",
        "v0 → v2, n 64",
        "400 generated (40.0k in all)",
        "150 trained (15.0k in all)",
        "mean 0.8, max 2 versions",
        "4 groups grew too old",
        "busy 60 %, waiting 40 %",
        "5 of 16 groups accepted for step 4",
        "79 accepted, 3 rejected (proof 2, unreadable 1)",
        "slashed  worker-liar",
    ):
        assert words in text


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_every_node_has_its_line(width: int) -> None:
    text = screen(mid_run(), width)
    assert re.search(r"v3 +serving v3 +now", row(text, "origin"))
    assert re.search(r"v2 +fetching v3 +5s", row(text, "relay-0"))
    assert re.search(r"worker +v3 +generating +– +41 +0 +900 ?M(iB)? +now", row(text, "worker-0"))
    assert re.search(r"38 +1 +– +1m 10s", row(text, "worker-1"))
    assert re.search(r"slashed +– +0 +2 +– +evicted", row(text, "worker-liar|worker-lia…"))
    assert re.search(r"validator +– ", row(text, "validator"))
    assert row(text, "learner") and row(text, "evaluator")


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_finished_run_has_no_eta_and_shows_its_last_evaluation(width: int) -> None:
    text = screen(finished(), width)
    assert "finished" in text and "step 30 of 30" in text and "ETA" not in text
    assert "greedy 12.0 % → 61.0 %" in text and "v0 → v30, n 256" in text
    assert "every step has its rollouts" in text


def test_metrics_without_the_expected_keys_are_shown_as_unknown() -> None:
    text = screen(mid_run(metrics=[{}]), 100)
    assert "no step trained yet" in text and "mean –, max – versions" in text and "busy –, waiting –" in text


def test_the_width_hint_narrows_the_screen() -> None:
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(render(mid_run(), width=80))
    assert max(len(line.rstrip()) for line in console.export_text().splitlines()) == 80


def test_what_a_node_says_cannot_break_the_screen() -> None:
    stats = {"doing": "\x1b[2J[red]\u202e\nhi", "tokens": 10**400, "busy_s": 1e-9, "rss_bytes": 10**400}
    evil = node("worker-0", policy_version=10**400, stats=stats, seen_s=1e300)
    text = screen(mid_run(nodes=[evil]), 100)
    assert "?[2J[red]??hi" in text
    assert "\x1b" not in text and "\u202e" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_terminal_that_is_too_low_shows_the_troubled_nodes_and_counts_the_rest() -> None:
    nodes = [node(f"worker-{i:02}", seen_s=170.0, rejected=int(i == 29)) for i in range(30)]
    console = Console(file=io.StringIO(), width=100, height=35, force_terminal=True, record=True)
    console.print(render(mid_run(nodes=nodes)))
    text = console.export_text()
    assert "worker-29" in text and "and 18 more" in text


# --- live and plain -----------------------------------------------------------------------------------------


def plain_lines(*shown: Status) -> list[str]:
    out = io.StringIO()
    with LiveView(Console(file=out, width=70)) as view:
        for one in shown:
            view.update(one)
    return out.getvalue().splitlines()


def test_plain_mode_prints_each_event_exactly_once() -> None:
    here = [node("worker-0", seen_s=100.0, stats={"pid": 7}), node("worker-1", seen_s=100.0)]
    start = status(nodes=here, now_s=101.0)
    lines = plain_lines(status(), start, start, mid_run(), mid_run(), finished(), finished())
    assert len(lines) == len(set(lines))
    assert sum(line.startswith("step ") for line in lines) == 30
    assert [line for line in lines if line.startswith("held-out")] == [
        "held-out at v0: greedy 12.0 %, sampled 10.5 %, n 256",
        "held-out at v2: greedy 52.0 %, sampled –, n 64",
        "held-out at v30 (final): greedy 61.0 %, sampled 58.0 %, n 256",
    ]
    assert [line for line in lines if line.startswith("rejected")] == [
        "rejected: worker-liar 2, worker-1 1; reason: proof 2, unreadable 1"
    ]
    assert [line for line in lines if line.startswith(("slashed", "evicted"))] == [
        "evicted: worker-liar (worker)",
        "slashed: worker-liar",
    ]
    assert sum(line.startswith("joined: ") for line in lines) == 8


def test_a_plain_line_of_a_step_is_not_wrapped() -> None:
    (line,) = [line for line in plain_lines(mid_run()) if line.startswith("step 2 ")]
    assert line == (
        "step 2 of 30: reward 0.250 (+0.150 since step 1), 5.0k tokens, rollout age mean 0.8 max 2, "
        "entropy 0.410, busy 12.0 s, waiting 8.0 s"
    )


def test_a_later_rejection_prints_only_what_is_new() -> None:
    nodes = [node("worker-1", seen_s=170.0, rejected=2)]
    lines = plain_lines(
        mid_run(), mid_run(nodes=nodes, reject_reasons={"proof": 2, "unreadable": 1, "bounds": 1})
    )
    assert lines[-1] == "rejected: worker-1 1; reason: bounds 1"


def test_coming_and_going_is_told() -> None:
    def at(now_s: float, seen_s: float, pid: int, evicted: bool = False) -> Status:
        return status(now_s=now_s, nodes=[node("w", seen_s=seen_s, evicted=evicted, stats={"pid": pid})])

    lines = plain_lines(
        at(100, 100, 0),
        at(101, 101, 7),
        at(102, 102, 8),
        at(140, 102, 8),
        at(141, 141, 8),
        at(142, 142, 8, True),
    )
    assert lines == [
        "joined: w (worker)",
        "restarted: w (worker)",
        "silent: w (worker), last seen 38s ago",
        "rejoined: w (worker)",
        "evicted: w (worker)",
    ]


def test_a_finished_run_calls_nobody_silent() -> None:
    assert not [line for line in plain_lines(finished()) if line.startswith("silent")]


def test_in_a_terminal_the_screen_is_redrawn_and_lines_go_above_it() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=100, height=60, force_terminal=True)) as view:
        view.update(mid_run())
        view.log("stopping\nsoon \x1b[2J")
        view.update(finished())
    text = out.getvalue()
    assert "stopping" in text and "soon ?[2J" in text and "\x1b[2J" not in text
    assert "joined:" not in text
    assert text.rindex("step 30 of 30") > text.index("stopping") > text.index("step 3 of 30")
    assert text.endswith("\x1b[?25h")  # the cursor is shown again


# --- figures ------------------------------------------------------------------------------------------------


def test_a_nodes_pace_is_that_of_the_window_and_survives_a_restart() -> None:
    def at(now_s: float, tokens: int) -> Status:
        return status(
            now_s=now_s, nodes=[node("w", stats={"tokens": tokens, "busy_s": 40.0, "waiting_s": 10.0})]
        )

    pace = Pace(window_s=60)
    pace.add(at(0, 1000))
    assert pace.tokens_per_s(at(0, 1000).nodes[0]) == 20  # since the node's start
    for now_s in range(10, 210, 10):
        pace.add(at(now_s, 1000 + (0 if now_s <= 100 else 50 * (now_s - 100))))
    assert pace.tokens_per_s(at(200, 6000).nodes[0]) == 50
    pace.add(at(210, 10))
    pace.add(at(220, 310))
    assert pace.tokens_per_s(at(220, 310).nodes[0]) == 30
    assert Pace().tokens_per_s(node("idle")) is None


def test_eta_follows_the_last_steps_and_not_a_wrong_clock() -> None:
    assert eta_s(status()) is None
    assert eta_s(status(metrics=[step(0, 0.1)], steps=3, now_s=100.0)) == 60  # begun at 70, trained at 100
    slow_start = [{"time_s": 0.0}, *({"time_s": 1000.0 + 10 * i} for i in range(11))]
    assert eta_s(status(metrics=slow_start, steps=20, now_s=1104.0)) == 8 * 10 - 4
    assert eta_s(status(metrics=slow_start, steps=20, now_s=9e9)) == 7 * 10
    assert eta_s(status(metrics=slow_start, steps=20, now_s=0.0)) == 8 * 10


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 1], 8) == "▄▄▄"
    assert sparkline([-5.0], 8) == "▄"
    assert sparkline([0, 0, 1, 1, 2, 2, 7, 7], 4) == "▁▂▃█"
    assert len(sparkline(list(range(1000)), 30)) == 30


def test_figures_are_short() -> None:
    assert [count(n) for n in (None, 0, 812.4, 999.9, 81_234, 812_345, 5e6, 1e15)] == [
        *("–", "0", "812", "1.0k", "81.2k", "812k", "5.0M", "1000.0T")
    ]
    assert [duration(s) for s in (None, -3, 59.4, 59.6, 3599, 3 * 3600 + 300, 180_000)] == [
        *("–", "0s", "59s", "1m 00s", "59m 59s", "3h 05m", "2d 02h")
    ]
    assert [memory(b) for b in (0, 900 << 20, 1 << 30)] == ["–", "900 MiB", "1.0 GiB"]
    assert clean("a\tb\x7f\u200bé漢") == "a?b??é漢"
