"""Keys pressed in the terminal, read without waiting.

Invariant: on exit the terminal is as it was. Where standard input is not a terminal, or belongs to another process in the
foreground, nothing is changed and no key is ever pressed. Called by the live view.
"""

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Self, TextIO


class Keys:
    """`stream`: the terminal, standard input by default."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdin
        self._before: list[Any] | None = None  # the terminal's settings, while it is in cbreak mode

    @property
    def works(self) -> bool:
        return self._before is not None

    def __enter__(self) -> Self:
        if self._stream.isatty() and _in_foreground(self._stream.fileno()):
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream, termios.TCSANOW)  # keys come one by one and unechoed; Ctrl-C still interrupts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._stream, termios.TCSANOW, self._before)
            self._before = None

    def pressed(self) -> str:
        """All keys pressed since the last call, in order."""
        if self._before is None or not select.select([self._stream], [], [], 0)[0]:
            return ""
        return os.read(self._stream.fileno(), 1024).decode(errors="replace")


def _in_foreground(fd: int) -> bool:
    """Whether this process may change the terminal: a background process that tries is stopped by the system."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # it is not the controlling terminal: no such rule
        return True
