"""How far a command is: lines where there is no terminal, a bar with the time left where there is one."""

import io
import sys

import pytest
from rich.console import Console

from shoal.watch.terminal.progress import CommandProgress, FetchBar


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_a_line_every_ten_seconds_with_the_time_left() -> None:
    console, clock = Console(file=io.StringIO(), record=True), Clock()
    with CommandProgress(console, "tasks", 100, clock) as progress:
        for now_s, done in ((0, 20), (4, 30), (10, 40), (12, 50), (30, 80), (31, 100)):
            clock.now_s = now_s
            progress(done)
    assert console.export_text().splitlines() == [
        "tasks: 20 of 100",
        "tasks: 40 of 100, ETA 30s",
        "tasks: 80 of 100, ETA 10s",
        "tasks: 100 of 100",
    ]


def test_in_a_terminal_it_is_a_bar() -> None:
    file = io.StringIO()
    with CommandProgress(Console(file=file, force_terminal=True, width=80), "tasks", 10) as progress:
        progress(4)
        progress(10)
    text = file.getvalue()
    assert "10/10" in text and "ETA" in text and "tasks: " not in text


def test_the_time_left_counts_only_what_was_done_now() -> None:
    console, clock = Console(file=io.StringIO(), record=True), Clock()
    with CommandProgress(console, "m [x]", 100, clock) as progress:
        progress(40)
        for done in range(41, 51):
            clock.now_s += 5
            progress(done)
    assert console.export_text().splitlines()[-1] == "m [x]: 50 of 100, ETA 4m 10s"


def test_what_is_printed_beside_the_bar_of_a_download_stays_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with FetchBar() as bar:
        assert bar.bar.console.is_terminal
        sys.stdout.write("weights/v000003\n")
    assert capsys.readouterr().out == "weights/v000003\n"
