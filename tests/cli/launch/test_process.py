"""A process of a run ends on a signal, or when its parent ends, even if kill -9 ended the parent. Its exit status says
whether a restart may help."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.launch.children import ENVIRONMENT
from shoal.cli.main import FAILED, LASTING, answer, command_line
from shoal.errors import ShoalError
from shoal.protocol.calling import NodeError

from ..support import wait_until

CHILD = """
import os, sys, time
from pathlib import Path
from shoal.cli.launch import process
stop = process.begin("child", threads=3)
if int(sys.argv[2]):
    process.follow(lambda: os.getppid() == int(sys.argv[2]))
Path(sys.argv[1]).write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
if sys.argv[3] != "listens":
    time.sleep(60)
stop.wait(60)
"""
PARENT = """
import os, subprocess, sys
child = [sys.executable, "-c", sys.argv[1], sys.argv[2], str(os.getpid()), sys.argv[3]]
subprocess.Popen(child, start_new_session=True).wait()
"""


def alive(pid: int) -> bool:
    """Return whether a process runs. An ended orphan may stay a zombie where nothing reaps it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """Yield the path where the child writes its pid. Kill the child afterwards if it still runs."""
    path = tmp_path / "pid"
    yield path
    if path.exists() and alive(pid := int(path.read_text().split()[0])):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("mode", ["listens", "ignores SIGTERM"])
def test_a_child_ends_when_its_parent_is_killed(written: Path, mode: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(written), mode])
    try:
        wait_until(lambda: written.exists() and written.read_text(), 20)
        pid = int(written.read_text().split()[0])
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not alive(pid), 60)


def test_a_child_whose_parent_is_already_gone_ends_at_once(written: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(written), str(gone.pid), "listens"], timeout=120, check=False
    )
    assert child.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_signal_sets_the_stop_event_and_threads_are_limited(written: Path, number: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(written), "0", "listens"])
    wait_until(lambda: written.exists() and written.read_text(), 20)
    assert written.read_text().split() == [str(child.pid), "3"]
    child.send_signal(number)
    assert child.wait(5) == 0


def test_a_process_ends_without_a_last_garbage_collection() -> None:
    script = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
from shoal.cli.launch import process
process.begin("child", threads=0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "True\n"


def test_freed_memory_goes_back_to_the_system() -> None:
    """With a child's malloc settings, only malloc_trim returns freed memory that lies below a block still in use."""
    script = """
import time
from pathlib import Path
from shoal.cli.launch import process
process.TRIM_S = 0.1
process.follow(lambda: True)
kept = [bytearray(b"x" * 100_000) for _ in range(2000)]
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6
before = resident_mb()
del kept[:-1]
deadline_s = time.monotonic() + 60
while resident_mb() > before - 150 and time.monotonic() < deadline_s:
    time.sleep(0.1)
print(before - resident_mb() >= 150)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "True\n"


WORKER = ["worker", "--join", "x", "--dir", "y"]


@pytest.mark.parametrize(
    ("command", "error", "status"),
    [
        (WORKER, OSError(errno.EADDRINUSE, "address already in use"), LASTING),
        (WORKER, OSError(errno.ENOSPC, "no space left on device"), LASTING),
        (WORKER, ShoalError("no chat template"), LASTING),
        (WORKER, NodeError("the coordinator was away"), FAILED),
        (WORKER, ConnectionResetError(errno.ECONNRESET, "reset"), FAILED),
        (["filter", "x.toml", "--out", "y"], ShoalError("no model"), FAILED),
    ],
    ids=["port", "disk", "template", "away", "reset", "no-node"],
)
def test_a_lasting_failure_of_a_node_has_its_own_status(command: list[str], error: Exception, status: int) -> None:
    def fail(arguments: object) -> int:
        raise error

    assert answer(fail, command_line().parse_args(command)) == status
