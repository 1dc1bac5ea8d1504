"""Reads submissions by way of a child process that a file may kill: one flipped bit can make pyarrow abort.

Invariant: a file that crashes, stalls or overfills its reader is refused like any other bad file, and costs the caller
only the child. The file is decoded once, in the child. The parent takes plain arrays from it, checks their sizes, and
verifies the signature over them itself. The child ends with its parent and, while it reads, after twice the time limit.
Called by the validator.
Left out: a sandbox (this guards against crashes, not against code that a file might run), a memory limit on systems other
than Linux, reads by several threads at once.
"""

import os
import signal
import subprocess
import sys
import threading
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.store.columns import SUBMISSION, unpack
from shoal.store.decode import MAX_HEADER_BYTES, OUT_OF_MEMORY, Decoded
from shoal.store.rollouts import FileLimits, Rollout, RolloutFile, RolloutFileError, verified_submission

START_S = 60.0
MAX_LINE_BYTES = 1 << 16
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # by an operator or for lack of memory: the file is not to blame
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_IO_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
SYSTEM_POOL = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others reserve far more address space than they use


class _Answer(BaseModel):
    """The child's answer about a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    error: str | None = None
    header: str = Field(default="", max_length=MAX_HEADER_BYTES)
    signature: str = Field(default="", max_length=MAX_HEADER_BYTES)
    rows: int = Field(default=0, ge=0)
    size_bytes: int = Field(default=0, ge=0)


class Quarantine:
    """The child: started by the first file, kept for the next ones, replaced when it dies.

    max_rows and max_tokens as for `read_submission`; memory_bytes is what one file may take beyond the imports.
    """

    def __init__(self, max_rows: int, max_tokens: int, *, memory_bytes: int = 1 << 30, timeout_s: float = 20.0) -> None:
        self.limits = FileLimits(max_rows, max_tokens)
        self.memory_bytes = memory_bytes
        self.timeout_s = timeout_s
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child. A later `read` starts another."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.communicate()

    def read(self, data: bytes) -> RolloutFile[Rollout]:
        """The submission's rows under a valid signature.

        Raises RolloutFileError or BadSignatureError, also if the file kills the child; OSError if no child starts.
        """
        found = self._ask(data) or self._ask(data)
        if found is None:
            raise RolloutFileError("its reader was killed twice")
        answer, columns = found
        if answer.error is not None:
            raise RolloutFileError(answer.error)
        unpacked = unpack(columns, answer.rows, SUBMISSION, self.limits)
        decoded = Decoded(answer.header, answer.signature, unpacked)
        return verified_submission(decoded, self.limits)

    def _ask(self, data: bytes) -> tuple[_Answer, bytes] | None:
        """The child's answer; None if somebody else killed it. Raises RolloutFileError if the file did."""
        child, self.child = self.child or self._start(), None  # it takes no other file until it has answered
        most_bytes = self.limits.size_bytes(SUBMISSION)
        try:
            answer = _exchange(child, data, most_bytes, self.timeout_s)
        except TimeoutError as error:
            raise RolloutFileError(f"takes more than {self.timeout_s:g} s to read") from error
        if answer is not None:
            self.child = child
        elif child.returncode == OUT_OF_MEMORY:
            raise RolloutFileError(f"takes more than {self.memory_bytes >> 20} MiB of memory to read")
        elif child.returncode not in KILLED:
            raise RolloutFileError(f"ends its reader: {_ending(child.returncode)}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        limits = (self.limits.max_rows, self.limits.max_tokens, self.memory_bytes, 2 * self.timeout_s)
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal.store.decode", *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SINGLE | SYSTEM_POOL,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        if _exchange(child, None, 0, START_S) is None:
            raise ChildProcessError(f"the reader of submissions does not start: {_ending(child.returncode)}")
        return child


def _exchange(
    child: subprocess.Popen[bytes], data: bytes | None, most_bytes: int, timeout_s: float
) -> tuple[_Answer, bytes] | None:
    """Send a file, if there is one, and return the child's answer; None, and its returncode set, if it died instead.

    Raises TimeoutError, the child killed, if both together take longer than timeout_s; RolloutFileError, likewise, if the
    answer is malformed.
    """
    assert child.stdin is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(timeout_s, end)  # also unblocks a write into a pipe that nobody reads
    timer.start()
    answer = None
    try:
        if data is not None:
            child.stdin.write(len(data).to_bytes(8, "big"))
            child.stdin.write(data)
            child.stdin.flush()
        answer = _receive(child, most_bytes)
    except BrokenPipeError:
        pass  # it died; its returncode says how
    except RolloutFileError:
        child.kill()
        child.communicate()
        raise
    finally:
        timer.cancel()
        timer.join()
    if late.is_set() or answer is None:
        child.communicate()
    if late.is_set():
        raise TimeoutError(f"the reader of submissions is silent for {timeout_s:g} s")
    return answer


def _receive(child: subprocess.Popen[bytes], most_bytes: int) -> tuple[_Answer, bytes] | None:
    assert child.stdout is not None
    line = child.stdout.readline(MAX_LINE_BYTES)
    if not line:
        return None
    try:
        answer = _Answer.model_validate_json(line)
    except ValidationError as error:
        raise RolloutFileError("makes its reader answer nonsense") from error
    if answer.size_bytes > most_bytes:
        raise RolloutFileError(f"makes its reader return {answer.size_bytes} bytes, more than {most_bytes}")
    columns = child.stdout.read(answer.size_bytes)
    return (answer, columns) if len(columns) == answer.size_bytes else None


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
