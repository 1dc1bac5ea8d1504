from pathlib import Path

import pytest

from shoal.store.rollouts import Rollout
from shoal.validator.service import Validator
from shoal.worker.produce import Producer

from ..workers import produced
from .support import ASSIGNMENT, SETTINGS, make_producer, make_validator


@pytest.fixture(scope="module")
def worker(one_thread: None, tiny_folder: Path) -> Producer:
    """Return an honest worker."""
    return make_producer(tiny_folder, SETTINGS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def honest(worker: Producer) -> list[Rollout]:
    """Return the honest worker's rollouts for `ASSIGNMENT`."""
    return produced(worker, ASSIGNMENT)


@pytest.fixture(scope="module")
def validator(one_thread: None, tiny_folder: Path) -> Validator:
    return make_validator(tiny_folder, SETTINGS)
