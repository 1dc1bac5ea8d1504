"""The recorded run that the audit's tests share. Its workers are paid after one later check."""

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
    """A finished and sealed run. Copy it before you change it."""
    return record_run(tmp_path_factory.mktemp("finished"))
