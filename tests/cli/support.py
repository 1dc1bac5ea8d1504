"""Helpers shared by the tests of commands."""

import threading
import time
from collections.abc import Callable

import pytest


def wait_until(condition: Callable[[], object], within_s: float = 60.0, what: str = "the condition") -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {within_s} s for {what}"
        time.sleep(0.02)


def sets(*settings: str) -> list[str]:
    """Return the arguments that override these fields of a config."""
    return [word for setting in settings for word in ("--set", setting)]


def replace_begin(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep commands from changing this process's signals and log. Return the event that a signal would set."""
    stop = threading.Event()
    monkeypatch.setattr("shoal.cli.launch.process.begin", lambda name, *, threads: stop)
    return stop
