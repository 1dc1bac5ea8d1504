"""Gives memory that was freed back to the system.

glibc keeps freed pieces below its threshold (32 MB in children of `shoal run`), and returns only those at the end of the
heap by itself: what loading or evaluating a model leaves in between would be held for the rest of the run.
Called where something large has just ended; it takes the kernel some milliseconds a gigabyte. Elsewhere it does nothing.
"""

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """glibc's function; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not in this library; no library of the process can be opened
        return None
