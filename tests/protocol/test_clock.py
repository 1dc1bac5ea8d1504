"""A node whose clock is minutes off is told so, and works by the coordinator's signed time."""

import logging
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.calling import PoolClock


@dataclass
class Machine:
    """A machine whose clock is off, and a coordinator that signs what arrives `there_s` later and takes `back_s` back."""

    off_s: float
    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s + self.off_s

    def ask(self, clock: PoolClock, there_s: float, back_s: float) -> bool:
        asked_s = self()
        self.now_s += there_s
        created_s = int(self.now_s)
        self.now_s += back_s
        return clock.heard(created_s, asked_s, self())


@pytest.mark.parametrize("off_s", [-3600.0, -300.0, 90.0, 7200.0])
def test_minutes_are_corrected_by_one_answer_and_told_once(off_s: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    machine = Machine(off_s)
    clock = PoolClock(machine)
    assert machine.ask(clock, 0.05, 0.05)
    assert clock() == pytest.approx(machine.now_s, abs=1.2)
    for _ in range(20):
        machine.now_s += 7.3
        machine.ask(clock, 0.05, 0.05)
    (told,) = [record.getMessage() for record in caplog.records]
    found = re.fullmatch(r"this machine's clock is (\d+) s (ahead of|behind) the coordinator's; .*\(NTP\)", told)
    assert found and found[2] == ("ahead of" if off_s > 0 else "behind")
    assert int(found[1]) == pytest.approx(abs(off_s), abs=2)  # an answer is signed in whole seconds


delay = st.floats(0, 40)


@given(st.floats(-5000, 5000), st.lists(st.tuples(delay, delay), max_size=20))
def test_delays_by_others_never_make_a_right_clock_wrong(off_s: float, delays: list[tuple[float, float]]) -> None:
    machine = Machine(off_s)
    clock = PoolClock(machine)
    machine.ask(clock, 0.01, 0.01)
    error_s = 1.1
    for there_s, back_s in delays:
        machine.ask(clock, there_s, back_s)
        assert abs(clock() - machine.now_s) <= error_s + 1e-3
        error_s = abs(clock() - machine.now_s)


def test_a_right_clock_is_left_alone() -> None:
    machine = Machine(0.0)
    clock = PoolClock(machine)
    assert not any(machine.ask(clock, 0.3, 0.4) for _ in range(10))
    assert clock.offset_s == 0
