"""Count the files of the package through which each of four stories passes, such as from a heartbeat to a task.

    python -m benchmarks.stories                     this checkout
    python -m benchmarks.stories --root ../before    another checkout, by this interpreter

A test runs each story. A file counts if one of its functions runs during the test, in any thread of this process. Fixtures
do not count, nor do other processes, such as a sandbox's child. A story lists the names that its test had at the commits
compared in results/layout.md. The first name that exists in the checkout is used.
"""

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.common.machine import ROOT

STORIES = {
    "heartbeat to task": [
        "tests/coordinator/test_assignments.py::test_a_worker_that_requests_a_task_gets_one_of_its_version",
        "tests/coordinator/test_assignments.py::test_a_worker_that_asks_gets_a_task_of_its_version",
    ],
    "upload to ledger": [
        "tests/coordinator/http/test_routes.py::test_a_submission_goes_from_worker_to_validator_to_learner",
    ],
    "batch to published weights": [
        "tests/learner/test_loop.py::test_old_versions_and_checkpoints_are_deleted",
        "tests/learner/test_loop.py::test_old_versions_go",
    ],
    "chat request to answer": [
        "tests/serve/test_openai.py::test_a_seed_repeats_its_text_and_other_seeds_give_other_texts",
    ],
}


class Files:
    """A pytest plugin that collects the files whose functions run during a test."""

    def __init__(self, source: Path) -> None:
        self.source, self.files, self.counts = str(source) + os.sep, set[str](), False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self.counts and event == "call" and frame.f_code.co_filename.startswith(self.source):
            self.files.add(frame.f_code.co_filename)

    def pytest_runtest_setup(self) -> None:
        threading.setprofile(self.profile)  # servers' threads start here

    def pytest_runtest_call(self) -> None:
        self.counts = True
        sys.setprofile(self.profile)

    def pytest_runtest_teardown(self) -> None:
        sys.setprofile(None)
        self.counts = False


def count(test: str, root: Path) -> int:
    """Return the number of files that one test passes through. Raise SystemExit if the test fails."""
    import pytest

    files = Files(root / "src" / "shoal")
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(root), str(root / test)], plugins=[files])
    if status:
        raise SystemExit(f"{test} failed: pytest exited with status {status}")
    return len(files.files)


def exists(test: str, root: Path) -> bool:
    path, _, name = test.partition("::")
    return (root / path).exists() and f"def {name}(" in (root / path).read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--test", help="count this test alone, in this process")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    if arguments.test:
        sys.stdout.write(f"\nfiles: {count(arguments.test, root)}\n")
        return
    for story, names in STORIES.items():
        test = next(name for name in names if exists(name, root))
        argv = [sys.executable, str(Path(__file__).resolve()), "--root", str(root), "--test", test]
        environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{ROOT}"}
        done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, check=False)
        files = (
            done.stdout.rpartition("files: ")[2].strip() if done.returncode == 0 else f"failed: {done.stdout[-300:]}"
        )
        sys.stdout.write(f"{story:28} {files}\n")


if __name__ == "__main__":
    main()
