"""Print at the end of a test run which tests were skipped because something is missing, and how to install it."""

import re
from collections import defaultdict

import pytest

# If a test is skipped because something is missing, the reason contains one of these install commands.
REMEDY = re.compile(r"make (?:sandbox|servers|browser|evm)\b|pip install .+")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each command that would let skipped tests run, and one line for all other skipped tests."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.getreports("skipped"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        command = REMEDY.search(reason)
        reasons[command.group() if command else ""].append(reason.removeprefix("Skipped: "))
    others = len(reasons.pop("", []))
    for command_, missing in sorted(reasons.items()):
        why = re.split(f"[;:] *(?=install |{re.escape(command_)})", missing[0])[0]
        terminalreporter.write_line(f"skipped {len(missing)}: {why}. To run them: {command_}")
    if others:
        terminalreporter.write_line(f'skipped {others} for other reasons. To list them: make test ARGS="-rs"')
