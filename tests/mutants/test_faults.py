"""Each fault can be applied to the code, and the tests that should catch it exist."""

import re
from pathlib import Path

from .faults import FAULTS

ROOT = Path(__file__).parents[2]
NAMES_TESTS = re.compile(r"def test_|\bids?=")  # a line with the name of a test or of its parameters


def test_each_fault_changes_one_place_and_names_existing_tests() -> None:
    for fault in FAULTS:
        text = (ROOT / "src/shoal" / fault.file).read_text()
        assert text.count(fault.old) == 1, fault.name
        assert fault.old != fault.new and (ROOT / "tests" / fault.tests).exists(), fault.name
        if fault.only:
            lines = (ROOT / "tests" / fault.tests).read_text().splitlines()
            assert any(fault.only in line and NAMES_TESTS.search(line) for line in lines), fault.name


def test_every_part_has_enough_faults() -> None:
    assert len(FAULTS) >= 60 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    for part in ("learner", "model", "model/sampling", "validator", "toploc", "shardcast"):
        assert sum(fault.file.startswith(part) for fault in FAULTS) >= 4, part
