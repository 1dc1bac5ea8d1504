"""The short form of benchmarks/fuzz.py: a few thousand damaged proofs, submissions and requests, each properly refused."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .coordinator import fuzz_requests
from .damage import CRASH, damaged
from .files import fuzz_files
from .proofs import fuzz_proofs

pytestmark = pytest.mark.usefixtures("one_thread")


class Noted(Counter[str]):
    def __call__(self, outcome: str) -> None:
        self[outcome] += 1

    def crashes(self) -> list[str]:
        return [outcome for outcome in self if outcome.startswith(CRASH)]


def test_damaged_proofs_are_refused_or_fail() -> None:
    noted = Noted()
    fuzz_proofs(Random(0), 6_000, noted)
    assert noted.crashes() == []
    assert noted.total() == 6_000
    assert min(noted["proof refused"], noted["proof fails"], noted["text refused"], noted["proofs refused"]) > 50


def test_damaged_submissions_are_refused_or_unchanged() -> None:
    noted = Noted()
    fuzz_files(Random(0), 800, noted)
    assert noted.crashes() == []
    assert noted.total() == 800
    assert min(noted["file refused"], noted["file of bad signature"], noted["file passes"]) > 5


def test_damaged_requests_are_answered_below_500(tmp_path: Path) -> None:
    noted = Noted()
    fuzz_requests(Random(0), 800, noted, tmp_path)
    assert noted.crashes() == []
    assert noted.total() == 800
    kinds = ["request: 400", "request: 401", *(f"signed by its role: {status}" for status in (200, 400, 404))]
    assert min(noted[kind] for kind in kinds) > 20


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.binary(max_size=300), st.lists(st.binary(max_size=300), min_size=1, max_size=3))
def test_damage_is_the_same_for_the_same_seed(seed: int, data: bytes, others: list[bytes]) -> None:
    assert damaged(Random(seed), data, others) == damaged(Random(seed), data, others)
