"""Start processes, wait for them, and read what they print."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHOAL = [sys.executable, "-m", "shoal"]
LATEST_S = 600.0
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
    """Return the next line whose start matches `pattern`. Raise SystemExit if the process ends without it, or has
    not printed it after LATEST_S."""
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


def wait_until(
    true: Callable[[], Any], what: str, log: Path | None = None, process: Any = None, within_s: float = LATEST_S
) -> None:
    """Wait until `true()`. Raise SystemExit with the end of `log` if the time is up, or if `process` ends before."""
    deadline_s = time.monotonic() + within_s
    while not true():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline_s:
            tail = log.read_text(errors="replace")[-2000:] if log is not None else ""
            raise SystemExit(f"no {what}: {'its process ended' if ended else f'waited {within_s:g} s'}. {tail}")
        time.sleep(0.1)
