"""The program's process: it confines itself, then runs the program's code as `__main__`.

Invariant: in confined tiers, before the first line of that code runs, this process has hard limits, a Landlock domain,
a seccomp filter and an empty environment. It has no capability, cannot gain privileges, and has no descriptor but 0, 1,
2 and, if it exchanges frames, 3 and 4. If any step fails, the code does not run and the pool gets the error. Once the
code runs, nothing that this process reports is trusted.
"""

import _sitebuiltins
import atexit
import builtins
import io
import json
import linecache
import math
import os
import random
import resource
import signal
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from shoal.sandbox import channel, kernel, seccomp

NAME = "program.py"
OUT_OF_MEMORY = signal.SIGUSR1  # this process's signal for an uncaught MemoryError
MAX_FILES = 64
SCRATCH = "/tmp"  # noqa: S108 - a fresh mount
MAIN = types.ModuleType("__main__")
FILTERS: list[seccomp.Filter] = []  # the one filter, built in the server
STACK_BYTES = 64 << 20
SCRATCH_BYTES = 16 << 20
THREADS = 8  # threads beyond a program's first
# Number of the user's other processes: server, supervisor and, in `kernel`, the one outside that waits for the server.
OTHERS = {"bubblewrap": 2, "kernel": 3}


def main(config: dict[str, Any], request: dict[str, Any], stdio: list[int], leash: int) -> NoReturn:
    try:
        os.setsid()
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
        os.closerange(len(stdio), leash)
        os.closerange(leash + 1, 1 << 16)
        set_limits(request, config)
        if config["plain"]:
            kernel.call_prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            confine(config)
        os.close(leash)
    except BaseException as error:  # noqa: BLE001 - reported to the pool, which raises it
        os.write(leash, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        os._exit(1)
    source, scratch = request["source"], "" if config["plain"] else SCRATCH
    config.clear()  # the program can read the frames below its own, which must not name the host's files
    request.clear()
    execute(source, scratch)


def set_limits(request: dict[str, Any], config: dict[str, Any]) -> None:
    cpu_s = request["cpu_s"]
    values = {
        resource.RLIMIT_AS: request["memory_bytes"],
        # This is only a backstop, because `server.wait` enforces `cpu_s`.
        resource.RLIMIT_CPU: 2 * math.ceil(cpu_s) + 1 if math.isfinite(cpu_s) else -1,
        resource.RLIMIT_CORE: 0,
    }
    if config["plain"]:
        values[resource.RLIMIT_AS] += config["reserved_bytes"]  # do not count preloaded imports
    else:
        values |= {
            resource.RLIMIT_FSIZE: SCRATCH_BYTES,
            resource.RLIMIT_NOFILE: MAX_FILES,
            resource.RLIMIT_STACK: STACK_BYTES,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_SIGPENDING: 64,
            resource.RLIMIT_NPROC: 1 + THREADS + OTHERS[config["tier"]],
        }
    for limit, value in values.items():
        _, hard = resource.getrlimit(limit)
        if value == resource.RLIM_INFINITY:
            value = hard
        elif hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))


def confine(config: dict[str, Any]) -> None:
    kernel.keep_capabilities(0)
    kernel.call_prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.restrict_files(config["binds"], config["devices"], SCRATCH)
    FILTERS[0].apply()


def execute(source: str, scratch: str) -> NoReturn:
    """Run the source as the interpreter runs a script, and exit as the interpreter does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if scratch:
        sys.path.insert(0, scratch)
        sys.set_int_max_str_digits(0)  # the limit on CPU time is enough
    open_streams()
    random.seed(0)  # in the child, because a fork reseeds
    code = 1
    try:
        try:
            linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
            exec(compile(source, NAME, "exec"), MAIN.__dict__)
            code = 0
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at an interpreter's end
            atexit._run_exitfuncs()
    except SystemExit as end:
        code = exit_code(end)
    except MemoryError as error:
        MAIN.__dict__.clear()
        show(error)
        signal.signal(OUT_OF_MEMORY, signal.SIG_DFL)
        os.kill(os.getpid(), OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001 - shown on the program's stderr
        show(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the interpreter exits with 120 in this case
        code = code or 120
    os._exit(code)


def warm_up() -> None:
    """Set up the interpreter as for a new script. The server does this once, because each fork copies changed pages."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "shoal"]:
        del sys.modules[name]
    sys.modules["channel"] = channel
    sys.argv = [NAME]
    for name in ("exit", "quit"):  # builtins that the module `site` adds
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    sys.modules["__main__"] = MAIN
    MAIN.__dict__["__file__"] = NAME


def open_streams() -> None:
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return int.__and__(end.code, 0xFF)
    try:
        print(end.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException:  # noqa: BLE001 - its __str__ may be the program's
        return 1
    return 1


def show(error: BaseException) -> None:
    try:
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this file's frame
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # noqa: BLE001 - the program may have broken its own stderr
        os.write(2, b"the traceback could not be printed\n")
