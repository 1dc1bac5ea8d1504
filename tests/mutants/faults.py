"""Deliberate faults, each with the few tests meant to catch it. `run` applies them one by one; a survivor is a missing test.

`faults.txt` holds them, a block for each: the file in src/shoal, the file in tests/ and, if not all of its tests are meant,
pytest's -k; then the text to replace (`-`) and what takes its place (`+`; without: nothing).
Invariant: the text to replace occurs exactly once in its file (`test_faults` checks it, so a change of the code shows here).
"""

from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    file: str  # in src/shoal
    old: str
    new: str
    tests: str  # a file in tests/
    only: str = ""  # pytest's -k

    @property
    def name(self) -> str:
        old, new = (text.strip().splitlines() or ["(gone)"] for text in (self.old, self.new))
        return f"{self.file}: {old[0][:60]} -> {new[0][:90]}"


def read(block: str) -> Fault:
    first, *lines = block.splitlines()
    file, tests, *only = first.split(" ", 2)
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    return Fault(file, old, new, tests, *only)


BLOCKS = Path(__file__).with_suffix(".txt").read_text().strip().split("\n\n")
FAULTS = [read(block) for block in BLOCKS if not block.startswith("#")]
