"""The pool of killable processes: every value gets a result, whatever the function does with it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.sandbox import Budget
from shoal.tasks.rewards.killable.pool import GraderStartError, Killable

GRADER = """
import os, signal, sys, time
prepared, seen = [], []
def prepare():
    prepared.append(1)
def act(value):
    what, *more = value
    seen.append(what)
    if what == "add": return sum(more)
    if what == "state": return [len(prepared), len(seen), hash("a"), os.getpid(), os.getppid()]
    if what == "spin":
        while True: pass
    if what == "work":
        while time.process_time() < more[0]: pass
    if what == "sleep": time.sleep(more[0])
    if what == "raise": raise ValueError("no " + "x" * more[0])
    if what == "exit": sys.exit(3)
    if what == "leave": os._exit(3)
    if what == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "memory": return len(bytearray(more[0]))
    if what == "flood": return "x" * more[0]
    if what == "object": return object()
    if what == "nan": return float("nan")
    if what == "print": print("noise", flush=True); return 1
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grader") / "grader.py"
    path.write_text(GRADER)
    return path


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[Killable]:
    with Killable(file, "act", cpu_s=0.3, wall_s=20, memory_bytes=256 << 20) as made:
        yield made


def test_values_come_back_in_order(pool: Killable) -> None:
    assert [one.value for one in pool.run([["add", n, 1] for n in range(20)])] == list(range(1, 21))
    assert pool.run([]) == []


@pytest.mark.parametrize(
    ("value", "ending", "detail"),
    [
        (["spin"], "cpu", ""),
        (["deaf"], "cpu", ""),
        (["raise", 1], "raised", "ValueError: no x"),
        (["raise", 10_000], "raised", "ValueError: no x"),
        (["exit"], "raised", "SystemExit"),
        (["leave"], "died", "exit status 3"),
        (["crash"], "died", "SIGSEGV"),
        (["memory", 1 << 30], "raised", "MemoryError"),
        (["flood", 2_000_000], "died", "more than"),
        (["object"], "raised", "TypeError"),
        (["nan"], "raised", "ValueError"),
    ],
)
def test_every_ending_is_a_result_and_the_pool_goes_on(
    pool: Killable, value: list[object], ending: str, detail: str
) -> None:
    bad, good = pool.run([value, ["add", 2, 3]])
    assert bad.ending == ending and detail in bad.detail and len(bad.detail) < 600
    assert (good.ending, good.value) == ("answered", 5)


def test_the_clock_ends_what_waits(file: Path) -> None:
    with Killable(file, "act", cpu_s=5, wall_s=0.5) as pool:
        assert [one.ending for one in pool.run([["sleep", 60], ["add", 1]])] == ["wall", "answered"]


def test_no_call_begins_after_the_end_of_the_budget(file: Path) -> None:
    with Killable(file, "act", budget=(budget := Budget())) as pool:
        budget.start(0)
        assert [one.ending for one in pool.run([["add", 1], ["add", 2]])] == ["wall", "wall"]
        assert pool.idle.qsize() == 1
        budget.stop()
        assert pool.run([["add", 1]])[0].ending == "answered"


def test_waiting_costs_no_cpu_time(pool: Killable) -> None:
    """Longer than the limit of CPU time, by the clock."""
    [result] = pool.run([["sleep", 1.0]])
    assert result.ending == "answered" and result.cpu_s < 0.3


def test_use_is_measured(pool: Killable) -> None:
    idle, large = pool.run([["add", 1], ["memory", 100 << 20]])
    assert large.memory_bytes - idle.memory_bytes > 90 << 20
    [worked] = pool.run([["work", 0.1]])
    assert worked.cpu_s >= 0.1 > idle.cpu_s


def test_each_value_meets_the_same_state(pool: Killable) -> None:
    first, second = (one.value for one in pool.run([["state"], ["state"]]))
    assert first[:3] == second[:3] and first[:2] == [1, 1]
    assert first[3] != second[3] and first[4] == second[4]  # another child of the same trunk


def test_hashes_are_the_same_in_every_pool(pool: Killable, file: Path) -> None:
    with Killable(file, "act") as other:
        assert other.run([["state"]])[0].value[2] == pool.run([["state"]])[0].value[2]


def test_what_a_grader_prints_is_not_taken_for_an_answer(pool: Killable) -> None:
    assert [one.value for one in pool.run([["print"], ["add", 4]])] == [1, 4]


def test_a_killed_trunk_is_replaced(file: Path) -> None:
    with Killable(file, "act", size=2) as pool:
        for _ in range(3):
            trunk = pool.run([["state"]])[0].value[4]
            os.kill(trunk, signal.SIGKILL)
            assert [one.value for one in pool.run([["add", n] for n in range(6)])] == list(range(6))


def test_closing_ends_its_processes_and_a_later_run_starts_others(file: Path) -> None:
    pool = Killable(file, "act", size=2)
    trunks = {one.value[4] for one in pool.run([["state"]] * 8)}
    pool.close()
    pool.close()
    assert not any(Path(f"/proc/{trunk}").exists() for trunk in trunks)
    assert pool.run([["add", 1]])[0].value == 1
    pool.close()


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize("busy", [True, False])
def test_the_processes_end_with_their_owner(file: Path, busy: bool) -> None:
    script = f"""
        import os, signal, sys, threading, time
        from pathlib import Path
        from shoal.tasks.rewards.killable.pool import Killable
        pool = Killable(Path({str(file)!r}), "act", cpu_s=60, wall_s=60)
        print(pool.run([["state"]])[0].value[4], flush=True)
        if {busy}:
            threading.Thread(target=pool.run, args=([["spin"]],), daemon=True).start()
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=120
    )
    trunk = int(ended.stdout)
    deadline_s = time.monotonic() + 60
    while alive(trunk) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive(trunk)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("source", ["import no_such_module", "def other(value): pass", "x ="])
def test_a_grader_that_cannot_start_says_so(tmp_path: Path, source: str, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(GraderStartError, match="broken.py does not start"):
        Killable(file, "act").run([1])
    assert "Error" in capfd.readouterr().err
