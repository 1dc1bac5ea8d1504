"""Run the pages' JavaScript tests under Node. Check the files that the pages refer to, and their size."""

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.watch.page.files import SHARED
from shoal.watch.page.server import STATIC

PAGE = {path.name: path for folder in (SHARED, STATIC) for path in folder.iterdir()}
JAVASCRIPT_TESTS = sorted(Path(__file__).parents[2].rglob("*.test.mjs"))
MIN_NODE = (20, 19)  # the first version that loads modules without a package.json


@pytest.mark.parametrize("path", JAVASCRIPT_TESTS, ids=lambda path: path.name)
def test_the_javascript_tests_pass(path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_NODE:
        pytest.skip(f"node {version} is too old; {MIN_NODE[0]}.{MIN_NODE[1]} is required")
    result = subprocess.run([node, "--test", path], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_the_page_refers_only_to_files_that_exist() -> None:
    for name in [name for name in PAGE if (STATIC / name).exists() and name.endswith((".js", ".html"))]:
        text = PAGE[name].read_text()
        names = re.findall(r'(?:from |import )"\./([\w.-]+)"', text) + re.findall(r'"/assets/([\w.-]+)"', text)
        assert set(names) <= PAGE.keys(), name


def test_the_page_is_smaller_than_100_kilobytes() -> None:
    sizes = [len(gzip.compress(PAGE[path.name].read_bytes())) for path in STATIC.iterdir()]
    assert sum(sizes) < 100_000
