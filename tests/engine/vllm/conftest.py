"""The Python of a real vLLM, if one is installed."""

import os

import pytest

from shoal.engine.vllm.client import PYTHON


@pytest.fixture(scope="session")
def vllm_python() -> str:
    if not os.environ.get(PYTHON):
        pytest.skip(f"{PYTHON} names no environment with vLLM (docs/operate.md)")
    return os.environ[PYTHON]
