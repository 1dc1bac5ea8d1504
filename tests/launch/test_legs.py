"""A resumed run's summary covers all its legs."""

from pathlib import Path

from shoal.launch.legs import Leg, read_legs, total, write_legs

FIRST = Leg(wall_s=100.0, restarts={"learner": 1, "worker-0": 0}, peak_rss_bytes={"learner": 5}, peak_together_bytes=9)
SECOND = Leg(wall_s=50.0, restarts={"learner": 2}, peak_rss_bytes={"learner": 3, "origin": 1}, peak_together_bytes=4)


def test_seconds_and_restarts_are_summed_and_peaks_are_the_highest() -> None:
    assert total([FIRST, SECOND]) == Leg(
        wall_s=150.0,
        restarts={"learner": 3, "worker-0": 0},
        peak_rss_bytes={"learner": 5, "origin": 1},
        peak_together_bytes=9,
    )


def test_legs_are_kept_in_the_folder(tmp_path: Path) -> None:
    assert read_legs(tmp_path) == []
    write_legs(tmp_path, [FIRST, SECOND])
    assert read_legs(tmp_path) == [FIRST, SECOND]
