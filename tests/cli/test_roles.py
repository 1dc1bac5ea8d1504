"""What a role does before its loop: the learner refuses what its model cannot do, a node gets the task set by its digest."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import tasks
from shoal.cli import roles as role
from shoal.cli.roles import task_set
from shoal.config import Config, parse
from shoal.model import numerics
from shoal.model.numerics import NumericsError


def started(model: Path, folder: Path, wanted: str, monkeypatch: pytest.MonkeyPatch, **learner: Any) -> str:
    @contextmanager
    def leading(*_: Any) -> Iterator[Any]:
        config = {"model": {"name": str(model), "numerics": wanted}, "run": {"steps": 1}, "learner": learner}
        yield None, parse(config), "float32"

    monkeypatch.setattr(role, "_leading", leading)
    monkeypatch.setattr(numerics, "refusal", lambda *_: None)  # this machine can
    monkeypatch.setattr("shoal.learner.loop.Learner", lambda *_: SimpleNamespace(run=lambda _: "finished"))
    return role.run_learner(None, folder, 1, threading.Event())  # type: ignore[arg-type]


def test_exact_numerics_asked_for_by_name_are_never_fast(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NumericsError, match="learner.compile = true"):
        started(tiny_folder, tmp_path, "exact", monkeypatch, compile=True)
    for model, wanted in ((tiny_folder, "auto"), (tiny_folder, "fast"), (tiny_folder, "exact")):
        assert started(model, tmp_path, wanted, monkeypatch) == "finished"


class Node:
    """A node of a coordinator with this folder of task data; `asked` collects the paths of its requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []

    def get_bytes(self, path: str, *, most_bytes: int) -> bytes:
        self.asked.append(path)
        return (self.folder / path.removeprefix("/v1/tasks/")).read_bytes()


def test_a_node_takes_the_tasks_that_the_signed_config_names(tmp_path: Path) -> None:
    pool = tasks.load(Config().tasks, tmp_path / "pool")
    config = Config(tasks=Config().tasks.model_copy(update={"digest": pool.digest}))
    node: Any = Node(tmp_path / "pool")
    found = task_set(node, config, tmp_path / "node")
    assert node.asked == [f"/v1/tasks/{pool.digest}"]
    assert found.train[3] == pool.train[3] and len(node.asked) == 2
    assert {path.name for path in (tmp_path / "node" / "tasks").iterdir()} == {path[10:] for path in node.asked}
