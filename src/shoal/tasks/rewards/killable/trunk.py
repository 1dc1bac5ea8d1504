"""The far side of `killable.py`: a process that imports a grader once and forks a child for each value.

Run as a file (`python -P trunk.py FILE FUNCTION CPU_S WALL_S MEMORY_BYTES [ARGUMENT ...]`), so that it imports
nothing of Shoal and starts fast. It reads frames from stdin and writes frames to stdout: four bytes of length, then JSON.
Invariants: only children compute on values. Every child starts from the same state, so what one value does to the grader's
caches cannot change the score of the next one. The kernel ends a child that passes its limits: ITIMER_PROF for CPU time,
ITIMER_REAL for the clock, RLIMIT_AS for memory. The trunk ends when stdin closes or its parent is gone.
Left out: isolation. A child may do what this user may do; graders of untrusted code belong into the sandbox.
"""

import gc
import importlib.util
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAX_ANSWER_BYTES = 1 << 20
LENGTH = struct.Struct(">I")
ENDINGS = {signal.SIGPROF: "cpu", signal.SIGALRM: "wall"}


def main() -> None:
    file, name, cpu_s, wall_s, memory_bytes, *arguments = sys.argv[1:]
    stdout = os.dup(1)
    os.dup2(2, 1)  # what a grader prints must not land between frames
    function = load(Path(file), name, arguments)
    bound_memory(int(memory_bytes))
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    start_bytes = memory()[1]
    parent = os.getppid()
    write_frame(stdout, {"ready": os.getpid()})
    while (value := read_frame(0)) is not None:
        result = in_child(function, value, float(cpu_s), float(wall_s), parent)
        result["memory_bytes"] = max(0, result["memory_bytes"] - start_bytes)
        write_frame(stdout, result)


def load(file: Path, name: str, arguments: Sequence[str]) -> Callable[[Any], Any]:
    """The function of a file. A function `prepare` in it, if there is one, runs first: what it makes, all children have."""
    spec = importlib.util.spec_from_file_location(file.stem + "_killable", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if hasattr(module, "prepare"):
        module.prepare(*arguments)
    function: Callable[[Any], Any] = getattr(module, name)
    return function


def bound_memory(memory_bytes: int) -> None:
    """What a child may take beyond what the trunk has. Linux only; other systems do not enforce it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reserved, _ = memory()
    if reserved:
        resource.setrlimit(resource.RLIMIT_AS, (reserved + memory_bytes, reserved + memory_bytes))


def memory() -> tuple[int, int]:
    """Bytes of address space and of memory that this process has now; 0 and its peak where the system does not say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        reserved, resident = (int(pages) * resource.getpagesize() for pages in statm.read_text().split()[:2])
        return reserved, resident
    return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_child(function: Callable[[Any], Any], value: Any, cpu_s: float, wall_s: float, parent: int) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(function, value, write_end, cpu_s, wall_s)
    os.close(write_end)
    answer = bytearray()
    while len(answer) <= MAX_ANSWER_BYTES:
        if os.getppid() != parent:
            os.kill(pid, signal.SIGKILL)
            os._exit(1)
        if select.select([read_end], [], [], 1.0)[0]:
            data = os.read(read_end, 1 << 16)
            if not data:
                break
            answer += data
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(read_end)
    _, status, used = os.wait4(pid, 0)
    return {
        **outcome(bytes(answer), os.waitstatus_to_exitcode(status)),
        "cpu_s": used.ru_utime + used.ru_stime,
        "memory_bytes": used.ru_maxrss << 10 if sys.platform == "linux" else used.ru_maxrss,
    }


def outcome(answer: bytes, status: int) -> dict[str, Any]:
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return {"ending": ENDINGS[signal.Signals(-status)]}
    if len(answer) > MAX_ANSWER_BYTES:
        return {"ending": "died", "detail": f"it answers with more than {MAX_ANSWER_BYTES} bytes"}
    if status != 0:
        return {"ending": "died", "detail": signal.Signals(-status).name if status < 0 else f"exit status {status}"}
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        return {"ending": "died", "detail": "it ends without an answer"}
    return found


def child(function: Callable[[Any], Any], value: Any, write_end: int, cpu_s: float, wall_s: float) -> None:
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    status = 1
    try:
        try:
            found = json.dumps({"ending": "answered", "value": function(value)}, allow_nan=False)
        except BaseException as error:  # noqa: BLE001  whatever a grader raises is its answer, an exit too
            found = json.dumps({"ending": "raised", "detail": f"{type(error).__name__}: {error}"[:500]})
        write_all(write_end, found.encode())
        status = 0
    finally:
        os._exit(status)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_frame(fd: int, value: Any) -> None:
    data = json.dumps(value).encode()
    write_all(fd, LENGTH.pack(len(data)) + data)


def read_exactly(fd: int, size: int) -> bytes | None:
    """None at the end of the stream, also in the middle of a frame."""
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def read_frame(fd: int) -> Any | None:
    head = read_exactly(fd, LENGTH.size)
    body = head and read_exactly(fd, LENGTH.unpack(head)[0])
    return json.loads(body) if body else None


if __name__ == "__main__":
    main()
