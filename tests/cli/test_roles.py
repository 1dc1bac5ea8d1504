"""A node fetches the task set by the digest in the signed config."""

from pathlib import Path
from typing import Any

from shoal import tasks
from shoal.cli.roles import task_set
from shoal.config import Config


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
