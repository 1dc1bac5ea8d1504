"""The engine on the tiny llama, shared by a file's tests."""

from pathlib import Path

import pytest

from shoal.engine.torch_engine import TorchEngine


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> TorchEngine:
    engine = TorchEngine("float32")
    engine.load(tiny_folder)
    return engine
