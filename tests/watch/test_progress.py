"""How far a command is: lines with the time left, and a bar that leaves standard output alone."""

import io
import sys

import pytest
from rich.console import Console

from shoal.watch.terminal.progress import CommandProgress, FetchBar


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_every_ten_seconds_has_the_time_left() -> None:
    console, clock = Console(file=io.StringIO(), record=True), Clock()
    progress = CommandProgress(console, "tasks", 100, clock)
    for now_s, done in ((0, 20), (4, 30), (10, 40), (12, 50), (30, 80), (31, 100)):
        clock.now_s = now_s
        progress(done)
    assert console.export_text().splitlines() == [
        "tasks: 20 of 100",
        "tasks: 40 of 100, ETA 30s",
        "tasks: 80 of 100, ETA 10s",
        "tasks: 100 of 100",
    ]


def test_what_is_printed_beside_the_bar_of_a_download_stays_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with FetchBar() as bar:
        assert bar.bar.console.is_terminal
        sys.stdout.write("weights/v000003\n")
    assert capsys.readouterr().out == "weights/v000003\n"
