"""The reader in a child: what kills it is refused, what is honest passes, and it ends with whoever started it."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import BadSignatureError, RolloutFileError

from .test_rollouts import DATA, FOOTER, claiming, long_submission, opened, refused_or_unchanged, signed

BAD_SIGNATURE = signed(opened(DATA)[0], domain="accepted")


@pytest.fixture(scope="module")
def started() -> Iterator[Quarantine]:
    with Quarantine(8, 16) as quarantine:
        yield quarantine


@pytest.fixture
def quarantine(started: Quarantine) -> Quarantine:
    """One that has a child."""
    started.check(DATA)
    return started


def pid(quarantine: Quarantine) -> int:
    assert quarantine.child is not None
    return quarantine.child.pid


def ended(pid: int, within_s: float) -> bool:
    """Whether the process ends in time. One that nobody has waited for yet counts."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# --- what it lets pass ----------------------------------------------------------------------------------------------


def test_honest_files_pass_and_share_a_child(quarantine: Quarantine) -> None:
    child = pid(quarantine)
    for _ in range(3):
        quarantine.check(DATA)
    assert pid(quarantine) == child


def test_refusals_are_those_of_the_reader_and_leave_the_child_alone(quarantine: Quarantine) -> None:
    child = pid(quarantine)
    with pytest.raises(BadSignatureError, match="not signed by"):
        quarantine.check(BAD_SIGNATURE)
    with pytest.raises(RolloutFileError, match="not a readable rollout file") as refusal:
        quarantine.check(b"")
    assert not isinstance(refusal.value, BadSignatureError)
    quarantine.check(DATA)
    assert pid(quarantine) == child


def test_the_reader_needs_no_torch() -> None:
    code = "import shoal.store.quarantine, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- what kills it --------------------------------------------------------------------------------------------------


def test_a_damaged_footer_is_refused(quarantine: Quarantine) -> None:
    places = range(FOOTER, len(DATA) - 8)
    patches = [(at, bytes([DATA[at] ^ 0x40])) for at in places]
    draw = random.Random(0)
    patches += [(draw.choice(places), draw.randbytes(draw.randint(1, 4))) for _ in range(200)]
    for at, patch in patches:
        data = DATA[:at] + patch + DATA[at + len(patch) :]
        try:
            quarantine.check(data)  # some kill it: pyarrow 25 aborts on a column chunk without its metadata
        except RolloutFileError:
            continue
        refused_or_unchanged(data)


def test_a_small_file_cannot_fill_the_memory() -> None:
    data = long_submission(20_000_003)
    chunk = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(4)
    for true, claimed in ((chunk.num_values, 1), (chunk.total_uncompressed_size, 100)):
        data = claiming(data, true, claimed, same_length=True)
    assert len(data) < 20_000
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with Quarantine(8, 16, memory_bytes=64 << 20) as quarantine:
            with pytest.raises(RolloutFileError, match="takes more than 64 MiB of memory to read"):
                quarantine.check(data)
            quarantine.check(DATA)
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() == 0


def test_a_file_that_kills_its_reader_is_refused_and_the_next_one_is_read(quarantine: Quarantine) -> None:
    child = pid(quarantine)
    os.kill(child, signal.SIGABRT)
    with pytest.raises(RolloutFileError, match="ends its reader: SIGABRT"):
        quarantine.check(DATA)
    quarantine.check(DATA)
    assert pid(quarantine) != child and not psutil.pid_exists(child)


def test_an_honest_file_does_not_pay_for_a_reader_that_others_killed(quarantine: Quarantine) -> None:
    os.kill(pid(quarantine), signal.SIGKILL)
    quarantine.check(DATA)


@pytest.mark.parametrize("data", [DATA, DATA + bytes(1 << 20)], ids=["fits the pipe", "fills the pipe"])
def test_a_file_that_stalls_its_reader_is_refused_and_the_next_one_is_read(
    quarantine: Quarantine, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = pid(quarantine)
    os.kill(child, signal.SIGSTOP)
    with monkeypatch.context() as hasty:
        hasty.setattr(quarantine, "timeout_s", 0.2)
        with pytest.raises(RolloutFileError, match=r"takes more than 0\.2 s to read"):
            quarantine.check(data)
    assert ended(child, within_s=0.1)
    quarantine.check(DATA)


def test_a_reader_that_does_not_start_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Quarantine(8, 16) as quarantine, pytest.raises(ChildProcessError, match="does not start: status 1"):
        quarantine.check(DATA)


# --- how it ends ----------------------------------------------------------------------------------------------------

PARENT = """
import sys, time
from pathlib import Path
from shoal.store.quarantine import Quarantine

quarantine = Quarantine(8, 16)
quarantine.check(Path(sys.argv[1]).read_bytes())
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
    assert ended(child, within_s=5)


def test_a_child_that_reads_too_long_ends_by_itself() -> None:
    command = [sys.executable, "-m", "shoal.store.quarantine", "8", "16", str(1 << 30), "0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write((1 << 20).to_bytes(8, "big"))  # a file that never comes
        child.stdin.flush()
        assert child.wait(20) == -signal.SIGALRM


def test_closing_ends_the_child() -> None:
    quarantine = Quarantine(8, 16)
    quarantine.close()
    quarantine.check(DATA)
    child = pid(quarantine)
    quarantine.close()
    assert not psutil.pid_exists(child)
