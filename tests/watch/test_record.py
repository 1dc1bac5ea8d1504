"""The record of a run: the files that it writes, and what it sends to the tracker."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.history import MAX_SAMPLES, History, WorkerSample
from shoal.protocol.messages import Evaluation
from shoal.watch.record import RunRecord


class Memory:
    """A tracker that keeps its calls in memory, and fails after `good` calls."""

    def __init__(self, good: int = 100) -> None:
        self.good = good
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[int, str]] = []
        self.closed = False

    def log(self, values: Mapping[str, float], version: int) -> None:
        if len(self.logged) >= self.good:
            raise ConnectionError("no route to host")
        self.logged.append((version, dict(values)))

    def log_samples(self, samples: Sequence[WorkerSample], version: int) -> None:
        if len(self.logged) >= self.good:
            raise ConnectionError("no route to host")
        self.samples += [(version, sample.submission[-6:]) for sample in samples]

    def close(self) -> None:
        if len(self.logged) >= self.good:
            raise ConnectionError("no route to host")
        self.closed = True


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def record(tmp_path: Path, messages: list[str]) -> RunRecord:
    return RunRecord(tmp_path, messages.append)


def steps(n: int) -> list[dict[str, float]]:
    return [{"step": float(i), "time_s": 10.0 + i, "reward/mean": i / 10} for i in range(n)]


def evaluation(version: int, *, final: bool = False) -> Evaluation:
    return Evaluation(version=version, greedy=0.5, sampled=None, n=4, final=final)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample(submission: int) -> WorkerSample:
    return WorkerSample(
        task="1+1", prompt="1+1=", completion="2", reward=1.0, tokens=2, submission=f"{'a' * 16}-{submission:06d}",
        group=0, worker="alice", policy_version=0,
    )  # fmt: skip


def new_history(cursor: int, **changes: list[Any]) -> History:
    return History.model_validate({"cursor": cursor, "metrics": [], "evaluations": [], "samples": []} | changes)


def test_the_files_hold_the_whole_run_so_far(record: RunRecord, tmp_path: Path) -> None:
    assert lines(tmp_path / "metrics.jsonl") == []
    assert record.add_history(new_history(2, metrics=steps(1), evaluations=[evaluation(0)]))
    assert record.add_history(new_history(5, metrics=steps(3)[1:], evaluations=[evaluation(3, final=True)]))
    assert not record.add_history(new_history(5))
    assert lines(tmp_path / "metrics.jsonl") == steps(3)
    assert [line["version"] for line in lines(tmp_path / "evaluations.jsonl")] == [0, 3]


def test_the_newest_sample_completions_are_kept(record: RunRecord, tmp_path: Path) -> None:
    record.add_history(new_history(3, samples=[sample(n) for n in range(3)]))
    record.add_history(new_history(4, samples=[sample(n) for n in range(3, MAX_SAMPLES + 3)]))
    kept = [line["submission"][-6:] for line in lines(tmp_path / "rollouts.jsonl")]
    assert (len(kept), kept[0], kept[-1]) == (MAX_SAMPLES, "000003", f"{MAX_SAMPLES + 2:06d}")


def test_the_tracker_gets_only_the_newest_samples(record: RunRecord) -> None:
    record.tracker = memory = Memory()
    record.add_history(new_history(1, samples=[sample(n) for n in range(20)]))
    record.add_history(new_history(2, samples=[sample(20)]))
    assert [number for _, number in memory.samples] == [f"{n:06d}" for n in range(12, 21)]


def test_a_step_that_is_reported_again_replaces_its_line(record: RunRecord, tmp_path: Path) -> None:
    record.add_history(new_history(2, metrics=steps(2)))
    changed = {"step": 1.0, "time_s": 20.0, "reward/mean": 0.9}
    record.add_history(new_history(3, metrics=[changed]))
    assert lines(tmp_path / "metrics.jsonl") == [steps(2)[0], changed]


def test_the_tracker_gets_each_step_and_evaluation_once_at_its_version(record: RunRecord) -> None:
    record.tracker = memory = Memory()
    record.add_history(new_history(2, metrics=steps(1), evaluations=[evaluation(0)]))
    for cursor in (4, 6):
        record.add_history(new_history(cursor, metrics=steps(2), evaluations=[evaluation(0), evaluation(2)]))
    record.close()
    assert memory.logged == [
        (1, {"reward/mean": 0.0}),
        (0, {"heldout/greedy": 0.5}),
        (2, {"reward/mean": 0.1}),
        (2, {"heldout/greedy": 0.5}),
    ]
    assert memory.closed


def test_a_failing_tracker_is_reported_once_and_the_files_are_complete(
    record: RunRecord, messages: list[str], tmp_path: Path
) -> None:
    record.tracker = Memory(good=1)
    for n in range(5):
        record.add_history(new_history(n, metrics=steps(n)))
    record.close()
    (line,) = messages
    assert "Memory failed: ConnectionError: no route to host. Training continues" in line
    assert lines(tmp_path / "metrics.jsonl") == steps(4)
    record.tracker = Memory(good=0)
    record.close()
    assert "Memory did not close: ConnectionError" in messages[1]
