"""The live view logs each event once. In a terminal it redraws the screen. Long commands report progress."""

import io
import sys

import pytest
from rich.console import Console

from shoal.protocol.history import Signal
from shoal.watch.terminal.live import LiveView
from shoal.watch.terminal.progress import CommandProgress, FetchBar

from .support import Snapshot, finished, mid_run, node, status, step


def plain_lines(*shown: Snapshot) -> list[str]:
    out = io.StringIO()
    with LiveView(Console(file=out, width=70)) as view:
        for each in shown:
            view.update(*each)
    return out.getvalue().splitlines()


def test_the_log_reports_each_event_exactly_once() -> None:
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
        "rejected: 2 of worker-liar, 1 of worker-1; reason: 2 proof, 1 unreadable"
    ]
    assert [line for line in lines if line.startswith(("slashed", "evicted"))] == [
        "evicted: worker-liar (worker)",
        "slashed: worker-liar",
    ]
    assert sum(line.startswith("joined: ") for line in lines) == 8
    assert not [line for line in plain_lines(finished()) if line.startswith("silent")]


def test_the_line_of_a_step_is_not_wrapped() -> None:
    (line,) = [line for line in plain_lines(mid_run()) if line.startswith("step 2 ")]
    assert line == (
        "step 2 of 30: reward 0.250 (+0.150 since step 1), 5.0k tokens, rollout age mean 0.8 max 2, "
        "entropy 0.410, busy 12.0 s, waiting 8.0 s"
    )


def test_later_rejections_are_logged_without_the_earlier_ones() -> None:
    nodes = [node("worker-1", seen_s=170.0, rejected=2)]
    lines = plain_lines(mid_run(), mid_run(nodes=nodes, reject_reasons={"proof": 2, "unreadable": 1, "bounds": 1}))
    assert lines[-1] == "rejected: 1 of worker-1; reason: 1 bounds"


def test_nodes_that_join_and_leave_are_logged() -> None:
    def at(now_s: float, seen_s: float, pid: int, evicted: bool = False) -> Snapshot:
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


def test_a_suspension_is_logged_once() -> None:
    def at(now_s: float, left_s: float) -> Snapshot:
        why = "3 tasks expired" if left_s else ""
        return status(now_s=now_s, nodes=[node("w", seen_s=now_s, suspended_s=left_s, suspension=why)])

    lines = plain_lines(at(100, 0), at(101, 60), at(102, 59), at(110, 0), at(120, 120))
    assert lines == [
        "joined: w (worker)",
        "suspended: w (worker) for 1m 00s: 3 tasks expired",
        "suspended: w (worker) for 2m 00s: 3 tasks expired",
    ]


def test_a_drained_worker_has_left_and_is_not_silent() -> None:
    def at(now_s: float, seen_s: float, state: str) -> Snapshot:
        return status(now_s=now_s, nodes=[node("w", seen_s=seen_s, state=state, reason="it asked to leave")])

    lines = plain_lines(at(100, 100, "active"), at(101, 101, "draining"), at(102, 102, "left"), at(140, 102, "left"))
    assert lines == ["joined: w (worker)", "left: w (worker), it asked to leave"]


def test_in_a_terminal_the_screen_is_redrawn_below_messages() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=100, height=60, force_terminal=True)) as view:
        view.update(*mid_run())
        view.log("stopping\nsoon \x1b[2J")
        view.update(*finished())
    text = out.getvalue()
    assert "stopping" in text and "soon ?[2J" in text and "\x1b[2J" not in text
    assert "joined:" not in text
    assert text.rindex("30 of 30 steps") > text.index("stopping") > text.index("3 of 30 steps")
    assert text.endswith("\x1b[?25h")  # this code shows the cursor again


def test_groups_with_equal_rewards_are_reported_and_again_when_their_number_doubles() -> None:
    def flat(n: int) -> Snapshot:
        signal = Signal(groups=n, useful=0, flat=n, lowest=0.0, highest=0.0)
        return status(signal=signal)

    lines = plain_lines(*map(flat, (31, 39, 45, 77, 78)))
    reported = [line for line in lines if "equal rewards" in line]
    assert [line.partition(":")[0] for line in reported] == [
        "39 of the newest 39 groups had equal rewards, all 0.0",
        "78 of the newest 78 groups had equal rewards, all 0.0",
    ]
    assert len(lines) == 2


def test_progress_of_the_current_step_is_logged_every_minute() -> None:
    def at(now_s: float, have: int) -> Snapshot:
        signal = Signal(groups=2 * have, useful=have)
        return status(now_s=now_s, have=have, step=3, nodes=[], signal=signal)

    lines = plain_lines(at(100, 2), at(130, 3), at(159, 4), at(160, 4), at(190, 6), at(221, 8))
    assert lines == [
        "progress: step 4 of 30: 4 of 16 groups accepted, 50 % of 8 useful, the rest expected in 6m 00s",
        "progress: step 4 of 30: 8 of 16 groups accepted, 50 % of 16 useful, the rest expected in 2m 41s",
    ]
    lines = plain_lines(status(now_s=100), status(now_s=160))
    assert lines == ["progress: step 1 of 30: 0 of 16 groups accepted"]


def test_a_step_with_length_targets_reports_the_length_penalty() -> None:
    def line_of(**metrics: float) -> str:
        [line] = [line for line in plain_lines(status(metrics=[step(0, 0.5) | metrics])) if line.startswith("step 1 ")]
        return line

    assert "tokens, length penalty 0.250, rollout" in line_of(**{"length_penalty/mean": 0.25})
    assert "length" not in line_of()


def test_grader_errors_are_reported_once_and_again_when_their_number_doubles() -> None:
    def graded(errors: int) -> Snapshot:
        return status(grading={"total": 99, "recent": 99, "errors": errors})

    lines = plain_lines(*(graded(n) for n in (0, 1, 1, 2, 3, 4, 2, 0, 1)))
    reported = [line for line in lines if "the grader failed" in line]
    assert [line.partition("failed for ")[2][:2] for line in reported] == ["1 ", "2 ", "4 ", "1 "]


def test_a_command_reports_progress_every_ten_seconds_with_the_eta() -> None:
    now_s = 0.0
    console = Console(file=io.StringIO(), record=True)
    progress = CommandProgress(console, "tasks", 100, lambda: now_s)
    for now_s, done in ((0.0, 20), (4.0, 30), (10.0, 40), (12.0, 50), (30.0, 80), (31.0, 100)):  # noqa: B007
        progress(done)
    assert console.export_text().splitlines() == [
        "tasks: 20 of 100",
        "tasks: 40 of 100, ETA 30s",
        "tasks: 80 of 100, ETA 10s",
        "tasks: 100 of 100",
    ]


def test_the_progress_bar_of_a_download_does_not_write_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with FetchBar() as bar:
        assert bar.bar.console.is_terminal
        sys.stdout.write("weights/v000003\n")
    assert capsys.readouterr().out == "weights/v000003\n"
