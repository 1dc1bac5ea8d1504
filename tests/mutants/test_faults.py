"""The list of faults fits the code: each can be applied, and the tests that are meant to catch it exist."""

from pathlib import Path

from .faults import FAULTS

ROOT = Path(__file__).parents[2]


def test_every_fault_changes_one_place_of_the_code_and_names_tests() -> None:
    for fault in FAULTS:
        text = (ROOT / "src/shoal" / fault.file).read_text()
        assert text.count(fault.old) == 1, fault.name
        assert fault.old != fault.new and (ROOT / "tests" / fault.tests).exists(), fault.name
        if fault.only:
            assert fault.only in (ROOT / "tests" / fault.tests).read_text(), fault.name


def test_there_are_enough_of_them_in_every_part() -> None:
    assert len(FAULTS) >= 60 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    for part in ("learner", "model", "model/sampling", "validator", "toploc", "shardcast"):
        assert sum(fault.file.startswith(part) for fault in FAULTS) >= 4, part
