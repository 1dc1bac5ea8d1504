"""The terminal's screen: it shows every figure, no line is too long, and no node can break it."""

import re
from typing import Any

import pytest

from shoal.protocol.history import Signal
from shoal.protocol.messages import LARGEST

from .support import Snapshot, finished, mid_run, node, screen, status, step

WIDTHS = [40, 70, 100, 160]


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if re.search(rf"│ {name}\b", line))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shown", [status(), mid_run(), finished()], ids=["empty", "mid-run", "finished"])
def test_no_line_is_wider_than_the_console(shown: Snapshot, width: int) -> None:
    assert max(len(line) for line in screen(shown, width).splitlines()) <= width


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_an_empty_status_shows_that_nothing_happened_yet(width: int) -> None:
    text = screen(status(), width)
    for words in (
        *("sums", "running", "0 of 30 steps", "ETA –", "no step trained yet", "not evaluated yet"),
        *("no node yet", "0 of 16 groups accepted for step 1", "none"),
    ):
        assert words in text


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_run_in_progress_shows_its_figures(width: int) -> None:
    text = screen(mid_run(), width)
    for words in (
        "3 of 30 steps",
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
        "79 accepted, 3 rejected: 2 proof, 1 unreadable",
        "slashed  worker-liar",
    ):
        assert words in text


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_every_node_has_a_row(width: int) -> None:
    text = screen(mid_run(), width)
    assert re.search(r"v3 +serving v3 .*now", row(text, "origin"))
    assert re.search(r"v2 +fetching v3 .*5s", row(text, "relay-0"))
    assert re.search(r"(worker +)?v3 +generating +– +41 +0( +900 ?M(iB)?)? +now", row(text, "worker-0"))
    assert re.search(r"38 +1( +–)? +1m 10s", row(text, "worker-1"))
    assert re.search(r"slashed +– +0 +2( +–)? +evicted", row(text, "worker-liar|worker-lia…"))
    assert re.search(r"validator +– ", row(text, "validator"))
    assert row(text, "learner") and row(text, "evaluator")


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_finished_run_has_no_eta_and_shows_its_last_evaluation(width: int) -> None:
    text = screen(finished(), width)
    assert "finished" in text and "30 of 30 steps" in text and "ETA" not in text
    assert "greedy 12.0 % → 61.0 %" in text and "v0 → v30, n 256" in text
    assert "every step has its rollouts" in text


def test_missing_metrics_are_shown_as_unknown() -> None:
    text = screen(mid_run(metrics=[{}]), 100)
    assert "no step trained yet" in text and "mean –, max – versions" in text and "busy –, waiting –" in text


def test_text_and_numbers_of_a_node_cannot_break_the_screen() -> None:
    stats = {"doing": "\x1b[2J[red]\u202e\nhi", "tokens": LARGEST, "busy_s": 1e-9, "rss_bytes": LARGEST}
    evil = node("worker-0", policy_version=LARGEST, stats=stats, seen_s=1e12)
    text = screen(mid_run(nodes=[evil]), 100)
    assert "?[2J[red]??hi" in text
    assert "\x1b" not in text and "\u202e" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("height", [14, 18, 30])
def test_the_screen_is_never_taller_than_the_terminal(height: int) -> None:
    text = screen(mid_run(), 80, height)
    assert len(text.splitlines()) <= height and "nodes (8)" in text


def test_a_short_terminal_shows_nodes_with_problems_and_counts_the_rest() -> None:
    nodes = [node(f"worker-{i:02}", seen_s=170.0, rejected=int(i == 29)) for i in range(30)]
    text = screen(mid_run(nodes=nodes), 100, 35)
    shown = len(re.findall(r"│ worker-", text))
    assert "worker-29" in text and shown >= 12 and f"+{30 - shown} more" in text
    assert len(text.splitlines()) <= 35


@pytest.mark.parametrize("shown", [mid_run(), finished()], ids=["mid-run", "finished"])
def test_a_terminal_of_80x24_shows_the_main_figures(shown: Snapshot) -> None:
    text = screen(shown, 80, 24)
    assert len(text.splitlines()) <= 24
    for words in ("step ", "reward", "held-out", "next batch", "nodes (8)", "verdicts  79 accepted, 3 rejected"):
        assert words in text
    assert shown.status.state == "finished" or "ETA 13m 20s" in text
    assert "worker-0" in text, "nodes must fill the remaining lines"


def busy(workers: int, **values: Any) -> Snapshot:
    """Return a pool with two servers, whose nodes report the longest activities that honest nodes report."""
    nodes = [
        node("evaluator", "evaluator", seen_s=170.0, stats={"doing": "a version to evaluate", "waiting": True}),
        node("learner", "learner", seen_s=170.0, stats={"doing": "the batch of step 25", "waiting": True}),
        node("validator", "validator", seen_s=170.0, stats={"doing": "submissions", "waiting": True}),
        node("origin", "origin", url="http://o"),
        node("relay-0", "relay", url="http://r"),
    ]
    doing = {"doing": "generating for step 25"}
    nodes += [node(f"worker-{number}", seen_s=170.0, stats=doing) for number in range(workers)]
    return mid_run(nodes=nodes, **values)


@pytest.mark.parametrize("workers", [1, 3, 4, 9])
def test_in_80x24_every_node_has_a_row_or_is_counted(workers: int) -> None:
    text = screen(busy(workers), 80, 24)
    assert len(text.splitlines()) <= 24
    shown = len(re.findall(r"│ (worker-|learner  +v|validator|evaluator|origin|relay)", text))
    assert shown >= min(workers + 5, 6) and (shown == workers + 5 or f" +{workers + 5 - shown} more ─╯" in text)
    for words in ("waiting for a version to evaluate", "waiting for the batch of step 25", "waiting for submissions"):
        assert words in text, "the activity must not be cut"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 12)])
def test_no_line_breaks_a_word(width: int, height: int) -> None:
    reasons = {"special_tokens": 3, "distribution": 2, "unrepeatable": 1, "termination": 4}
    grading = {
        "total": 40,
        "recent": 40,
        "errors": 3,
    }
    slashed = ["worker-a", "worker-b", "worker-c", "worker-d"]
    drawn = screen(busy(3, reject_reasons=reasons, grading=grading, slashed=slashed), width, height)
    text = " ".join(drawn.replace("│", " ").split())
    for word in ("distribution", "unrepeatable", "termination", "verdicts", "worker-d"):
        assert re.search(rf"(^| ){word}[ ,:…]", f"{text} "), word
    assert max(len(line) for line in drawn.splitlines()) <= width


def test_a_long_name_is_cut_in_its_middle() -> None:
    text = screen(mid_run(run="words-of-seven-letters-by-the-second-site-17-0123456789abcdef"), 80, 24)
    assert "words-of-seven-" in text and "…" in text and "0123456789abcdef" in text


def test_kl_is_shown_only_if_it_is_computed() -> None:
    without = [step(0, 0.1) | {"policy/kl": 0.0}, step(1, 0.1) | {"policy/kl": 0.0}]
    assert "KL" not in screen(mid_run(metrics=without), 100)
    assert "KL" not in screen(mid_run(metrics=[step(0, 0.1)]), 100)
    assert "KL 0.0123" in screen(mid_run(metrics=[step(0, 0.1), step(1, 0.1) | {"policy/kl": 0.0123}]), 100)


def test_groups_with_equal_rewards_are_reported() -> None:
    signal = Signal(groups=39, useful=0, flat=39, lowest=0.0, highest=0.0)
    text = screen(mid_run(signal=signal), 160)
    assert "39 of the newest 39 groups had equal rewards, all 0.0: nothing to learn from" in text
    assert "0 % of 39 useful" in text
    assert "no signal" not in screen(mid_run(signal=Signal(groups=20, useful=4, flat=16, lowest=0, highest=1)), 160)


def test_sources_and_target_lengths_have_a_line_if_the_run_has_any() -> None:
    targets = {"length/100/mean": 90.4, "length/2000/mean": 800.0, "length_penalty/mean": 0.25}
    figures = step(0, 0.5) | {"reward/sums/mean": 0.25, "reward/code/mean": 0.5, "filtered/code": 3.0} | targets
    text = screen(status(metrics=[figures]), 100)
    assert "sums 0.250   code 0.500 (3 left out)" in row(text, "sources")
    assert "penalty 0.250   100 → 90   2000 → 800" in row(text, "length")
    alone = screen(status(metrics=[step(0, 0.5) | {"reward/sums/mean": 0.25}]), 100)
    assert "sources" not in alone and "│ length" not in alone


def test_sources_that_do_not_fit_the_width_are_counted() -> None:
    many = {f"reward/source-{n}/mean": 0.5 for n in range(20)}
    text = screen(status(metrics=[step(0, 0.5) | many]), 70)
    shown = len(re.findall(r"source-\d+ 0.500", text))
    assert 0 < shown < 20 and f"+{20 - shown} more" in row(text, "sources")


def test_grader_errors_are_reported() -> None:
    grading = {"total": 40, "recent": 40, "errors": 3}
    text = screen(status(grading=grading), 160)
    assert "the grader failed for 3 of the newest 40 completions (why: a validator's log)" in text
    assert "grader" not in screen(mid_run(), 160)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"state": "draining", "reason": "drained by the operator"}, "draining: drained by the operator"),
        ({"suspended_s": 90.0, "suspension": "3 tasks expired"}, "suspended for 1m 30s: 3 tasks expired"),
    ],
)
def test_a_worker_that_gets_no_tasks_is_shown_with_the_reason(state: dict[str, Any], words: str) -> None:
    assert words in row(screen(status(nodes=[node("worker-0", **state)]), 120), "worker-0")
