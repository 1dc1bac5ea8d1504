"""The fork server and its keepers: a warm interpreter forks a keeper for each program, and the keeper forks the program.

Invariants: nothing that a program does reaches the server, which never runs one itself. It holds one socket to the
pool, takes one request at a time and ends when the socket closes or the pool's process dies. A keeper ends when the
program ends, when the pool pulls the leash (closes its end of a socket), when the pool dies, or when the wall limit has
passed, whichever is first; then nothing that the program started is alive. Only it writes to the leash once the
program's code runs, so a program cannot report for itself. Behind walls both are process 1 of their namespaces; in
`plain` the server keeps its programs itself.
Left out: a second program at once, and the program's output; the pool starts more servers, and reads the pipes itself.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any, NoReturn

from shoal.sandbox import kernel, program, seccomp

FRESH = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
# What programs import most; a fork shares it, and each program still has to import it by name.
WARM = [
    "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "io", "itertools", "json", "linecache", "math", "operator", "queue", "random", "re", "statistics",
    "string", "textwrap", "threading", "time", "traceback", "types", "typing",
]  # fmt: skip
MAX_DESCRIPTORS = 8
READY, DONE = b"ready", b"done"
BACKSTOP_S = 0.5  # the pool's own clock comes first
LONGEST_WAIT_S = 3600.0  # of one call of `poll`
PROCESS_CPU_CLOCK = 2  # the kernel's way to name the exact CPU clock of a process
LOWEST = 16  # numbers below are for the program's own descriptors


def main(config: dict[str, Any]) -> NoReturn:
    control = socket.socket(fileno=config["control"])
    os.close(config["blob"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not config["plain"]:
        os.environ.clear()
        os.environ["PYTHONHASHSEED"] = "0"
    for name in WARM:
        importlib.import_module(name)
    program.warm_up()
    for name, text in config["preloaded"].items():
        sys.modules[name] = module = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    if config["plain"]:
        kernel.call_prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    else:
        program.FILTERS.append(seccomp.Filter())
        kernel.keep_capabilities(1 << kernel.CAP_SYS_ADMIN)
    gc.collect()
    gc.freeze()
    if config["plain"]:  # what the server has imported is not its programs'
        pages = [int(count) for count in Path("/proc/self/statm").read_text().split()[:2]]
        config["reserved_bytes"], config["resident_bytes"] = (count * resource.getpagesize() for count in pages)
    self_fd = os.pidfd_open(os.getpid())
    socket.send_fds(control, [READY + sys.version.encode()], [self_fd])
    os.close(self_fd)
    while serve_one(control, config):
        pass
    if config["plain"]:
        end_descendants()
    os._exit(0)


def serve_one(control: socket.socket, config: dict[str, Any]) -> bool:
    """Wait for one request, fork its keeper, wait for its end. False: the pool has gone."""
    if readable([control.fileno(), config["parent"]]) != {control.fileno()}:
        return False
    message, descriptors, _, _ = socket.recv_fds(control, 64, MAX_DESCRIPTORS)
    if not message:
        return False
    if config["plain"]:  # code that is trusted needs no keeper of its own
        copies = [above(LOWEST, descriptor) for descriptor in descriptors]
        close(descriptors)
        keep(config, copies)
    elif not keep_apart(control, config, descriptors):
        return False
    with contextlib.suppress(OSError):  # the pool has gone, as the next call sees
        control.send(DONE)
    return True


def keep_apart(control: socket.socket, config: dict[str, Any], descriptors: list[int]) -> bool:
    """Fork a keeper and wait for its end. False: the pool has gone."""
    child = kernel.fork_into(FRESH)
    if child == 0:
        try:
            keep(config, raise_above(LOWEST, descriptors))
        finally:
            os._exit(0)
    close(descriptors)
    ended = os.pidfd_open(child)
    alone = readable([ended, control.fileno(), config["parent"]]) != {ended}
    os.close(ended)
    if alone:
        return False
    os.waitpid(child, 0)
    return True


def readable(descriptors: list[int]) -> set[int]:
    """Wait for any of them, for ever: the pool's death is one of the events."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll()}


# --- the keeper of one program --------------------------------------------------------------------------------------


def keep(config: dict[str, Any], descriptors: list[int]) -> None:
    """Prepare scratch space, start the program, wait, kill everything, report. Closes the descriptors."""
    payload, stdin, stdout, stderr, leash, *frames = descriptors
    plain = config["plain"]
    try:
        request = json.loads(read_all(payload))
        if not plain:
            make_scratch()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if child == 0:
            try:
                program.main(config, request, [stdin, stdout, stderr, *frames], leash)
            finally:
                os._exit(1)  # never back into this code
        close([stdin, stdout, stderr, *frames])
        timely = wait(child, leash, time.monotonic() + request["wall_s"] + BACKSTOP_S, request["cpu_s"])
        code, resident_kib = end(child, plain)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
        memory_bytes = max(0, (resident_kib << 10) - config.get("resident_bytes", 0))
        report(leash, {"code": code, "timely": timely, "cpu_s": cpu_s, "memory_bytes": memory_bytes})
    except BaseException as error:  # noqa: BLE001 - told to the pool, which raises it
        report(leash, {"error": f"{type(error).__name__}: {error}"})
    os.close(leash)


def above(lowest: int, descriptor: int) -> int:
    """Return a copy of the descriptor, out of the way of those that the program gets."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)


def raise_above(lowest: int, descriptors: list[int]) -> list[int]:
    """Move descriptors up and close every other one but stdio: the server's socket among them."""
    raised = [above(64, descriptor) for descriptor in descriptors]
    os.closerange(3, 64)
    lowered = [above(lowest, descriptor) for descriptor in raised]
    os.closerange(64, 1 << 16)
    return lowered


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def make_scratch() -> None:
    """Enter an empty folder, bounded and gone with its mount namespace."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    options = f"mode=0700,nr_inodes=4096,size={program.SCRATCH_BYTES}"
    kernel.mount("tmpfs", program.SCRATCH, "tmpfs", flags, options)
    os.chdir(program.SCRATCH)


def wait(child: int, leash: int, deadline: float, cpu_s: float) -> bool:
    """Wait until the program ends or the leash is pulled; False: its time is over.

    CPU time is read here because RLIMIT_CPU counts clock ticks, and has been seen to kill at two thirds of its limit.
    """
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(leash, select.POLLIN | select.POLLRDHUP)
    clock = ~child << 3 | PROCESS_CPU_CLOCK
    try:
        while True:
            left_s = min(deadline - time.monotonic(), cpu_s - time.clock_gettime(clock), LONGEST_WAIT_S)
            if poll.poll(max(0, math.ceil(left_s * 1000))):
                return True
            if left_s <= 0:
                return False
    finally:
        os.close(ended)


def end(child: int, plain: bool) -> tuple[int, int]:
    """Kill and reap all that is left. Return the program's exit code or negative signal, and its peak of memory in KiB."""
    ended, status, usage = os.wait4(child, os.WNOHANG)
    if not plain:
        assert os.getpid() == 1  # or the next line would kill the host
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    elif not ended:
        os.kill(child, signal.SIGKILL)
    if not ended:
        _, status, usage = os.wait4(child, 0)
    if plain:
        end_descendants()
    else:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss


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
    with contextlib.suppress(OSError):  # the pool has gone: nobody to tell
        os.write(leash, json.dumps(message).encode() + b"\n")
