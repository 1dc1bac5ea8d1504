"""Each event is told once, and the terminal is left as it was."""

import io

from rich.console import Console

from shoal.view import LiveView

from .support import Seen, finished, mid_run, node, status


def plain_lines(*shown: Seen) -> list[str]:
    out = io.StringIO()
    with LiveView(Console(file=out, width=70)) as view:
        for one in shown:
            view.update(*one)
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
    lines = plain_lines(mid_run(), mid_run(nodes=nodes, reject_reasons={"proof": 2, "unreadable": 1, "bounds": 1}))
    assert lines[-1] == "rejected: worker-1 1; reason: bounds 1"


def test_coming_and_going_is_told() -> None:
    def at(now_s: float, seen_s: float, pid: int, evicted: bool = False) -> Seen:
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
        view.update(*mid_run())
        view.log("stopping\nsoon \x1b[2J")
        view.update(*finished())
    text = out.getvalue()
    assert "stopping" in text and "soon ?[2J" in text and "\x1b[2J" not in text
    assert "joined:" not in text
    assert text.rindex("step 30 of 30") > text.index("stopping") > text.index("step 3 of 30")
    assert text.endswith("\x1b[?25h")  # the cursor is shown again
