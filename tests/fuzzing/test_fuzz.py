"""Thousands of damaged proofs, submissions and requests cause no crash. benchmarks/trust/fuzz.py tries a million."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from .coordinator import fuzz_requests
from .damage import CRASH, Note
from .files import fuzz_files
from .proofs import fuzz_proofs

pytestmark = pytest.mark.usefixtures("one_thread")


def check(fuzz: Callable[[Note], None], cases: int, common: list[str], at_least: int) -> None:
    """Check that no case crashes, and that each of the `common` outcomes occurs more than `at_least` times."""
    outcomes: list[str] = []
    fuzz(outcomes.append)
    assert [outcome for outcome in outcomes if outcome.startswith(CRASH)] == []
    assert len(outcomes) == cases
    assert min(outcomes.count(outcome) for outcome in common) > at_least


def test_damaged_proofs_are_refused_or_fail() -> None:
    common = ["proof refused", "proof fails", "text refused", "proofs refused"]
    check(lambda note: fuzz_proofs(Random(0), 6_000, note), 6_000, common, 50)


def test_damaged_submissions_are_refused_or_unchanged() -> None:
    common = ["file refused", "file of bad signature", "file passes"]
    check(lambda note: fuzz_files(Random(0), 800, note), 800, common, 5)


def test_damaged_requests_get_a_status_below_500(tmp_path: Path) -> None:
    common = [
        "request: 400",
        "request: 401",
        *(f"signed by a node of the required role: {status}" for status in (200, 400, 404)),
    ]
    check(lambda note: fuzz_requests(Random(0), 800, note, tmp_path), 800, common, 20)
