"""The programs that run inside the sandbox, as text: a module of this package with `wire` in front.

Invariant: they import nothing of Shoal there, as the sandbox shows nothing of it. Called by `code.reward` and `own`.
"""

from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def program(name: str) -> str:
    """The text of `name`.py, which imports `wire` and `channel` from Shoal, to run without Shoal."""
    wire, own = ((HERE / f"{each}.py").read_text() for each in ("wire", name))
    lines = [line for line in own.splitlines() if not line.startswith("from shoal.")]
    return "\n".join([wire, "import channel", *lines, ""])
