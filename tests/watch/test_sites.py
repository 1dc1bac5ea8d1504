"""The learner's sites in the view: who counts, who was left out or is gone, and where their time goes."""

import io

import pytest
from rich.console import Console

from shoal.watch.figures import sites_of
from shoal.watch.figures import sites_summary as summary
from shoal.watch.terminal.events import Events
from shoal.watch.terminal.screen import Screen

from .support import Seen, mid_run, step


def told(name: str, *, kept: bool = True, left_out: bool = False, **figures: float) -> dict[str, float]:
    found = {"kept": float(kept), "left_out": float(left_out)} | figures
    return {f"sites/{name}/{key}": value for key, value in found.items()} | {"sites/kept": 1.0}


TIMES = {"computed_s": 60.0, "waited_s": 30.0, "synced_s": 10.0, "sent_bytes": 6e6, "received_bytes": 7e6}
BOTH = told("site-0", loss=0.125, **TIMES) | told("site-1", loss=0.25, **TIMES)


def run(*sites: dict[str, float]) -> Seen:
    return mid_run(metrics=[step(number, 0.1) | each for number, each in enumerate(sites)])


def drawn(shown: Seen, width: int = 120, height: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, record=True)
    console.print(Screen(*shown))
    return console.export_text()


def test_each_site_has_a_line_with_loss_times_and_bytes() -> None:
    text = drawn(run(BOTH))
    [line] = [line for line in text.splitlines() if "site-1" in line]
    assert line.split()[1:-1] == ["site-1", "counts", "0.250", "60", "%", "30", "%", "10", "%", "6.0MB", "7.0MB"]
    assert "2 of 2 count" in text


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (told("site-0") | told("site-1", kept=False), "site-1 missing"),
        (told("site-0") | told("site-1", kept=False, left_out=True), "site-1 left out"),
        (told("site-0"), "site-1 away since step 2"),
    ],
)
def test_a_site_that_does_not_count_is_named_with_the_reason(last: dict[str, float], words: str) -> None:
    assert summary(sites_of(run(BOTH, last).history.metrics)) == ["1 of 2 count", words]
    assert words in drawn(run(BOTH, last), height=24), "also where the table has no room"


def test_a_site_that_was_missing_and_never_came_back_is_away_since_then() -> None:
    metrics = run(BOTH, told("site-0") | told("site-1", kept=False), told("site-0")).history.metrics
    assert [site.state for site in sites_of(metrics)] == ["counts", "away since step 2"]


def test_a_run_without_sites_says_nothing_of_them() -> None:
    assert sites_of(mid_run().history.metrics) == [] and "sites" not in drawn(mid_run())


def test_what_a_site_reports_cannot_break_the_screen() -> None:
    odd = told("a\x1b[2J" + "b" * 300, loss=float("nan"), computed_s=float("inf"), sent_bytes=1e30)
    text = drawn(run(odd), width=80)
    assert max(len(line) for line in text.splitlines()) <= 80 and "\x1b[2J" not in text


def test_a_log_says_once_when_the_sites_that_count_change() -> None:
    events, before, after = Events(), run(BOTH), run(BOTH, told("site-0"))
    lines = [line for shown in (before, before, after, after) for line in events.new(*shown) if "sites" in line]
    assert lines == ["sites: 2 of 2 count", "sites: 1 of 2 count, site-1 away since step 2"]
