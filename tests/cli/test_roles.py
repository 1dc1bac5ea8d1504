"""A node fetches the task set by the digest in the signed config. A learner's ranks start or fail together."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import tasks
from shoal.cli import roles
from shoal.cli.roles import task_set
from shoal.config import Config, parse
from shoal.errors import ShoalError, UserError
from shoal.model.dtype import DeviceError
from tests.conftest import locked_elsewhere
from tests.learner.test_leader import Wire


class Node:
    """A node whose coordinator serves this folder of task data. It records the paths of its requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []

    def get_bytes(self, path: str, *, max_bytes: int) -> bytes:
        self.requests.append(path)
        return (self.folder / path.removeprefix("/v1/tasks/")).read_bytes()


def test_a_node_fetches_tasks_when_it_needs_them(tmp_path: Path) -> None:
    pool = tasks.load(Config().tasks, tmp_path / "pool")
    config = Config(tasks=Config().tasks.model_copy(update={"digest": pool.digest}))
    node: Any = Node(tmp_path / "pool")
    joined = task_set(node, config, tmp_path / "node")
    assert node.requests == [f"/v1/tasks/{pool.digest}"]
    assert joined.train[3] == pool.train[3] and len(node.requests) == 2
    assert {path.name for path in (tmp_path / "node" / "tasks").iterdir()} == {path[10:] for path in node.requests}


def test_if_the_leader_cannot_join_every_rank_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ShoalError("this run is full")

    monkeypatch.setattr(roles, "join", refuse)
    sent: list[bytes] = []
    for leads, why in ((True, "^this run is full"), (False, "rank 0 ended: this run is full")):
        ranks: Any = Wire(sent, leads=leads)
        with pytest.raises(ShoalError, match=why):
            roles._leading(None, tmp_path, 0, ranks, threading.Event()).__enter__()  # type: ignore[arg-type]


def test_two_processes_cannot_use_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two workers with one key would generate the same tasks, and waste the work of one."""
    monkeypatch.setattr(roles.Node, "join", lambda *_, **__: pytest.fail("it joined"))
    with (
        locked_elsewhere(tmp_path / roles.LOCK),
        pytest.raises(UserError, match=f"another process uses {tmp_path}: stop it first"),
    ):
        roles.join(None, tmp_path, 0, threading.Event())  # type: ignore[arg-type]


def test_a_node_may_compute_on_another_device_than_the_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse({"model": {"device": "cuda", "dtype": "float32"}})
    monkeypatch.setattr(roles.Node, "join", lambda *_, **__: SimpleNamespace(config=lambda: config))
    monkeypatch.setattr(roles, "lock", lambda _: True)
    monkeypatch.setattr("shoal.model.dtype.set_threads", lambda _: None)
    _, own, _ = roles.join(None, tmp_path, 1, threading.Event(), "cpu")  # type: ignore[arg-type]
    assert own == parse({"model": {"device": "cpu", "dtype": "float32"}})
    with pytest.raises(DeviceError, match='^device "nonsense" cannot be used here'):
        roles.join(None, tmp_path, 1, threading.Event(), "nonsense")  # type: ignore[arg-type]


def test_the_leader_sends_heartbeats_while_it_waits_for_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Beating:
        @contextmanager
        def heartbeats(self) -> Iterator[None]:
            events.append("begin")
            yield
            events.append("end")

        def doing(self, what: str) -> None: ...

    class Recording(Wire):
        def broadcast(self, message: bytes | None) -> bytes:
            events.append("broadcast")
            return super().broadcast(message)

    monkeypatch.setattr(roles, "join", lambda *_: (Beating(), Config(), "float32"))
    sent: list[bytes] = []
    for ranks in (Recording(sent), Wire(sent, leads=False)):
        with roles._leading(None, tmp_path, 0, ranks, threading.Event()) as (_, config, dtype):  # type: ignore[arg-type]
            assert (config, dtype) == (Config(), "float32")
    assert events == ["begin", "broadcast", "end"]
