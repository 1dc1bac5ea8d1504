"""Fixtures that several test files of this folder share."""

from collections.abc import Iterator

import pytest

from shoal.sandbox import best_tier
from shoal.tasks.rewards.math import Math
from shoal.tasks.task import TRUST


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    math = Math()
    yield math
    math.close()


@pytest.fixture(params=["sandbox", "trusted"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice, with user code sandboxed and trusted. Return the tier that its grades then name."""
    monkeypatch.setenv(TRUST, "1" if request.param == "trusted" else "")
    return best_tier() if request.param == "sandbox" else "trusted"
