"""Trackers are tested with fake packages, and TensorBoard also with the real package if it is installed."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.config import Config, ConfigError, parse
from shoal.errors import UserError
from shoal.protocol.history import WorkerSample
from shoal.watch.trackers import TrackerError, open_tracker


def config(tracker: str) -> Config:
    return parse({"run": {"tracker": tracker, "seed": 7}})


class FakeRun:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append((name, step_metric))

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.calls.append((values, step))

    def finish(self) -> None:
        self.calls.append("finished")


def fake(name: str, calls: list[Any]) -> ModuleType:
    def init(**arguments: Any) -> FakeRun:
        calls.append(arguments)
        return FakeRun(calls)

    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(init=init, Settings=lambda **settings: settings, Table=lambda **table: table)
    return module


def test_there_is_no_tracker_by_default(tmp_path: Path) -> None:
    assert open_tracker("r", tmp_path, Config()) is None


SAMPLE = WorkerSample(
    task="2+2", prompt="2 + 2 =", completion="4", reward=1.0, tokens=2, submission=f"{'a' * 16}-000001", group=0,
    worker="worker-0", policy_version=3,
)  # fmt: skip


def test_wandb_gets_samples_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", fake("wandb", calls))
    open_tracker("mine", tmp_path, config("wandb")).log_samples([SAMPLE], 3)
    columns = ["policy_version", "worker", "task", "prompt", "completion", "reward", "tokens"]
    table = {"columns": columns, "data": [[3, "worker-0", "2+2", "2 + 2 =", "4", 1.0, 2]]}
    assert calls[-1] == ({"version": 3, "samples": table}, None)


def test_the_config_refuses_an_unknown_tracker() -> None:
    with pytest.raises(ConfigError, match=r"run\.tracker"):
        config("mlflow")


def test_wandb_gets_the_config_and_the_values_of_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", fake("wandb", calls))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    tracker = open_tracker("mine", tmp_path, config("wandb"))
    tracker.log({"reward/mean": 0.5}, 3)
    tracker.close()
    init, axis, logged, finished = calls
    assert (init["project"], init["name"], init["dir"]) == ("shoal", "mine", str(tmp_path))
    assert init["config"]["run"]["seed"] == 7
    assert axis == ("*", "version") and logged == ({"version": 3, "reward/mean": 0.5}, None)
    assert finished == "finished"


def test_tensorboard_can_read_the_written_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'shoal[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_tracker("mine", tmp_path, config("tensorboard"))
    tracker.log({"reward/mean": 0.5, "optim/lr": 1e-6}, 3)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")] == [(3, 0.5)]


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_the_error_for_a_missing_package_names_the_package_to_install(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)  # as if it were not installed
    with pytest.raises(UserError, match=rf"{kind}, which is not installed; pip install 'shoal\[{kind}\]'"):
        open_tracker("r", tmp_path, config(kind))


def test_the_error_of_a_tracker_that_does_not_start_contains_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**arguments: Any) -> None:
        raise RuntimeError("no API key configured")

    module = fake("wandb", [])
    monkeypatch.setattr(module, "init", init)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(TrackerError, match='run.tracker = "wandb" does not start: RuntimeError: no API key configured'):
        open_tracker("r", tmp_path, config("wandb"))
