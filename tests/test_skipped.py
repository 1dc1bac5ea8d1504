"""`make test` lists skipped tests with the commands that install what they need. A real pytest run checks this."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest
@pytest.mark.parametrize("n", range(3))
def test_sandbox(n): pytest.skip("sandbox tier bubblewrap: no program bwrap found; install it (`make sandbox`)")
@pytest.mark.skipif(True, reason="anvil is not installed: make evm")
def test_anvil(): pass
def test_evals(): pytest.importorskip("no_such_module", reason="lm_eval is not installed: pip install 'shoal[evals]'")
def test_other(): pytest.skip("kernel does not promise this")
def test_fine(): pass
"""
MODULE = 'import pytest\npytest.skip("rclone is not installed: make servers", allow_module_level=True)\n'


def last_lines(folder: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "tests.skipped", *options, folder]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("skipped ")]


def test_each_missing_thing_has_one_line_with_its_number_of_tests_and_its_command(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    expected = [
        "skipped 1: anvil is not installed. To run them: make evm",
        "skipped 3: sandbox tier bubblewrap: no program bwrap found. To run them: make sandbox",
        "skipped 1: rclone is not installed. To run them: make servers",
        "skipped 1: lm_eval is not installed. To run them: pip install 'shoal[evals]'",
        'skipped 1 for other reasons. To list them: make test ARGS="-rs"',
    ]
    assert last_lines(tmp_path, "-p", "no:cacheprovider", "-p", "no:xdist") == expected


def test_nothing_is_printed_if_nothing_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_fine(): pass\n")
    assert last_lines(tmp_path, "-p", "no:cacheprovider", "--numprocesses", "1") == []
