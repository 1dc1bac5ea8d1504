"""The fork server: a preloaded interpreter that forks a supervisor for each program; the supervisor forks the program.

Invariants: a program cannot affect the server, which never runs programs itself. The server has one socket to the pool,
handles one request at a time, and exits when the socket closes or the pool's process dies. A supervisor exits when the
program ends, when the pool closes its end of the leash (a socket), when the pool dies, or at the wall limit. By then
every process that the program started is dead. Once the program's code runs, only the supervisor can write to the
leash, so a program cannot fake a report. In confined tiers, the server and each supervisor are process 1 of a PID
namespace. In `plain`, the server is the supervisor.
Left out: concurrent programs (the pool starts more servers) and the program's output (the pool reads the pipes).
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
# Common imports, shared by fork; a program still imports them by name.
WARM = [
    "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "io", "itertools", "json", "linecache", "math", "operator", "queue", "random", "re", "statistics",
    "string", "textwrap", "threading", "time", "traceback", "types", "typing",
]  # fmt: skip
MAX_DESCRIPTORS = 8
READY, DONE = b"ready", b"done"
BACKSTOP_S = 0.5  # the supervisor stops a program this much later than the pool would
MAX_WAIT_S = 3600.0  # the longest wait of one `poll` call
PROCESS_CPU_CLOCK = 2  # low bits of the clock id of a process's CPU clock
LOWEST = 16  # the program may use all lower descriptors


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
    if config["plain"]:  # do not count the server's imports against its programs
        pages = [int(count) for count in Path("/proc/self/statm").read_text().split()[:2]]
        config["reserved_bytes"], config["resident_bytes"] = (count * resource.getpagesize() for count in pages)
    self_fd = os.pidfd_open(os.getpid())
    socket.send_fds(control, [READY], [self_fd])
    os.close(self_fd)
    while serve_one(control, config):
        pass
    if config["plain"]:
        kill_descendants()
    os._exit(0)


def serve_one(control: socket.socket, config: dict[str, Any]) -> bool:
    """Wait for a request and run its program. Return False if the pool has gone."""
    if readable([control.fileno(), config["parent"]]) != {control.fileno()}:
        return False
    message, descriptors, _, _ = socket.recv_fds(control, 64, MAX_DESCRIPTORS)
    if not message:
        return False
    if config["plain"]:  # trusted code needs no separate supervisor
        copies = [duplicate(descriptor, LOWEST) for descriptor in descriptors]
        close(descriptors)
        supervise(config, copies)
    elif not fork_supervisor(control, config, descriptors):
        return False
    with contextlib.suppress(OSError):  # the pool has gone; the next call notices
        control.send(DONE)
    return True


def fork_supervisor(control: socket.socket, config: dict[str, Any], descriptors: list[int]) -> bool:
    """Fork a supervisor into new namespaces and wait for it. Return False if the pool has gone."""
    child = kernel.fork_into(FRESH)
    if child == 0:
        try:
            supervise(config, keep_only(descriptors))
        finally:
            os._exit(0)
    close(descriptors)
    ended = os.pidfd_open(child)
    orphaned = readable([ended, control.fileno(), config["parent"]]) != {ended}
    os.close(ended)
    if orphaned:
        return False
    os.waitpid(child, 0)
    return True


def readable(descriptors: list[int]) -> set[int]:
    """Wait until any descriptor is readable. No deadline is needed, because the pool's death makes one readable."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll()}


# --- the supervisor of one program ------------------------------------------------------------------------------------


def supervise(config: dict[str, Any], descriptors: list[int]) -> None:
    """Prepare scratch space, start the program, wait, kill everything, report, close the descriptors."""
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
                os._exit(1)  # never return into the server's code
        close([stdin, stdout, stderr, *frames])
        timely = wait(
            child, leash, time.monotonic() + request["wall_s"] + BACKSTOP_S, request["cpu_s"], request["idle_s"]
        )
        code, resident_kib = kill_all(child, plain)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
        memory_bytes = max(0, (resident_kib << 10) - config.get("resident_bytes", 0))
        report(leash, {"code": code, "timely": timely, "cpu_s": cpu_s, "memory_bytes": memory_bytes})
    except BaseException as error:  # noqa: BLE001 - reported to the pool, which raises it
        report(leash, {"error": f"{type(error).__name__}: {error}"})
    os.close(leash)


def duplicate(descriptor: int, lowest: int) -> int:
    """Return a copy of the descriptor with a number of at least `lowest`."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)


def keep_only(descriptors: list[int]) -> list[int]:
    """Renumber these descriptors from LOWEST up. Close all others, including the server's socket, but not stdio."""
    high = [duplicate(descriptor, 64) for descriptor in descriptors]
    os.closerange(3, 64)
    kept = [duplicate(descriptor, LOWEST) for descriptor in high]
    os.closerange(64, 1 << 16)
    return kept


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def make_scratch() -> None:
    """Enter an empty folder of bounded size, which vanishes with its mount namespace."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    options = f"mode=0700,nr_inodes=4096,size={program.SCRATCH_BYTES}"
    kernel.mount("tmpfs", program.SCRATCH, "tmpfs", flags, options)
    os.chdir(program.SCRATCH)


def wait(child: int, leash: int, deadline: float, cpu_s: float, idle_s: float) -> bool:
    """Wait until the program ends or the pool closes the leash. Return False on timeout.

    A fifth of `cpu_s` must be used in every `idle_s`.

    Measure CPU time here, because RLIMIT_CPU counts clock ticks and was seen to kill at two thirds of its limit.
    """
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(leash, select.POLLIN | select.POLLRDHUP)
    clock = ~child << 3 | PROCESS_CPU_CLOCK
    counted_s, idle_until = 0.0, time.monotonic() + idle_s
    try:
        while True:
            now, used_s = time.monotonic(), time.clock_gettime(clock)
            if now >= idle_until and used_s - counted_s >= cpu_s / 5:
                counted_s, idle_until = used_s, now + idle_s
            left_s = min(deadline - now, idle_until - now, cpu_s - used_s, MAX_WAIT_S)
            if poll.poll(max(0, math.ceil(left_s * 1000))):
                return True
            if left_s <= 0:
                return False
    finally:
        os.close(ended)


def kill_all(child: int, plain: bool) -> tuple[int, int]:
    """Kill and reap all remaining processes. Return the program's exit code or negative signal, and peak memory in KiB."""
    ended, status, usage = os.wait4(child, os.WNOHANG)
    if not plain:
        assert os.getpid() == 1  # otherwise the next line would kill the host's processes
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    elif not ended:
        os.kill(child, signal.SIGKILL)
    if not ended:
        _, status, usage = os.wait4(child, 0)
    if plain:
        kill_descendants()
    else:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss


def kill_descendants() -> None:
    """Kill and reap all children until none is left. Orphans become children, because this process is a subreaper."""
    while True:
        for child in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def report(leash: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the pool has gone
        os.write(leash, json.dumps(message).encode() + b"\n")
