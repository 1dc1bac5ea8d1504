"""One server for the tests that change nothing of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import Running, serving


@pytest.fixture(scope="session")
def api(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tiny_folder, tmp_path_factory.mktemp("serve")) as running:
        yield running
