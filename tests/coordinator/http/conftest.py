from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator.http.routes import Coordinator
from shoal.protocol.identity import Identity
from shoal.protocol.messages import PolicyVersion

from ..support import config
from .support import ROLES, Site, served


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with served(tmp_path_factory.mktemp("coordinator")) as site:
        yield site.staff(*ROLES)


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    coordinator = Coordinator(config(prompts_per_step=10_000, groups=64), "r", Identity.generate(), tmp_path)
    coordinator.pool.learning.published(PolicyVersion(version=0, digest="d" * 64, size_bytes=1))
    return coordinator
