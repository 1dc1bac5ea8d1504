import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal.protocol.messages import Evaluation
from shoal.tracking.record import Record


class Memory:
    """A tracker that remembers, and fails from the call after `good` ones."""

    def __init__(self, good: int = 100) -> None:
        self.good = good
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, values: Mapping[str, float], version: int) -> None:
        if len(self.logged) >= self.good:
            raise ConnectionError("no route to host")
        self.logged.append((version, dict(values)))

    def close(self) -> None:
        if len(self.logged) >= self.good:
            raise ConnectionError("no route to host")
        self.closed = True


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def record(tmp_path: Path, said: list[str]) -> Record:
    return Record(tmp_path, said.append)


def steps(n: int) -> list[dict[str, float]]:
    return [{"step": float(i), "time_s": 10.0 + i, "reward/mean": i / 10} for i in range(n)]


def evaluation(version: int, *, final: bool = False) -> Evaluation:
    return Evaluation(version=version, greedy=0.5, sampled=None, n=4, final=final)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_files_hold_the_whole_run_so_far(record: Record, tmp_path: Path) -> None:
    record.take([], [])
    assert lines(tmp_path / "metrics.jsonl") == []
    record.take(steps(1), [evaluation(0)])
    record.take(steps(3), [evaluation(0), evaluation(3, final=True)])
    assert lines(tmp_path / "metrics.jsonl") == steps(3)
    assert [found["version"] for found in lines(tmp_path / "evaluations.jsonl")] == [0, 3]


def test_a_step_that_is_reported_again_replaces_its_line(record: Record, tmp_path: Path) -> None:
    record.take(steps(2), [])
    changed = [steps(2)[0], {"step": 1.0, "time_s": 20.0, "reward/mean": 0.9}]
    record.take(changed, [])
    assert lines(tmp_path / "metrics.jsonl") == changed


def test_the_tracker_gets_each_step_and_evaluation_once_at_its_version(record: Record) -> None:
    record.tracker = memory = Memory()
    record.take(steps(1), [evaluation(0)])
    for _ in range(2):
        record.take(steps(2), [evaluation(0), evaluation(2)])
    record.close()
    assert memory.logged == [
        (1, {"reward/mean": 0.0}),
        (0, {"heldout/greedy": 0.5}),
        (2, {"reward/mean": 0.1}),
        (2, {"heldout/greedy": 0.5}),
    ]
    assert memory.closed


def test_a_tracker_that_fails_is_told_of_once_and_the_files_go_on(
    record: Record, said: list[str], tmp_path: Path
) -> None:
    record.tracker = Memory(good=1)
    for n in range(5):
        record.take(steps(n), [])
    record.close()
    (line,) = said
    assert "Memory failed: ConnectionError: no route to host. Training goes on" in line
    assert lines(tmp_path / "metrics.jsonl") == steps(4)


def test_a_tracker_that_does_not_close_is_told_of(record: Record, said: list[str]) -> None:
    record.tracker = Memory(good=0)
    record.close()
    assert "Memory did not close: ConnectionError" in said[0]
