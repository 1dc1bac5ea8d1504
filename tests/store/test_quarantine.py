"""The child process that reads submissions: files that kill it are refused, and it ends with its parent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shoal.store.columns import BadSignatureError, RolloutFileError, from_table, pack
from shoal.store.quarantine import Quarantine

from .support import DATA, HEADER, ROWS, long_submission, opened, signed

COLUMNS = from_table(opened(DATA)[0])
TOO_MANY = COLUMNS | {"tokens": replace(COLUMNS["tokens"], lengths=np.full(4, 2**30, dtype="<i4"))}
BAD_SIGNATURE = signed(opened(DATA)[0], domain="accepted")


@pytest.fixture(scope="module")
def started() -> Iterator[Quarantine]:
    with Quarantine(8, 16) as quarantine:
        yield quarantine


@pytest.fixture
def quarantine(started: Quarantine) -> Quarantine:
    """A quarantine with a running child."""
    started.read(DATA)
    return started


def pid(quarantine: Quarantine) -> int:
    assert quarantine.child is not None
    return quarantine.child.pid


def ended(pid: int, within_s: float) -> bool:
    """Return whether the process ends in time. A zombie counts as ended."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# --- honest and refused files -----------------------------------------------------------------------------------------


def test_honest_files_are_all_read_by_the_same_child(quarantine: Quarantine) -> None:
    child = pid(quarantine)
    for _ in range(3):
        assert list(quarantine.read(DATA).rows) == ROWS
    assert pid(quarantine) == child


def test_a_refused_file_leaves_the_child_running(quarantine: Quarantine) -> None:
    child = pid(quarantine)
    with pytest.raises(BadSignatureError, match="not signed by"):
        quarantine.read(BAD_SIGNATURE)
    with pytest.raises(RolloutFileError, match="not a readable rollout file") as refusal:
        quarantine.read(b"")
    assert not isinstance(refusal.value, BadSignatureError)
    quarantine.read(DATA)
    assert pid(quarantine) == child


def test_a_file_with_more_rows_than_its_task_is_refused_by_the_child_and_by_the_parent(quarantine: Quarantine) -> None:
    child = pid(quarantine)
    with pytest.raises(RolloutFileError, match="4 rows; between 1 and 3 are allowed"):
        quarantine.read(DATA, 3)
    assert list(quarantine.read(DATA, 6).rows) == list(quarantine.read(DATA, 99).rows) == ROWS
    assert pid(quarantine) == child
    columns = pack(COLUMNS)
    about = {"header": HEADER.model_dump_json(), "signature": "0" * 128, "rows": 4, "size_bytes": len(columns)}
    with (
        scripted(json.dumps(about).encode() + b"\n" + columns) as taken_over,
        pytest.raises(RolloutFileError, match="return 1836 bytes, more than 1482"),
    ):
        taken_over.read(DATA, 3)


def test_the_reader_needs_no_torch() -> None:
    code = "import shoal.store.quarantine, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_parent_checks_every_answer_of_its_child() -> None:
    """A file may have taken over the child, which may then send anything."""
    answers = {
        "the rows are not the signed rows": (HEADER.model_dump_json(), 4, pack(COLUMNS)),
        "header: ": ("{}", 4, pack(COLUMNS)),
        "9 rows; between 1 and 8 are allowed": (HEADER.model_dump_json(), 9, pack(COLUMNS)),
        "bytes instead of ": (HEADER.model_dump_json(), 4, pack(COLUMNS)[:-1]),
        "1 bytes after the last column": (HEADER.model_dump_json(), 4, pack(COLUMNS) + b"x"),
        "column tokens has more than 128 values": (HEADER.model_dump_json(), 4, pack(TOO_MANY)),
        "makes its reader return 9999999 bytes": (HEADER.model_dump_json(), 4, bytes(9_999_999)),
    }
    for message, (header, rows, columns) in answers.items():
        about = {"header": header, "signature": "0" * 128, "rows": rows, "size_bytes": len(columns)}
        answer = json.dumps(about).encode() + b"\n" + columns
        with scripted(answer) as quarantine, pytest.raises(RolloutFileError, match=message):
            quarantine.read(DATA)
    for invalid in (b"{}}\n", b"x" * (1 << 16), b'{"error": null, "more": 1}\n', b'{"rows": -1}\n'):
        with scripted(invalid) as quarantine, pytest.raises(RolloutFileError, match="send an invalid answer"):
            quarantine.read(DATA)


@contextmanager
def scripted(answer: bytes) -> Iterator[Quarantine]:
    """A quarantine whose child gives this answer to every file."""
    code = """if True:
        import sys
        answer = bytes.fromhex(sys.stdin.buffer.readline().decode())
        sys.stdout.buffer.write(b'{"error": null}\\n')
        sys.stdout.flush()
        sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(16)[:8], "big"))
        sys.stdout.buffer.write(answer)
    """
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(answer.hex().encode() + b"\n")
    child.stdin.flush()
    child.stdout.readline()
    with Quarantine(8, 16) as quarantine:
        quarantine.child = child
        yield quarantine
    child.kill()
    child.communicate()


# --- files that end the child -----------------------------------------------------------------------------------------


def test_a_file_that_takes_too_much_memory_is_refused_and_the_next_one_is_read() -> None:
    """The file is within all other limits: it has 4 million tokens, and 5 million are allowed."""
    with Quarantine(8, 5_000_000, memory_bytes=8 << 20) as quarantine:
        with pytest.raises(RolloutFileError, match="takes more than 8 MiB of memory to read"):
            quarantine.read(long_submission(4_000_000))
        assert list(quarantine.read(DATA).rows) == ROWS


def test_a_file_that_kills_its_reader_is_refused_and_the_next_one_is_read(quarantine: Quarantine) -> None:
    child = pid(quarantine)
    os.kill(child, signal.SIGABRT)
    with pytest.raises(RolloutFileError, match="ends its reader: SIGABRT"):
        quarantine.read(DATA)
    quarantine.read(DATA)
    assert pid(quarantine) != child and not psutil.pid_exists(child)


def test_a_file_is_read_again_if_somebody_else_killed_the_child(quarantine: Quarantine) -> None:
    os.kill(pid(quarantine), signal.SIGKILL)
    quarantine.read(DATA)


def test_ctrl_c_does_not_reach_the_child(quarantine: Quarantine) -> None:
    """A terminal sends SIGINT to its foreground process group. If that ended the child, the file would be blamed."""
    assert os.getsid(pid(quarantine)) == pid(quarantine) != os.getsid(0)


@pytest.mark.parametrize("data", [DATA, DATA + bytes(1 << 20)], ids=["fits the pipe", "fills the pipe"])
def test_a_file_that_stalls_two_readers_is_refused_and_the_next_one_is_read(
    quarantine: Quarantine, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = quarantine._start, []

    def stopped() -> Any:
        started.append(child := start())
        os.kill(child.pid, signal.SIGSTOP)
        return child

    os.kill(pid(quarantine), signal.SIGSTOP)
    with monkeypatch.context() as hasty:
        hasty.setattr(quarantine, "timeout_s", 0.2)
        hasty.setattr(quarantine, "_start", stopped)
        with pytest.raises(RolloutFileError, match=r"did not answer within 0\.2 s, twice"):
            quarantine.read(data)
    assert not psutil.pid_exists(started[0].pid)
    quarantine.read(DATA)


def test_a_slow_machine_is_not_the_files_fault(quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch) -> None:
    start = quarantine._start

    def faster() -> Any:
        monkeypatch.setattr(quarantine, "timeout_s", 60.0)
        return start()

    os.kill(pid(quarantine), signal.SIGSTOP)
    monkeypatch.setattr(quarantine, "timeout_s", 0.2)
    monkeypatch.setattr(quarantine, "_start", faster)
    assert list(quarantine.read(DATA).rows) == ROWS


def test_a_file_that_takes_too_much_cpu_time_is_refused_and_the_next_one_is_read() -> None:
    with Quarantine(8, 5_000_000, cpu_s=0.02) as quarantine:
        with pytest.raises(RolloutFileError, match=r"takes more than 0\.02 s of CPU time to read"):
            quarantine.read(long_submission(4_000_000))
        assert list(quarantine.read(DATA).rows) == ROWS


def test_a_child_that_does_not_start_is_not_blamed_on_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Quarantine(8, 16) as quarantine, pytest.raises(ChildProcessError, match="does not start: status 1"):
        quarantine.read(DATA)


# --- the end of the child ---------------------------------------------------------------------------------------------

PARENT = """
import sys, time
from pathlib import Path
from shoal.store.quarantine import Quarantine

quarantine = Quarantine(8, 16)
quarantine.read(Path(sys.argv[1]).read_bytes())
print(quarantine.child.pid, flush=True)
time.sleep(60)
"""


def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
        parent.kill()
    assert ended(child, within_s=60)


def test_a_child_that_reads_for_too_long_ends_itself() -> None:
    command = [sys.executable, "-m", "shoal.store.decode", "16", str(1 << 30), "20", "0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write((1 << 20).to_bytes(8, "big") + (8).to_bytes(8, "big"))  # announces a file that never comes
        child.stdin.flush()
        assert child.wait(60) == -signal.SIGALRM


def test_closing_ends_the_child() -> None:
    quarantine = Quarantine(8, 16)
    quarantine.close()
    quarantine.read(DATA)
    child = pid(quarantine)
    quarantine.close()
    assert not psutil.pid_exists(child)
