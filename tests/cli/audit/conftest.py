"""Recorded runs pay early."""

from collections.abc import Iterator

import pytest

from shoal.config import sections


@pytest.fixture(scope="package", autouse=True)
def paid_after_one_check() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "LEAST_ESCROW_CHECKS", 1)
        yield
