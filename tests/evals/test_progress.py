"""Progress where there is no terminal: few lines, and a time left that counts only what was done now."""

from rich.console import Console

from shoal.evals.progress import LINE_EVERY_S, Counting
from tests.evals.support import quiet, written


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_lines_come_now_and_then_with_the_time_left() -> None:
    console, clock = quiet(), Clock()
    with Counting(console, "m, Sums", 100, 40, clock) as counting:
        for _ in range(30):
            clock.now_s += LINE_EVERY_S / 10
            counting.add(1)
    assert written(console).splitlines() == [
        "m, Sums: 40 of 100",
        "m, Sums: 50 of 100, 2m 30s left",
        "m, Sums: 60 of 100, 2m 00s left",
        "m, Sums: 70 of 100, 1m 30s left",
    ]


def test_nothing_is_said_where_nothing_is_to_do() -> None:
    console = quiet()
    with Counting(console, "m", 5, 5):
        pass
    assert written(console) == ""


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=quiet().file, width=100, force_terminal=True)
    with Counting(console, "m [x]", 4) as counting:
        counting.add(4)
    assert "4/4" in written(console)
