"""The screen and the log show which of the learner's sites count, and how the sites use their time."""

import pytest

from shoal.watch.figures import site_rows, sites_summary
from shoal.watch.terminal.events import Events

from .support import Snapshot, mid_run, screen, step


def site(name: str, *, kept: bool = True, left_out: bool = False, **figures: float) -> dict[str, float]:
    values = {"kept": float(kept), "left_out": float(left_out)} | figures
    return {f"sites/{name}/{key}": value for key, value in values.items()} | {"sites/kept": 1.0}


TIMES = {"computed_s": 60.0, "waited_s": 30.0, "synced_s": 10.0, "sent_bytes": 6e6, "received_bytes": 7e6}
BOTH = site("site-0", loss=0.125, **TIMES) | site("site-1", loss=0.25, **TIMES)


def run(*sites: dict[str, float]) -> Snapshot:
    return mid_run(metrics=[step(number, 0.1) | each for number, each in enumerate(sites)])


def test_each_site_has_a_line_with_loss_times_and_bytes() -> None:
    text = screen(run(BOTH), 120, 60)
    [line] = [line for line in text.splitlines() if "site-1" in line]
    assert line.split()[1:-1] == ["site-1", "counts", "0.250", "60", "%", "30", "%", "10", "%", "6.0MB", "7.0MB"]
    assert "2 of 2 count" in text


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (site("site-0") | site("site-1", kept=False), "site-1 missing"),
        (site("site-0") | site("site-1", kept=False, left_out=True), "site-1 left out"),
        (site("site-0"), "site-1 away since step 2"),
    ],
)
def test_a_site_that_does_not_count_is_named_with_the_reason(last: dict[str, float], words: str) -> None:
    assert sites_summary(site_rows(run(BOTH, last).history.metrics)) == ["1 of 2 count", words]
    assert words in screen(run(BOTH, last), 120, 24), "the screen must name the site even if the table does not fit"


def test_an_absent_site_is_shown_with_its_first_missed_step() -> None:
    metrics = run(BOTH, site("site-0") | site("site-1", kept=False), site("site-0")).history.metrics
    assert [row.state for row in site_rows(metrics)] == ["counts", "away since step 2"]


def test_a_run_without_sites_does_not_mention_them() -> None:
    assert site_rows(mid_run().history.metrics) == [] and "sites" not in screen(mid_run(), 120, 60)


def test_text_and_numbers_of_a_site_cannot_break_the_screen() -> None:
    odd = site("a\x1b[2J" + "b" * 300, loss=float("nan"), computed_s=float("inf"), sent_bytes=1e30)
    text = screen(run(odd), 80, 60)
    assert max(len(line) for line in text.splitlines()) <= 80 and "\x1b[2J" not in text


def test_the_log_reports_which_sites_count_only_when_that_changes() -> None:
    events, before, after = Events(), run(BOTH), run(BOTH, site("site-0"))
    lines = [line for shown in (before, before, after, after) for line in events.new(*shown) if "sites" in line]
    assert lines == ["sites: 2 of 2 count", "sites: 1 of 2 count, site-1 away since step 2"]
