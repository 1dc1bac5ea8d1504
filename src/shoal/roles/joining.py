"""The first steps of every role that computes: check the device, join the pool, get the config and tasks, pick the dtype.

Called by the other modules of this room.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import Config
from shoal.protocol.invite import Invite
from shoal.protocol.messages import Capability
from shoal.protocol.node import Node

if TYPE_CHECKING:
    from shoal.model.dtype import DtypeName
    from shoal.tasks import TaskSet

TASKS = "tasks"  # in a node's folder: what it fetched of the task set


def join(
    invite: Invite, folder: Path, threads: int, stop: threading.Event, engine: str = "torch"
) -> tuple[Node, Config, DtypeName]:
    """Join the pool. Returns the node, the run's config, and the dtype to compute in on this machine.

    Raises RefusedError, DeviceError.
    """
    from shoal.model import dtype
    from shoal.model.threads import compute_on

    compute_on(threads)
    node = Node.join(invite, folder, stop=stop, capability=capability(engine))
    config = node.config()
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    return node, config, picked


def capability(engine: str = "torch") -> Capability:
    """What this machine reports about itself: all of its memory, the cores this process may use, its best device."""
    import torch

    return Capability(
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        device="cuda" if torch.cuda.is_available() else "cpu",
        engine=engine,
    )


def task_set(node: Node, config: Config, folder: Path) -> TaskSet:
    """The pool's task set: its manifest now, the tasks as they are needed. Raises TasksNotFoundError, RefusedError."""
    from shoal import tasks

    def fetch(sha256: str, most_bytes: int) -> bytes:
        return node.get_bytes(f"/v1/tasks/{sha256}", most_bytes=most_bytes)

    return tasks.join(config.tasks, folder / TASKS, fetch)
