"""Deliberate faults, each with the tests that should catch it. `run` applies them. If a fault survives, a test is missing.

Each block of `faults.txt` is a fault. Its first line names a file in src/shoal, a file in tests/ and, optionally, an
expression for pytest's -k. Then come the text to replace (`-`) and its replacement (`+`). Without a replacement, the text is
deleted. Invariant: the text to replace occurs exactly once in its file. `test_faults` checks this.
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
        old, new = (text.strip().splitlines() or ["(deleted)"] for text in (self.old, self.new))
        return f"{self.file}: {old[0][:60]} -> {new[0][:90]}"


def read(block: str) -> Fault:
    first, *lines = block.splitlines()
    file, tests, *only = first.split(" ", 2)
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    return Fault(file, old, new, tests, *only)


BLOCKS = Path(__file__).with_suffix(".txt").read_text().strip().split("\n\n")
FAULTS = [read(block) for block in BLOCKS if not block.startswith("#")]
