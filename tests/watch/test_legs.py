"""Legs of a resumed run, and how its summary combines them."""

import json
import os
import shlex
from pathlib import Path

import pytest

from shoal.cli.launch import swarm
from shoal.config import parse
from shoal.protocol.messages import Evaluation
from shoal.watch.record import EVALUATIONS
from shoal.watch.summary import SUMMARY, Leg, all_legs, read_legs, wall_s, write_legs

FIRST = Leg(100.0, {"learner": 1, "worker-0": 0}, {"learner": 5}, 9, {"learner": 60.0, "worker-0": 30.0})
SECOND = Leg(50.0, {"learner": 2}, {"learner": 3, "origin": 1}, 4, {"learner": 20.0})


def test_merged_legs_sum_times_and_restarts_and_keep_the_highest_peaks() -> None:
    assert all_legs([FIRST, SECOND]) == Leg(
        wall_s=150.0,
        restarts={"learner": 3, "worker-0": 0},
        peak_rss_bytes={"learner": 5, "origin": 1},
        peak_together_bytes=9,
        cpu_s={"learner": 80.0, "worker-0": 30.0},
    )


def test_legs_are_stored_in_the_folder(tmp_path: Path) -> None:
    assert read_legs(tmp_path) == []
    write_legs(tmp_path, [FIRST, SECOND])
    assert read_legs(tmp_path) == [FIRST, SECOND]


def test_legs_that_an_older_version_wrote_with_a_forecast_are_read(tmp_path: Path) -> None:
    (tmp_path / "legs.json").write_text(json.dumps([{"wall_s": 3.0, "estimated_s": 4.0, "estimated_bytes": 5.0}]))
    assert read_legs(tmp_path) == [Leg(wall_s=3.0)]


@pytest.mark.parametrize(("steps", "finished"), [(2, False), (4, True)])
def test_a_run_is_finished_only_if_its_summary_covers_all_steps(
    steps: int, finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "summary_table", lambda summary, folder: "")
    finals = [Evaluation(version=version, greedy=0.5, sampled=None, n=1, final=True) for version in (2, 4)]
    (tmp_path / EVALUATIONS).write_text("".join(final.model_dump_json() + "\n" for final in finals))
    (tmp_path / SUMMARY).write_text(json.dumps({"steps": steps}))
    resumed = swarm.Swarm(parse({"run": {"steps": 4}}), "run-0", tmp_path, "http://127.0.0.1:1")
    assert resumed._is_finished() == finished


def test_the_command_that_resumes_a_run_is_valid_shell(tmp_path: Path) -> None:
    (tmp_path / "my run" / "coordinator").mkdir(parents=True)
    (tmp_path / "my run" / "coordinator" / "coordinator.json").touch()
    stopped = swarm.Swarm(parse({}), "run-0", tmp_path / "my run", "http://127.0.0.1:1")
    assert shlex.split(stopped._how_to_resume())[-3:] == ["run", "--resume", str(tmp_path / "my run")]


def test_a_runs_time_is_the_sum_of_its_legs_including_the_current_one(tmp_path: Path) -> None:
    assert wall_s(tmp_path, 0.0, running=True) is None
    write_legs(tmp_path, [Leg(wall_s=40.0), Leg(wall_s=16.0)])
    os.utime(tmp_path / "legs.json", (1000.0, 1000.0))
    assert wall_s(tmp_path, 1007.0, running=True) == 63.0
    assert wall_s(tmp_path, 1007.0, running=False) == 56.0
    assert wall_s(tmp_path, 9999.0, running=True) == 56.0, "a leg whose file is older than a minute must count as ended"
