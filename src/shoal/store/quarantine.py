"""Submissions are first read in here, by a child process that a file may kill: one flipped bit can make pyarrow abort.

Invariant: a file that crashes, stalls or overfills its reader is refused like any other bad file, and costs the caller
nothing but the child; the child outlives neither its parent nor, while it reads, twice the time limit.
Called by validator, which then reads what the child let pass: same bytes, same code, so they pass there too.
Left out: a sandbox (this guards against crashes, not against code that a file might run), a memory limit anywhere but
on Linux, checks by several threads at once.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from shoal.store.rollouts import BadSignatureError, RolloutFileError, read_submission

START_S = 60.0
OUT_OF_MEMORY = 3  # the child's exit status
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # by an operator or a machine out of memory: no fault of the file
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_IO_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
SYSTEM_POOL = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others reserve far more address space than they use


class Quarantine:
    """The child: started by the first file, kept for the next ones, replaced when it dies.

    max_rows and max_tokens as for `read_submission`; memory_bytes is what one file may take beyond the imports.
    """

    def __init__(self, max_rows: int, max_tokens: int, *, memory_bytes: int = 1 << 30, timeout_s: float = 20.0) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.memory_bytes = memory_bytes
        self.timeout_s = timeout_s
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child. A later `check` starts another."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.communicate()

    def check(self, data: bytes) -> None:
        """Return if the child read the file; raise its RolloutFileError or BadSignatureError, or one for how it died.

        Raises OSError where no child can be started.
        """
        line = self._ask(data) or self._ask(data)
        if not line:
            raise RolloutFileError("its reader was killed twice")
        answer = json.loads(line)
        if answer["error"] is not None:
            raise (BadSignatureError if answer["bad_signature"] else RolloutFileError)(answer["error"])

    def _ask(self, data: bytes) -> bytes:
        """The child's answer, b"" where somebody else killed it. Raises RolloutFileError where the file did."""
        child, self.child = self.child or self._start(), None  # until it has answered, it is not to be asked again
        try:
            line = _exchange(child, data, self.timeout_s)
        except TimeoutError as error:
            raise RolloutFileError(f"takes more than {self.timeout_s:g} s to read") from error
        if line:
            self.child = child
        elif child.returncode == OUT_OF_MEMORY:
            raise RolloutFileError(f"takes more than {self.memory_bytes >> 20} MiB of memory to read")
        elif child.returncode not in KILLED:
            raise RolloutFileError(f"ends its reader: {_ending(child.returncode)}")
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        limits = (self.max_rows, self.max_tokens, self.memory_bytes, 2 * self.timeout_s)
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal.store.quarantine", *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SINGLE | SYSTEM_POOL,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        if not _exchange(child, None, START_S):
            raise ChildProcessError(f"the reader of submissions does not start: {_ending(child.returncode)}")
        return child


def _exchange(child: subprocess.Popen[bytes], data: bytes | None, timeout_s: float) -> bytes:
    """Send a file, if there is one, and return the child's next line; b"" and its returncode set if it died instead.

    Raises TimeoutError, the child killed, if both together take longer than timeout_s.
    """
    assert child.stdin is not None and child.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(timeout_s, end)  # wakes a blocked write too: into a pipe without a reader
    timer.start()
    try:
        if data is not None:
            child.stdin.write(len(data).to_bytes(8, "big"))
            child.stdin.write(data)
            child.stdin.flush()
        line = child.stdout.readline()
    except BrokenPipeError:
        line = b""
    finally:
        timer.cancel()
        timer.join()
    if late.is_set() or not line.endswith(b"\n"):
        child.communicate()
        line = b""
    if late.is_set():
        raise TimeoutError(f"the reader of submissions is silent for {timeout_s:g} s")
    return line


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def main(max_rows: int, max_tokens: int, memory_bytes: int, alarm_s: float) -> None:
    """The child: a line of JSON when it is ready, then one for each file on stdin, led by its size in 8 bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])  # what the imports take
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answer = _answer(None)
    while True:
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
        size = sys.stdin.buffer.read(8)
        if len(size) < 8:
            return
        signal.setitimer(signal.ITIMER_REAL, alarm_s)  # its default is to end the process, whatever that is doing
        answer = _read(int.from_bytes(size, "big"), max_rows, max_tokens)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read(size_bytes: int, max_rows: int, max_tokens: int) -> str:
    try:
        read_submission(sys.stdin.buffer.read(size_bytes), max_rows=max_rows, max_tokens=max_tokens)
    except RolloutFileError as error:
        if isinstance(error.__cause__, MemoryError):
            os._exit(OUT_OF_MEMORY)
        return _answer(error)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # without an answer: what it has left may be too little for an honest file
    return _answer(None)


def _answer(refusal: RolloutFileError | None) -> str:
    return json.dumps({"error": refusal and str(refusal), "bad_signature": isinstance(refusal, BadSignatureError)})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
