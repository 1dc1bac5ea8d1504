"""The sandbox: a program's environment, how programs end, frames, and the pool of servers."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.sandbox import (
    TIERS,
    Budget,
    Program,
    ProgramLimits,
    Sandbox,
    SandboxError,
    Tier,
    best_tier,
    forkserver,
    interpreter,
    problem,
    server,
)
from shoal.sandbox.forkserver import ForkServer
from shoal.sandbox.limits import MIB

from .conftest import alive, descendants, wait_until


def out(box: Sandbox, source: str, **limits: float) -> str:
    result = box.run(Program(source), ProgramLimits(wall_s=60.0, cpu_s=20.0, **limits))  # type: ignore[arg-type]
    assert (result.outcome, result.exit_code) == ("exited", 0), result
    return result.stdout.decode()


def test_a_program_reads_its_input_and_the_result_names_the_tier(box: Sandbox) -> None:
    source = "import sys\nprint(input(), sys.argv, __name__)\nprint('error', file=sys.stderr)"
    result = box.run(Program(source, b"hello\nrest"))
    assert (result.outcome, result.exit_code, result.tier) == ("exited", 0, box.tier)
    assert result.stdout == b"hello ['program.py'] __main__\n"
    assert result.stderr == b"error\n"
    assert 0 < result.cpu_s < 20 and 0 < result.wall_s < 60


def test_a_budget_that_runs_out_stops_all_programs_until_the_budget_is_stopped(box: Sandbox) -> None:
    endless = Program("import time\nprint(1, flush=True)\ntime.sleep(3600)")
    with Sandbox(box.tier, ProgramLimits(wall_s=3600.0), budget=(budget := Budget())) as bounded:
        budget.start(0.5)
        assert [bounded.run(endless).outcome for _ in range(2)] == ["timeout", "timeout"], (
            "both must be stopped, although the second starts only after the budget has run out"
        )
        assert budget.over
        budget.stop()
        assert not budget.over and bounded.run(Program("print(1)")).stdout == b"1\n"


def test_programs_run_in_the_same_environment_in_every_server(box: Sandbox) -> None:
    assert out(box, "import os; print(dict(os.environ))") == "{'PYTHONHASHSEED': '0'}\n"
    version = "import platform as p; print(p.python_implementation(), p.python_version(), p.machine())"
    assert out(box, version).strip() == interpreter()
    source = "import random; print(hash('shoal'), list({'a', 'b', 'c', 'd'}), random.random())"
    outputs = {out(box, source) for _ in range(2)}
    with Sandbox(box.tier) as other:
        outputs.add(out(other, source))
    assert len(outputs) == 1


def test_pythons_standard_library_works(box: Sandbox) -> None:
    source = (
        "import asyncio, threading, tempfile, decimal, sqlite3, hashlib\n"
        "async def two(): return await asyncio.sleep(0.001, 2)\n"
        "print(asyncio.run(two()))\n"
        "seen = []\n"
        "thread = threading.Thread(target=seen.append, args=(3,)); thread.start(); thread.join()\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "print(seen, sqlite3.connect(':memory:').execute('select 4').fetchone())\n"
    )
    assert out(box, source) == "2\n[3] (4,)\n"


@pytest.mark.parametrize(
    ("source", "outcome", "code"),
    [
        *(("raise SystemExit", "exited", 0), ("exit(3)", "exited", 3), ("raise SystemExit('why')", "exited", 1)),
        *(("1 / 0", "exited", 1), ("def", "exited", 1), ("import os; os._exit(7)", "exited", 7)),
        *(("exit(256)", "exited", 0), ("import os; os.kill(os.getpid(), 11)", "killed", -11)),
    ],
)
def test_exit_codes_and_signals_are_those_of_the_interpreter(
    box: Sandbox, source: str, outcome: str, code: int
) -> None:
    result = box.run(Program(source))
    assert (result.outcome, result.exit_code) == (outcome, code)


def test_a_traceback_shows_the_program_and_nothing_of_the_sandbox(box: Sandbox) -> None:
    text = box.run(Program("def f():\n    return 1 / 0\nf()\n")).stderr.decode()
    assert 'File "program.py", line 3' in text and "return 1 / 0" in text and "ZeroDivisionError" in text
    assert "sandbox" not in text and text.count("File ") == 2


def test_a_program_ends_only_after_its_threads_and_exit_functions(box: Sandbox) -> None:
    source = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print('main')\n"
    )
    assert out(box, source) == "main\nthread\nlast\n"


@pytest.mark.parametrize(("share", "wall_s"), [(1.0, 5.0), (0.25, 20.0), (0.1, 40.0), (0.01, 10.0)])
def test_a_program_that_a_busy_machine_slows_down_gets_its_cpu_time_and_a_sleeping_one_is_stopped(
    monkeypatch: pytest.MonkeyPatch, share: float, wall_s: float
) -> None:
    """`share`: the share of a processor that the program gets. It may use 5 s of CPU time, at least 1 s of them in 10 s."""
    now_s = 0.0

    class Poll:
        def register(self, *_: int) -> None:
            pass

        def poll(self, wait_ms: int) -> list[int]:
            nonlocal now_s
            now_s += max(wait_ms, 1) / 1000
            return []

    monkeypatch.setattr(server.os, "pidfd_open", lambda _: os.dup(0))
    monkeypatch.setattr(server.select, "poll", Poll)
    monkeypatch.setattr(server.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(server.time, "clock_gettime", lambda _: now_s * share)
    assert server.wait(1, 0, deadline=40.0, cpu_s=5.0, idle_s=10.0) is False
    assert now_s == pytest.approx(wall_s, abs=0.1)


def test_time_memory_and_output_are_limited_and_programs_within_the_limits_are_not_stopped(box: Sandbox) -> None:
    slow = box.run(Program("print('early', flush=True)\nimport time; time.sleep(600)"), ProgramLimits(wall_s=2.0))
    assert (slow.outcome, slow.exit_code, slow.stdout) == ("timeout", None, b"early\n") and 2.0 <= slow.wall_s < 60
    busy = box.run(Program("while True: pass"), ProgramLimits(wall_s=60.0, cpu_s=1.0))
    assert busy.outcome == "timeout" and 0.9 <= busy.cpu_s < 3
    large = box.run(Program("x = bytearray(1 << 30)"), ProgramLimits(memory_bytes=256 * MIB))
    assert large.outcome == "memory" and b"MemoryError" in large.stderr
    assert out(box, "x = bytearray(100 << 20); print(len(x))", memory_bytes=256 * MIB) == f"{100 << 20}\n"
    long = box.run(Program("print('x' * 5000)"), ProgramLimits(output_bytes=1000))
    assert (long.outcome, long.stdout) == ("output", b"x" * 1000)
    assert out(box, "print('x' * 998)", output_bytes=999) == "x" * 998 + "\n"


# --- frames -----------------------------------------------------------------------------------------------------------


def test_frames_pass_both_ways(box: Sandbox) -> None:
    source = (
        "import channel, sys\n"
        "while (frame := channel.receive()) is not None:\n"
        "    print('got', len(frame)); channel.send(frame[::-1])\n"
        "sys.exit(5)\n"
    )
    with box.open(Program(source)) as process:
        for frame in (b"abc", b"", b"x" * 400_000):
            process.send(frame)
            assert process.receive() == frame[::-1]
        result = process.close()
    assert (result.outcome, result.exit_code, result.stdout) == ("exited", 5, b"got 3\ngot 0\ngot 400000\n")
    assert process.close() is result


def test_receive_returns_none_after_the_programs_end(box: Sandbox) -> None:
    with box.open(Program("import channel; channel.send(b'one'); raise SystemExit(4)")) as process:
        assert process.receive() == b"one"
        assert process.receive() is None
        process.send(b"ignored")
        assert process.receive() is None
        assert (process.close().outcome, process.close().exit_code) == ("exited", 4)


@pytest.mark.parametrize(
    ("source", "limits", "outcome"),
    [
        ("import time; time.sleep(600)", ProgramLimits(wall_s=0.3), "timeout"),
        ("import os; os.write(4, b'\\xff' * 4); os.read(3, 1)", ProgramLimits(output_bytes=1000), "output"),
    ],
    ids=["no answer in time", "a frame larger than the output limit"],
)
def test_receive_returns_none_at_a_limit(box: Sandbox, source: str, limits: ProgramLimits, outcome: str) -> None:
    with box.open(Program(source), limits) as process:
        assert process.receive() is None
        assert process.close().outcome == outcome
    assert out(box, "print(1)") == "1\n"


def test_leaving_the_context_kills_the_program(box: Sandbox) -> None:
    with box.open(Program("import time; time.sleep(600)")) as process:
        pass
    assert process.close().outcome == "killed"
    assert out(box, "print(1)") == "1\n"


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_many_threads_may_share_a_pool(box: Sandbox) -> None:
    with Sandbox(box.tier, size=2) as pool, ThreadPoolExecutor(12) as threads:
        results = threads.map(lambda number: out(pool, f"print({number} * 2)"), range(12))
        assert list(results) == [f"{number * 2}\n" for number in range(12)]


def test_waiting_for_a_busy_pool_times_out_with_advice(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sandbox.pool.QUEUE_S", 0.2)
    with Sandbox(box.tier) as pool:
        process = pool.open(Program("import channel; channel.receive()"))
        with pytest.raises(SandboxError, match="size"):
            pool.run(Program(""))
        assert process.close().outcome == "exited"


def test_a_server_that_died_is_replaced(box: Sandbox) -> None:
    with Sandbox(box.tier) as pool:
        assert out(pool, "print(1)") == "1\n"
        server = pool._idle.get_nowait()
        assert server is not None
        signal.pidfd_send_signal(server._server_fd, signal.SIGKILL)
        pool._idle.put(server)
        wait_until(lambda: server.dead)
        assert out(pool, "print(2)") == "2\n"


def test_a_server_that_dies_during_a_program_is_a_sandbox_error_and_is_given_back_once(box: Sandbox) -> None:
    with Sandbox(box.tier) as pool:
        with pool.open(Program("import channel, time; channel.send(b'up'); time.sleep(600)")) as process:
            assert process.receive() == b"up"
            (server,) = pool._busy
            signal.pidfd_send_signal(server._server_fd, signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(SandboxError, match="died"):
                    process.close()
        assert pool._idle.qsize() == pool.size
        assert out(pool, "print(2)") == "2\n"


def test_a_closed_sandbox_has_no_processes_and_refuses_programs(box: Sandbox) -> None:
    before = set(descendants(os.getpid()))
    pool = Sandbox(box.tier, size=2)
    pool.run(Program(""))
    process = pool.open(Program("import channel; channel.send(b'up'); channel.receive()"))
    assert process.receive() == b"up"
    started = set(descendants(os.getpid())) - before
    assert len(started) >= 3
    pool.close()
    with pytest.raises(SandboxError, match="closed"):
        pool.run(Program(""))
    wait_until(lambda: not any(map(alive, started)))
    assert process.receive() is None


def test_if_the_parent_is_killed_all_processes_of_its_sandbox_die(box: Sandbox) -> None:
    script = (
        "import sys, time\n"
        "from shoal.sandbox import Sandbox, Program\n"
        f"box = Sandbox({box.tier!r}, size=2)\n"
        "box.run(Program(''))\n"
        "process = box.open(Program('import channel; channel.send(b\"up\"); import time; time.sleep(600)'))\n"
        "process.receive()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        family = descendants(parent.pid)
        assert len(family) >= 3
        parent.kill()
    wait_until(lambda: not any(map(alive, family)))


def test_preloaded_modules_are_fresh_for_every_program(box: Sandbox) -> None:
    module = "import channel\nstate = []\ndef add(x): state.append(x); return state"
    with Sandbox(box.tier, preloaded={"preloaded": module}) as own:
        for _ in range(2):
            assert own.run(Program("import preloaded; print(preloaded.add(1))")).stdout == b"[1]\n"


# --- where a sandbox starts -------------------------------------------------------------------------------------------


def test_the_best_tier_is_the_first_that_works_and_the_error_says_why_none_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.sandbox.pool.problem", lambda tier: f"no {tier}")
    with pytest.raises(SandboxError, match="no bubblewrap\nno kernel$"):
        best_tier()
    monkeypatch.setattr("shoal.sandbox.pool.problem", lambda tier: "no" if tier == "bubblewrap" else "")
    assert best_tier() == "kernel"


def test_the_problem_of_an_unavailable_tier_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sandbox.forkserver.bwrap", lambda: None)
    assert "make sandbox" in problem.__wrapped__("bubblewrap")
    with pytest.raises(SandboxError, match="bubblewrap, kernel"):
        Sandbox("docker")


def test_a_sandbox_starts_with_any_umask(box: Sandbox) -> None:
    before = os.umask(0o077)
    try:
        with Sandbox(box.tier) as own:
            assert own.run(Program("print(1)")).stdout == b"1\n"
    finally:
        os.umask(before)


def test_programs_see_the_library_of_a_virtual_environment_but_not_the_environment(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    read = "from shoal.sandbox import forkserver; print(*forkserver.binds(), sep='\\n')"
    source = str(Path(forkserver.__file__).parents[2])
    command = [environment / "bin" / "python", "-c", read]
    shown = subprocess.run(command, env={"PYTHONPATH": source}, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == forkserver.binds() and str(environment) not in shown


@pytest.fixture
def root_only(tmp_path: Path) -> Path:
    """A folder that only root may enter."""
    folder = tmp_path / "closed"
    folder.mkdir(0o700)
    return folder


def test_a_sandbox_starts_where_only_root_may_enter_the_folder_of_temporary_files(
    box: Sandbox, root_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(root_only))
    with Sandbox(box.tier) as own:
        assert own.run(Program("open('x', 'w').write('fine'); print(open('x').read())")).stdout == b"fine\n"
    assert list(root_only.iterdir()) == []


@pytest.mark.parametrize("linked", [False, True])
def test_a_sandbox_starts_where_only_root_may_enter_the_folder_of_bubblewrap(
    linked: bool, root_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := problem("bubblewrap"):
        pytest.skip(reason)
    shutil.copy(str(forkserver.bwrap()), root_only)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        Path(folder, "bwrap").symlink_to(root_only / "bwrap")
        monkeypatch.setenv("PATH", folder if linked else str(root_only))
        assert problem.__wrapped__("bubblewrap") == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("tier", TIERS)
def test_the_error_for_an_interpreter_that_only_root_may_read_gives_the_remedy(
    tier: Tier, root_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := problem(tier):
        pytest.skip(reason)
    binds = [*forkserver.binds(), str(root_only)]
    monkeypatch.setattr(forkserver, "binds", lambda: binds)
    with pytest.raises(SandboxError, match=f"{root_only}.*chmod -R go"):
        ForkServer(tier)
