"""Start processes, and read what they print."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SHOAL = [sys.executable, "-m", "shoal"]
LATEST_S = 600.0  # a process that prints nothing for this long is killed
STOP_S = 30.0


@contextmanager
def running(argv: Sequence[object], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process, with `more` for Popen. End it with SIGTERM, or with SIGKILL if that takes longer than STOP_S."""
    process = subprocess.Popen(list(map(str, argv)), text=True, **more)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def serving(command: str, *arguments: object, **more: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `shoal serve` or `shoal dashboard`. Yield the process and its address once it answers."""
    with running([*SHOAL, command, *arguments], stdout=subprocess.PIPE, **more) as process:
        url = re.search(r"http://[\w.:]+", next_line(process, ".*http://"))
        assert url is not None
        if command == "serve":
            next_line(process, "ready")
        yield process, url[0]


def next_json(process: subprocess.Popen[str]) -> Any:
    """Return the next object or list that the process prints as a line of JSON."""
    return json.loads(next_line(process, r"[{\[]"))


def next_line(process: subprocess.Popen[str], pattern: str) -> str:
    """Return the next line whose start matches `pattern`. Skip others. Raise SystemExit if the process prints none."""
    assert process.stdout is not None
    killer = threading.Timer(LATEST_S, process.kill)
    killer.start()
    try:
        for line in process.stdout:
            if re.match(pattern, line):
                return line
    finally:
        killer.cancel()
    raise SystemExit(f"{process.args} printed no line that begins with {pattern}")
