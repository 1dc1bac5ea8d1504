"""The fork server: a warm interpreter inside the sandbox that forks a keeper for each program and never runs one itself.

Invariant: nothing that a program does reaches this process. It holds one socket to the pool, takes one request at a time and
ends when the socket closes or the pool's process dies. In the strong tiers it is process 1, so all else inside dies with it.
Called by `launch.py`, or by bwrap. Left out: a second program at once; the pool starts more servers for that.
"""

import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import types
from typing import Any, NoReturn

from shoal.sandbox import keeper, kernel, program, seccomp

FRESH = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
# What programs import most; a fork shares it, and each program still has to import it by name.
WARM = [
    "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "io", "itertools", "json", "linecache", "math", "operator", "queue", "random", "re", "statistics",
    "string", "textwrap", "threading", "time", "traceback", "types", "typing",
]  # fmt: skip
MOST_DESCRIPTORS = 8
READY, DONE = b"ready", b"done"


def main(config: dict[str, Any]) -> NoReturn:
    strong = config["tier"] != "rlimits"
    control = socket.socket(fileno=config["control"])
    os.close(config["blob"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ["PYTHONHASHSEED"] = "0"
    sys.path += config["paths"]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would not survive a fork
    for name in (*WARM, *config["packages"]):
        importlib.import_module(name)
    del os.environ["OPENBLAS_NUM_THREADS"]
    program.warm_up()
    for name, text in config["preloaded"].items():
        sys.modules[name] = module = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    if strong:
        program.FILTERS.update({forks: seccomp.Filter(forks) for forks in (False, True)})
        kernel.keep_capabilities(1 << kernel.CAP_SYS_ADMIN)
    else:
        kernel.call_prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()
    self_fd = os.pidfd_open(os.getpid())
    socket.send_fds(control, [READY + sys.version.encode()], [self_fd])
    os.close(self_fd)
    while serve_one(control, config):
        pass
    if not strong:
        keeper.end_descendants()
        shutil.rmtree(config["scratch"], ignore_errors=True)
    os._exit(0)


def serve_one(control: socket.socket, config: dict[str, Any]) -> bool:
    """Wait for one request, fork its keeper, wait for its end. False: the pool has gone."""
    if readable([control.fileno(), config["parent"]]) != {control.fileno()}:
        return False
    message, descriptors, _, _ = socket.recv_fds(control, 64, MOST_DESCRIPTORS)
    if not message:
        return False
    child = os.fork() if config["tier"] == "rlimits" else kernel.fork_into(FRESH)
    if child == 0:
        try:
            keeper.main(config, descriptors)
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(child)
    alone = readable([ended, control.fileno(), config["parent"]]) != {ended}
    os.close(ended)
    if alone:
        return False
    os.waitpid(child, 0)
    if config["tier"] == "rlimits":
        keeper.end_descendants()  # of a keeper that its program killed
    control.send(DONE)
    return True


def readable(descriptors: list[int]) -> set[int]:
    """Wait for any of them, for ever: the pool's death is one of the events."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll()}
