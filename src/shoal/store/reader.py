"""The child process in which submissions are decoded: a malformed file may abort it, stall it or exhaust its memory.

It answers a line of JSON when it is ready, then one answer for each file on stdin, which follows its size in 8 bytes.
An answer is a line of JSON, {"error": ...} or {"header", "signature", "rows", "size_bytes"}, and then `size_bytes` bytes
of columns (`columns.pack`). It checks no signature: the parent does, and trusts nothing that this process says.
Started by `quarantine`.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import pyarrow.compute  # noqa: F401  which pyarrow imports at its first use: not at the expense of a file's memory

from shoal.store.columns import SUBMISSION, Limits, RolloutFileError, pack
from shoal.store.decode import decode

OUT_OF_MEMORY = 3  # exit status


def main(max_rows: int, max_tokens: int, memory_bytes: int, alarm_s: float) -> None:
    """memory_bytes is what one file may take beyond the imports; after alarm_s on one file the process ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])  # taken by the imports
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _answer({"error": None})
    while True:
        size = sys.stdin.buffer.read(8)
        if len(size) < 8:
            return
        signal.setitimer(signal.ITIMER_REAL, alarm_s)  # SIGALRM ends the process, whatever it is doing
        _read(int.from_bytes(size, "big"), Limits(max_rows, max_tokens))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read(size_bytes: int, limits: Limits) -> None:
    try:
        decoded = decode(sys.stdin.buffer.read(size_bytes), SUBMISSION, limits)
        columns = pack(decoded.columns)
        about = {"header": decoded.header, "signature": decoded.signature, "rows": decoded.rows}
    except RolloutFileError as error:
        if isinstance(error.__cause__, MemoryError):
            os._exit(OUT_OF_MEMORY)
        _answer({"error": str(error)})
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # it may have too little memory left for an honest file
    else:
        _answer(about | {"size_bytes": len(columns)}, columns)


def _answer(about: dict[str, object], columns: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(about).encode() + b"\n" + columns)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
