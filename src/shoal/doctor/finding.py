"""One line of the doctor's report: what was looked at, how it stands, and what to do about it.

Invariant: every finding that is not "ok" has a remedy. Made by `examine`, printed by `cli`.
"""

import textwrap
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fails"]


@dataclass(frozen=True)
class Finding:
    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.verdict == "ok") == bool(self.remedy):
            raise ValueError(f"{self.name}: a remedy belongs to what is wrong, and to nothing else")

    def line(self, width: int = 0) -> str:
        """Wrapped and indented at `width` columns; in one line if `width` is 0."""
        said = f"{self.verdict:7}  {self.name:12}  {self.found}" + (f"; {self.remedy}" if self.remedy else "")
        below = " " * (7 + 2 + 12 + 2)
        wrapped = textwrap.wrap(said, width, subsequent_indent=below, break_long_words=False) if width else [said]
        return "\n".join(wrapped)


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warning", found, remedy)


def fails(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "fails", found, remedy)
