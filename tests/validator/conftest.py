from pathlib import Path

import pytest

from shoal.rollout.worker import Worker
from shoal.store.rollouts import Rollout

from .support import ASKED, SETTINGS, make_worker


@pytest.fixture(scope="module")
def worker(one_thread: None, tiny_folder: Path) -> Worker:
    """An honest one."""
    return make_worker(tiny_folder, SETTINGS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def honest(worker: Worker) -> list[Rollout]:
    """What it generated for the task it was given."""
    return worker.generate(ASKED)
