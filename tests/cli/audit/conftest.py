"""Recorded runs pay early."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.config import sections

from .recorded import record_run


@pytest.fixture(scope="package", autouse=True)
def paid_after_one_check() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "MIN_ESCROW_CHECKS", 1)
        yield


@pytest.fixture(scope="package")
def finished(paid_after_one_check: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished and sealed run, to be copied before it is changed."""
    return record_run(tmp_path_factory.mktemp("finished"))
