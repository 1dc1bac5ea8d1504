"""The page: its logic in node, its weight, and what its files may not do."""

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.watch.page.files import SHARED
from shoal.watch.page.server import STATIC

PAGE = {path.name: path for folder in (SHARED, STATIC) for path in folder.iterdir()}
HERE = Path(__file__).parent


def test_the_logic_of_the_page() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    found = subprocess.run([node, "--test", HERE / "page.test.mjs"], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout[-3000:]


def test_the_page_names_only_files_that_it_has() -> None:
    for name in [name for name in PAGE if (STATIC / name).exists() and name.endswith((".js", ".html"))]:
        text = PAGE[name].read_text()
        named = re.findall(r'(?:from |import )"\./([\w.-]+)"', text) + re.findall(r'"/assets/([\w.-]+)"', text)
        assert set(named) <= PAGE.keys(), name


def test_no_file_makes_markup_or_leaves_the_server() -> None:
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://"):
            assert word not in text, (path.name, word)


def test_the_page_weighs_less_than_100_kilobytes() -> None:
    sizes = [len(gzip.compress(PAGE[path.name].read_bytes())) for path in STATIC.iterdir()]
    assert sum(sizes) < 100_000
