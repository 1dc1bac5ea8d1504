"""The page's own logic, under Node's test runner."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FRONT = Path(__file__).parent / "front"
LEAST = (20, 19)  # the first that reads modules without a package.json


def test_the_front_ends_logic() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    found = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if version < LEAST:
        pytest.skip(f"node {found.strip()} is too old; {LEAST[0]}.{LEAST[1]} is needed")
    tests = sorted(map(str, FRONT.glob("*.test.mjs")))
    ran = subprocess.run([node, "--test", *tests], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
