"""Read submissions in a child process, because one flipped bit in a file can crash pyarrow.

Invariant: a file that crashes its reader, stalls it twice or exhausts its memory or CPU time is refused like any other
bad file, and costs the caller only the child. A slow machine is never a file's fault: the limit counts the child's CPU
time, and a child that does not answer is replaced once. The child decodes the file. The parent takes plain arrays from
the child, checks their sizes, and verifies the signature over them itself. The child ends when its parent ends, or when
it has read one file for twice the time limit.
Called by the validator.
Left out: a sandbox (a child guards against crashes, not against code execution by a file); a memory limit on systems other
than Linux; reads by several threads at once.
"""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Self

from pydantic import Field, ValidationError

from shoal.protocol.messages import Message
from shoal.store.columns import SUBMISSION, FileLimits, RolloutFileError, unpack
from shoal.store.decode import MAX_HEADER_BYTES, OUT_OF_MEMORY, Decoded
from shoal.store.rollouts import Rollout, RolloutFile, verified_submission

START_S = 60.0
MAX_LINE_BYTES = 1 << 16
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # by an operator or the kernel's OOM killer, so it is not the file's fault
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_IO_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
SYSTEM_POOL = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # other pools reserve far more address space than they use


class _Answer(Message):
    """The child's answer for one file."""

    error: str | None = None
    header: str = Field(default="", max_length=MAX_HEADER_BYTES)
    signature: str = Field(default="", max_length=MAX_HEADER_BYTES)
    rows: int = Field(default=0, ge=0)
    size_bytes: int = Field(default=0, ge=0)


class Quarantine:
    """Reads submissions. The first file starts the child, which is reused until it dies.

    max_rows, max_tokens: as for `read_submission`. memory_bytes, cpu_s: the child's memory and CPU time for one file.
    timeout_s: how long to wait for a child's answer.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        *,
        memory_bytes: int = 1 << 30,
        cpu_s: float = 20.0,
        timeout_s: float = 120.0,
    ) -> None:
        self.limits = FileLimits(max_rows, max_tokens)
        self.memory_bytes = memory_bytes
        self.cpu_s = cpu_s
        self.timeout_s = timeout_s
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child. A later `read` starts a new one."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.communicate()

    def read(self, data: bytes, max_rows: int | None = None) -> RolloutFile[Rollout]:
        """Return a submission with a valid signature. `max_rows`: a lower limit for this file.

        Raise RolloutFileError (also if the file crashes the child) or BadSignatureError. Raise OSError if no child starts.
        """
        limits = self.limits if max_rows is None else replace(self.limits, max_rows=min(max_rows, self.limits.max_rows))
        result = self._decode(data, limits) or self._decode(data, limits)
        if result is None:
            raise RolloutFileError(f"its reader was killed or did not answer within {self.timeout_s:g} s, twice")
        answer, columns = result
        if answer.error is not None:
            raise RolloutFileError(answer.error)
        unpacked = unpack(columns, answer.rows, SUBMISSION, limits)
        return verified_submission(Decoded(answer.header, answer.signature, unpacked), limits)

    def _decode(self, data: bytes, limits: FileLimits) -> tuple[_Answer, bytes] | None:
        """Return the child's answer; None if somebody killed it, or if it does not answer.

        Raise RolloutFileError if the file ended the child.
        """
        child, self.child = self.child or self._start(), None  # the child is reused only if it answers
        try:
            answer = _exchange(child, data, limits, self.timeout_s)
        except TimeoutError:
            return None
        if answer is not None:
            self.child = child
        elif child.returncode == -signal.SIGPROF:
            raise RolloutFileError(f"takes more than {self.cpu_s:g} s of CPU time to read")
        elif child.returncode == OUT_OF_MEMORY:
            raise RolloutFileError(f"takes more than {self.memory_bytes >> 20} MiB of memory to read")
        elif child.returncode not in KILLED:
            raise RolloutFileError(f"ends its reader: {_ending(child.returncode)}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        limits = (self.limits.max_tokens, self.memory_bytes, self.cpu_s, 2 * self.timeout_s)
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal.store.decode", *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SINGLE | SYSTEM_POOL,
            start_new_session=True,  # so that Ctrl-C reaches only the parent
        )
        if _exchange(child, None, self.limits, START_S) is None:
            raise ChildProcessError(f"the reader of submissions does not start: {_ending(child.returncode)}")
        return child


def _exchange(
    child: subprocess.Popen[bytes], data: bytes | None, limits: FileLimits, timeout_s: float
) -> tuple[_Answer, bytes] | None:
    """Send `data` to the child, unless it is None. Return the child's answer, or None if the child died.

    Kill the child and raise TimeoutError after timeout_s, or RolloutFileError if the answer is malformed.
    """
    assert child.stdin is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(timeout_s, end)  # killing the child also unblocks a write to its pipe
    timer.start()
    answer = None
    try:
        if data is not None:
            child.stdin.write(len(data).to_bytes(8, "big") + limits.max_rows.to_bytes(8, "big"))
            child.stdin.write(data)
            child.stdin.flush()
        answer = _receive(child, limits.size_bytes(SUBMISSION))
    except BrokenPipeError:
        pass  # the child died; its returncode says why
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
        raise TimeoutError(f"the reader of submissions did not answer within {timeout_s:g} s")
    return answer


def _receive(child: subprocess.Popen[bytes], max_bytes: int) -> tuple[_Answer, bytes] | None:
    assert child.stdout is not None
    line = child.stdout.readline(MAX_LINE_BYTES)
    if not line:
        return None
    try:
        answer = _Answer.model_validate_json(line)
    except ValidationError as error:
        raise RolloutFileError("makes its reader send an invalid answer") from error
    if answer.size_bytes > max_bytes:
        raise RolloutFileError(f"makes its reader return {answer.size_bytes} bytes, more than {max_bytes}")
    columns = child.stdout.read(answer.size_bytes)
    return (answer, columns) if len(columns) == answer.size_bytes else None


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
