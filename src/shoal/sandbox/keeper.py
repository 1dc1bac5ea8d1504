"""The keeper of one program: process 1 of its namespaces. It prepares scratch space, waits, kills everything, reports.

Invariant: it ends when the program ends, when the pool pulls the leash (closes its end of a socket), when the pool dies, or
when the wall limit has passed, whichever is first; then nothing that the program started is alive. Only it writes to the
leash once the program's code runs, so a program cannot report for itself. Called by `server.py` right after a fork.
Left out: reading the program's output; the pool reads the pipes itself.
"""

import base64
import contextlib
import fcntl
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from shoal.sandbox import kernel, program

SCRATCH = "/tmp"  # noqa: S108 - a fresh mount
BACKSTOP_S = 0.5  # the pool's own clock comes first
PROCESS_CPU_CLOCK = 2  # the kernel's way to name the exact CPU clock of a process
LOWEST = 16  # numbers below are for the program's own descriptors


def main(config: dict[str, Any], descriptors: list[int]) -> NoReturn:
    payload, stdin, stdout, stderr, leash, *frames = raise_above(LOWEST, descriptors)
    strong = config["tier"] != "rlimits"
    scratch = ""
    try:
        request = json.loads(read_all(payload))
        if not strong:
            kernel.call_prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            kernel.call_prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        scratch = make_scratch(request, config)
        child = os.fork()
        if child == 0:
            try:
                program.main(config, request, [stdin, stdout, stderr, *frames], leash, scratch)
            finally:
                os._exit(1)  # never back into this code
        for descriptor in (stdin, stdout, stderr, *frames):
            os.close(descriptor)
        timely = wait(child, leash, time.monotonic() + request["wall_s"] + BACKSTOP_S, request["cpu_s"])
        code = end(child, strong)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        report(leash, {"code": code, "timely": timely, "cpu_s": usage.ru_utime + usage.ru_stime})
    except BaseException as error:  # noqa: BLE001 - told to the pool, which raises it
        report(leash, {"error": f"{type(error).__name__}: {error}"})
    if scratch and not strong:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def raise_above(lowest: int, descriptors: list[int]) -> list[int]:
    """Move descriptors up and close every other one but stdio: the server's socket among them."""
    raised = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in descriptors]
    os.closerange(3, 64)
    lowered = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest) for descriptor in raised]
    os.closerange(64, 1 << 16)
    return lowered


def read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def make_scratch(request: dict[str, Any], config: dict[str, Any]) -> str:
    """An empty folder, bounded and gone with its mount namespace in the strong tiers; the program's files in it."""
    if config["scratch"]:
        scratch: str = tempfile.mkdtemp(dir=config["scratch"])
    else:
        scratch = SCRATCH
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("tmpfs", SCRATCH, "tmpfs", flags, f"mode=0700,nr_inodes=4096,size={request['scratch_bytes']}")
    os.chdir(scratch)
    for name, content in request["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(base64.b64decode(content))
    return scratch


def wait(child: int, leash: int, deadline: float, cpu_s: float) -> bool:
    """Until the program ends or the leash is pulled; False: its time is over.

    CPU time is read here because RLIMIT_CPU counts clock ticks, and has been seen to kill at two thirds of its limit.
    """
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(leash, select.POLLIN | select.POLLRDHUP)
    clock = ~child << 3 | PROCESS_CPU_CLOCK
    try:
        while True:
            left_s = min(deadline - time.monotonic(), cpu_s - time.clock_gettime(clock))
            if poll.poll(max(0, math.ceil(left_s * 1000))):
                return True
            if left_s <= 0:
                return False
    finally:
        os.close(ended)


def end(child: int, strong: bool) -> int | None:
    """Kill and reap all that is left. Returns the program's exit code, or its signal as a negative number."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if strong:
        assert os.getpid() == 1  # or the next line would kill the host
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    elif not ended:
        os.kill(child, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(child, 0)
    if strong:
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
    else:
        end_descendants()
    return os.waitstatus_to_exitcode(status)


def end_descendants() -> None:
    """Kill and reap all children until there are none; orphans come to a subreaper as its children."""
    while True:
        for child in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def report(leash: int, message: dict[str, Any]) -> None:
    try:
        os.write(leash, json.dumps(message).encode() + b"\n")
    except OSError:  # the pool has gone: nobody to tell
        sys.exit(1)
