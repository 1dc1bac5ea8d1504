import pytest

from .support import ALICE, BOB, OTHER_VALIDATOR, VALIDATOR, Harness, open_pool


@pytest.fixture
def harness() -> Harness:
    """Two workers, two validators, version 0."""
    found = open_pool()
    for key in (ALICE, BOB):
        found.join(key)
    for key in (VALIDATOR, OTHER_VALIDATOR):
        found.join(key, "validator")
    found.publish(0)
    return found
