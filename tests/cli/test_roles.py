"""What a role does before its loop: a node gets the task set by its digest."""

from pathlib import Path
from typing import Any

from shoal import tasks
from shoal.cli.roles import task_set
from shoal.config import Config


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
