"""Set up each process of a run: threads, logging, signals, and the end of the process when its parent is gone.

Invariant: no process of a run outlives `shoal run`, even after kill -9.
"""

import atexit
import ctypes
import errno
import gc
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from setproctitle import setproctitle

from shoal.config.config import PRIVATE
from shoal.errors import UserError, printable

PARENT_POLL_S = 0.5
TRIM_S = 5.0  # how often freed memory is returned to the system
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
# Idle OpenMP threads spin briefly before they leave the core to other processes, because waking them between two
# operations of a model takes longer than a small operation (docs/results.md, "Threads that wait"). Only GNU OpenMP
# reads GOMP_SPINCOUNT.
IDLE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


HIDDEN = re.compile(rf"((?:{'|'.join(map(re.escape, PRIVATE))})=|--(?:rpc|key-file)[ =])\S+|shoal1\.\S+")


def show_title(command: Sequence[str]) -> None:
    """Show the command in the list of processes, which every user of the machine reads: no invite, no private field."""
    setproctitle(HIDDEN.sub(r"\1…", " ".join(["shoal", *command])))


class Interrupted(Exception):
    """Ctrl-C was pressed, or SIGTERM arrived."""


def begin(name: str, *, threads: int) -> threading.Event:
    """Set up logging, signals and threads. Return the event that SIGTERM and SIGINT set. `threads` 0: all cores."""
    log_lines(name)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if threads:
        _limit_threads(threads)
    atexit.register(gc.freeze)  # skips the interpreter's last garbage collection, which can take seconds with torch
    return stop


class _Printable(logging.Formatter):
    """Replace unprintable characters, because a message or a traceback may quote another machine."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_lines(name: str) -> None:
    """Log to standard error, with the time and this name."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable(f"%(asctime)s {name}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def listen(host: str, port: int, what: str) -> socket.socket:
    """Return a listening socket. `what`: the server's name in the error message. Raise UserError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        unknown = isinstance(error.__context__, socket.gaierror)  # its numbers are not those of `os.strerror`
        why = "no such host" if unknown else os.strerror(error.errno or 0)
        is_host = unknown or error.errno == errno.EADDRNOTAVAIL
        hint = "choose another host" if is_host else "choose another port, or 0 for a free one"
        raise UserError(f"{what} cannot listen at {host}:{port}: {why}; {hint}") from error


def follow(alive: Callable[[], bool]) -> None:
    """End this process once `alive()`, called twice a second, returns False because the parent is gone."""
    threading.Thread(target=_end_with, args=(alive,), daemon=True, name="parent").start()


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Raise Interrupted in the main thread at the first SIGINT or SIGTERM; ignore later ones."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not break the clean-up
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _limit_threads(threads: int) -> None:
    """Limit the threads of numeric libraries; must be called before torch is first imported."""
    for variable in THREAD_COUNTS:
        os.environ[variable] = str(threads)
    for variable, value in IDLE_THREADS.items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _end_with(alive: Callable[[], bool]) -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    trimmed_s = time.monotonic()
    while alive():
        time.sleep(PARENT_POLL_S)
        if trim is not None and time.monotonic() - trimmed_s > TRIM_S:
            trim(0)
            trimmed_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    os._exit(1)
